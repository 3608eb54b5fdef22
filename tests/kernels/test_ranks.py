"""The kernels of tokens that ranks gather do what the definitions do, for ranks that are played."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.backends.triton_ranks import supports_combine, supports_dispatch
from moe_ops.kernels.triton import ranks
from moe_ops.kernels.triton.ranks import Rows
from moe_ops.ops.combine_tokens import CombineTokensCall
from moe_ops.ops.dispatch_tokens import DispatchTokensCall
from moe_ops.ranks import packed as definition
from moe_ops.ranks.groups import sum_in_order
from moe_ops.ranks.tables import EVERY, HOME, known_ids, needed, slots
from moe_ops.testing import DEVICE, TOL, assert_close
from tests.kernels.spread import Tokens, raw

CASES = (
    Tokens(name="even", counts=(4, 4), rows=4),
    Tokens(name="uneven", counts=(5, 0, 2), rows=6, ids=torch.int64),
    Tokens(name="none", counts=(0, 0), rows=1),
    Tokens(name="wide", counts=(2, 1), rows=2, D=2 * ranks.BLOCK + 34, K=8),
    Tokens(name="float32", counts=(3, 1), rows=3, D=33, dtype=torch.float32),
    Tokens(name="short", counts=(2, 3), rows=3, D=2, K=4, weights=torch.bfloat16),
    Tokens(name="bytes", counts=(2, 3), rows=3, D=12, K=1, dtype=torch.float8_e4m3fn),
    Tokens(name="codes", counts=(2, 3), rows=4, D=400, dtype=torch.float8_e4m3fn, scales=4),
    Tokens(name="small_scales", counts=(3, 1), rows=3, D=384, dtype=torch.int8, scales=12,
           scale=torch.uint8),
)  # fmt: skip


def tables(case: Tokens) -> tuple[Tensor, Tensor]:
    """Experts of every rank, of all of them, and of the token's own."""
    R = len(case.counts)
    rank_of_P = (torch.arange(case.P) % R).int()
    rank_of_P[-2], rank_of_P[-1] = EVERY, HOME
    return rank_of_P.to(DEVICE), (torch.arange(case.P).int() // R).to(DEVICE)


def tokens(case: Tokens) -> list[Rows]:
    """Those of each rank."""
    every = (case.sent(T) for T in case.counts)
    parts = ([s.x_TD, s.scale_TS, s.weights_TK, s.ids_TK] for s in every)
    return [Rows(*(t.to(DEVICE) for t in part)) for part in parts]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_rows_are_packed_and_unpacked_as_defined(case: Tokens) -> None:
    rank_of_P, slot_of_P = tables(case)
    every = tokens(case)
    fields = [(s.x_TD, s.scale_TS, s.weights_TK, known_ids(s.ids_TK, case.P)) for s in every]
    want = torch.cat([definition.filled(definition.pack(f), case.rows) for f in fields])
    got = torch.cat([ranks.pack(Rows(*f), case.rows, case.P) for f in fields])
    assert got.shape[1] * 4 == want.shape[1]
    *floats, ids_GK = definition.unpack(want, fields[0])
    source_G1 = torch.arange(len(got), device=DEVICE)[:, None] // case.rows
    for rank in range(len(case.counts)):
        found = ranks.unpack(got, (rank_of_P, slot_of_P), every[0], case.rows, rank)
        local_GK = slots(ids_GK, rank_of_P, slot_of_P, rank, source_G1)
        for name, g, w in zip(
            ("x", "scales", "weights", "ids"), found, (*floats, local_GK), strict=True
        ):
            assert g.dtype == w.dtype and torch.equal(raw(g), raw(w)), name


def test_ids_of_no_expert_are_packed_as_none() -> None:
    ids = torch.tensor([[-5, 0, 7, 8, 2**31 + 3]], device=DEVICE)
    x = torch.ones(1, 4, device=DEVICE)
    weights = torch.ones(1, 5, device=DEVICE)
    got = ranks.pack(Rows(x, x.new_empty(1, 0), weights, ids), 1, 8)
    assert got[0, 12:17].tolist() == [-1, 0, 7, -1, -1]


FLOATS = [c for c in CASES if c.dtype.itemsize > 1]


@pytest.mark.parametrize("case", FLOATS, ids=lambda c: c.name)
def test_results_are_summed_over_the_ranks_that_were_needed(case: Tokens) -> None:
    R, (rank_of_P, _) = len(case.counts), tables(case)
    for rank, ids in enumerate(s.ids_TK for s in tokens(case)):
        T = ids.shape[0]
        back = torch.randn(R, case.rows, case.D).to(DEVICE, case.dtype)
        needed_TR = needed(known_ids(ids, case.P), rank_of_P, R, rank)
        mask_RT1 = ~needed_TR.T[..., None]
        back[:, T:] = float("nan")
        back[:, :T].masked_fill_(mask_RT1, float("nan"))
        got = ranks.combine(back.flatten(0, 1), ids, rank_of_P, case.rows, R, rank)
        want = sum_in_order(back[:, :T].masked_fill(mask_RT1, 0))
        assert_close(got, want, TOL["combine_tokens", case.dtype], f"rank {rank}")


def test_what_the_kernels_cannot_do_is_refused() -> None:
    tables = (torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32))
    ids, weights = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3)

    def sent(
        x: Tensor, weights: Tensor = weights, collective: str = "gather", scale: Any = None
    ) -> str | None:
        call = DispatchTokensCall(x, weights, ids, *tables, 2, "", scale, collective)
        return supports_dispatch(call)

    x = torch.zeros(2, 4)
    assert sent(x) is None
    assert "for 'gather', got collective='exchange'" in str(sent(x, collective="exchange"))
    assert "got x_TD of 3 x 2" in str(sent(x[:, :3].bfloat16()))
    assert "got weights_TK of 3 x 2" in str(sent(x, weights.bfloat16()))
    assert "got scale_TS of 3 x 1" in str(sent(x, scale=torch.zeros(2, 3, dtype=torch.uint8)))
    assert "requires grad" in str(sent(x.clone().requires_grad_()))
    assert "requires grad" in str(sent(x, scale=torch.ones(2, 4, requires_grad=True)))
    assert "32768 columns at most, got 32772" in str(sent(torch.zeros(2, 32772)))
    empty = (torch.empty(0, dtype=torch.int32), torch.empty(2, 0, dtype=torch.int64))
    back = CombineTokensCall(x, ids, *tables, *empty, 2)
    assert supports_combine(back) is None
    back.y_GD = x.clone().requires_grad_()
    assert "requires grad" in str(supports_combine(back))

"""Rows that ranks send, in batches by experts: what the layout "rows" gives, slot by slot."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import combine_tokens, dispatch_tokens, experts, experts_batched, quantize
from moe_ops.testing import TOL, Tol, assert_close
from tests.distributed.ranks import processes, results
from tests.distributed.shares import SPREADS, Whole

SPREAD = {spread.name: spread for spread in SPREADS}
SUMMED = Tol(1e-6, "a token's sum is in parts, one for each rank")
FORMATS = {
    "floats": ("", ""),
    "rows": ("float8_e4m3fn:row", "float8_e4m3fn:row"),
    "blocks": ("float8_e4m3fn:32x32", "float8_e4m3fn:1x32"),
}


def by_batches(rank: int, group: str, whole: Whole, as_codes: bool = False) -> Tensor:
    """Dispatch, experts and combine, with NaN in every slot past a count."""
    tables, (x, weights, ids) = whole.tables(), whole.own(rank)
    held, rows = whole.held(rank, tables), whole.spread.rows
    E, given = held["w13_EFD"].shape[0], dict(whole.options)
    q, scale = quantize(x, given["x_format"]) if as_codes else (x, None)
    sent = dispatch_tokens(
        q, weights, ids, *tables, rows, group, scale, layout="batched", experts=E
    )
    x_EMD, scale_EMS, weights_GK, slot_GK, counts_E, splits_2R = sent
    assert x_EMD.shape == (E, rows * whole.spread.ranks, q.shape[1])
    unused_EM1 = (torch.arange(x_EMD.shape[1]) >= counts_E[:, None])[..., None]
    nan = float("nan")
    if as_codes:
        given |= {"x_scale_EMG": scale_EMS.masked_fill(unused_EM1, nan), "out_dtype": "float32"}
    else:
        x_EMD = x_EMD.masked_fill(unused_EM1, nan)
    y_EMD = experts_batched(x_EMD, counts_E, **held, **given).masked_fill(unused_EM1, nan)
    weights_GK = weights_GK.masked_fill(slot_GK < 0, nan)
    return combine_tokens(
        y_EMD, ids, *tables, counts_E, splits_2R, rows, group, layout="batched",
        weights_GK=weights_GK, slot_GK=slot_GK,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["even", "uneven", "none", "one_expert", "nowhere"])
def test_ranks_give_what_one_process_gives(name: str, dtype: torch.dtype) -> None:
    whole = Whole.of(SPREAD[name], dtype)
    got = torch.cat(results(whole.spread.ranks, by_batches, whole))
    assert_close(got, whole.want(), SUMMED if dtype is torch.float32 else TOL["moe", dtype])


@pytest.mark.parametrize("as_codes", [False, True], ids=["floats", "codes"])
@pytest.mark.parametrize("formats", ["rows", "blocks"])
def test_quantized_experts(formats: str, as_codes: bool) -> None:
    """Tokens are quantised by their experts, or before they are sent."""
    whole = Whole.of(SPREAD["uneven"], torch.float32, *FORMATS[formats])
    got = torch.cat(results(whole.spread.ranks, by_batches, whole, as_codes))
    assert_close(got, whole.want(), SUMMED)


def test_a_token_may_name_an_expert_twice() -> None:
    """Then it lies in one slot, and is weighed twice."""
    whole = Whole.of(SPREAD["even"], torch.float32)
    whole.ids_TK[:, 2] = whole.ids_TK[:, 0]
    assert_close(torch.cat(results(2, by_batches, whole)), whole.want(), SUMMED)


def both_layouts(rank: int, group: str, whole: Whole) -> tuple[Any, Any]:
    given = (*whole.own(rank), *whole.tables(), whole.spread.rows, group)
    E = 8 // whole.spread.ranks
    return dispatch_tokens(*given), dispatch_tokens(*given, layout="batched", experts=E)


def test_slots_are_those_of_rows() -> None:
    """In the order of rows, an expert's from its first slot on."""
    whole = Whole.of(SPREAD["uneven"], torch.float32)
    for rows, batches in results(4, both_layouts, whole):
        x_GD, _, _, ids_GK, *_ = rows
        x_EMD, _, _, slot_GK, counts_E, _ = batches
        assert torch.equal(slot_GK < 0, ids_GK < 0)
        for e, count in enumerate(counts_E.tolist()):
            here = (ids_GK == e).any(1).nonzero()[:, 0]
            assert len(here) == count and torch.equal(x_EMD[e, :count], x_GD[here])
            wanted = e * x_EMD.shape[1] + torch.arange(count, dtype=torch.int32)
            assert torch.equal(slot_GK[ids_GK == e], wanted)


@torch.enable_grad()
def gradients(rank: int, group: str, whole: Whole) -> None:
    """Of the sum of squares of tokens, by the weights of their experts."""
    (x, weights, ids), tables, rows = whole.own(rank), whole.tables(), whole.spread.rows
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    x_EMD, _, weights_GK, slot_GK, counts_E, splits_2R = dispatch_tokens(
        x, weights, ids, *tables, rows, group, layout="batched", experts=4
    )
    used_EM1 = (torch.arange(x_EMD.shape[1]) < counts_E[:, None])[..., None]
    y_EMD = torch.where(used_EM1, x_EMD, 0) ** 2
    out = combine_tokens(
        y_EMD, ids, *tables, counts_E, splits_2R, rows, group, layout="batched",
        weights_GK=weights_GK, slot_GK=slot_GK,
    )  # fmt: skip
    out.sum().backward()
    assert x.grad is not None and weights.grad is not None
    of_x, of_weights = 2 * x * weights.sum(1, keepdim=True), x.square().sum(1, keepdim=True)
    assert_close(x.grad, of_x.detach(), SUMMED)
    assert_close(weights.grad, of_weights.detach().expand(-1, 3), SUMMED)


@pytest.mark.slow
def test_gradients_pass_through_batches(tmp_path: Path) -> None:
    processes(2, tmp_path, gradients, Whole.of(SPREAD["even"], torch.float32))


WHOLE = Whole.of(replace(SPREAD["even"], tokens=(4,)), torch.float32)
SENT: dict[str, tuple[dict[str, Any], str]] = {
    "layout": ({"layout": "batches"}, "layout='batches' is unknown; choose one of rows, batched"),
    "no_experts": ({"layout": "batched"}, "experts=0 must be at least 1"),
    "no_choices": (
        {"layout": "batched", "experts": 8, "weights_TK": torch.ones(4, 0),
         "ids_TK": torch.ones(4, 0, dtype=torch.int64)},
        "ids_TK must name at least one expert a token, got shape (4, 0)",
    ),
    "experts": ({"experts": 4}, "experts=4 says for how many experts here there are batches; give"),
    "exchange": (
        {"layout": "batched", "experts": 8, "collective": "exchange"},
        "layout='batched' has a slot for each row that may arrive, and collective='exchange'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "said"), SENT.values(), ids=SENT)
def test_what_cannot_be_sent(given: dict[str, Any], said: str) -> None:
    tokens = dict(zip(("x_TD", "weights_TK", "ids_TK"), WHOLE.own(0), strict=True))
    tables = dict(zip(("rank_of_P", "slot_of_P"), WHOLE.tables(), strict=True))
    with pytest.raises(ValueError, match=re.escape(said)):
        dispatch_tokens(**{**tokens, **tables, "rows": 4, **given})


BACK: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"weights_GK": None}, "layout='batched' needs weights_GK and slot_GK, as dispatch"),
    "rows": ({"layout": "rows", "y_GD": torch.zeros(4, 64)}, "weights_GK and slot_GK are those of"),
    "slots": ({"y_GD": torch.zeros(8, 5, 64)}, "y_GD must have 4 (ranks times rows) on axis 1"),
    "choices": ({"slot_GK": torch.zeros(4, 2, dtype=torch.int32)}, "slot_GK must have 3 (the top"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "said"), BACK.values(), ids=BACK)
def test_what_cannot_come_back(given: dict[str, Any], said: str) -> None:
    tables, (x, weights, ids) = WHOLE.tables(), WHOLE.own(0)
    x_EMD, _, weights_GK, slot_GK, counts_E, splits_2R = dispatch_tokens(
        x, weights, ids, *tables, 4, layout="batched", experts=8
    )
    call = {
        "y_GD": x_EMD, "ids_TK": ids, "rank_of_P": tables[0], "slot_of_P": tables[1],
        "token_N": counts_E, "splits_2R": splits_2R, "rows": 4, "layout": "batched",
        "weights_GK": weights_GK, "slot_GK": slot_GK,
    }  # fmt: skip
    with pytest.raises(ValueError, match=re.escape(said)):
        combine_tokens(**{**call, **given})


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@torch.enable_grad()
def test_gradients_of_pairs_that_go_nowhere_or_twice_to_an_expert(twice: bool) -> None:
    """As of the layout of rows, with NaN in slots past a count."""
    tables = torch.zeros(4, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    ids = torch.tensor([[1, 2], [3, 3 if twice else 1], [-1, 2], [-1, 4]])
    given = [torch.randn(4, 8), torch.rand(4, 2), torch.randn(4, 12, 8), torch.randn(4, 8, 6)]
    nan, found = float("nan"), []
    for layout in ("batched", "rows"):
        x, weights, w13, w2 = (t.clone().requires_grad_() for t in given)
        if layout == "rows":
            out = experts(x, weights, ids, w13, w2)
        else:
            x_EMD, _, weights_GK, slot_GK, counts_E, splits_2R = dispatch_tokens(
                x, weights, ids, *tables, 6, layout=layout, experts=4
            )
            unused_EM1 = (torch.arange(x_EMD.shape[1]) >= counts_E[:, None])[..., None]
            y_EMD = experts_batched(x_EMD.masked_fill(unused_EM1, nan), counts_E, w13, w2)
            out = combine_tokens(
                y_EMD.masked_fill(unused_EM1, nan), ids, *tables, counts_E, splits_2R, 6,
                layout=layout, weights_GK=weights_GK, slot_GK=slot_GK,
            )  # fmt: skip
        out.square().sum().backward()
        found.append([t.grad for t in (x, weights, w13, w2)])
    for got, want in zip(*found, strict=True):
        assert_close(got, want, TOL["moe", torch.float32])


def test_sums_of_float64_are_taken_in_it() -> None:
    tables = torch.zeros(4, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    x, weights, ids = torch.randn(5, 8).double(), torch.rand(5, 2).double(), torch.arange(10) % 4
    w13, w2 = torch.randn(4, 12, 8).double(), torch.randn(4, 8, 6).double()
    sent = dispatch_tokens(x, weights, ids.view(5, 2), *tables, 6, layout="batched", experts=4)
    x_EMD, _, weights_GK, slot_GK, counts_E, splits_2R = sent
    got = combine_tokens(
        experts_batched(x_EMD, counts_E, w13, w2), ids.view(5, 2), *tables, counts_E, splits_2R, 6,
        layout="batched", weights_GK=weights_GK, slot_GK=slot_GK,
    )  # fmt: skip
    assert_close(got, experts(x, weights, ids.view(5, 2), w13, w2), Tol(1e-14, "sums in float64"))

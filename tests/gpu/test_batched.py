"""Experts on batches on a GPU, captured, with other counts in every replay; and batches that two
GPUs send each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import combine_tokens, dispatch_tokens, experts_batched, quantize
from moe_ops.conformance.samples import quantized
from moe_ops.testing import TOL, Case, assert_close, make_layer
from tests.distributed.on_gpus import RANKS, on_gpus
from tests.distributed.shares import Spread, Whole
from tests.gpu.captures import captured, warmed_up

BF16, F8 = torch.bfloat16, torch.float8_e4m3fn
CASE = Case(name="batches", T=64, E=8, K=2, D=1024, I=512)
FORMATS = {
    "floats": ("", ""),
    "rows": ("float8_e4m3fn:row", "float8_e4m3fn:row"),
    "blocks": ("float8_e4m3fn:128x128", "float8_e4m3fn:1x128"),
}


def layer_of(w_format: str, x_format: str) -> dict[str, Any]:
    layer = make_layer(CASE, BF16)
    given: dict[str, Any] = {"w13_EFD": layer.w13_EFD, "w2_EDI": layer.w2_EDI}
    if w_format:
        given |= quantized(layer.w13_EFD, w_format, "w13", "FD")
        given |= quantized(layer.w2_EDI, w_format, "w2", "DI")
        given |= {"w_format": w_format, "x_format": x_format}
    return {n: a.cuda() if isinstance(a, Tensor) else a for n, a in given.items()}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("M", "expected"), [(16, 0), (256, 0), (256, 4), (256, 8), (256, 16)], ids=str
)
@pytest.mark.parametrize(("w_format", "x_format"), FORMATS.values(), ids=FORMATS)
def test_counts_change_between_replays(
    w_format: str, x_format: str, M: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows as floats and, where inputs are quantised, as codes in the same buffers."""
    # What fills new memory with NaN would be captured, and fill the result in every replay.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    given, E, D = layer_of(w_format, x_format), CASE.E, CASE.D
    x_EMD = torch.randn(E, M, D, device="cuda", dtype=BF16)
    counts_E = torch.full((E,), M, dtype=torch.int32, device="cuda")
    codes: dict[str, Any] = {"x_EMD": x_EMD}
    slots_M = torch.arange(M, device="cuda")
    if x_format:
        q, scale = quantize(x_EMD.flatten(0, 1), x_format)
        codes = {"x_EMD": q.view(E, M, D), "x_scale_EMG": scale.view(E, M, -1)}
        codes["out_dtype"] = "bfloat16"

    def call() -> Tensor:
        return experts_batched(counts_E=counts_E, expected=expected, **codes, **given)

    assert experts_batched.refusals(counts_E=counts_E, **codes, **given)["triton"] is None
    with torch.no_grad():
        warmed_up(call, 1)
        graph, out = captured(call)
        tol = TOL["experts", F8 if x_format else BF16]
        for step in range(4):
            counts_E.random_(0, M + 1) if step else counts_E.fill_(M)
            want = experts_batched.reference(counts_E=counts_E, **codes, **given)
            x_EMD.masked_fill_((slots_M >= counts_E[:, None])[..., None], torch.nan)
            out.fill_(7.0)
            graph.replay()
            for e, count in enumerate(counts_E.tolist()):
                assert_close(out[e, :count], want[e, :count], tol, f"replay {step}, expert {e}")
                assert bool((out[e, count:] == 7.0).all()), "what lies past a count is written"
            x_EMD.nan_to_num_()


def sent(
    rank: int, group: str, whole: Whole, collective: str, x_format: str, held: dict[str, Tensor]
) -> Any:
    """A function of a layer of two ranks by batches, and its tokens, weights and ids."""
    tables, rows = tuple(t.cuda() for t in whole.tables()), whole.spread.rows
    x, weights, ids = (t.clone() for t in whole.own(rank))
    E, options = held["w13_EFD"].shape[0], dict(whole.options)

    def call() -> Tensor:
        q, scale, given = x, None, dict(options)
        if x_format:
            q, scale = quantize(x, x_format)
            given["out_dtype"] = "bfloat16"
        x_EMD, scale_EMS, weights_GK, slot_GK, counts_E, splits_2R = dispatch_tokens(
            q, weights, ids, *tables, rows, group, scale, collective, layout="batched", experts=E
        )
        if x_format:
            given["x_scale_EMG"] = scale_EMS
        y_EMD = experts_batched(x_EMD, counts_E, **held, **given)
        return combine_tokens(
            y_EMD, ids, *tables, counts_E, splits_2R, rows, group, collective, "batched",
            weights_GK, slot_GK,
        )  # fmt: skip

    return call, x, ids


def replayed(rank: int, group: str, w_format: str, x_format: str, rows: int) -> None:
    """Eager calls are what one GPU gives; replays with other tokens are eager calls."""
    for collective in ("gather", "push"):
        spread = Spread(name="full", tokens=(rows, rows))
        whole = Whole.of(spread, BF16, w_format, x_format, width=128)
        for name in ("x_TD", "weights_TK", "ids_TK"):
            object.__setattr__(whole, name, getattr(whole, name).cuda())
        whole.weights.update({name: t.cuda() for name, t in whole.weights.items()})
        held = whole.held(rank, tuple(t.cuda() for t in whole.tables()))
        call, x, ids = sent(rank, group, whole, collective, x_format, held)
        want = whole.want().split(list(spread.tokens))[rank]
        tol = TOL["experts", F8] if x_format else TOL["experts_over_ranks", BF16]
        assert_close(call(), want, tol, collective)
        warmed_up(call, 2)
        graph, out = captured(call)
        generator = torch.Generator(device="cuda").manual_seed(rank)
        for step in range(20):
            x.normal_(generator=generator)
            ids.random_(8, generator=generator)
            ids[rows - step % rows :] = -1
            graph.replay()
            got, eager = out.clone(), call()
            assert torch.equal(got, eager), f"{collective}, replay {step}"
        del graph  # before the group goes


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs")
@pytest.mark.parametrize("rows", [8, 128])
@pytest.mark.parametrize(("w_format", "x_format"), FORMATS.values(), ids=FORMATS)
def test_two_gpus_by_batches(w_format: str, x_format: str, rows: int, tmp_path: Path) -> None:
    on_gpus(tmp_path, replayed, w_format, x_format, rows)

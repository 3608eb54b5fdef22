"""Experts on batches: each row by its expert, and nothing that lies past a count."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import QuantConfig, experts_batched, quantize
from moe_ops.conformance.samples import quantized
from moe_ops.testing import TOL, Case, assert_close, make_layer

CASE = Case(name="batches", T=24, E=4, K=2, D=128, I=64)
E, M, D = CASE.E, 6, CASE.D
LAYER = make_layer(CASE)
COUNTS = torch.tensor([0, 6, 2, 5], dtype=torch.int32)
FORMATS = {
    "floats": ("", ""),
    "rows": ("float8_e4m3fn:row", "float8_e4m3fn:row"),
    "blocks": ("float8_e4m3fn:128x128", "float8_e4m3fn:1x128"),
    "mxfp4": ("mxfp4", ""),
}
by_format = pytest.mark.parametrize(("w_format", "x_format"), FORMATS.values(), ids=FORMATS)


def weights_of(w_format: str, x_format: str) -> dict[str, Any]:
    if not w_format:
        return {"w13_EFD": LAYER.w13_EFD, "w2_EDI": LAYER.w2_EDI}
    return {
        **quantized(LAYER.w13_EFD, w_format, "w13", "FD"),
        **quantized(LAYER.w2_EDI, w_format, "w2", "DI"),
        "w_format": w_format, "x_format": x_format,
    }  # fmt: skip


def rows() -> Tensor:
    return torch.randn(E, M, D)


def by_loop(x_EMD: Tensor, given: dict[str, Any]) -> Tensor:
    """The same with every slot in use, an expert at a time."""
    every = torch.full((1,), M, dtype=torch.int32)
    parts = []
    for e in range(E):
        one = {n: a[e : e + 1] if isinstance(a, Tensor) else a for n, a in given.items()}
        parts.append(experts_batched(x_EMD[e : e + 1], every, **one))
    return torch.cat(parts)


def assert_used(got: Tensor, want: Tensor, counts_E: Tensor = COUNTS) -> None:
    for e, count in enumerate(counts_E.clamp(0, M).tolist()):
        assert_close(got[e, :count], want[e, :count], TOL["experts_batched", torch.float32])


def poisoned(x_EMD: Tensor) -> Tensor:
    """NaN past the counts."""
    x_EMD = x_EMD.clone()
    for e, count in enumerate(COUNTS.tolist()):
        x_EMD[e, count:] = float("nan")
    return x_EMD


@by_format
def test_rows_go_through_their_expert(w_format: str, x_format: str) -> None:
    """What lies past a count is not read."""
    given, x_EMD = weights_of(w_format, x_format), rows()
    assert_used(experts_batched(poisoned(x_EMD), COUNTS, **given), by_loop(x_EMD, given))


@by_format
def test_codes_are_the_rows_that_were_quantized(w_format: str, x_format: str) -> None:
    """As kernels of expert parallelism hand them over; scales may lie group by group."""
    if not x_format:
        return
    given, x_EMD = weights_of(w_format, x_format), rows()
    codes, scale = quantize(x_EMD.flatten(0, 1), x_format)
    config = QuantConfig(weights=w_format, inputs=x_format)
    scale_EMG = scale.view(config.batched_scale_shape(E, M, D))
    want = experts_batched(x_EMD, COUNTS, **given)
    for scales in (scale_EMG, scale_EMG.transpose(1, 2).contiguous().transpose(1, 2)):
        got = experts_batched(
            codes.view(E, M, D), COUNTS, x_scale_EMG=scales, out_dtype="float32", **given
        )
        assert_used(got, want)


def test_counts_beyond_the_slots_are_all_of_them() -> None:
    given, x_EMD = weights_of("", ""), rows()
    counts_E = torch.tensor([-3, 2**30, M, M + 1], dtype=torch.int32)
    assert_used(experts_batched(x_EMD, counts_E, **given), by_loop(x_EMD, given), counts_E)


def test_gradients_are_those_of_used_rows() -> None:
    x_EMD = rows().requires_grad_()
    given = {n: t.clone().requires_grad_() for n, t in weights_of("", "").items()}
    out = experts_batched(x_EMD, COUNTS, **given)
    used_EM = torch.arange(M) < COUNTS[:, None]
    torch.where(used_EM[..., None], out, 0).square().sum().backward()
    assert x_EMD.grad is not None
    assert bool(x_EMD.grad[used_EM].any(-1).all()) and not bool(x_EMD.grad[~used_EM].any())
    assert not bool(given["w13_EFD"].grad[0].any())  # an expert without rows


@pytest.mark.parametrize("scales", [1, E], ids=["one", "of_experts"])
def test_static_scales_are_not_made_of_slots(scales: int) -> None:
    given, x_EMD = weights_of("int8:row", "int8:tensor"), rows()
    static = {"x_scale": torch.full((E,), 0.02), "h_scale": torch.full((E,), 0.01)}
    some = {name: t[:scales] for name, t in static.items()}
    got = experts_batched(poisoned(x_EMD), COUNTS, **given, **some)
    assert_used(got, by_loop(x_EMD, given | static))


def test_no_slots() -> None:
    out = experts_batched(torch.empty(E, 0, D), COUNTS * 0, **weights_of("", ""))
    assert out.shape == (E, 0, D)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "axes": ({"x_EMD": torch.zeros(E, D)}, ValueError, "x_EMD must have 3 axes"),
    "experts": ({"x_EMD": torch.zeros(3, M, D)}, ValueError, "x_EMD must have 4 (the experts"),
    "width": ({"x_EMD": torch.zeros(E, M, 64)}, ValueError, "w13_EFD must have 64"),
    "counts": ({"counts_E": COUNTS[:3]}, ValueError, "counts_E must have 4 (the experts"),
    "dtype": ({"counts_E": COUNTS.long()}, TypeError, "counts_E must be int32"),
    "expected": ({"expected": -1}, ValueError, "expected=-1 must be at least 0"),
    "scale": (
        {"x_scale_EMG": torch.ones(E, M)}, ValueError,
        "x_scale_EMG must have an axis of experts, one of their rows and one of groups, got (4, 6)",
    ),
    "scales_of_fewer_experts": (
        {"x_scale_EMG": torch.ones(E - 1, M, 1)}, ValueError,
        "x_scale_EMG must have 4 (the experts of w13_EFD) on axis 0, got shape (3, 6, 1)",
    ),
    "no_codes": ({"x_scale_EMG": torch.ones(E, M, 1)}, ValueError, "x_scale_EMG and out_dtype go"),
    "one_scale": (
        weights_of("float8_e4m3fn:row", "float8_e4m3fn:tensor"), ValueError,
        "x_format='float8_e4m3fn:tensor' takes one scale from all slots, and those past a",
    ),
    "no_experts": (
        {"w13_EFD": LAYER.w13_EFD[:0], "w2_EDI": LAYER.w2_EDI[:0], "x_EMD": torch.zeros(0, M, D)},
        ValueError, "w13_EFD holds no expert",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "error", "said"), WRONG.values(), ids=WRONG)
def test_what_is_refused(given: dict[str, Any], error: type[Exception], said: str) -> None:
    call = {"x_EMD": torch.zeros(E, M, D), "counts_E": COUNTS, **weights_of("", ""), **given}
    with pytest.raises(error, match=re.escape(said)):
        experts_batched(**call)


SHAPES = {
    "rows": ("float8_e4m3fn:row", "float8_e4m3fn:row", (4, 6, 1)),
    "blocks": ("float8_e4m3fn:128x128", "float8_e4m3fn:1x128", (4, 6, 2)),
    "mxfp8": ("mxfp8", "mxfp8", (4, 6, 8)),
}


@pytest.mark.parametrize(("weights", "inputs", "shape"), SHAPES.values(), ids=SHAPES)
def test_the_shape_of_scales(weights: str, inputs: str, shape: tuple[int, ...]) -> None:
    assert QuantConfig(weights=weights, inputs=inputs).batched_scale_shape(4, 6, 256) == shape


NO_SCALES = {
    "floats": (QuantConfig(weights="mxfp4"), "the input format '' quantises no inputs; give x_EMD"),
    "nvfp4": (QuantConfig(weights="nvfp4", inputs="nvfp4"), "has a global scale above those"),
    "tensor": (QuantConfig(weights="int8:row", inputs="int8:tensor"), "that is not a token's own"),
}


@pytest.mark.parametrize(("config", "said"), NO_SCALES.values(), ids=NO_SCALES)
def test_batches_that_have_no_scales(config: QuantConfig, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config.batched_scale_shape(4, 6, 256)

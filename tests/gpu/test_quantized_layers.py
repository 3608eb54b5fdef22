"""Quantised layers and the packing of values on a CUDA GPU give what they give on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import BF16, F32, TOL, Case, Tol, assert_close, make_layer
from tests.gpu.captures import captured

pytestmark = pytest.mark.gpu
CASE = Case(name="small", T=9, E=5, K=2, D=64, I=32)
# Sums in another order move activations across the border of two codes.
ONE_STEP = Tol(4e-2, "one step of a quantised activation")
WEIGHTS = (
    "float8_e4m3fn:16x32",
    "float8_e5m2:row",
    "float8_e4m3fn:tensor",
    "int8:row:bfloat16",
    "uint4:1x16",
    "mxfp4",
    "mxfp6_e3m2",
    "mxfp6_e2m3",
    "mxfp8",
    "nvfp4",
)
PAIRS = (
    ("float8_e4m3fn:16x32", "float8_e4m3fn:1x32"),
    ("float8_e4m3fn:tensor", "float8_e4m3fn:tensor"),
    ("int8:row", "int8:row"),
    ("uint4:1x16", ""),
    ("mxfp4", "mxfp6_e3m2"),
    ("mxfp6_e2m3", "mxfp8"),
    ("nvfp4", "nvfp4"),
)


def cuda(value: Any) -> Any:
    return value.cuda() if isinstance(value, Tensor) else value


def raw(t: Tensor | None) -> list[int] | None:
    return None if t is None else t.cpu().contiguous().flatten().view(torch.uint8).tolist()


@pytest.mark.parametrize("name", WEIGHTS)
def test_packing_is_bit_for_bit_that_of_the_cpu(name: str) -> None:
    # Powers of two apart: subnormal quotients, saturation and ties occur in every format.
    x = torch.randn(32, 64) * 2.0 ** torch.randint(-24, 24, (32, 64))
    x[0, :32], x[1, 3], x[2, 5] = 0, float("nan"), float("inf")
    format = Format.of(name)
    want, got = packing.quantize(x, format), packing.quantize(x.cuda(), format)
    finite = [i for i in range(32) if i not in (1, 2)]
    assert raw(got.values[finite]) == raw(want.values[finite])
    assert raw(got.scale.float().nan_to_num(-1)) == raw(want.scale.float().nan_to_num(-1))
    decoded = [packing.dequantize(q.values, q.scale, format, q.zero).cpu() for q in (got, want)]
    assert torch.equal(decoded[0].isnan(), decoded[1].isnan())
    assert torch.equal(decoded[0].nan_to_num(0), decoded[1].nan_to_num(0))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("w_format", "x_format"), PAIRS)
def test_a_quantized_layer_gives_on_the_gpu_what_it_gives_on_the_cpu(
    w_format: str, x_format: str, dtype: torch.dtype
) -> None:
    layer = make_layer(CASE, dtype)
    w13, w2 = (packing.quantize(w, Format.of(w_format)) for w in (layer.w13_EFD, layer.w2_EDI))
    routed = (layer.x_TD, layer.weights_TK, layer.ids_TK, w13.values, w2.values)
    formats = {
        "w13_scale_EFG": w13.scale, "w2_scale_EDG": w2.scale, "w13_zero_EFG": w13.zero,
        "w2_zero_EDG": w2.zero, "w_format": w_format, "x_format": x_format,
    }  # fmt: skip
    with moe_ops.using("reference"):
        want = moe_ops.experts(*routed, **formats)
    args, kwargs = [cuda(a) for a in routed], {k: cuda(v) for k, v in formats.items()}
    got = moe_ops.experts(*args, **kwargs)
    assert got.device.type == "cuda"
    few_bits = bool(x_format) and Format.of(x_format).parsed.storage.dtype == torch.uint8
    tol = TOL["experts", torch.uint8] if few_bits else ONE_STEP
    assert_close(got.cpu(), want, tol, f"{w_format} {x_format}")
    with torch.inference_mode():
        graph, replayed = captured(lambda: moe_ops.experts(*args, **kwargs))
    graph.replay()
    assert torch.equal(replayed, got)

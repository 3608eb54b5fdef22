"""`fake_quantize`: the values of codes in a forward, the gradient of none in a backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import Case, make_layer

FORMATS = ("float8_e4m3fn:1x32", "int8:row", "mxfp4", "uint4:1x16", "float8_e4m3fn:16x32")
LAYER = make_layer(Case(name="coded", T=5, E=3, K=2, D=64, I=32))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_are_those_of_codes_and_gradients_those_of_none(
    format: str, dtype: torch.dtype
) -> None:
    x = torch.randn(32, 64).to(dtype).requires_grad_()
    y = moe_ops.fake_quantize(x, format)
    done = packing.quantize(x.detach(), Format.of(format))
    want = packing.dequantize(done.values, done.scale, Format.of(format), done.zero)
    assert y.dtype is dtype and torch.equal(y, want.to(dtype)) and not torch.equal(y, x)
    weight = torch.randn_like(y)
    (grad,) = torch.autograd.grad(y, x, weight)
    assert torch.equal(grad, weight)


def loss(x: Tensor, w13: Tensor) -> Tensor:
    x, w13 = moe_ops.fake_quantize(x, "float8_e4m3fn:1x32"), moe_ops.fake_quantize(w13, "mxfp4")
    given = LAYER.weights_TK, LAYER.ids_TK
    return moe_ops.experts(x, *given, w13, LAYER.w2_EDI).square().sum()


def under_vmap(*leaves: Tensor) -> tuple[Tensor, ...]:
    """A batch of one."""
    batch = [t.detach()[None] for t in leaves]
    made = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(*batch)
    return tuple(g[0] for g in made)


WAYS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "vmap": under_vmap,
    "func.grad": lambda *leaves: torch.func.grad(loss, argnums=(0, 1))(*leaves),
    "compiled": lambda *leaves: torch.autograd.grad(
        torch.compile(loss, backend="aot_eager", fullgraph=True)(*leaves), leaves
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same(way: str) -> None:
    torch._dynamo.reset()
    leaves = [t.clone().requires_grad_() for t in (LAYER.x_TD, LAYER.w13_EFD)]
    want = torch.autograd.grad(loss(*leaves), leaves)
    for g, w in zip(WAYS[way](*leaves), want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5 * float(w.abs().max()))


def test_what_a_format_does_not_take_is_refused() -> None:
    with pytest.raises(ValueError, match="int7:row"):
        moe_ops.fake_quantize(torch.randn(2, 4), "int7:row")
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        moe_ops.fake_quantize(torch.arange(8).view(2, 4), "int8:row")

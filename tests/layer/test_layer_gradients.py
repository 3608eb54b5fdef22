"""Quantised layers that are called with gradients enabled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_ops.layer import MoELayer
from moe_ops.testing import Tol, assert_close
from tests.layer.shards import randomize

E, D, I = 4, 64, 64  # noqa: E741
TOL = Tol(1e-5, "float32 sums in another order")
RAISED = "this MoELayer quantises its inputs, through which no gradients are defined"


def layer_of(quant: str, **more: object) -> MoELayer:
    layer = randomize(MoELayer(E, 2, D, I, quant=quant, **more))  # type: ignore[arg-type]
    for name, t in layer.named_parameters():
        if name.endswith("scale") and t.dtype == torch.float32:
            t.data.fill_(0.01)
    return layer


def given(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(5, D, generator=g), torch.randn(5, E, generator=g)


@pytest.mark.parametrize("quant", ["mxfp8", "nvfp4_w4a4"])
@pytest.mark.parametrize("bias", [False, True])
def test_layers_that_quantize_inputs_run_and_refuse_a_backward(quant: str, bias: bool) -> None:
    layer, (x, logits) = layer_of(quant, bias=bias), given()
    with torch.no_grad():
        want = layer(x, logits)
    leaf = x if not bias else layer.w13_bias  # a bias alone is above nothing but h
    got = layer(x.requires_grad_() if not bias else x, logits)
    assert_close(got.detach(), want, TOL)
    with pytest.raises(RuntimeError, match=RAISED):
        torch.autograd.grad(got.sum(), leaf)


def test_weights_of_the_router_have_gradients() -> None:
    layer, (x, logits) = layer_of("mxfp8"), given()
    got = layer(x, logits.requires_grad_())
    (grad,) = torch.autograd.grad(got.sum(), logits)
    assert grad.isfinite().all() and grad.any()


def test_compiled_layers_refuse_the_backward_alone() -> None:
    layer, (x, logits) = layer_of("mxfp8"), given()
    got = torch.compile(layer, backend="eager")(x.requires_grad_(), logits)
    with pytest.raises(RuntimeError, match=RAISED):
        got.sum().backward()

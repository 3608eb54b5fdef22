"""Linear layers that a `MoELayer` is given, in eager calls that are to be batch invariant."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops.layer import Latent, MoELayer, SharedExperts
from moe_ops.testing import Tol, assert_close
from tests.layer.shards import randomize

T, WIDE, D = 70, 256, 64
TOL = Tol(1e-5, "float32 sums in another order")


def linear(K: int, N: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(K, N, bias=bias)


# By which linear layer of torch's own each is made, whose products depend on the number of rows.
GIVEN: dict[str, dict[str, Any]] = {
    "gate": {"internal_gate": linear(WIDE, 8), "hidden_size": WIDE},
    "latents": {"latent": Latent(linear(WIDE, D), linear(D, WIDE)), "internal_gate": True},
    "latents_with_biases": {
        "latent": Latent(linear(WIDE, D, bias=True), linear(D, WIDE, bias=True)),
        "internal_gate": True,
    },
    "shared": {"shared_experts": linear(WIDE, WIDE), "hidden_size": WIDE, "internal_gate": True},
    "shared_apart": {
        "shared_experts": SharedExperts(linear(WIDE, WIDE), separate=True),
        "hidden_size": WIDE,
        "internal_gate": True,
    },
}


def made(**options: Any) -> MoELayer:
    layer = MoELayer(**{"hidden_size": D, **options}, num_experts=8, top_k=2, intermediate_size=32)
    return randomize(layer).requires_grad_(False)


def results(layer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    out = layer(x)
    return out if isinstance(out, tuple) else (out,)


@pytest.mark.parametrize("by", ["option", "using"])
@pytest.mark.parametrize("given", GIVEN)
def test_linear_layers_that_a_layer_is_given_have_the_same_bits_alone(given: str, by: str) -> None:
    layer, x = made(**GIVEN[given], batch_invariant=by == "option"), torch.randn(T, WIDE)
    with moe_ops.using(batch_invariant=True) if by == "using" else nullcontext():
        together = results(layer, x)
        alone = zip(*(results(layer, x[t : t + 1]) for t in range(T)), strict=True)
    for one, whole in zip(alone, together, strict=True):
        assert torch.equal(torch.cat(one), whole)
    plain = made(**GIVEN[given])
    plain.load_state_dict(layer.state_dict())
    for got, want in zip(together, results(plain, x), strict=True):
        assert_close(got, want, TOL)


def test_linear_layers_that_somebody_watches_are_called() -> None:
    """As gates are: what a hook sees or gives is the caller's."""
    latent = Latent(linear(WIDE, D), linear(D, WIDE))
    layer, seen = made(latent=latent, internal_gate=True, batch_invariant=True), []
    for module in (latent.routed_input_transform, latent.routed_output_transform):
        assert module is not None
        module.register_forward_hook(lambda module, *_: seen.append(module))
    layer(torch.randn(3, WIDE))
    assert seen == [latent.routed_input_transform, latent.routed_output_transform]


def test_gradients_reach_the_latents_of_an_invariant_layer() -> None:
    latent = Latent(linear(WIDE, D), linear(D, WIDE))
    layer = made(latent=latent, internal_gate=True, batch_invariant=True).requires_grad_(True)
    plain = made(latent=latent, internal_gate=True).requires_grad_(True)
    plain.load_state_dict(layer.state_dict())
    x, of_latents = torch.randn(5, WIDE), [*plain.routed_input_transform.parameters()]
    of_latents += plain.routed_output_transform.parameters()
    want, got = (torch.autograd.grad(one(x).square().sum(), of_latents) for one in (plain, layer))
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, TOL)

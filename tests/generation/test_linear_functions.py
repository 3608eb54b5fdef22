"""The convolutions that stand for those of transformers' linear layers."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as of_transformers

from moe_ops.generation.linear_functions import convolved, convolved_step
from moe_ops.testing import BF16, Tol, assert_close

NEAR = Tol(1e-6, "a few products in another order")
FUNCTION = inspect.unwrap(of_transformers.causal_conv1d_fn)
UPDATE = inspect.unwrap(of_transformers.causal_conv1d_update)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_convolutions(activation: str | None, bias: bool) -> None:
    weight, b = torch.randn(6, 4), torch.randn(6) if bias else None
    for T in (1, 3, 4, 9):
        x = torch.randn(2, 6, T)
        want = FUNCTION(x, weight, b, activation=activation)
        assert_close(convolved(x, weight, b, activation), want, NEAR, f"{T} tokens")
    for kept in (3, 4, 7):  # inputs in the state
        state, x = torch.randn(2, 6, kept), torch.randn(2, 6, 1)
        theirs = state.clone()
        want = UPDATE(x, theirs, weight, b, activation)
        assert_close(convolved_step(x, state, weight, b, activation), want, NEAR, "step")
        assert torch.equal(state, theirs)


def test_convolutions_of_sixteen_bits_are_rounded_once() -> None:
    x, state, weight = (torch.randn(2, 6, n).to(BF16) for n in (9, 4, 4))
    weight = weight[0]
    wide = convolved(x.float(), weight.float())
    assert torch.equal(convolved(x, weight), wide.to(BF16))
    step = convolved_step(x[..., :1], state.clone(), weight)
    wide = convolved_step(x[..., :1].float(), state.float(), weight.float())
    assert torch.equal(step, wide.to(BF16))


def test_other_convolutions_are_not_ours() -> None:
    x, weight = torch.randn(2, 6, 9), torch.randn(6, 4)
    assert convolved(x, weight, None, "gelu") is None
    assert convolved_step(x, torch.randn(2, 6, 4), weight) is None  # more tokens than one
    assert convolved_step(x[..., :1], torch.randn(2, 6, 2), weight) is None  # too few kept

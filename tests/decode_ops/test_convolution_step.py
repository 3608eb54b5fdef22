"""One token of a causal convolution: the definition, the kernel, and what either refuses."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops.backends.triton_decode import supports_convolution
from moe_ops.decode_ops import convolution_step
from moe_ops.testing import BF16, F16, F32, Tol, assert_close

pytest.importorskip("transformers")
pytest.importorskip("triton")
from transformers.models.qwen3_next import modeling_qwen3_next as of_transformers

from moe_ops.kernels.triton.decode.states import step_convolution

TOL = Tol(1e-6, "a few products in another order")
TOL_F16 = Tol(1e-3, "one rounding to 11 bits, either way at a tie")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Sequences, channels, inputs kept, weights of a channel.
SIZES = {
    "as in models": (2, 200, 4, 4),
    "one less is kept": (1, 128, 3, 4),
    "more are kept": (3, 130, 7, 3),
    "none is kept": (2, 5, 0, 1),
    "one weight": (2, 5, 2, 1),
    "no sequence": (0, 8, 4, 4),
}
each_size = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)


def given(size: tuple[int, ...], dtype: torch.dtype = F32, bias: bool = True) -> dict[str, Any]:
    """x is a view of longer rows, whose rest is no number."""
    B, D, kept, taps = size
    x = torch.full((B, D + 6), float("nan"))
    x[:, 3:-3] = torch.randn(B, D)
    found = {"x_BD": x, "state_BDW": torch.randn(B, D, kept), "weight_DW": torch.randn(D, taps)}
    found |= {"bias_D": torch.randn(D)} if bias else {}
    found = {name: t.to(DEVICE, dtype) for name, t in found.items()}
    return {**found, "x_BD": found["x_BD"][:, 3:-3], "silu": bias}


def with_state(call: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    state = call["state_BDW"].clone()
    return {**call, "state_BDW": state}, state


@each_size
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias and silu"])
def test_the_kernel(size: tuple[int, ...], bias: bool) -> None:
    call = given(size, bias=bias)
    (ours, state), (theirs, wanted) = with_state(call), with_state(call)
    assert_close(step_convolution(**ours), convolution_step.reference(**theirs), TOL, "out")
    assert torch.equal(state, wanted)


def test_the_kernel_on_sixteen_bits() -> None:
    call = given(SIZES["as in models"], F16)
    (ours, state), (theirs, wanted) = with_state(call), with_state(call)
    got, want = step_convolution(**ours), convolution_step.reference(**theirs)
    assert got.dtype == F16
    assert_close(got.float(), want.float(), TOL_F16, "out")
    assert torch.equal(state, wanted)


@pytest.mark.parametrize("name", ["as in models", "more are kept"])
def test_steps_are_those_of_transformers(name: str) -> None:
    call = given(SIZES[name])
    (ours, state), (theirs, wanted) = with_state(call), with_state(call)
    function = inspect.unwrap(of_transformers.causal_conv1d_update)
    for _ in range(3):
        x = torch.randn_like(call["x_BD"])
        want = function(x[..., None], wanted, theirs["weight_DW"], theirs["bias_D"], "silu")
        assert_close(convolution_step(**{**ours, "x_BD": x}), want[..., 0], TOL, "out")
        assert torch.equal(state, wanted)


def test_sixteen_bits_are_summed_in_float32_and_rounded_once() -> None:
    call = given(SIZES["as in models"], BF16)
    wide = {n: t.float() if isinstance(t, Tensor) else t for n, t in call.items()}
    want = convolution_step.reference(**wide)
    got = convolution_step.reference(**call)
    assert got.dtype == BF16 and torch.equal(got, want.to(BF16))
    assert torch.equal(call["state_BDW"], wide["state_BDW"].to(BF16))


def test_sequences_are_independent() -> None:
    call, _ = with_state(given((3, 130, 4, 4)))
    for run in (convolution_step.reference, step_convolution):
        (clean, state), (marred, other) = with_state(call), with_state(call)
        marred["x_BD"] = call["x_BD"].clone()
        marred["x_BD"][1] = other[1] = float("nan")
        assert torch.equal(run(**marred)[::2], run(**clean)[::2])
        assert torch.equal(other[::2], state[::2])


WRONG = {
    "axes": ({"x_BD": (2, 3, 5)}, "x, state and weight are [2, 3, 5], [2, 5, 4], [5, 4], not [B,"),
    "taps": ({"weight_DW": (5, 6)}, "6 weights do not fit 4 inputs in the state and one more"),
    "state": ({"state_BDW": (3, 5, 4)}, "the state is [3, 5, 4], not [2, 5, 4]; reshape it"),
    "weight": ({"weight_DW": (4, 4)}, "the weight is [4, 4], not [5, 4]; reshape it"),
    "bias": ({"bias_D": (4,)}, "the bias is [4], not [5]; reshape it"),
    "dtype": ({"x_BD": torch.int32}, "the x is torch.int32, not float32, bfloat16"),
    "float64": ({"weight_DW": torch.float64}, "the weight is torch.float64, not float32, bfloat16"),
    "no float64": ({"x_BD": torch.float64}, "the state is torch.float32, not float64; convert"),
    "device": ({"bias_D": "meta"}, "the bias is on meta, x on cpu; move one of them"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls_say_what_is_wrong(change: dict[str, Any], message: str) -> None:
    call = {n: t.cpu() if isinstance(t, Tensor) else t for n, t in given((2, 5, 4, 4)).items()}
    for name, value in change.items():
        call[name] = torch.ones(value) if isinstance(value, tuple) else call[name].to(value)
    with pytest.raises(ValueError, match=re.escape(f"convolution_step: {message}")):
        convolution_step(**call)


def test_what_the_kernel_refuses() -> None:
    for name, axes in (("state_BDW", (1, 2)), ("weight_DW", (0, 1)), ("x_BD", (0, 1))):
        call = given((2, 5, 4, 4))
        call[name] = call[name].transpose(*axes).contiguous().transpose(*axes)
        said = supports_convolution(convolution_step.call(**call))
        assert said is not None and "contiguous" in said
    assert supports_convolution(convolution_step.call(**given((2, 5, 4, 4)))) is None

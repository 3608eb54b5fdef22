"""A selective state space, for one token and for prompts, against transformers' functions."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from moe_ops.decode_ops import state_space_scan, state_space_step
from moe_ops.testing import BF16, Tol, assert_close

pytest.importorskip("transformers")
from transformers.models.nemotron_h import modeling_nemotron_h as stock

from tests.chosen import in_turn

TOL = Tol(1e-5, "float32 sums in another order, over hundreds of tokens")
INF = float("inf")
# Sequences, groups, heads, state width, head width.
SIZES = {"one head": (1, 1, 1, 16, 8), "groups": (2, 2, 6, 16, 8), "odd": (3, 1, 2, 5, 7)}
LENGTHS = [1, 2, 63, 64, 65, 700]
each_size = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
OF_TOKENS = ("x_BTHV", "dt_BTH", "b_BTND", "c_BTND")


def prompt(size: tuple[int, ...], T: int) -> dict[str, Any]:
    B, N, H, D, V = size
    return {
        "x_BTHV": torch.randn(B, T, H, V),
        "dt_BTH": torch.randn(B, T, H) - 1,
        "a_H": -16 * torch.rand(H),
        "b_BTND": torch.randn(B, T, N, D),
        "c_BTND": torch.randn(B, T, N, D),
        "state_BHVD": torch.randn(B, H, V, D),
        "least": 0.0,
        "most": INF,
        "skip_H": torch.randn(H),
        "dt_bias_H": torch.randn(H),
        "softplus": True,
    }


def of_transformers(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What its scan gives, without what it may be replaced by."""
    x, dt, a, b, c, state, least, most, skip, bias, softplus = given.values()
    return inspect.unwrap(stock.mamba2_chunk_scan)(
        x, dt, a, b, c, chunk_size=32, D=skip, dt_bias=bias, initial_states=state,
        dt_softplus=softplus, dt_limit=(least, most), return_final_states=True,
    )  # fmt: skip


def step_by_step(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    x, dt, a, b, c, state, _, _, *of_heads = given.values()
    state, outs = state.clone(), []
    for t in range(x.shape[1]):
        outs.append(state_space_step(x[:, t], dt[:, t], a, b[:, t], c[:, t], state, *of_heads))
    return torch.stack(outs, 1), state


def steps_of_transformers(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    x, dt, a, b, c, state, _, _, skip, bias, softplus = given.values()
    V, D = state.shape[2:]
    wide = [None if t is None else t[:, None].expand(-1, V) for t in (skip, bias)]
    state, outs = state.clone(), []
    for t in range(x.shape[1]):
        out = inspect.unwrap(stock.mamba2_selective_state_update)(
            state, x[:, t], dt[:, t, :, None].expand(-1, -1, V), a[:, None, None].expand(-1, V, D),
            b[:, t], c[:, t], wide[0], dt_bias=wide[1], dt_softplus=softplus,
        )  # fmt: skip
        outs.append(out)
    return torch.stack(outs, 1), state


def check(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    for what, ours, theirs in zip(("out", "state"), got, want, strict=True):
        assert ours.dtype == theirs.dtype
        assert_close(ours, theirs, TOL, what)


def part(given: dict[str, Any], tokens: slice) -> dict[str, Any]:
    return {n: x[:, tokens] if n in OF_TOKENS else x for n, x in given.items()}


@in_turn(each_size, pytest.mark.parametrize("T", LENGTHS))
def test_prompts_are_those_of_transformers(size: tuple[int, ...], T: int) -> None:
    given = prompt(size, T)
    check(state_space_scan(**given), of_transformers(given))
    assert all(t.is_contiguous() for t in state_space_scan(**given))
    given |= {"state_BHVD": None, "skip_H": None, "dt_bias_H": None, "least": 0.1, "most": 0.5}
    check(state_space_scan(**given), of_transformers(given))
    check(
        state_space_scan(**{**given, "softplus": False}),
        of_transformers({**given, "softplus": False}),
    )


@each_size
@pytest.mark.parametrize("T", [1, 3, 70])
def test_steps_are_those_of_transformers(size: tuple[int, ...], T: int) -> None:
    given = prompt(size, T)
    check(step_by_step(given), steps_of_transformers(given))
    check(step_by_step(given), state_space_scan(**given))
    given |= {"skip_H": None, "dt_bias_H": None}
    check(step_by_step(given), steps_of_transformers(given))


@each_size
def test_inputs_of_sixteen_bits_are_computed_in_float32(size: tuple[int, ...]) -> None:
    given = prompt(size, 70)
    rounded = {n: x.to(BF16) if n in OF_TOKENS else x for n, x in given.items()}
    exact = {n: x.float() if n in OF_TOKENS else x for n, x in rounded.items()}
    check(state_space_scan(**rounded), state_space_scan(**exact))
    out, state = step_by_step(rounded)
    want, wanted = step_by_step(exact)
    assert out.dtype == BF16 and torch.equal(out, want.to(BF16)) and torch.equal(state, wanted)


@each_size
@pytest.mark.parametrize("cut", [1, 40, 64])
def test_a_prompt_in_two_parts_is_the_whole(size: tuple[int, ...], cut: int) -> None:
    given = prompt(size, 100)
    first, state = state_space_scan(**part(given, slice(cut)))
    rest, last = state_space_scan(**{**part(given, slice(cut, None)), "state_BHVD": state})
    check((torch.cat([first, rest], 1), last), state_space_scan(**given))


@each_size
def test_the_first_state_stays_as_it_is(size: tuple[int, ...]) -> None:
    given = prompt(size, 5)
    before = given["state_BHVD"].clone()
    _, last = state_space_scan(**given)
    assert torch.equal(given["state_BHVD"], before) and not torch.equal(last, before)
    out, last = state_space_scan(**part(given, slice(0)))
    assert out.shape[1] == 0 and torch.equal(last, before)
    assert last.data_ptr() != given["state_BHVD"].data_ptr()


@each_size
def test_sequences_are_independent(size: tuple[int, ...]) -> None:
    given = prompt((3, *size[1:]), 70)
    clean = state_space_scan(**given), step_by_step(given)
    for name in (*OF_TOKENS, "state_BHVD"):
        given[name][1] = float("nan")
    for (out, state), (want, wanted) in zip(
        (state_space_scan(**given), step_by_step(given)), clean, strict=True
    ):
        assert torch.equal(out[::2], want[::2]) and torch.equal(state[::2], wanted[::2])


def test_one_graph_serves_all_lengths() -> None:
    def twice(given: dict[str, Any]) -> Any:
        out, state = state_space_scan(**given)
        return out * 2, state

    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(twice, backend=counter)
    for T in (5, 64, 65, 200):
        given = prompt(SIZES["groups"], T)
        for name, x in given.items():
            if name in OF_TOKENS:
                torch._dynamo.mark_dynamic(x, 1)
        check(call(given), twice(given))
    assert counter.frame_count == 1


WRONG = {
    "b is flat": ({"b_BND": (2, 16)}, "x and b are [2, 4, 8] and [2, 16], not [B, H, V]"),
    "groups": ({"b_BND": (2, 3, 16)}, "3 groups of heads do not divide 4 heads"),
    "c": ({"c_BND": (2, 2, 8)}, "the c is [2, 2, 8], not [2, 2, 16]; reshape it"),
    "dt": ({"dt_BH": (2, 4, 8)}, "the dt is [2, 4, 8], not [2, 4]; reshape it"),
    "a": ({"a_H": (4, 8)}, "the a is [4, 8], not [4]; reshape it"),
    "skip": ({"skip_H": (8,)}, "the skip is [8], not [4]; reshape it"),
    "state": ({"state_BHVD": (2, 4, 16, 8)}, "the state is [2, 4, 16, 8], not [2, 4, 8, 16]"),
    "dtype": ({"x_BHV": torch.int64}, "the x is torch.int64, not float32, bfloat16"),
    "a rounded state": ({"state_BHVD": BF16}, "the state is torch.bfloat16, not float32"),
    "device": ({"c_BND": "meta"}, "the c is on meta, x on cpu; move one of them"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls_say_what_is_wrong(change: dict[str, Any], message: str) -> None:
    given = prompt((2, 2, 4, 16, 8), 1)
    whole = dict(given)
    step = {n.replace("T", ""): x[:, 0] if n in OF_TOKENS else x for n, x in given.items()}
    del step["least"], step["most"]
    for name, value in change.items():
        step[name] = torch.ones(value) if isinstance(value, tuple) else step[name].to(value)
        long = name.replace("B", "BT") if name.replace("B", "BT") in OF_TOKENS else name
        whole[long] = step[name][:, None] if long in OF_TOKENS else step[name]
    with pytest.raises(ValueError, match=re.escape(f"state_space_step: {message}")):
        state_space_step(**step)
    with pytest.raises(ValueError, match="state_space_scan: "):
        state_space_scan(**whole)

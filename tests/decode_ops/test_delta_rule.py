"""The gated delta rule, for one token and for prompts, against transformers' functions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from moe_ops.decode_ops import delta_rule, delta_rule_step
from moe_ops.testing import BF16, Tol, assert_close

pytest.importorskip("transformers")
from transformers.models.kimi_linear import modeling_kimi_linear as by_channel
from transformers.models.qwen3_next import modeling_qwen3_next as by_head

from tests.chosen import in_turn

TOL = Tol(1e-5, "float32 sums in another order, over hundreds of tokens")
TOL_BF16 = Tol(8e-3, "one rounding to 8 bits, either way at a tie")
# Sequences, heads of the keys, heads of the state, key width, value width, a gate for each channel.
KINDS = {
    "one head": (1, 1, 1, 16, 16, False),
    "heads share keys": (2, 2, 6, 16, 24, False),
    "a gate a channel": (2, 3, 3, 16, 24, True),
}
LENGTHS = [1, 2, 63, 64, 65, 700]
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def prompt(kind: tuple[Any, ...], T: int, least: float = -3.0) -> dict[str, Any]:
    B, N, H, D, V, channels = kind
    return {
        "q_BTND": torch.randn(B, T, N, D),
        "k_BTND": torch.randn(B, T, N, D),
        "v_BTHV": torch.randn(B, T, H, V),
        "g_BTHD": least * torch.rand((B, T, H, D) if channels else (B, T, H)),
        "beta_BTH": torch.rand(B, T, H),
        "state_BHDV": torch.randn(B, H, D, V),
        "scale": D**-0.5,
        "normalize": True,
    }


def stock(function: Callable[..., Any], given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What a function of transformers gives, without what it may be replaced by."""
    q, k, v, g, beta, state, _, normalize = given.values()
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    return inspect.unwrap(function)(
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True,
        use_qk_l2norm_in_kernel=normalize,
    )  # fmt: skip


def functions(kind: tuple[Any, ...]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """For prompts, and token by token."""
    if kind[-1]:
        return by_channel.chunk_kimi_delta_attention, by_channel.recurrent_kimi_delta_attention
    return by_head.torch_chunk_gated_delta_rule, by_head.torch_recurrent_gated_delta_rule


def step_by_step(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    *tensors, state, scale, normalize = given.values()
    state, T = state.clone(), tensors[0].shape[1]
    outs = [delta_rule_step(*(x[:, t] for x in tensors), state, scale, normalize) for t in range(T)]
    return torch.stack(outs, 1), state


def check(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], tol: Tol = TOL) -> None:
    for what, ours, theirs in zip(("out", "state"), got, want, strict=True):
        assert ours.dtype == theirs.dtype
        assert_close(ours.float(), theirs.float(), tol, what)


def part(given: dict[str, Any], tokens: slice) -> dict[str, Any]:
    return {n: x[:, tokens] if "T" in n.partition("_")[2] else x for n, x in given.items()}


@in_turn(each_kind, pytest.mark.parametrize("T", LENGTHS))
def test_prompts_are_those_of_transformers(kind: tuple[Any, ...], T: int) -> None:
    given = prompt(kind, T)
    in_chunks, by_token = functions(kind)
    check(delta_rule(**given), stock(in_chunks, given))
    check(delta_rule(**given), stock(by_token, given))
    assert all(t.is_contiguous() for t in delta_rule(**given))
    given |= {"state_BHDV": None, "normalize": False}
    given["k_BTND"] = given["k_BTND"] * given["scale"]  # or states grow
    check(delta_rule(**given), stock(in_chunks, given))


@each_kind
@pytest.mark.parametrize("T", [1, 3, 70])
def test_steps_are_those_of_transformers(kind: tuple[Any, ...], T: int) -> None:
    given = prompt(kind, T)
    check(step_by_step(given), stock(functions(kind)[1], given))
    given |= {"normalize": False, "k_BTND": given["k_BTND"] * given["scale"]}
    check(step_by_step(given), stock(functions(kind)[1], given))


@each_kind
def test_inputs_of_sixteen_bits_are_computed_in_float32(kind: tuple[Any, ...]) -> None:
    given = prompt(kind, 70)
    for name in ("q_BTND", "k_BTND", "v_BTHV", "beta_BTH"):
        given[name] = given[name].to(BF16)
    in_chunks, by_token = functions(kind)
    check(delta_rule(**given), stock(in_chunks, given), TOL_BF16)
    check(step_by_step(given), stock(by_token, given), TOL_BF16)


@each_kind
@pytest.mark.parametrize("cut", [1, 40, 64])
def test_a_prompt_in_two_parts_is_the_whole(kind: tuple[Any, ...], cut: int) -> None:
    given = prompt(kind, 100)
    first, state = delta_rule(**part(given, slice(cut)))
    rest, last = delta_rule(**{**part(given, slice(cut, None)), "state_BHDV": state})
    check((torch.cat([first, rest], 1), last), delta_rule(**given))


@each_kind
def test_the_first_state_stays_as_it_is(kind: tuple[Any, ...]) -> None:
    given = prompt(kind, 5)
    before = given["state_BHDV"].clone()
    _, last = delta_rule(**given)
    assert torch.equal(given["state_BHDV"], before) and not torch.equal(last, before)
    none = part(given, slice(0))
    out, last = delta_rule(**none)
    assert out.shape[1] == 0 and torch.equal(last, before)
    assert last.data_ptr() != given["state_BHDV"].data_ptr()


@each_kind
def test_tokens_of_zeros_leave_the_state(kind: tuple[Any, ...]) -> None:
    """As padding comes, on the left or on the right."""
    given = prompt(kind, 30)
    padded = dict(given)
    for name, x in given.items():
        if "T" in name.partition("_")[2]:
            zeros = torch.zeros_like(x)
            padded[name] = torch.cat([zeros, x, zeros, zeros], 1)
    out, state = delta_rule(**padded)
    check((out[:, 30:60], state), delta_rule(**given))


@each_kind
def test_gates_that_forget_all_give_numbers(kind: tuple[Any, ...]) -> None:
    """exp of a sum of gates, or of its negative, is 0 or infinite within a few tokens."""
    given = prompt(kind, 130, least=-400.0)
    check(delta_rule(**given), step_by_step(given))


@each_kind
def test_sequences_are_independent(kind: tuple[Any, ...]) -> None:
    given = prompt((3, *kind[1:]), 70)
    clean = delta_rule(**given), step_by_step(given)
    for x in given.values():
        if isinstance(x, Tensor):
            x[1] = float("nan")
    for (out, state), (want, wanted) in zip(
        (delta_rule(**given), step_by_step(given)), clean, strict=True
    ):
        assert torch.equal(out[::2], want[::2]) and torch.equal(state[::2], wanted[::2])


def test_a_token_reads_none_behind_it() -> None:
    for kind in KINDS.values():
        given = prompt(kind, 70)
        want, _ = delta_rule(**given)
        for name, x in given.items():
            if "T" in name.partition("_")[2]:
                x[:, 50:] *= 0.3
        assert torch.equal(delta_rule(**given)[0][:, :50], want[:, :50])


@pytest.mark.parametrize("channels", [False, True], ids=["a gate a head", "a gate a channel"])
def test_one_graph_serves_all_lengths(channels: bool) -> None:
    kind = (2, 2, 2, 16, 16, channels)

    def twice(given: dict[str, Any]) -> Any:
        out, state = delta_rule(**given)
        return out * 2, state

    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(twice, backend=counter)
    for T in (5, 64, 65, 200):
        given = prompt(kind, T)
        for name, x in given.items():
            if "T" in name.partition("_")[2]:
                torch._dynamo.mark_dynamic(x, 1)
        check(call(given), twice(given))
    assert counter.frame_count == 1


WRONG = {
    "q is flat": ({"q_BND": (2, 16)}, r"q and v are [2, 16] and [2, 4, 8], not [B, N, D]"),
    "heads": ({"q_BND": (2, 3, 16), "k_BND": (2, 3, 16)}, "3 heads of the keys do not divide 4"),
    "k": ({"k_BND": (2, 2, 8)}, "the k is [2, 2, 8], not [2, 2, 16]; reshape it"),
    "g": ({"g_BHD": (2, 4, 8)}, "the g is [2, 4, 8], not [2, 4, 16]; reshape it"),
    "beta": ({"beta_BH": (2, 2)}, "the beta is [2, 2], not [2, 4]; reshape it"),
    "state": ({"state_BHDV": (2, 4, 8, 16)}, "the state is [2, 4, 8, 16], not [2, 4, 16, 8]"),
    "dtype": ({"v_BHV": torch.float64}, "the v is torch.float64, not float32, bfloat16"),
    "a rounded state": ({"state_BHDV": BF16}, "the state is torch.bfloat16, not float32"),
    "device": ({"k_BND": "meta"}, "the k is on meta, q on cpu; move one of them"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls_say_what_is_wrong(change: dict[str, Any], message: str) -> None:
    given = prompt((2, 2, 4, 16, 8, False), 1)
    step = {n.replace("T", "", 1): x[:, 0] if "T" in n else x for n, x in given.items()}
    for name, value in change.items():
        step[name] = torch.ones(value) if isinstance(value, tuple) else step[name].to(value)
    with pytest.raises(ValueError, match=re.escape(f"delta_rule_step: {message}")):
        delta_rule_step(**step)
    whole = {
        n: step[n.replace("T", "", 1)][:, None] if "T" in n else step[n] for n in given
    }  # fmt: skip
    with pytest.raises(ValueError, match="delta_rule: "):
        delta_rule(**whole)

"""Layers that keep states, one token and prompts: the kernels against their ops' definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops.backends.triton_decode import supports_state
from moe_ops.decode_ops import (
    delta_rule,
    delta_rule_step,
    state_space_scan,
    state_space_step,
)
from moe_ops.decode_ops.delta_rule_step import EPS
from moe_ops.testing import F16, F32, Tol, assert_close

pytest.importorskip("triton")
from moe_ops.kernels.triton.decode.scans import scan_delta_rule, scan_state_space
from moe_ops.kernels.triton.decode.states import step_delta_rule, step_state_space
from moe_ops.kernels.triton.decode.states_plan import TILE, part_of
from tests.chosen import in_turn, one_in

TOL = Tol(2e-6, "float32 sums in another order")
TOL_PROMPT = Tol(1e-5, "float32 sums in another order, over many tokens")
TOL_F16 = Tol(1e-3, "one rounding to 11 bits, either way at a tie")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Sequences, heads of the keys, heads of the state, key width, value width.
SIZES = {
    "one": (1, 1, 1, 16, 16),
    "heads share a key": (2, 2, 4, 16, 32),
    "three heads share a key": (3, 1, 3, 32, 16),
    "wide": (1, 1, 2, 128, 128),
    "no powers of two": (2, 1, 2, 24, 40),
    "narrow": (2, 2, 2, 4, 5),
    "none": (0, 1, 2, 16, 16),
}
each_size = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)


def noise(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def of_a_row(x: Tensor) -> Tensor:
    """The same heads as a view of longer rows, whose rest is no number, as a split leaves them."""
    flat = x.flatten(1)
    edge = torch.full((len(x), 3), float("nan"), device=DEVICE, dtype=x.dtype)
    return torch.cat([edge, flat, edge], 1)[:, 3:-3].unflatten(1, x.shape[1:])


def delta_step(
    size: tuple[int, ...], dtype: torch.dtype = F32, channels: bool = False
) -> dict[str, Any]:
    B, N, H, D, V = size
    gates = (B, H, D) if channels else (B, H)
    return {
        "q_BND": of_a_row(noise(B, N, D, dtype=dtype)),
        "k_BND": of_a_row(noise(B, N, D, dtype=dtype)),
        "v_BHV": of_a_row(noise(B, H, V, dtype=dtype)),
        "g_BHD": of_a_row(-3 * torch.rand(gates, device=DEVICE)),
        "beta_BH": of_a_row(torch.rand(B, H, device=DEVICE).to(dtype)),
        "state_BHDV": noise(B, H, D, V),
        "scale": D**-0.5,
        "normalize": True,
    }


def space_step(size: tuple[int, ...], dtype: torch.dtype = F32) -> dict[str, Any]:
    B, N, H, D, V = size
    dt = 4 * noise(B, H) - 2
    dt.flatten()[:2] = torch.tensor([30.0, -40.0], device=DEVICE)[: dt.numel()]
    return {
        "x_BHV": of_a_row(noise(B, H, V, dtype=dtype)),
        "dt_BH": of_a_row(dt.to(dtype)),
        "a_H": -torch.rand(H, device=DEVICE),
        "b_BND": of_a_row(noise(B, N, D, dtype=dtype)),
        "c_BND": of_a_row(noise(B, N, D, dtype=dtype)),
        "state_BHVD": noise(B, H, V, D),
        "skip_H": noise(H),
        "dt_bias_H": noise(H, dtype=dtype),
        "softplus": True,
    }


def with_state(given: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """The call with a copy of the state, and that copy."""
    (name,) = (n for n in given if n.startswith("state_"))
    copy = given[name].clone()
    return {**given, name: copy}, copy


def check_delta(given: dict[str, Any], tol: Tol, **plan: int) -> None:
    (ours, state), (theirs, wanted) = with_state(given), with_state(given)
    got = step_delta_rule(**ours, eps=EPS, **plan)
    want = delta_rule_step.reference(**theirs)
    assert got.dtype == want.dtype and got.is_contiguous()
    assert_close(got.float(), want.float(), tol, "out")
    assert_close(state, wanted, TOL, "state")


def check_space(given: dict[str, Any], tol: Tol, **plan: int) -> None:
    (ours, state), (theirs, wanted) = with_state(given), with_state(given)
    got = step_state_space(**ours, **plan)
    want = state_space_step.reference(**theirs)
    assert got.dtype == want.dtype and got.is_contiguous()
    assert_close(got.float(), want.float(), tol, "out")
    assert_close(state, wanted, TOL, "state")


@in_turn(
    each_size,
    pytest.mark.parametrize("channels", [False, True], ids=["a gate a head", "a gate a channel"]),
)
def test_the_delta_rule(size: tuple[int, ...], channels: bool) -> None:
    given = delta_step(size, channels=channels)
    check_delta(given, TOL)
    check_delta({**given, "normalize": False, "scale": 0.3, "ahead": True}, TOL)


@each_size
def test_a_state_space(size: tuple[int, ...]) -> None:
    given = space_step(size)
    check_space(given, TOL)
    check_space({**given, "skip_H": None, "dt_bias_H": None, "ahead": True}, TOL)
    dt = given["dt_BH"].abs().clamp(max=2)
    check_space({**given, "dt_BH": dt, "dt_bias_H": None, "softplus": False}, TOL)


def test_inputs_of_sixteen_bits_are_rounded_once() -> None:
    size = SIZES["heads share a key"]
    check_delta(delta_step(size, F16), TOL_F16)
    check_delta(delta_step(size, F16, channels=True), TOL_F16)
    check_space(space_step(size, F16), TOL_F16)


@pytest.mark.parametrize("part", [8, 16, 64])
def test_every_part_of_a_state(part: int) -> None:
    check_delta(delta_step(SIZES["no powers of two"]), TOL, part=part)
    check_space(space_step(SIZES["no powers of two"]), TOL, part=part)


def of_longer_rows(x: Tensor) -> Tensor:
    """Tokens as a view of longer rows, whose rest is no number, as a split leaves them."""
    B, T = x.shape[:2]
    edge = torch.full((B, T, 3), float("nan"), device=DEVICE, dtype=x.dtype)
    rows = torch.cat([edge, x.flatten(2), edge], 2)
    return rows[..., 3 : rows.shape[2] - 3].unflatten(2, x.shape[2:])


def delta_prompt(
    size: tuple[int, ...], T: int, dtype: torch.dtype = F32, channels: bool = False
) -> dict[str, Any]:
    B, N, H, D, V = size
    gates = (B, T, H, D) if channels else (B, T, H)
    return {
        "q_BTND": of_longer_rows(noise(B, T, N, D, dtype=dtype)),
        "k_BTND": of_longer_rows(noise(B, T, N, D, dtype=dtype)),
        "v_BTHV": of_longer_rows(noise(B, T, H, V, dtype=dtype)),
        "g_BTHD": of_longer_rows(-3 * torch.rand(gates, device=DEVICE)),
        "beta_BTH": of_longer_rows(torch.rand(B, T, H, device=DEVICE).to(dtype)),
        "state_BHDV": noise(B, H, D, V),
        "scale": D**-0.5,
        "normalize": True,
    }


def space_prompt(size: tuple[int, ...], T: int, dtype: torch.dtype = F32) -> dict[str, Any]:
    B, N, H, D, V = size
    return {
        "x_BTHV": of_longer_rows(noise(B, T, H, V, dtype=dtype)),
        "dt_BTH": of_longer_rows(noise(B, T, H, dtype=dtype)),
        "a_H": -torch.rand(H, device=DEVICE),
        "b_BTND": of_longer_rows(noise(B, T, N, D, dtype=dtype)),
        "c_BTND": of_longer_rows(noise(B, T, N, D, dtype=dtype)),
        "state_BHVD": noise(B, H, V, D),
        "least": 0.0,
        "most": float("inf"),
        "skip_H": noise(H),
        "dt_bias_H": noise(H),
        "softplus": True,
    }


def check_prompt(
    got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], tol: Tol | None = None
) -> None:
    for what, ours, theirs in zip(("out", "state"), got, want, strict=True):
        assert ours.dtype == theirs.dtype and ours.is_contiguous()
        how = TOL_PROMPT if tol is None or what == "state" else tol
        assert_close(ours.float(), theirs.float(), how, what)


@in_turn(
    each_size,
    pytest.mark.parametrize("channels", [False, True], ids=["a gate a head", "a gate a channel"]),
)
def test_prompts_by_the_delta_rule(size: tuple[int, ...], channels: bool) -> None:
    for T in (0, 1, 20):
        given = delta_prompt(size, T, channels=channels)
        check_prompt(scan_delta_rule(**given, eps=EPS), delta_rule.reference(**given))
    given |= {"state_BHDV": None, "normalize": False, "k_BTND": given["k_BTND"] * given["scale"]}
    check_prompt(scan_delta_rule(**given, eps=EPS), delta_rule.reference(**given))


@one_in(2, each_size)
def test_prompts_through_a_state_space(size: tuple[int, ...]) -> None:
    for T in (0, 1, 20):
        given = space_prompt(size, T)
        check_prompt(scan_state_space(**given), state_space_scan.reference(**given))
    given |= {"state_BHVD": None, "skip_H": None, "dt_bias_H": None, "least": 0.1, "most": 0.5}
    check_prompt(scan_state_space(**given), state_space_scan.reference(**given))
    given["softplus"] = False
    check_prompt(scan_state_space(**given), state_space_scan.reference(**given))


@pytest.mark.parametrize("part", [8, 64])
def test_every_part_of_a_state_through_a_prompt(part: int) -> None:
    size = SIZES["no powers of two"]
    given = delta_prompt(size, 5)
    check_prompt(scan_delta_rule(**given, eps=EPS, part=part), delta_rule.reference(**given))
    given = space_prompt(size, 5)
    check_prompt(scan_state_space(**given, part=part), state_space_scan.reference(**given))


def test_prompts_of_sixteen_bits_are_rounded_once() -> None:
    size = SIZES["heads share a key"]
    given = delta_prompt(size, 20, F16)
    check_prompt(scan_delta_rule(**given, eps=EPS), delta_rule.reference(**given), TOL_F16)
    given = space_prompt(size, 20, F16)
    check_prompt(scan_state_space(**given), state_space_scan.reference(**given))


def test_prompts_are_independent() -> None:
    size = (3, *SIZES["heads share a key"][1:])
    for given, scan, more in (
        (delta_prompt(size, 9), scan_delta_rule, {"eps": EPS}),
        (space_prompt(size, 9), scan_state_space, {}),
    ):
        want = scan(**given, **more)
        for x in given.values():
            if isinstance(x, Tensor) and x.dim() > 1:
                x[1] = float("nan")
        for got, wanted in zip(scan(**given, **more), want, strict=True):
            assert torch.equal(got[::2], wanted[::2])


def test_sequences_are_independent() -> None:
    """What is no number in one of them stays there, and the bits of others are the same alone."""
    size = (3, *SIZES["heads share a key"][1:])
    for make, step, more in (
        (delta_step, step_delta_rule, {"eps": EPS}),
        (space_step, step_state_space, {}),
    ):
        given = make(size)
        of_rows = [n for n, x in given.items() if isinstance(x, Tensor) and x.dim() > 1]
        for name in of_rows:
            given[name] = given[name].clone()
            given[name][1] = float("nan")
        both, states = with_state(given)
        out = step(**both, **more)
        for row in (0, 2):
            one = {n: x[row : row + 1] if n in of_rows else x for n, x in given.items()}
            alone, state = with_state(one)
            assert torch.equal(step(**alone, **more)[0], out[row])
            assert torch.equal(state[0], states[row]) and not out[row].isnan().any()


def test_parts_fit_their_states() -> None:
    for width in (1, 16, 100, 128, 256):
        for others in (1, 5, 64, 128, 1024):
            part = part_of(width, others)
            assert part & (part - 1) == 0 and part < 2 * others
            assert part * width <= max(TILE, 8 * width)


REFUSED = {
    "a wide key": ((1, 1, 1, 300, 4), {}, "holds 256 numbers of a key, got 300"),
    "a state with strides": ((1, 1, 2, 8, 8), {"state": True}, "make it contiguous"),
    "heads with strides": ((1, 1, 2, 8, 8), {"wide": True}, "make its last axis contiguous"),
}


@pytest.mark.parametrize(("size", "change", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_kernels_refuse(size: tuple[int, ...], change: dict[str, bool], reason: str) -> None:
    for op, given in (
        (delta_rule_step, delta_step(size)),
        (state_space_step, space_step(size)),
        (delta_rule, delta_prompt(size, 3)),
        (state_space_scan, space_prompt(size, 3)),
    ):
        for name, x in given.items():
            if name.startswith("state_") and "state" in change:
                given[name] = x.mT.contiguous().mT
            elif name[0] in "vx" and "wide" in change:
                given[name] = torch.stack([x, x], -1)[..., 0]
        said = supports_state(op.call(**given))
        assert said is not None and reason in said

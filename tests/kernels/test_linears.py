"""Linear layers of few rows: the kernels against float64, the op's schema, errors and CPU code.

The interpreter multiplies float16 and float32 alone, so bfloat16 is left to tests/gpu.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops.decode_ops import linears, normed_linears
from moe_ops.decode_ops.linears import LinearsCall, refusal
from moe_ops.decode_ops.normed_linears import NormedLinearsCall
from moe_ops.decode_ops.normed_linears import refusal as norm_refusal
from moe_ops.testing import BF16, F16, F32, Tol, assert_close

pytest.importorskip("triton")
from moe_ops.kernels.triton.decode.linears import run, run_normed
from moe_ops.kernels.triton.decode.linears_plan import LinearsPlan, plan_for
from tests.chosen import in_turn

TOL = Tol(1e-5, "float32 sums in another order")
TOL_F16 = Tol(1e-3, "one rounding to 11 bits of mantissa")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H200 = (132, 232448)  # multiprocessors, bytes of shared memory for a block


def tensors(
    T: int, K: int, sizes: tuple[int, ...], dtype: torch.dtype = F32, biases: str = "some"
) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """An input and weights, with a bias for every other one, or for none."""
    x = torch.randn(T, K, device=DEVICE).to(dtype)
    weights = [(torch.randn(n, K, device=DEVICE) * K**-0.5).to(dtype) for n in sizes]
    given = [torch.randn(n, device=DEVICE).to(dtype) for n in sizes]
    return x, weights, [b if biases == "some" and g % 2 == 0 else None for g, b in enumerate(given)]


def check(got: list[Tensor], x: Tensor, weights: Any, biases: Any, tol: Tol, what: str) -> None:
    for y, w, b in zip(got, weights, biases, strict=True):
        want = x.double() @ w.double().T + (0 if b is None else b.double())
        assert y.dtype == x.dtype and y.is_contiguous()
        assert_close(y.float(), want.float(), tol, what)


@pytest.mark.slow
@in_turn(
    pytest.mark.parametrize("T", [1, 2, 17, 64]),
    pytest.mark.parametrize("K", [1, 128, 200]),
    pytest.mark.parametrize("sizes", [(7,), (3, 1, 20, 33)], ids=str),
)
def test_sizes_that_are_no_multiples_of_tiles(T: int, K: int, sizes: tuple[int, ...]) -> None:
    given = tensors(T, K, sizes)
    check(run(*given), *given, TOL, "run")
    few = LinearsPlan(16 if T > 1 else 4, 32, 4, 2)
    check(run(*given, plan=few), *given, TOL, "several tiles")


@pytest.mark.slow
@pytest.mark.parametrize("T", [1, 3])
def test_more_weights_than_a_launch_takes(T: int) -> None:
    given = tensors(T, 48, (5, 16, 7, 31, 9, 1), F16)
    check(run(*given), *given, TOL_F16, "run")


@pytest.mark.parametrize("T", [1, 9])
def test_rows_of_a_wider_input(T: int) -> None:
    x, weights, biases = tensors(T, 96, (24, 8))
    wide = torch.full((T, 200), float("nan"), device=DEVICE)
    wide[:, 50:146] = x
    check(run(wide[:, 50:146], weights, biases), x, weights, biases, TOL, "a view")


@pytest.mark.slow
def test_the_same_in_every_run() -> None:
    for T in (1, 4, 32):
        given = tensors(T, 160, (50, 14))
        first, second = run(*given), run(*given)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("T", "K", "sizes", "residual", "shift"),
    [
        (1, 1, (40, 8, 9), True, None),
        (1, 33, (7,), True, 1.0),
        (3, 33, (7,), True, 1.0),
        (64, 200, (40, 8, 9), False, None),
        pytest.param(1, 128, (40, 8, 9), False, None, marks=pytest.mark.slow),
        pytest.param(1, 200, (5, 6, 7, 8, 9), True, None, marks=pytest.mark.slow),
        pytest.param(1, 200, (5, 6, 7, 8, 9), True, 1.0, marks=pytest.mark.slow),
        pytest.param(8, 200, (5, 6, 7, 8, 9), True, None, marks=pytest.mark.slow),
        (1, 200, (7,), False, None),
        (1, 40, (7,), False, 0.0),
        (2, 40, (7,), True, 0.0),
    ],
    ids=str,
)
def test_a_norm_first(
    T: int, K: int, sizes: tuple[int, ...], residual: bool, shift: float | None
) -> None:
    x, weights, biases = tensors(T, K, sizes, F16)
    added = torch.randn_like(x) if residual else None
    gain = torch.randn(K, device=DEVICE).to(F16)
    given = x, added, gain, 1e-5, weights, biases, shift
    cpu = [None if t is None else t.cpu() for t in (x, added, gain, *weights, *biases)]
    G = len(sizes)
    want = normed_linears(cpu[0], cpu[1], cpu[2], 1e-5, cpu[3 : 3 + G], cpu[3 + G :], shift)
    for plan in (None, LinearsPlan(4 if T == 1 else 16, 32, 4, 2)):
        got = run_normed(*given, plan=plan)
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            assert_close(
                g.float().cpu(), w.float(), Tol(2e-3, "float16, rounded three times"), str(i)
            )
        if residual:
            assert torch.equal(got[0], x + added)


@pytest.mark.parametrize(
    ("residual", "shift", "dtype"),
    [
        (False, None, BF16),
        (True, None, F16),
        (False, 0.0, BF16),
        (True, 1.0, BF16),
        (True, 1.0, F16),
    ],
    ids=str,
)
def test_the_op_that_norms(residual: bool, shift: float | None, dtype: torch.dtype) -> None:
    x, weights, biases = tensors(1, 40, (24, 8, 9), dtype)
    added = torch.randn_like(x) if residual else None
    gain = torch.randn(40, device=DEVICE).to(dtype)
    given = x, added, gain, 1e-6, weights, biases, shift
    got = normed_linears(*given)
    s = x if added is None else x + added
    quotient = s.float() * torch.rsqrt(s.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    n = (
        gain * quotient.to(dtype)
        if shift is None
        else (quotient * (gain.float() + shift)).to(dtype)
    )
    tol = Tol(8e-3 if dtype == BF16 else 1e-3, "one rounding either way")
    assert_close(got[int(residual)].float(), n.float(), tol)
    if DEVICE == "cpu":
        assert torch.equal(got[int(residual)], n)
    assert len(got) == 4 + residual
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.moe_ops.normed_linears.default, given, test_utils=tests)


def test_refusals_of_norms() -> None:
    def why(x: Any = (1, 8), residual: Any = (1, 8), gain: Any = (8,)) -> Any:
        x, residual, gain = (torch.empty(t, dtype=BF16) for t in (x, residual, gain))
        weights = [torch.empty(6, x.shape[1], dtype=BF16)]
        return norm_refusal(NormedLinearsCall(x, residual, gain, 0.0, weights, [None]))

    assert why() is None
    assert why((2, 8), (2, 8)) is None
    wanted = "[T, K] with T from 1 to 64 and K up to 8192; use `linears`"
    assert why((1, 9000)) == f"x_TK is [1, 9000], not {wanted}"
    assert why(gain=(9,)) == (
        "the gain is [9] with the strides (1,), not a contiguous [8]; reshape it"
    )
    assert why(residual=(8,)) == (
        "the residual is [8] with the strides (1,), not a contiguous [1, 8]; reshape it"
    )
    wide = torch.empty(8)
    x, weights = torch.empty(1, 8, dtype=BF16), [torch.empty(6, 8, dtype=BF16)]
    assert norm_refusal(NormedLinearsCall(x, None, wide, 0.0, weights, [None])) == (
        "the gain is torch.float32 on cpu, x_TK torch.bfloat16 on cpu; convert one of them"
    )
    with pytest.raises(ValueError, match="normed_linears: the gain is"):
        normed_linears(
            torch.empty(1, 8, dtype=BF16), None, wide, 0.0, [wide[None].bfloat16()], [None]
        )


def test_plans_fit_what_a_processor_has() -> None:
    for T, N, K, device in itertools.product(
        (1, 2, 8, 16, 17, 33, 64),
        (1, 128, 2048, 5120, 151936),
        (1, 33, 2048, 2880, 4096, 20000),
        (H200, (108, 166912), (128, 101376)),
    ):
        plan = plan_for(T, N, K, *device)
        what = f"{T} rows, {N} x {K}, {device}: {plan}"
        for number in (plan.rows, plan.step):
            assert number > 0 and number & (number - 1) == 0, what
        if T > 1:
            assert plan.rows >= 16 and plan.step >= 16 and plan.stages >= 2, what
            columns = max(16, T)
            assert 2 * plan.step * (plan.rows + columns) * plan.stages <= device[1], what


def test_the_programs_of_a_step() -> None:
    programs = {
        (T, N): -(-N // plan_for(T, N, 2048, *H200).rows)
        for T in (1, 8, 32) for N in (128, 2048, 5120)
    }  # fmt: skip
    assert programs == {
        (1, 128): 128, (1, 2048): 512, (1, 5120): 640,
        (8, 128): 8, (8, 2048): 32, (8, 5120): 80,
        (32, 128): 8, (32, 2048): 32, (32, 5120): 80,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("T", [1, 5])
def test_the_op(T: int, dtype: torch.dtype) -> None:
    given = tensors(T, 40, (24, 8, 9), dtype)
    tol = Tol(8e-3 if dtype == BF16 else 1e-3, "one rounding to the input's dtype")
    check(linears(*given), *given, tol, "op")
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.moe_ops.linears.default, given, test_utils=tests)


def test_refusals_say_what_and_what_to_do() -> None:
    def why(x: Any = (4, 8), w: Any = (6, 8), b: Any = None, dtype: torch.dtype = BF16) -> Any:
        x, w, b = (
            torch.empty(t, dtype=dtype) if isinstance(t, tuple) else t for t in (x, w, b)
        )  # fmt: skip
        return refusal(LinearsCall(x, [w], [b]))

    assert why() is None and why(b=(6,)) is None
    rows = "not [T, K] with T from 1 to 64; use torch's linear"
    assert why((4, 2, 8)) == f"x_TK is [4, 2, 8], {rows}"
    assert why((65, 8)) == f"x_TK is [65, 8], {rows}"
    assert why((0, 8)) == f"x_TK is [0, 8], {rows}"
    assert why(dtype=F32) == (
        "x_TK is torch.float32, not bfloat16 or float16; use torch's linear"
    )  # fmt: skip
    assert why(torch.empty(8, 4, dtype=BF16).T) == (
        "x_TK has the strides (1, 4); make it contiguous"
    )  # fmt: skip
    assert why(w=(6, 9)) == "weight 0 is [6, 9], not [N, 8]; give weights of x_TK"
    assert why(w=torch.empty(8, 6, dtype=BF16).T) == (
        "weight 0 has the strides (1, 6); make it contiguous"
    )  # fmt: skip
    assert why(b=(5,)) == "bias 0 is [5], not [6]; give a number for each row"
    assert why(b=torch.empty(12, dtype=BF16)[::2]) == (
        "bias 0 has the strides (2,); make it contiguous"
    )  # fmt: skip
    assert why(w=torch.empty(6, 8)) == (
        "weight 0 is torch.float32 on cpu, x_TK torch.bfloat16 on cpu; convert one of them"
    )
    assert refusal(LinearsCall(torch.empty(4, 8, dtype=BF16), [], [])) == (
        "got 0 weights and 0 biases; give a bias or None for each"
    )
    with pytest.raises(ValueError, match=r"linears: x_TK is \[65, 8\]"):
        linears(torch.empty(65, 8, dtype=BF16), [torch.empty(6, 8, dtype=BF16)], [None])

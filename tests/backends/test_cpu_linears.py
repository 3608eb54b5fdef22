"""Linear layers in codes on the CPU: every format, by every set of instructions that is here."""

from __future__ import annotations

import pytest
import torch

from moe_ops.backends.cpu_linears import multiply, supports
from moe_ops.decode_ops import quantized_linears
from moe_ops.kernels.cpu import quantized as kernels
from moe_ops.quant.formats import Format
from moe_ops.testing import BF16, F16, F32, Tol, assert_close
from tests.backends.code_layers import by_format_and_instructions
from tests.backends.test_cpu_codes import GROUPED, INSTRUCTIONS, RAGGED, WHOLE
from tests.chosen import in_turn
from tests.decode_ops.test_quantized_linears import call_of

TOL = {F32: Tol(1e-5, "float32 sums in another order"),
       BF16: Tol(8e-3, "one rounding to 8 bits of mantissa")}  # fmt: skip
# Rows of few tokens, of a tile and more, and of panels; whole steps of columns, and parts of them.
SIZES = [(1, 128), (3, 320), (17, 128), (70, 192)]
each_element = by_format_and_instructions(  # but blocks, which `test_cpu_blocks.py` has
    "row",
    [f"{e}:row" for e in kernels.ELEMENTS if not Format.of(f"{e}:row").in_blocks],
    *INSTRUCTIONS,
)


@in_turn(each_element, pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"]))
def test_every_format_is_multiplied_as_it_is_defined(
    row: str, dtype: torch.dtype, instructions: str
) -> None:
    of = Format.of(row).element
    mine = [f for f in dict.fromkeys((*GROUPED, *WHOLE, *RAGGED)) if Format.of(f).element == of]
    assert mine
    for format in mine:
        for T, K in SIZES:
            call, values = call_of(T, K, (37, 5), format, dtype)
            assert supports(call) is None
            for y, w, b in zip(multiply(call), values, call.biases, strict=True):
                want = call.x_TK.double() @ w.double().T + (0 if b is None else b.double())
                assert y.dtype is dtype and y.is_contiguous()
                assert_close(y.float(), want.float(), TOL[dtype], f"{format}, {T} of {K}")


NAN, INF = float("nan"), float("inf")
# What takes the place of numbers of a row, by column from either end.
PLANTED: dict[str, dict[int, float]] = {
    "inf": {5: INF},
    "minus_inf": {-3: -INF},
    "nan": {70: NAN},
    "infs": {0: INF, 40: INF, -1: INF},
    "both_infs": {7: INF, -40: -INF},
}


@in_turn(each_element, pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"]))
def test_what_is_not_finite_is_so_in_the_results_of_its_row_as_it_is_defined(
    row: str, dtype: torch.dtype, instructions: str
) -> None:
    of = Format.of(row).element
    mine = [f for f in dict.fromkeys((*GROUPED, *WHOLE, *RAGGED)) if Format.of(f).element == of]
    for format in mine:
        for T, K in SIZES:
            call, _ = call_of(T, K, (37, 5), format, dtype)
            before, x_TK, hit = multiply(call), call.x_TK, torch.arange(T) % 3 == 0
            for name, planted in PLANTED.items():
                call.x_TK = x_TK.clone()
                for column, value in planted.items():
                    call.x_TK[hit, column] = value
                got, what = multiply(call), f"{format}, {name} in {T} of {K}"
                for y, want, untouched in zip(
                    got, quantized_linears.body(call), before, strict=True
                ):
                    assert torch.equal(kinds(y), kinds(want)), what
                    assert bool((kinds(y)[hit] != 0).all()), what
                    assert torch.equal(y[~hit], untouched[~hit]), what


def kinds(t: torch.Tensor) -> torch.Tensor:
    """1 and -1 for infinities, 2 for NaN, 0 for numbers."""
    return torch.where(t.isnan(), 2.0, torch.where(t.isinf(), t.sign(), torch.zeros_like(t)))


def test_it_is_what_runs() -> None:
    for dtype, name in ((F32, "cpu"), (BF16, "cpu"), (F16, "dequantize")):
        call, _ = call_of(2, 64, (4,), "int8:row", dtype)
        assert quantized_linears.pick(call).name == name


def test_views_of_a_wider_input_and_threads(threads: None) -> None:
    call, _ = call_of(3, 128, (200,), "uint4:1x32")
    wide = torch.full((3, 200), float("nan"))
    wide[:, 30:158] = call.x_TK
    want = multiply(call)[0]
    call.x_TK = wide[:, 30:158]
    torch.set_num_threads(3)
    assert torch.equal(multiply(call)[0], want)
    call.x_TK = wide[:, 30:158].T.contiguous().T
    assert torch.equal(multiply(call)[0], want)


def test_refusals() -> None:
    call, _ = call_of(2, 64, (4,), "int8:row", F16)
    assert supports(call) == "needs float32 or bfloat16, got torch.float16"
    call, _ = call_of(2, 64, (4,), "mxfp6_e2m3")
    assert str(supports(call)).startswith("needs weights of int8, ")
    call, _ = call_of(2, 64, (4,), "nvfp4")
    assert str(supports(call)).startswith("needs scales of float32, ")
    call, _ = call_of(2, 64, (4,), "int4:1x16")
    assert str(supports(call)).startswith("needs groups of 32, 64 or a multiple of 128 columns")
    call, _ = call_of(2, 64, (4,), "int8:1x32")
    call.scales = [call.scales[0].T.contiguous().T]
    assert supports(call) == "needs contiguous codes, scales and zero points"
    call.x_TK.requires_grad_()
    assert supports(call) == "is not differentiable, and an argument requires grad"

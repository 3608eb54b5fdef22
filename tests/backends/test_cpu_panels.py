"""Panels of floats: the same sums, to the bit, for any number of rows, and those of streams within
the tolerance; widths that fill no register, missing experts, neighbours that are no numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from moe_ops.kernels import cpu as kernels
from moe_ops.kernels.cpu import PANELS, STREAMS
from moe_ops.kernels.cpu.quantized import INSTRUCTIONS
from moe_ops.testing import BF16, F32, TOL, assert_close
from tests.chosen import in_turn

TOKENS = 40


@dataclass(frozen=True)
class Layer:
    """Experts, and tokens that choose two of three; one token chose none that is here."""

    dtype: torch.dtype
    D: int
    I: int  # noqa: E741
    gated: bool = True
    interleaved: bool = False
    bias: bool = False

    def weights(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        F = 2 * self.I if self.gated else self.I
        w13_EFD = torch.randn(3, F, self.D) * self.D**-0.5
        w2_EDI = torch.randn(3, self.D, self.I) * self.I**-0.5
        biases = (torch.randn(3, F), torch.randn(3, self.D)) if self.bias else (None, None)
        to = partial(torch.Tensor.to, dtype=self.dtype)
        b13_EF, b2_ED = (None if b is None else to(b) for b in biases)
        return to(w13_EFD), to(w2_EDI), b13_EF, b2_ED

    def tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        ids_TK = torch.rand(TOKENS, 3).argsort(1)[:, :2].int()
        ids_TK[3] = -1
        return torch.randn(TOKENS, self.D).to(self.dtype), torch.rand(TOKENS, 2), ids_TK

    def runner(self) -> Callable[[Tensor, Tensor, Tensor, int], Tensor]:
        w13_EFD, w2_EDI, b13_EF, b2_ED = self.weights()

        def run(x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, least: int) -> Tensor:
            return kernels.experts(
                x_TD, weights_TK, ids_TK, w13_EFD, w2_EDI, b13_EF, b2_ED,
                "silu", self.gated, self.interleaved, 1.0, None, 0.0, least,
            )  # fmt: skip

        return run


WIDTHS = {"whole": (64, 32), "odd": (33, 17), "one": (1, 1), "wide": (130, 70), "short": (15, 100)}
FORMS = {
    "gated": {},
    "interleaved": {"interleaved": True, "bias": True},
    "plain": {"gated": False, "bias": True},
}
each_layer = in_turn(
    pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"]),
    pytest.mark.parametrize("form", FORMS.values(), ids=FORMS),
    pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS),
)


def check(layer: Layer) -> None:
    run, tokens = layer.runner(), layer.tokens()
    got = run(*tokens, PANELS)
    assert_close(got, run(*tokens, STREAMS), TOL["experts", layer.dtype])
    assert torch.equal(got[3], torch.zeros_like(got[3]))
    for n in (1, 2, 3, 5, 7, 11, 19):
        assert torch.equal(run(*(t[:n] for t in tokens), PANELS), got[:n]), n


@each_layer
def test_sums_do_not_depend_on_the_number_of_rows(
    widths: tuple[int, int], form: dict[str, bool], dtype: torch.dtype
) -> None:
    check(Layer(dtype, *widths, **form))


@pytest.mark.every
@pytest.mark.parametrize("instructions", INSTRUCTIONS[1:])
@each_layer
def test_they_do_not_with_fewer_instructions(
    widths: tuple[int, int],
    form: dict[str, bool],
    dtype: torch.dtype,
    instructions: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    confined = kernels.plain_library(instructions)
    monkeypatch.setattr(kernels, "plain_library", lambda: confined)
    check(Layer(dtype, *widths, **form))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_rows_that_are_no_numbers_stay_by_themselves(dtype: torch.dtype) -> None:
    layer = Layer(dtype, 33, 17)
    run, (x_TD, *routing) = layer.runner(), layer.tokens()
    want = run(x_TD, *routing, PANELS)
    spoiled = x_TD.clone()
    spoiled[1::2] = torch.tensor([float("nan"), float("inf"), 3e38]).repeat(7)[:20, None]
    got = run(spoiled, *routing, PANELS)
    assert torch.equal(got[::2], want[::2])
    assert got[1].isnan().all()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_one_product_does_not_depend_on_the_number_of_rows(dtype: torch.dtype) -> None:
    x_RD, w_EFD = torch.randn(30, 70).to(dtype), torch.randn(2, 50, 70).to(dtype)
    ends_E = torch.tensor([13, 30], dtype=torch.int32)

    def gemm(x_RD: Tensor, ends_E: Tensor, least: int) -> Tensor:
        y_RF = x_RD.new_empty(x_RD.shape[0], 50)
        assert kernels.gemm(x_RD, w_EFD, ends_E, None, y_RF, least)
        return y_RF

    got = gemm(x_RD, ends_E, PANELS)
    assert_close(got, gemm(x_RD, ends_E, STREAMS), TOL["expert_gemm", dtype])
    few = gemm(torch.cat((x_RD[11:13], x_RD[25:])), torch.tensor([2, 7], dtype=torch.int32), PANELS)
    assert torch.equal(few, torch.cat((got[11:13], got[25:])))


def test_experts_with_many_rows_run_by_panels_by_themselves() -> None:
    layer = Layer(F32, 64, 32)
    run, tokens = layer.runner(), layer.tokens()
    assert torch.equal(run(*tokens, 0), run(*tokens, PANELS))
    one = [t[:1] for t in tokens]
    assert torch.equal(run(*one, 0), run(*one, STREAMS))

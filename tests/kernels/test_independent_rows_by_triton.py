"""Rows of quantised inputs by Triton's kernels: results do not depend on other rows, bit for bit;
in Triton's interpreter without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_ops import experts
from moe_ops.ops.experts import ExpertsCall
from moe_ops.testing import BF16, DEVICE, F16, Case
from tests.chosen import in_turn, one_in, those_of
from tests.independent_rows import PAIRS, assert_independent, call_of

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.backends.triton import run_experts

ON_GPU = DEVICE == "cuda"
# The interpreter multiplies no bfloat16. On a GPU many rows an expert, too.
DTYPE = BF16 if ON_GPU else F16
SMALL = Case(name="mates", T=3, E=4, K=2, D=128, I=128)
CASES = (SMALL, replace(SMALL, T=40, D=512, I=512), replace(SMALL, T=700, D=512, I=512))
QUICK = (("nvfp4", "nvfp4"), ("mxfp4", "float8_e4m3fn:row"), ("int8:row", "int8:row"))
each_pair = pytest.mark.parametrize("formats", PAIRS if ON_GPU else those_of(QUICK, PAIRS), ids=str)
each_case = pytest.mark.parametrize("case", CASES[: 3 if ON_GPU else 1], ids=lambda c: f"T{c.T}")


def runs(kernel: str, call: ExpertsCall) -> bool:
    backend = experts.backends[f"triton.{kernel}"]
    return backend.refusal("cuda", len(call.x_TD), call) is None


@in_turn(each_case, each_pair, pytest.mark.parametrize("kernel", ["tiny", "rows", "grouped"]))
def test_independent_rows(kernel: str, formats: tuple[str, str], case: Case) -> None:
    call = call_of(*formats, DTYPE, case, DEVICE)
    if not runs(kernel, call):
        pytest.skip(f"triton.{kernel} does not run {formats} with {case.T} tokens here")
    assert_independent(lambda c: run_experts(kernel, c), call)


@one_in(2, pytest.mark.parametrize("kernel", ["rows", "grouped"]))
def test_padding_does_not_count(kernel: str) -> None:
    """Rows of no expert, such as those of a padded batch, may hold anything."""
    call = call_of("nvfp4", "nvfp4", DTYPE, SMALL, DEVICE)
    call.ids_TK[-1] = -1

    def run(fill: float) -> Tensor:
        padded = replace(call, x_TD=call.x_TD.clone())
        padded.x_TD[-1] = fill
        return run_experts(kernel, padded)

    want = run(0.0)
    for fill in (float("nan"), float("inf"), 1e4):
        assert torch.equal(run(fill), want)
    assert not bool(want[-1].any())

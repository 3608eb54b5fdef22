"""Gate and up under global scales of their own, by Triton's kernels; in its interpreter without a
GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_ops import experts
from moe_ops.ops.experts import ExpertsCall
from moe_ops.testing import BF16, DEVICE, F16, TOL, Case, assert_close

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.backends.triton import run_experts
from tests.chosen import in_turn
from tests.kernels.test_quantized_experts import ODD, call_of, definition

ON_GPU = DEVICE == "cuda"
WIDE = Case(name="wide", T=300, E=4, K=2, D=512, I=512)  # by the kernels for many rows an expert
CASES = (replace(ODD, T=1), ODD, *((WIDE,) if ON_GPU else ()))


def two_of(case: Case, interleaved: bool) -> ExpertsCall:
    dtype = BF16 if ON_GPU else F16
    call = call_of(case, "nvfp4", dtype=dtype, biases=True, interleaved=interleaved)
    assert call.global_scale13_E is not None
    factors = (
        torch.tensor([1.0, 2.5], device=DEVICE) * (1 + torch.arange(case.E, device=DEVICE))[:, None]
    )
    return replace(call, global_scale13_E=call.global_scale13_E[:, None] * factors)


@in_turn(
    pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"]),
    pytest.mark.parametrize("case", CASES, ids=lambda case: f"T{case.T}"),
    pytest.mark.parametrize("kernel", ["tiny", "rows", "grouped"]),
)
def test_each_half_has_its_factor(kernel: str, case: Case, interleaved: bool) -> None:
    call = two_of(case, interleaved)
    if experts.backends[f"triton.{kernel}"].refusal("cuda", case.T, call) is not None:
        pytest.skip(f"triton.{kernel} does not run {case.T} tokens here")
    assert_close(
        run_experts(kernel, call), definition(call), TOL["experts", call.x_TD.dtype], kernel
    )

"""Gate and up under global scales of their own, as where they were quantised apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_ops import experts
from moe_ops.ops.experts import ExpertsCall
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import F32, TOL, assert_close
from tests.independent_rows import CASE, call_of

FACTORS = torch.tensor([[1.0, 2.0], [0.5, 0.25], [1.0, 1.0], [3.0, 0.7]])


def two_of(call: ExpertsCall, interleaved: bool) -> ExpertsCall:
    assert call.global_scale13_E is not None
    own_E2 = call.global_scale13_E[:, None] * FACTORS
    return replace(call, global_scale13_E=own_E2, interleaved=interleaved)


def in_floats(call: ExpertsCall) -> ExpertsCall:
    """The same layer with the floats that its codes stand for."""
    w13, w2 = (
        packing.dequantize(w, scale, Format.of("nvfp4"))
        for w, scale in ((call.w13_EFD, call.w13_scale_EFG), (call.w2_EDI, call.w2_scale_EDG))
    )
    scale_E, F = call.global_scale13_E, w13.shape[1]
    if scale_E.dim() == 1:
        scale_E = scale_E[:, None].expand(-1, 2)
    is_up_F = torch.arange(F) % 2 if call.interleaved else torch.arange(F) // (F // 2)
    w13 = w13 * scale_E[:, is_up_F, None]
    return ExpertsCall(
        call.x_TD, call.weights_TK, call.ids_TK, w13, w2 * call.global_scale2_E[:, None, None],
        interleaved=call.interleaved,
    )  # fmt: skip


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
def test_each_half_has_its_factor(interleaved: bool) -> None:
    call = two_of(replace(call_of("nvfp4", "nvfp4", F32), x_format=""), interleaved)
    want = experts.body(in_floats(call))
    assert_close(experts.body(call), want, TOL["experts", F32], "the definition")
    assert_close(experts.part(call), want, TOL["experts", F32], "on the CPU")


def test_two_that_are_equal_are_one() -> None:
    call = call_of("nvfp4", "nvfp4", F32)
    assert call.global_scale13_E is not None
    twice = replace(call, global_scale13_E=call.global_scale13_E[:, None].repeat(1, 2))
    assert torch.equal(experts.part(twice), experts.part(call))


def test_other_shapes_are_refused() -> None:
    call = two_of(call_of("nvfp4", "nvfp4", F32), False)
    three = replace(call, global_scale13_E=torch.ones(CASE.E, 3))
    with pytest.raises(ValueError, match=r"global_scale13_E must be float32 \[4, 2\], got shape"):
        experts.check(three)
    of_w2 = replace(call, global_scale2_E=torch.ones(CASE.E, 2))
    with pytest.raises(ValueError, match=r"global_scale2_E must be float32 \[4\], got shape"):
        experts.check(of_w2)
    assert call.w13_scale_EFG is not None
    alone = replace(call, gated=False, kind="relu2", w13_EFD=call.w13_EFD[:, :128])
    alone.w13_scale_EFG = call.w13_scale_EFG[:, :128]
    with pytest.raises(ValueError, match=r"global_scale13_E must be float32 \[4\], got shape"):
        experts.check(alone)

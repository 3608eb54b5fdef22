"""Rows of single choices by Triton's kernels, which a token's own rank sums: the bits of invariant
experts of all choices at once. In Triton's interpreter without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_ops.ops.combine import CombineCall
from moe_ops.ops.experts import experts
from moe_ops.ranks.choices import rows_of_pairs
from moe_ops.registry.invariance import invariant
from moe_ops.testing import BF16, DEVICE, F16, Case, make_layer
from tests.chosen import those_of
from tests.independent_rows import PAIRS, call_of
from tests.random_batches import bits

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.backends.triton import run_experts
from moe_ops.backends.triton_ranks import sum_choices

DTYPE = BF16 if DEVICE == "cuda" else F16  # the interpreter multiplies no bfloat16
CASE = Case(name="some", T=2, E=3, K=3, D=128, I=128)
FLOATS = ("", "")


@pytest.mark.parametrize("formats", those_of([FLOATS], [FLOATS, *PAIRS]), ids=str)
def test_a_token_sums_the_rows_of_its_choices(formats: tuple[str, str]) -> None:
    if formats == FLOATS:
        made = make_layer(CASE, DTYPE, device=DEVICE)
        call = experts.call(made.x_TD, made.weights_TK, made.ids_TK, made.w13_EFD, made.w2_EDI)
    else:
        call = call_of(*formats, DTYPE, CASE, DEVICE)
    T, K = call.ids_TK.shape
    call.ids_TK[1, 2] = -1
    pairs = replace(
        call,
        x_TD=call.x_TD.repeat_interleave(K, 0),
        weights_TK=torch.ones_like(call.weights_TK).view(T * K, 1),
        ids_TK=call.ids_TK.reshape(T * K, 1),
    )
    with invariant():
        want = run_experts("rows", call)
        y_ND = run_experts("rows", pairs)
        got = sum_choices(CombineCall(y_ND, call.weights_TK, rows_of_pairs(call.ids_TK)))
    assert torch.equal(bits(got), bits(want))

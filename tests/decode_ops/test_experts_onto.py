"""`experts_onto`: schema, CPU code and errors; its kernels are in tests/kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ops import experts
from moe_ops.decode_ops.experts_onto import experts_onto
from moe_ops.testing import BF16, CASES, DEVICE, make_layer

CASE = next(case for case in CASES if case.name == "odd")


def call(dtype: torch.dtype = BF16, biases: bool = True) -> tuple[Any, ...]:
    """The arguments without the residual and the plan."""
    layer = make_layer(CASE, dtype, DEVICE)
    tensors = (layer.x_TD, layer.weights_TK, layer.experts_TK, layer.w13_EFD, layer.w2_EDI)
    more = (layer.b13_EF, layer.b2_ED) if biases else (None, None)
    return *tensors, *more, None, False, "silu", True, False, 1.0, None, 0.0


@pytest.mark.parametrize("biases", [False, True])
def test_the_schema(biases: bool) -> None:
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    given = call(biases=biases)
    residual = torch.randn_like(given[0])
    torch.library.opcheck(
        torch.ops.moe_ops.experts_onto.default, (residual, *given, "triton.tiny"), test_utils=tests
    )


def test_it_is_the_sum() -> None:
    given = call()
    residual = torch.randn_like(given[0])
    got = experts_onto(residual, *given, "triton.rows")
    assert torch.equal(got, residual + experts(*given))


def test_another_plan_is_refused() -> None:
    given = call()
    said = "experts_onto: the plan is 'cpu', not one of triton.tiny, triton.rows, triton.grouped"
    with pytest.raises(ValueError, match=said):
        experts_onto(given[0], *given, "cpu")


def test_a_residual_of_another_kind_is_refused() -> None:
    given = call()
    for residual in (given[0].float(), given[0][:1], given[0].T):
        with pytest.raises(ValueError, match=r"experts_onto: the residual is .*; convert one"):
            experts_onto(residual, *given, "triton.tiny")

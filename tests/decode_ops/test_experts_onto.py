"""`experts_onto`: its definition and errors; its kernels are in tests/kernels and tests/gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ops import experts
from moe_ops.decode_ops import experts_onto
from moe_ops.testing import BF16, CASES, DEVICE, make_layer

CASE = next(case for case in CASES if case.name == "odd")


def call(dtype: torch.dtype = BF16, biases: bool = True) -> tuple[Any, ...]:
    """The arguments without the residual."""
    layer = make_layer(CASE, dtype, DEVICE)
    tensors = (layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI)
    more = (layer.b13_EF, layer.b2_ED) if biases else (None, None)
    return *tensors, *more, None, False, "silu", True, False, 1.0, None, 0.0


@pytest.mark.parametrize("biases", [False, True])
def test_the_schema(biases: bool) -> None:
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    given = call(biases=biases)
    residual = torch.randn_like(given[0])
    torch.library.opcheck(experts_onto.overload, (residual, *given), test_utils=tests)


def test_it_is_the_sum() -> None:
    given = call()
    residual = torch.randn_like(given[0])
    want = residual + experts(*given)
    assert torch.equal(experts_onto(residual, *given), want)
    assert torch.equal(experts_onto.planned(residual, *given, plan="reference"), want)


def test_kernels_say_why_they_do_not_run_it() -> None:
    given = call()
    said = experts_onto.refusals(given[0], *given)
    assert set(said) == {"reference", "triton.tiny", "triton.rows", "triton.grouped"}
    if DEVICE == "cpu":
        assert said["triton.tiny"] == "needs a tensor on cuda, got cpu"


def test_a_residual_of_another_kind_is_refused() -> None:
    given = call()
    for residual in (given[0].float(), given[0][:1], given[0].T):
        with pytest.raises(ValueError, match=r"experts_onto: the residual is .*; convert one"):
            experts_onto(residual, *given)


def test_what_experts_refuses_is_refused() -> None:
    given = call()
    with pytest.raises(ValueError, match="weights_TK must have"):
        experts_onto(given[0], given[0], given[1][:1], *given[2:])

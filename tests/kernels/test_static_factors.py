"""Factors of static scales by their kernel, in Triton's interpreter: torch's to the bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.kernels.triton.static_factors import BLOCK, static_factors
from moe_ops.testing import DEVICE
from tests.kernels.test_by_row import same


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared by experts"])
@pytest.mark.parametrize("each", [False, True], ids=["one scale", "one for each expert"])
@pytest.mark.parametrize("E", [2, 5, BLOCK + 1])
def test_they_are_products_and_a_reciprocal(E: int, each: bool, shared: bool) -> None:
    x_scale, h_scale = (torch.rand(n, device=DEVICE) + 0.01 for n in (1, E if each else 1))
    w13, w2 = (torch.rand(1 if shared else E, 1, 1, device=DEVICE).expand(E, 1, 1) for _ in "ab")
    first_E, second_E, inverse = static_factors(x_scale, h_scale, w13, w2)
    assert same(first_E, w13.flatten() * x_scale)
    assert same(second_E, w2.flatten() * h_scale)
    assert same(inverse, h_scale.reciprocal() if each else h_scale.reciprocal().reshape(()))


@pytest.mark.parametrize("strided", [False, True], ids=["shared", "every second"])
def test_scales_of_the_second_input_may_lie_apart(strided: bool) -> None:
    held = torch.rand(5, 2, device=DEVICE) + 0.01
    h_scale = held[:, 1] if strided else held[0, :1].expand(5)
    x_scale, w = torch.ones(1, device=DEVICE), torch.rand(5, 1, 1, device=DEVICE)
    _, second_E, inverse = static_factors(x_scale, h_scale, w, w)
    assert same(second_E, w.flatten() * h_scale) and same(inverse, h_scale.reciprocal())


@pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")  # of numpy
@pytest.mark.parametrize("h_scale", [0.0, float("inf"), float("nan")])
def test_what_is_no_scale_stays_seen(h_scale: float) -> None:
    one, w = torch.ones(1, device=DEVICE), torch.rand(3, 1, 1, device=DEVICE)
    h = torch.tensor([h_scale], device=DEVICE)
    _, second_E, inverse = static_factors(one, h, w, w)
    assert same(second_E, w.flatten() * h) and same(inverse, h.reciprocal().reshape(()))

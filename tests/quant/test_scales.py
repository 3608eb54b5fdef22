"""Values of scales: inverses, exponents and powers of two by hand, and every refusal."""

import math
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_ops.quant.scales import e8m0_to_float32, float32_to_e8m0, inverse, wrong_scale

NAN, INF = math.nan, math.inf
scales = st.floats(2.0**-100, 2.0**100, width=32)
E8M0_CODES = torch.arange(256, dtype=torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def strided(t: Tensor) -> Tensor:
    """The same values with a gap after each."""
    return torch.stack((t, t), dim=-1)[..., 0]


def test_inverses_by_hand() -> None:
    held = strided(torch.tensor([[2.0, 0.5], [-4.0, 8.0]]))
    before = held.clone()
    assert same(inverse(held), torch.tensor([[0.5, 2.0], [-0.25, 0.125]]))
    assert torch.equal(held, before)


@given(st.lists(scales, max_size=8))
def test_decoding_is_the_same_in_both_conventions(values: list[float]) -> None:
    held = torch.tensor(values)
    there = inverse(held)
    torch.testing.assert_close(inverse(there), held, rtol=2.0**-22, atol=0.0)
    codes = torch.arange(len(values)).float()
    torch.testing.assert_close(codes / there, codes * held, rtol=2.0**-22, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_an_inverse_is_not_rounded_to_a_narrow_dtype(dtype: torch.dtype) -> None:
    assert torch.equal(inverse(torch.tensor([3.0]).to(dtype)), torch.tensor([1.0]) / 3.0)


@pytest.mark.parametrize("value", [0.0, -0.0, INF, -INF, NAN, 2.0**-140])
def test_what_has_no_inverse_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=f"scale {value} has no finite inverse; every scale"):
        inverse(torch.tensor([1.0, value]))


def test_codes_have_no_inverse() -> None:
    with pytest.raises(TypeError, match="scale must be floating point, got uint8; decode e8m0"):
        inverse(E8M0_CODES)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_e8m0_is_the_power_of_two(dtype: torch.dtype) -> None:
    codes = strided(E8M0_CODES).view(dtype)
    got = e8m0_to_float32(codes)
    assert got.dtype == torch.float32
    assert got[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert bool(got[255].isnan())
    assert torch.equal(codes.view(torch.uint8), E8M0_CODES)


@given(st.lists(st.integers(0, 254), max_size=8))
def test_e8m0_round_trip(codes: list[int]) -> None:
    held = torch.tensor(codes, dtype=torch.uint8)
    assert same(float32_to_e8m0(e8m0_to_float32(held)), held)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_powers_of_two_become_e8m0(dtype: torch.dtype) -> None:
    scale = torch.tensor([[0.5], [1.0], [2.0**-20]]).to(dtype)
    assert float32_to_e8m0(scale).tolist() == [[126], [127], [107]]
    assert float32_to_e8m0(scale[0, 0]).tolist() == 126


@given(st.floats(width=32).filter(lambda x: not (x > 0 and math.frexp(x)[0] == 0.5)))
def test_other_values_are_refused_and_named(value: float) -> None:
    message = re.escape(f"scale {value} is not a power of two") + ".*re-quantise the weights"
    with pytest.raises(ValueError, match=message):
        float32_to_e8m0(torch.tensor([1.0, value, 3.0]))


@pytest.mark.parametrize("value", [2.0**-128, 2.0**-149, -1.0, 0.0, INF])
def test_powers_out_of_range_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=re.escape(f"scale {value} is not a power of two from")):
        float32_to_e8m0(torch.tensor([value]))


@pytest.mark.parametrize(("convert", "got"), [(e8m0_to_float32, "float32"), (float32_to_e8m0, "")])
def test_e8m0_wants_its_dtypes(convert: Callable[[Tensor], Tensor], got: str) -> None:
    with pytest.raises(TypeError, match=f"scale must be .*; got {got or 'uint8'}; convert it"):
        convert(torch.ones(1) if got else E8M0_CODES)


F8 = torch.float8_e4m3fn
WRONG = {
    "float": (torch.float32, "float32", [(1e-30, None), (0.0, "0.0"), (-1.0, "-1.0")]),
    "float_special": (torch.float32, "float32", [(NAN, "nan"), (INF, "inf"), (-INF, "-inf")]),
    "half": (torch.float16, "float16", [(1e-5, None), (0.0, "0.0"), (NAN, "nan")]),
    "bfloat16": (torch.bfloat16, "bfloat16", [(1e-5, None), (-0.5, "-0.5"), (INF, "inf")]),
    "e8m0": (torch.uint8, "e8m0", [(0, None), (254, None), (255, "NaN")]),
    "float8": (F8, "float8_e4m3fn", [(0.0, None), (448.0, None), (NAN, "NaN")]),
    "float8_negative": (F8, "float8_e4m3fn", [(-1.0, "a negative number"), (-448.0, "a neg")]),
}


@pytest.mark.parametrize(("dtype", "kind", "values"), WRONG.values(), ids=WRONG)
def test_what_no_scale_can_be_is_found_among_others(
    dtype: torch.dtype, kind: str, values: list[tuple[float, str | None]]
) -> None:
    for value, wrong in values:
        for place in (0, 3, 7):
            scale = torch.ones(8).to(dtype)
            scale[place] = torch.tensor(value).to(dtype)
            found = wrong_scale(scale.reshape(2, 4), kind)
            assert found == wrong if wrong is None else found is not None and wrong in found


@pytest.mark.parametrize(("value", "wrong"), [(-1.0, None), (0.0, None), (NAN, "nan"), (-INF, "-")])
def test_scales_with_a_sign_are_finite(value: float, wrong: str | None) -> None:
    found = wrong_scale(torch.tensor([1.0, value]), "float16", signed=True)
    assert found is None if wrong is None else wrong in str(found)


def test_no_scales_are_right() -> None:
    assert wrong_scale(torch.empty(0, 4), "float32") is None
    assert wrong_scale(torch.ones(2).to(torch.float8_e8m0fnu), "e8m0") is None

"""`quantize` by its Triton kernel, in Triton's interpreter: codes and scales are the definition's
to the bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.ops.quantize import quantize
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import BF16, DEVICE, F16, F32
from tests.chosen import in_turn
from tests.kernels.test_by_row import same

ELEMENTS, GROUPS = ("float8_e4m3fn", "int8"), ("row", "tensor", "1x128", "1x32", "1x48")
FORMATS = [f"{element}:{group}" for element, group in itertools.product(ELEMENTS, GROUPS)]
BACKEND = quantize.backends["triton"]


def check(x_RD: Tensor, format: str, scale: Tensor | None = None, rule: str = "floor") -> None:
    call = quantize.call(x_RD, format, scale, rule)
    assert BACKEND.refusal(DEVICE, x_RD.shape[0], call) in (None, "needs a tensor on cuda, got cpu")
    (codes, scales), want = BACKEND.run(call), quantize.reference(x_RD, format, scale, rule)
    assert codes.dtype == want[0].dtype and codes.shape == want[0].shape
    assert scales.dtype == want[1].dtype and scales.shape == want[1].shape
    assert same(scales, want[1]) and same(codes, want[0])


@in_turn(
    pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str),
    pytest.mark.parametrize("format", FORMATS),
)
def test_codes_are_those_of_the_definition(format: str, dtype: torch.dtype) -> None:
    """Of rows apart in memory, of groups that are cut short, zeros and their signs."""
    for R, D in ((5, 200), (37, 96), (1, 1)):
        x_RD = (torch.randn(R, D + 7, device=DEVICE) * 3).to(dtype)[:, :D]
        x_RD[-1], x_RD[0, 0] = 0, -0.0
        check(x_RD, format)


@pytest.mark.parametrize("format", FORMATS)
def test_groups_with_what_is_no_number_are_that_as_a_whole(format: str) -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        x_RD = torch.randn(4, 150, device=DEVICE).to(BF16)
        x_RD[1, 140] = bad
        check(x_RD, format)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of numpy
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("scale", [0.013, -0.5, 1e-3, 0.0, float("inf"), float("nan")])
def test_static_scales(scale: float, element: str) -> None:
    """Values saturate, and what is no number stays so where the element can say it."""
    x_RD = (torch.randn(5, 70, device=DEVICE) * 3).to(BF16)
    x_RD[1, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    check(x_RD, f"{element}:tensor", torch.tensor(scale, device=DEVICE))


@pytest.mark.parametrize("format", FORMATS)
def test_no_rows(format: str) -> None:
    check(torch.empty(0, 64, device=DEVICE), format)


@pytest.mark.parametrize("element", ELEMENTS)
def test_ties_go_to_the_even_code(element: str) -> None:
    """By a static scale of 1: halves of integers, and what lies between two floats of 8 bits."""
    codes = torch.arange(0, 127, device=DEVICE)
    values = codes.to(torch.uint8).view(torch.float8_e4m3fn) if element != "int8" else codes
    value = values.float()
    ties = (value[1:] + value[:-1]) / 2
    x_RD = torch.stack((ties, -ties, ties.nextafter(value[1:]), ties.nextafter(value[:-1])))
    check(x_RD, f"{element}:tensor", torch.ones(1, device=DEVICE))


PUBLISHED = ("mxfp8", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "nvfp4")
BLOCKS = (*PUBLISHED, "float4_e2m1:1x64", "float6_e3m2:row:e8m0", "float8_e4m3fn:1x64:e8m0")


@in_turn(
    pytest.mark.parametrize("rule", ["floor", "ceil"]), pytest.mark.parametrize("format", BLOCKS)
)
def test_blocks_are_those_of_the_definition(format: str, rule: str) -> None:
    """Of magnitudes that every scale is needed for, and subnormal ones, zeros and signs."""
    if rule == "ceil" and Format.of(format).scale != "e8m0":
        pytest.skip("a rule of e8m0")
    for R, D, dtype in ((6, 200, F32), (33, 96, BF16), (2, 4, F16)):
        powers = 2.0 ** torch.randint(-20, 12, (R, 1), device=DEVICE)
        x_RD = (torch.randn(R, D + 8, device=DEVICE) * powers).to(dtype)[:, :D]
        x_RD[-1], x_RD[0, 0] = 0, -0.0
        if dtype is F32:
            x_RD[1], x_RD[2] = x_RD[1] * 1e-38 * 1e-3, x_RD[2].sign() * 3e38
        check(x_RD, format, rule=rule)


@pytest.mark.parametrize("format", BLOCKS)
def test_blocks_with_what_is_no_number_are_that_as_a_whole(format: str) -> None:
    for bad in (float("nan"), float("inf")):
        x_RD = torch.randn(3, 136, device=DEVICE).to(BF16)
        x_RD[1, 130] = bad
        check(x_RD, format)
    check(torch.empty(0, 64, device=DEVICE), format)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, by zero
@pytest.mark.parametrize("scale", [3e-3, 1e-6, 0.0, 1e6])
def test_a_global_scale(scale: float) -> None:
    """Scales of blocks saturate, or vanish with their values."""
    sizes = torch.tensor([[1.0], [0], [1e3], [1e-3], [1]], device=DEVICE)
    x_RD = (torch.randn(5, 80, device=DEVICE) * sizes).to(BF16)
    check(x_RD, "nvfp4", torch.tensor([scale], device=DEVICE))
    of_rows = torch.tensor([scale, 1e-3, 1.0, scale, 1e-6], device=DEVICE)
    check(x_RD, "nvfp4", of_rows)


@pytest.mark.parametrize("format", ["float4_e2m1:1x64", "float6_e3m2:1x64", "float6_e2m3:1x64"])
def test_ties_of_few_bits_go_to_the_even_code(format: str) -> None:
    element, _, _ = format.partition(":")
    values = packing.decode(torch.arange(2 ** int(Format.of(format).bits - 1)), element)
    ties = (values[1:] + values[:-1]) / 2
    rows = (ties, ties.nextafter(values[1:]), ties.nextafter(values[:-1]), -ties)
    x_RD = torch.zeros(4, 64, device=DEVICE)
    for row, some in zip(x_RD, rows, strict=True):
        row[: len(some)] = some
    x_RD[:, -1] = values[-1]  # so that the scale is 1
    check(x_RD, format)


REFUSED = {
    "float8_e5m2:row": "makes codes of float8_e4m3fn, float6_e3m2, float6_e2m3, float4_e2m1, int8, "
    "got float8_e5m2",
    "float4_e2m1:tensor": "takes one float32 scale for float8_e4m3fn or int8 alone, got "
    "float4_e2m1:tensor",
    "float4_e2m1:1x5": "needs groups that 2 divides, got 5",
    "int8:1x131072": "takes groups of 1 to 65536 columns, got 131072",
}


@pytest.mark.parametrize("format", REFUSED)
def test_what_has_no_kernel_is_refused(format: str) -> None:
    call = quantize.call(torch.zeros(2, 64), format)
    assert BACKEND.refusal("cuda", 2, call) == REFUSED[format]

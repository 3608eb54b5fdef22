"""`quantize` against its formula: float32 scales, values rounded half to even on a listed grid."""

import pytest
import torch
from torch import Tensor

from moe_ops import quantize
from moe_ops.checks.shapes import DTYPES, FLOATS
from moe_ops.conformance.tensors import strided
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from tests.ops.refused import Bad, assert_refused, wrong_dtype, wrong_rank

# Exponent bias, mantissa bits and largest finite value of each float8 format (arXiv:2209.05433).
FLOAT8 = {"float8_e4m3fn": (7, 3, 448.0), "float8_e5m2": (15, 2, 57344.0)}
LARGEST = {**{name: top for name, (_, _, top) in FLOAT8.items()}, "int8": 127.0}
each_format = pytest.mark.parametrize("format", LARGEST)


def named(element: str, group: int) -> str:
    """The format of an element with a scale a row (-1), in all (0), or for so many columns."""
    return element + {-1: ":row", 0: ":tensor"}.get(group, f":1x{group}")


def grid(format: str) -> list[float]:
    """The format's values from zero up; even places hold even mantissas."""
    if format == "int8":
        return [float(i) for i in range(128)]
    bias, bits, top = FLOAT8[format]
    subnormal = [m * 2.0 ** (1 - bias - bits) for m in range(2**bits)]
    normal = [
        (1 + m * 2.0**-bits) * 2.0 ** (e - bias) for e in range(1, 32) for m in range(2**bits)
    ]
    return [v for v in subnormal + normal if v <= top]


def nearest(value: float, values: list[float]) -> float:
    """The value of the grid nearest to |value|, ties to the even place, with value's sign."""
    places = range(len(values))
    place = min(places, key=lambda i: (abs(values[i] - abs(value)), i % 2))
    return values[place] if value > 0 else -values[place]


def by_hand(x: Tensor, format: str, group: int) -> tuple[Tensor, Tensor]:
    """Values and scales of dynamic groups; only the two divisions are torch's, in float32."""
    R, D = x.shape
    width = {-1: D, 0: D}.get(group, group)
    spans = [range(first, min(first + width, D)) for first in range(0, D, width)]
    magnitudes = x.float().abs()
    tops = torch.stack([magnitudes[:, span].amax(-1) for span in spans], 1)
    if group == 0:
        tops = tops.amax().reshape(1, 1)
    scales = (tops / LARGEST[format]).clamp(min=1e-12)
    values = grid(format)
    q = torch.zeros(R, D)
    for g, span in enumerate(spans):
        quotients = x.float()[:, span] / (scales if group == 0 else scales[:, g : g + 1])
        q[:, span] = torch.tensor([[nearest(v, values) for v in row] for row in quotients.tolist()])
    return q, scales


def test_the_grids_are_those_of_torch() -> None:
    for format in FLOAT8:
        dtype = getattr(torch, format)
        values = torch.tensor(grid(format))
        assert torch.equal(values.to(dtype).float(), values)
        assert torch.finfo(dtype).max == values[-1]
        assert torch.equal(values.to(dtype).view(torch.uint8), torch.arange(len(values)).byte())


@pytest.mark.parametrize("dtype", FLOATS, ids=DTYPES)
@pytest.mark.parametrize("group", [-1, 0, 1, 5, 8, 64], ids="group_{}".format)
@each_format
def test_matches_the_formula_exactly(format: str, group: int, dtype: torch.dtype) -> None:
    x = (torch.randn(4, 18) * torch.tensor([[1e-3], [1.0], [30.0], [0.0]])).to(dtype)
    q, scales = quantize(x, named(format, group))
    want_q, want_scales = by_hand(x, format, group)
    assert (q.dtype, scales.dtype) == (getattr(torch, format), torch.float32)
    assert torch.equal(scales, want_scales)
    assert torch.equal(q.float(), want_q)


SHAPES = {-1: (3, 1), 0: (1, 1), 1: (3, 18), 4: (3, 5), 6: (3, 3), 18: (3, 1), 19: (3, 1)}


@pytest.mark.parametrize(("group", "shape"), SHAPES.items(), ids=map("group_{}".format, SHAPES))
def test_one_scale_covers_one_group(group: int, shape: tuple[int, int]) -> None:
    assert quantize(torch.randn(3, 18), named("int8", group))[1].shape == shape


@each_format
def test_the_largest_magnitude_becomes_the_largest_value(format: str) -> None:
    q, scales = quantize(torch.tensor([[1.0, -2.0, 0.5], [0.25, 0.0, 0.0]]), named(format, -1))
    assert q.float().abs().amax(-1).tolist() == [LARGEST[format]] * 2
    assert torch.equal(scales * LARGEST[format], torch.tensor([[2.0], [0.25]]))


@each_format
@pytest.mark.parametrize("group", [-1, 0, 4], ids="group_{}".format)
def test_zeros_stay_zeros(format: str, group: int) -> None:
    q, scales = quantize(torch.zeros(3, 6), named(format, group))
    assert torch.equal(q.float(), torch.zeros(3, 6))
    assert bool((scales > 0).all())


@each_format
def test_values_beyond_a_static_scale_saturate(format: str) -> None:
    x = torch.tensor([[1e6, -1e6, float("inf"), -float("inf")]])
    q, _ = quantize(x, named(format, 0), torch.tensor(1.0))
    top = LARGEST[format]
    assert q.float().tolist() == [[top, -top, top, -top]]


TIES = {
    "float8_e4m3fn": ([17.0, 19.0, -17.0, 1.0625, 1.1875], [16.0, 20.0, -16.0, 1.0, 1.25]),
    "float8_e5m2": ([9.0, 11.0, -9.0, 1.125, 1.375], [8.0, 12.0, -8.0, 1.0, 1.5]),
    "int8": ([0.5, 1.5, 2.5, -0.5, -1.5], [0.0, 2.0, 2.0, 0.0, -2.0]),
}


@pytest.mark.parametrize(("format", "ties"), TIES.items(), ids=TIES)
def test_ties_go_to_the_even_value(format: str, ties: tuple[list[float], list[float]]) -> None:
    values, want = ties
    q, _ = quantize(torch.tensor([values]), named(format, 0), torch.ones(1))
    assert q.float().tolist() == [want]


def test_values_are_divided_by_the_scale() -> None:
    # Times the rounded 1 / 15 these would exceed 2.5, 6.5 and 10.5 by one bit.
    q, _ = quantize(torch.tensor([[37.5, 97.5, -157.5]]), "int8:tensor", torch.tensor(15.0))
    assert q.tolist() == [[2, 6, -10]]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=["scalar", "vector", "matrix"])
def test_a_static_scale_is_used_and_returned(shape: tuple[int, ...]) -> None:
    scale = torch.full(shape, 0.5)
    q, scales = quantize(torch.tensor([[3.0, -1.5]]), "int8:tensor", scale)
    assert q.tolist() == [[6, -3]]
    assert scales.tolist() == [[0.5]]
    scales.fill_(9.0)
    assert scale.item() == 0.5  # the result is a copy


@pytest.mark.parametrize("group", [-1, 4], ids="group_{}".format)
def test_a_row_does_not_depend_on_the_others(group: int) -> None:
    x = torch.randn(5, 10)
    q, scales = quantize(x, named("float8_e4m3fn", group))
    one_q, one_scales = quantize(x[2:3], named("float8_e4m3fn", group))
    assert torch.equal(one_q.float(), q[2:3].float())
    assert torch.equal(one_scales, scales[2:3])


def test_strided_rows_give_what_contiguous_ones_give() -> None:
    x = torch.randn(5, 10)
    for got, want in zip(quantize(strided(x)), quantize(x), strict=True):
        assert torch.equal(got.float(), want.float())


@pytest.mark.parametrize(
    ("group", "shape"), [(-1, (0, 1)), (0, (1, 1)), (4, (0, 2))], ids=["row", "all", "group"]
)
def test_no_rows_give_empty_results(group: int, shape: tuple[int, int]) -> None:
    q, scales = quantize(torch.empty(0, 8), named("float8_e4m3fn", group))
    assert (q.shape, scales.shape) == ((0, 8), shape)
    assert bool(scales.isfinite().all())


# One block of eight columns, its codes and scale by the rule of OCP Microscaling: the scale is the
# power of two of the largest magnitude, over that of the element's largest value.
MX = {
    "mxfp4": ([12.0, 6.0, 1.0, -0.5], [6.0, 3.0, 0.5, -0.0], 2.0),
    "mxfp6_e3m2": ([448.0, 1.0, -40.0, 0.0], [28.0, 0.0625, -2.5, 0.0], 16.0),
    "mxfp6_e2m3": ([15.0, 1.0, -7.0, 0.25], [7.5, 0.5, -3.5, 0.125], 2.0),
    "mxfp8": ([1000.0, 3.0, -0.01, 0.0], [448.0, 1.5, -0.005, 0.0], 2.0),
}


@pytest.mark.parametrize(("format", "example"), MX.items(), ids=MX)
def test_a_block_by_hand(format: str, example: tuple[list[float], list[float], float]) -> None:
    values, want, scale = example
    q, scales = quantize(torch.tensor([values]), format)
    assert scales.tolist() == [[127 + int(torch.tensor(scale).log2())]]
    codes = packing.decode(packing.unpack(q, Format.of(format).element), Format.of(format).element)
    assert codes.tolist() == torch.tensor([want]).to(torch.float8_e4m3fn).float().tolist()


def test_nvfp4_block_scales_are_relative_to_the_global_scale() -> None:
    x = torch.tensor([[3.0] * 16 + [0.75] * 16])
    for given in (1.0, 0.125):
        q, scales = quantize(x, "nvfp4", torch.tensor(given))
        assert scales.dtype == torch.float8_e4m3fn
        assert scales.float().tolist() == [[0.5 / given, 0.125 / given]]
        assert q.tolist() == [[0x77] * 16]  # every code is 6.0, two in a byte
    alone = quantize(x, "nvfp4")
    assert alone[1].float().tolist() == [[0.5, 0.125]]


BAD = {
    "rank": wrong_rank("x_RD", (8,), 2),
    "dtype": wrong_dtype("x_RD", (3, 8), "int32"),
    "element": Bad(
        {"format": "float4:row"}, "format 'float4:row' has the unknown element 'float4'; choose one"
    ),
    "group": Bad(
        {"format": "int8:0x8"},
        "format 'int8:0x8' has the group '0x8'; choose tensor, row, column or rows x columns",
    ),
    "not_a_format": Bad({"format": "fp8"}, "format 'fp8' is not element:group[:scale]"),
    "blocks": Bad({"format": "int8:4x4"}, "format='int8:4x4' shares scales between rows; inputs"),
    "columns": Bad({"format": "int8:column"}, "format='int8:column' shares scales between rows"),
    "zero_points": Bad({"format": "uint4:row"}, "format='uint4:row' has zero points; inputs are"),
    "half_scales": Bad(
        {"format": "int8:row:bfloat16"}, "format='int8:row:bfloat16' has bfloat16 scales; inputs"
    ),
    "odd_width": Bad(
        {"format": "mxfp4", "x_RD": torch.ones(3, 7)},
        "format='mxfp4' packs 2 values together; pad the width 7 to a multiple of 2",
    ),
    "static_scale_of_rows": Bad(
        {"scale": torch.ones(1)},
        "scale goes with one scale for the tensor or with nvfp4, got the format",
    ),
    "two_scales": Bad(
        {"scale": torch.ones(2), "format": "int8:tensor"},
        "scale must be one float32, got (2,) of torch.float32",
    ),
    "half_scale": Bad(
        {"scale": torch.ones(1).half(), "format": "int8:tensor"},
        "scale must be one float32, got (1,) of torch.float16",
    ),
    "scale_device": Bad(
        {"scale": torch.ones(1, device="meta"), "format": "int8:tensor"},
        "scale is on meta, but the first argument is on cpu; move one",
    ),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_refuses_a_bad_call(bad: Bad) -> None:
    assert_refused(quantize, {"x_RD": torch.ones(3, 8)}, bad)

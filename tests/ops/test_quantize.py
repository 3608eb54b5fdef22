"""`quantize` against its formula: float32 scales, values rounded half to even on a listed grid."""

import pytest
import torch
from samples import Bad, assert_refused, strided, wrong_dtype, wrong_rank
from torch import Tensor

from moe_ops import quantize
from moe_ops.shapes import DTYPES, FLOATS

# Exponent bias, mantissa bits and largest finite value of each float8 format (arXiv:2209.05433).
FLOAT8 = {"float8_e4m3fn": (7, 3, 448.0), "float8_e5m2": (15, 2, 57344.0)}
LARGEST = {**{name: top for name, (_, _, top) in FLOAT8.items()}, "int8": 127.0}
each_format = pytest.mark.parametrize("format", LARGEST)


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
    q, scales = quantize(x, None, format, group)
    want_q, want_scales = by_hand(x, format, group)
    assert (q.dtype, scales.dtype) == (getattr(torch, format), torch.float32)
    assert torch.equal(scales, want_scales)
    assert torch.equal(q.float(), want_q)


SHAPES = {-1: (3, 1), 0: (1, 1), 1: (3, 18), 4: (3, 5), 6: (3, 3), 18: (3, 1), 19: (3, 1)}


@pytest.mark.parametrize(("group", "shape"), SHAPES.items(), ids=map("group_{}".format, SHAPES))
def test_one_scale_covers_one_group(group: int, shape: tuple[int, int]) -> None:
    assert quantize(torch.randn(3, 18), None, "int8", group)[1].shape == shape


@each_format
def test_the_largest_magnitude_becomes_the_largest_value(format: str) -> None:
    q, scales = quantize(torch.tensor([[1.0, -2.0, 0.5], [0.25, 0.0, 0.0]]), None, format)
    assert q.float().abs().amax(-1).tolist() == [LARGEST[format]] * 2
    assert torch.equal(scales * LARGEST[format], torch.tensor([[2.0], [0.25]]))


@each_format
@pytest.mark.parametrize("group", [-1, 0, 4], ids="group_{}".format)
def test_zeros_stay_zeros(format: str, group: int) -> None:
    q, scales = quantize(torch.zeros(3, 6), None, format, group)
    assert torch.equal(q.float(), torch.zeros(3, 6))
    assert bool((scales > 0).all())


@each_format
def test_values_beyond_a_static_scale_saturate(format: str) -> None:
    x = torch.tensor([[1e6, -1e6, float("inf"), -float("inf")]])
    q, _ = quantize(x, torch.tensor(1.0), format, 0)
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
    q, _ = quantize(torch.tensor([values]), torch.ones(1), format, 0)
    assert q.float().tolist() == [want]


def test_values_are_divided_by_the_scale() -> None:
    # Times the rounded 1 / 15 these would exceed 2.5, 6.5 and 10.5 by one bit.
    q, _ = quantize(torch.tensor([[37.5, 97.5, -157.5]]), torch.tensor(15.0), "int8", 0)
    assert q.tolist() == [[2, 6, -10]]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=["scalar", "vector", "matrix"])
def test_a_static_scale_is_used_and_returned(shape: tuple[int, ...]) -> None:
    scale = torch.full(shape, 0.5)
    q, scales = quantize(torch.tensor([[3.0, -1.5]]), scale, "int8", 0)
    assert q.tolist() == [[6, -3]]
    assert scales.tolist() == [[0.5]]
    scales.fill_(9.0)
    assert scale.item() == 0.5  # the result is a copy


@pytest.mark.parametrize("group", [-1, 4], ids="group_{}".format)
def test_a_row_does_not_depend_on_the_others(group: int) -> None:
    x = torch.randn(5, 10)
    q, scales = quantize(x, None, "float8_e4m3fn", group)
    one_q, one_scales = quantize(x[2:3], None, "float8_e4m3fn", group)
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
    q, scales = quantize(torch.empty(0, 8), None, "float8_e4m3fn", group)
    assert (q.shape, scales.shape) == ((0, 8), shape)
    assert bool(scales.isfinite().all())


BAD = {
    "rank": wrong_rank("x_RD", (8,), 2),
    "dtype": wrong_dtype("x_RD", (3, 8), "int32"),
    "format": Bad(
        {"format": "float4"},
        "format='float4' is unknown; choose one of float8_e4m3fn, float8_e5m2, int8",
    ),
    "group": Bad(
        {"group": -2},
        "group=-2 must be a group size, -1 for one scale a row or 0 for one scale in all",
    ),
    "static_scale_of_rows": Bad(
        {"scale": torch.ones(1)},
        "a static scale goes with group=0 (one scale in all), got group=-1",
    ),
    "two_scales": Bad(
        {"scale": torch.ones(2), "group": 0},
        "scale must be one float32, got (2,) of torch.float32",
    ),
    "half_scale": Bad(
        {"scale": torch.ones(1).half(), "group": 0},
        "scale must be one float32, got (1,) of torch.float16",
    ),
    "scale_device": Bad(
        {"scale": torch.ones(1, device="meta"), "group": 0},
        "scale is on meta, but the first argument is on cpu; move one",
    ),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_refuses_a_bad_call(bad: Bad) -> None:
    assert_refused(quantize, {"x_RD": torch.ones(3, 8)}, bad)

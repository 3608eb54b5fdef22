"""Quantisation of drawn matrices: error bounds, fixed points, NaN, ragged groups, experts."""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from moe_ops.quant.formats import Format
from moe_ops.quant.packing import (
    Quantized,
    decode,
    decode_scale,
    dequantize,
    encode,
    encode_scale,
    expand,
    pack,
    quantize,
    unpack,
)
from tests.chosen import one_in

INF, NAN = float("inf"), float("nan")
NAMES = (
    "float8_e4m3fn:tensor",
    "float8_e4m3fn:3x20",
    "float8_e5m2:row:bfloat16",
    "float8_e4m3fn:1x16:float8_e4m3fn",
    "float6_e3m2:1x20:float16",
    "float4_e2m1:row",
    "mxfp4",
    "mxfp6_e3m2",
    "mxfp6_e2m3",
    "mxfp8",
    "mxfp8_e5m2",
    "nvfp4",
    "int8:column",
    "int8:row:float16",
    "int4:1x12:bfloat16",
    "uint4:1x16:float16",
    "uint4:row",
    "uint8:2x8:bfloat16",
)
# One of each kind of scale and of code; of the others some are slow, the rest are of `every`.
SLOW = ("float8_e5m2:row:bfloat16", "mxfp6_e2m3", "int4:1x12:bfloat16")
QUICK = ("float8_e4m3fn:3x20", "float6_e3m2:1x20:float16", "mxfp4", "nvfp4", "int8:row:float16",
         "uint4:row")  # fmt: skip


def formats(names: Iterable[str]) -> pytest.MarkDecorator:
    slow, every = [pytest.mark.slow], [pytest.mark.slow, pytest.mark.every]
    marks = {n: [] if n in QUICK else slow if n in SLOW else every for n in names}
    return pytest.mark.parametrize("name", [pytest.param(n, marks=m) for n, m in marks.items()])


each_format = formats(NAMES)
quick = settings(max_examples=30)  # of each of 18 formats
HALF_STEP = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}  # relative
SLACK = 2.0**-21  # a few float32 roundings: of the scale, the quotient and the products
SIZES = {"ordinary": 0, "tiny": -140, "huge": 120}  # as exponents of two; tiny ones are denormal


@dataclass(frozen=True, kw_only=True)
class Drawn:
    x: Tensor
    seed: int


@st.composite
def matrices(draw: st.DrawFn, sizes: tuple[str, ...] = tuple(SIZES)) -> Drawn:
    """[rows, columns] of normal values, some of them much smaller than the rest."""
    rows, columns = draw(st.integers(1, 5)), 4 * draw(st.integers(1, 20))
    exponent, seed = SIZES[draw(st.sampled_from(sizes))], draw(st.integers(0, 2**31))
    g = torch.Generator().manual_seed(seed)
    spread = torch.randint(-20, 1, (rows, columns), generator=g) * draw(st.integers(0, 1))
    x = torch.randn(rows, columns, generator=g).clamp(-4, 4) * 2.0**spread
    return Drawn(x=torch.ldexp(x, torch.tensor(exponent)), seed=seed)


def global_of(x: Tensor, format: Format) -> Tensor | None:
    """The global scale that lets the block scales of x use the range of e4m3."""
    if not format.has_global_scale:
        return None
    return (x.abs().amax() / 448 / format.largest).clamp(min=2.0**-100)


def undo(q: Quantized, format: Format, common: Tensor | None = None) -> Tensor:
    return dequantize(q.values, q.scale, format, q.zero, common)


def codes_of(q: Quantized, format: Format) -> Tensor:
    return unpack(q.values, format.element).view(torch.uint8)


def bound(x: Tensor, q: Quantized, format: Format, common: Tensor | None) -> Tensor:
    """The largest error that the definition of the format allows, for every value."""
    scale = expand(decode_scale(q.scale, format.scale), format.group, *x.shape[-2:])
    scale = scale if common is None else scale * common
    slack = SLACK * x.abs().amax()
    if format.integer is not None and format.has_zero:
        # Half a step inside the range. At its ends the zero point is off by half a step, and a
        # scale that was rounded down by a relative h makes the range h * highest steps too short.
        return scale * (0.5 + format.integer.highest * HALF_STEP[format.scale]) + slack
    if format.scale == "e8m0":
        # amax / scale < 2**(top + 1), and what exceeds the largest value is cut off.
        assert format.minifloat is not None
        cut = x.abs() * (1 - format.largest / 2 ** (format.minifloat.top_exponent + 1))
    elif format.scale == "float8_e4m3fn":
        # A scale is off by 1/16, or by half of the smallest subnormal, 2**-10 in units of common.
        assert common is not None
        cut = torch.maximum(x.abs() / 16, common * format.largest * 2.0**-10)
    else:
        cut = x.abs() * HALF_STEP[format.scale]
    if format.integer is not None:
        return torch.maximum(scale / 2, cut) + slack
    # Half a step: of the value's own binade, or of the subnormals.
    assert format.minifloat is not None
    m = format.minifloat.mantissa_bits
    half = torch.maximum(x.abs() * 2.0 ** -(m + 1), scale * 2.0 ** -(format.minifloat.bias + m))
    return torch.maximum(half, cut) + slack


@one_in(3, each_format)
@quick
@given(drawn=matrices())
def test_errors_stay_in_their_bounds(name: str, drawn: Drawn) -> None:
    format, x = Format.of(name), drawn.x
    if format.scale == "float16":
        x = x.clamp(-1e5, 1e5)  # beyond 65504 * largest a float16 scale has no room
    common = global_of(x, format)
    q = quantize(x, format, None, common)
    error = (undo(q, format, common) - x).abs()
    assert bool((error <= bound(x, q, format, common)).all())


# With a static scale the zero point is still that of the values: see the next test.
@formats(name for name in NAMES if not Format.of(name).has_zero)
@quick
@given(drawn=matrices())
def test_what_was_quantized_is_a_fixed_point_of_its_scale(name: str, drawn: Drawn) -> None:
    format = Format.of(name)
    common = global_of(drawn.x, format)
    q = quantize(drawn.x, format, None, common)
    again = quantize(undo(q, format, common), format, q.scale, common)
    assert torch.equal(codes_of(again, format), codes_of(q, format))
    assert again.scale is q.scale


def starts(size: int, group: int) -> range:
    return range(0, size, size if group == -1 else group)


def full_range(drawn: Drawn, format: Format) -> Quantized:
    """Drawn codes and scales; every group holds its largest code, and its lowest if it has zero."""
    g = torch.Generator().manual_seed(drawn.seed)
    rows, columns = drawn.x.shape
    limit = format.largest
    values = (torch.randn(rows, columns, generator=g) * limit / 3).clamp(-limit, limit)
    if format.has_zero:
        values = values.abs()
    for row in starts(rows, format.group[0]):
        for column in starts(columns, format.group[1]):
            values[row, column] = limit
            if format.has_zero:
                values[row, column + 1] = 0
    shape = format.parsed.scale_shape(rows, columns)
    exponents = torch.randint(-5, 6, shape, generator=g).float()
    mantissas = 1 + torch.rand(shape, generator=g)
    zero = torch.randint(0, int(limit) + 1, shape, generator=g).to(torch.uint8)
    return Quantized(
        values=pack(encode(values, format.element), format.element),
        scale=encode_scale(mantissas * 2.0**exponents, format.scale),
        zero=zero if format.has_zero else None,
    )


@each_format
@quick
@given(drawn=matrices())
def test_codes_that_use_their_range_survive_new_scales(name: str, drawn: Drawn) -> None:
    format = Format.of(name)
    want = full_range(drawn, format)
    got = quantize(undo(want, format), format)
    assert torch.equal(codes_of(got, format), codes_of(want, format))
    # float32 scales lose a bit to largest * scale / largest, all others are rounded back.
    tolerance = 2.0**-22 if format.scale == "float32" else 0
    assert torch.allclose(got.scale.float(), want.scale.float(), rtol=tolerance, atol=0)
    assert (got.zero is None) == (want.zero is None)
    if got.zero is not None and want.zero is not None:
        assert torch.equal(got.zero, want.zero)


@each_format
@quick
@given(drawn=matrices(("ordinary",)), bad=st.sampled_from([NAN, INF, -INF]))
def test_one_bad_value_makes_its_group_nan_and_no_other(
    name: str, drawn: Drawn, bad: float
) -> None:
    format, x = Format.of(name), drawn.x.clone()
    common = global_of(x, format)
    clean = undo(quantize(x, format, None, common), format, common)
    place = drawn.seed % x.numel()
    x.view(-1)[place] = bad
    got = undo(quantize(x, format, None, common), format, common)
    mark = torch.zeros(format.parsed.scale_shape(*x.shape))
    down, across = (n if g == -1 else g for g, n in zip(format.group, x.shape, strict=True))
    mark[place // x.shape[1] // down, place % x.shape[1] // across] = 1
    spoiled = expand(mark, format.group, *x.shape).expand(x.shape) == 1
    assert torch.equal(got.isnan(), spoiled)
    assert torch.equal(got[~spoiled], clean[~spoiled])


@each_format
def test_a_static_scale_saturates_infinities_and_keeps_nan_where_there_is_one(name: str) -> None:
    format = Format.of(name)
    scale = encode_scale(torch.tensor(2.0), format.scale)
    x = torch.tensor([[INF, 1.0, 3.0, 0.0], [2.0, NAN, 1.0, 0.0], [-4.0, 1e30, 0.0, 0.0]])
    q = quantize(x, format, scale)
    got = undo(q, format)
    assert decode_scale(q.scale, format.scale).unique().tolist() == [2.0]
    assert got.isnan().any() == format.element.startswith("float8")
    top = 2 * format.largest
    assert got[0, 0] == top
    if format.has_zero:
        assert bool((got[2] <= top).all())
    else:
        assert got[2, 1] == top
        assert got[0, 3] == 0
        low = quantize(torch.full((1, 4), -INF), format, scale)
        assert undo(low, format).unique().tolist() == [-top]


@each_format
def test_zeros_have_codes_of_zero_and_finite_scales(name: str) -> None:
    format = Format.of(name)
    for common in (None, *([torch.zeros(()), torch.ones(())] if format.has_global_scale else [])):
        q = quantize(torch.zeros(4, 40), format, None, common)
        assert torch.equal(
            codes_of(q, format), encode(torch.zeros(4, 40), format.element).view(torch.uint8)
        )
        assert torch.equal(undo(q, format, common), torch.zeros(4, 40))
        assert bool(decode_scale(q.scale, format.scale).isfinite().all())
        assert q.zero is None or not q.zero.any()


@each_format
@quick
@given(drawn=matrices())
def test_a_cut_group_is_a_group_padded_with_zeros(name: str, drawn: Drawn) -> None:
    format, x = Format.of(name), drawn.x
    rows, columns = x.shape
    common = global_of(x, format)
    down, across = (
        n if g == -1 else -(-n // g) * g for g, n in zip(format.group, (rows, columns), strict=True)
    )
    across += -across % 4  # so that it packs
    whole = quantize(pad(x, (0, across - columns, 0, down - rows)), format, None, common)
    got = quantize(x, format, None, common)
    groups = got.scale.shape
    assert torch.equal(got.scale.float(), whole.scale[: groups[0], : groups[1]].float())
    assert torch.equal(codes_of(got, format), codes_of(whole, format)[:rows, :columns])


@pytest.mark.slow
@each_format
@quick
@given(drawn=matrices(), dtype=st.sampled_from([torch.bfloat16, torch.float16]))
def test_experts_are_quantized_one_by_one(name: str, drawn: Drawn, dtype: torch.dtype) -> None:
    format = Format.of(name)
    x = torch.stack([drawn.x, drawn.x.flip(-1) / 3, drawn.x / 7]).to(dtype)[None]
    x = x.nan_to_num(0.0, 1.0, -1.0)
    common = None
    if format.has_global_scale:
        common = torch.stack([torch.as_tensor(global_of(m.float(), format)) for m in x[0]])[None]
    q = quantize(x, format, None, common)
    together = undo(q, format, common)
    for e in range(3):
        own = None if common is None else common[0, e]
        one = quantize(x[0, e].float(), format, None, own)
        assert torch.equal(codes_of(one, format), codes_of(q, format)[0, e])
        assert torch.equal(one.scale.view(torch.uint8), q.scale[0, e].view(torch.uint8))
        assert torch.equal(undo(one, format, own), together[0, e])


def test_scales_and_zero_points_written_by_hand() -> None:
    x = torch.tensor([[-1.0, 0.0, 2.0, 0.5]])
    q = quantize(x, Format.of("uint4:row"))
    assert q.zero is not None and (q.zero.item(), q.scale.item()) == (5, torch.tensor(3 / 15))
    assert codes_of(q, Format.of("uint4:row")).tolist() == [[0, 5, 15, 7]]  # 2.5 is even at 2
    q = quantize(x * 127, Format.of("int8:row"))
    assert (q.scale.item(), q.values.tolist()) == (2.0, [[-64, 0, 127, 32]])
    # The scale 100 / 7 is 14.3125 in bfloat16, and 100 / 14.3125 rounds to 7.
    q = quantize(torch.tensor([[100.0, 50.0]]), Format.of("int4:row:bfloat16"))
    assert (q.scale.item(), q.values.tolist()) == (14.3125, [[15 | 11 << 4]])


def test_nvfp4_written_by_hand() -> None:
    x = torch.tensor([[12.0, -1.0, 0.5, 0.0] * 4 + [1e-3, -1e-3] * 8])
    q = quantize(x, Format.of("nvfp4"), None, torch.tensor(0.5))
    # 12 / 6 / 0.5 = 4; the second block's 1e-3 / 3 rounds to zero in e4m3, whose step is 2**-9.
    assert q.scale.float().tolist() == [[4.0, 0.0]]
    assert decode(codes_of(q, Format.of("nvfp4")), "float4_e2m1").tolist() == [
        [6.0, -0.5, 0.0, 0.0] * 4 + [0.0] * 16  # 0.25 is a tie, and goes to 0
    ]
    assert codes_of(q, Format.of("nvfp4"))[0, 16:].tolist() == [0] * 16


def test_half_precision_scales_saturate_where_values_are_finite() -> None:
    q = quantize(torch.tensor([[1e30, 1.0], [1.0, 2.0]]), Format.of("int8:row:float16"))
    assert q.scale[0].item() == 65504
    assert q.values.tolist() == [[127, 0], [64, 127]]


@each_format
def test_no_rows_or_columns_give_empty_results(name: str) -> None:
    format = Format.of(name)
    for shape in ((0, 8), (2, 0, 8), (3, 0)):
        q = quantize(torch.zeros(shape), format)
        assert q.scale.shape == (*shape[:-2], *format.parsed.scale_shape(*shape[-2:]))
        assert undo(q, format).shape == shape


@pytest.mark.slow
@one_in(
    2,
    pytest.mark.parametrize(
        "name", ["mxfp6_e3m2", "nvfp4", "uint4:1x16:float16", "float8_e4m3fn:row"]
    ),
)
def test_one_graph_holds_all_of_it(name: str) -> None:
    format = Format.of(name)

    def there_and_back(x: Tensor) -> tuple[Tensor, Tensor]:
        q = quantize(x, format)
        return q.values, undo(q, format)

    x = torch.randn(3, 40)
    values, back = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")(x)
    want, want_back = there_and_back(x)
    assert torch.equal(values.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(back, want_back)

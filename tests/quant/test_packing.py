"""Elements, packing and quantisation against ml_dtypes, torchao and numbers written by hand."""

import contextlib
import io
import re

import pytest
import torch
from torch import Tensor

from moe_ops.fake_impls.formats import Storage
from moe_ops.quant.elements.kinds import Integer, Minifloat
from moe_ops.quant.elements.table import ELEMENTS
from moe_ops.quant.formats import Format
from moe_ops.quant.packing import (
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

INF, NAN = float("inf"), float("nan")
ML_NAMES = {  # ml_dtypes names the types without infinities or NaN "fn"
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
    "float6_e3m2": "float6_e3m2fn",
    "float6_e2m3": "float6_e2m3fn",
    "float4_e2m1": "float4_e2m1fn",
}
each_float = pytest.mark.parametrize("element", ML_NAMES)
INTEGERS = {name: of for name, of in ELEMENTS.items() if isinstance(of, Integer)}
FLOATS = {name: of for name, of in ELEMENTS.items() if isinstance(of, Minifloat)}
each_integer = pytest.mark.parametrize("element", INTEGERS)
NARROW = ("float6_e3m2", "float6_e2m3", "float4_e2m1")


def bits(codes: Tensor) -> Tensor:
    """Codes as unsigned bytes, whatever their dtype."""
    return codes.view(torch.uint8)


def every_code(element: str) -> Tensor:
    """All bit patterns of an element, in the dtype of its codes."""
    of = ELEMENTS[element]
    return torch.arange(2**of.bits, dtype=torch.uint8).view(of.storage.dtype)


def ml_decode(codes: Tensor, name: str) -> Tensor:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = bits(codes).numpy().view(getattr(ml_dtypes, name)).astype("float32")
    return torch.from_numpy(values)


def ml_encode(x: Tensor, element: str) -> Tensor:
    """Finite values by ml_dtypes, clamped to the range before it because not all types saturate."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    limit = FLOATS[element].largest
    rounded = x.clamp(-limit, limit).numpy().astype(getattr(ml_dtypes, ML_NAMES[element]))
    return torch.from_numpy(rounded.view("uint8"))


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, any NaN counting as any other."""
    nan = a.isnan()
    plain = torch.equal(a.signbit() & ~nan, b.signbit() & ~nan)
    return plain and torch.equal(nan, b.isnan()) and torch.equal(a[~nan], b[~nan])


@each_float
def test_every_code_decodes_like_ml_dtypes(element: str) -> None:
    codes = every_code(element)
    assert same(decode(codes, element), ml_decode(codes, ML_NAMES[element]))


@each_float
def test_every_finite_code_is_encoded_to_itself(element: str) -> None:
    codes = every_code(element)
    values = decode(codes, element)
    finite = values.isfinite()
    assert torch.equal(bits(encode(values[finite], element)), bits(codes)[finite])


@each_float
def test_every_float16_is_encoded_like_ml_dtypes(element: str) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    x = x[x.isfinite()]
    assert torch.equal(bits(encode(x, element)), ml_encode(x.float(), element))


@each_float
def test_midpoints_and_their_neighbours_are_encoded_like_ml_dtypes(element: str) -> None:
    values = decode(every_code(element), element)
    values = values[values.isfinite()].unique()
    middle = (values[1:] + values[:-1]) / 2  # exact in float32
    up, down = torch.tensor(INF), torch.tensor(-INF)
    x = torch.cat([middle, middle.nextafter(up), middle.nextafter(down)])
    assert torch.equal(bits(encode(x, element)), ml_encode(x, element))
    even = decode(encode(middle, element), element)
    assert bool(((even == values[1:]) | (even == values[:-1])).all())
    assert bool((bits(encode(middle, element)) % 2 == 0).all())


@each_float
def test_denormal_and_huge_values(element: str) -> None:
    limit = FLOATS[element].largest
    tiny = torch.tensor([2.0**-149, 1e-40, 2.0**-127, 2.0**-126, 0.0])
    huge = torch.tensor([limit * 1.01, 1e38, torch.finfo(torch.float32).max, INF])
    for sign in (1.0, -1.0):
        assert same(decode(encode(sign * tiny, element), element), sign * torch.zeros(5))
        assert decode(encode(sign * huge, element), element).tolist() == [sign * limit] * 4


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["plus", "minus"])
def test_nan_stays_in_float8_and_is_zero_elsewhere(sign: float) -> None:
    x = torch.tensor([NAN]).copysign(torch.tensor([sign]))
    for element in ("float8_e4m3fn", "float8_e5m2"):
        assert decode(encode(x, element), element).isnan().all()
    for element in NARROW:
        assert encode(x, element).tolist() == [0]
    for element in INTEGERS:
        assert decode(encode(x, element), element).tolist() == [0.0]


@each_integer
def test_integers_round_to_even_saturate_and_keep_every_code(element: str) -> None:
    of = INTEGERS[element]
    values = torch.arange(of.lowest, of.highest + 1).float()
    codes = encode(values, element)
    assert torch.equal(codes.int(), values.int() + of.offset)
    assert torch.equal(decode(codes, element), values)
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, 1e9, INF, -1e9, -INF])
    want = [0, 2, 2, 0, of.highest, of.highest, of.lowest, of.lowest]
    assert decode(encode(x, element), element).tolist() == want


def test_codes_are_those_of_the_specification() -> None:
    # OCP MX 1.0, tables 3 to 5: the largest normal, the smallest normal, the smallest subnormal.
    assert encode(torch.tensor([6.0, 1.0, 0.5, -6.0, -0.0]), "float4_e2m1").tolist() == [
        0b0111, 0b0010, 0b0001, 0b1111, 0b1000,
    ]  # fmt: skip
    assert encode(torch.tensor([28.0, 0.25, 0.0625]), "float6_e3m2").tolist() == [31, 4, 1]
    assert encode(torch.tensor([7.5, 1.0, 0.125]), "float6_e2m3").tolist() == [31, 8, 1]


def test_four_bits_lie_low_nibble_first() -> None:
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    for element in ("float4_e2m1", "int4", "uint4"):
        assert pack(codes, element).tolist() == [[0x21, 0x0F]]


def test_six_bits_lie_in_a_little_endian_stream() -> None:
    codes = torch.tensor([0b000001, 0b100010, 0b110100, 0b101011], dtype=torch.uint8)
    word = 0b101011_110100_100010_000001
    for element in ("float6_e3m2", "float6_e2m3"):
        assert pack(codes, element).tolist() == [word & 255, word >> 8 & 255, word >> 16]


@pytest.mark.parametrize("element", ["float4_e2m1", "float6_e3m2", "int4", "int8", "float8_e5m2"])
def test_unpack_undoes_pack_for_all_neighbours(element: str) -> None:
    codes = every_code(element)
    n = len(codes)
    pairs = torch.stack([bits(codes).repeat_interleave(n), bits(codes).repeat(n)], -1)
    for order in (pairs, pairs.flip(-1)):
        quads = order.roll(1, 0).reshape(2, -1, 4).view(codes.dtype)
        packed = pack(quads, element)
        assert packed.shape[-1] * 8 == 4 * n.bit_length() - 4
        assert torch.equal(bits(unpack(packed, element)), bits(quads))


@pytest.mark.parametrize(("values", "units"), [(8, 1), (4, 1), (8, 3), (8, 5), (4, 3), (8, 7)])
def test_values_of_any_number_of_bits_lie_in_a_little_endian_stream(
    values: int, units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(dtype=torch.uint8, values=values, units=units)
    most = 2**storage.bits - 1
    of = Integer(name="any", storage=storage, lowest=-1, highest=most - 1, offset=1)
    monkeypatch.setitem(ELEMENTS, "any", of)
    codes = torch.randint(most + 1, (3, 2 * values), dtype=torch.uint8)
    packed = pack(codes, "any")
    for row, stored in zip(codes.tolist(), packed.tolist(), strict=True):
        number = sum(code << (storage.bits * i) for i, code in enumerate(row))
        assert stored == list(number.to_bytes(2 * units, "little"))
    assert torch.equal(unpack(packed, "any"), codes)
    zeros = torch.tensor(of.zeros, dtype=torch.uint8)
    assert decode(unpack(zeros, "any"), "any").tolist() == [0.0] * values


def test_nothing_packs_to_nothing() -> None:
    for element in ("float4_e2m1", "float6_e3m2"):
        for shape in ((0, 8), (3, 0)):
            codes = torch.zeros(shape, dtype=torch.uint8)
            assert unpack(pack(codes, element), element).shape == shape


def test_power_of_two_scales_are_those_of_ml_dtypes() -> None:
    codes = torch.arange(256).to(torch.uint8)
    values = decode_scale(codes, "e8m0")
    assert same(values, ml_decode(codes, "float8_e8m0fnu"))
    assert values[0] == 2.0**-127
    assert torch.equal(encode_scale(values, "e8m0"), codes)
    above = values[:-1].nextafter(torch.tensor(INF))
    below = values[1:-1].nextafter(torch.tensor(0.0))
    assert torch.equal(encode_scale(above, "e8m0"), codes[:-1])
    assert torch.equal(encode_scale(below, "e8m0"), codes[:-2])
    odd = torch.tensor([0.0, -0.0, 1e-45, 3e38, INF, NAN, -1.0])
    assert encode_scale(odd, "e8m0").tolist() == [0, 0, 0, 254, 255, 255, 255]


def test_other_scales_are_floats() -> None:
    x = torch.tensor([1.0, 1.0625, 1e9, INF, NAN, 2.0**-10])
    eight = decode_scale(encode_scale(x, "float8_e4m3fn"), "float8_e4m3fn")
    assert same(eight, torch.tensor([1.0, 1.0, 448.0, 448.0, NAN, 0.0]))
    for kind in ("float32", "bfloat16", "float16"):
        stored = encode_scale(x, kind)
        assert stored.dtype == getattr(torch, kind)
        assert same(decode_scale(stored, kind), x.to(stored.dtype).float())


def test_expand_repeats_cuts_and_leaves_whole_axes() -> None:
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    want = [[1.0, 1, 1, 2], [1, 1, 1, 2], [3, 3, 3, 4]]
    assert expand(scale, (2, 3), 3, 4).tolist() == want
    assert expand(scale[:1], (-1, 3), 3, 4).tolist() == want[:1]
    assert expand(scale[None, :, :1], (2, -1), 3, 4).shape == (1, 3, 1)


MX = {
    "mxfp4": "float4_e2m1fn_x2",
    "mxfp6_e3m2": "fp6_e3m2",
    "mxfp6_e2m3": "fp6_e2m3",
    "mxfp8": "float8_e4m3fn",
    "mxfp8_e5m2": "float8_e5m2",
}


@pytest.mark.parametrize("name", MX)
def test_microscaling_blocks_are_those_of_torchao(name: str) -> None:
    with contextlib.redirect_stderr(io.StringIO()):
        mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    # Normal float32 quotients only: torchao reads the scale 2**-127 as 2**-126.
    x = torch.randn(64, 128) * 2.0 ** torch.randint(-100, 120, (64, 4)).repeat_interleave(32, 1)
    x[0, :32] = 0
    element = getattr(torch, MX[name], MX[name])
    scale, values = mx.to_mx(x, element, 32, mx.ScaleCalculationMode.FLOOR)
    got = quantize(x, Format.of(name))
    assert torch.equal(got.scale, bits(scale))
    # torchao packs float4 alone.
    ours = unpack(got.values, Format.of(name).element) if "6" in name else got.values
    assert torch.equal(bits(ours), bits(values))


BAD = {
    "element": (
        lambda: encode(torch.ones(2), "float3"),
        "element='float3' is unknown; choose one of float8_e4m3fn",
    ),
    "kind": (lambda: decode_scale(torch.ones(2), "e5m3"), "kind='e5m3' is unknown"),
    "pack": (
        lambda: pack(torch.zeros(2, 6, dtype=torch.uint8), "float6_e3m2"),
        "float6_e3m2 wants codes in multiples of 4 on the last axis, got shape (2, 6); "
        "pad the columns",
    ),
    "unpack": (
        lambda: unpack(torch.zeros(4, dtype=torch.uint8), "float6_e2m3"),
        "float6_e2m3 wants packed bytes in multiples of 3 on the last axis, got shape (4,)",
    ),
    "groups": (
        lambda: expand(torch.ones(2, 3), (1, 4), 2, 8),
        "scales must have 2 on axis -1 (groups of 4 of 8), got shape (2, 3)",
    ),
    "rank": (
        lambda: quantize(torch.ones(8), Format.of("int8:row")),
        "x must be float32, bfloat16 or float16 [..., rows, columns], "
        "got torch.float32 of shape (8,)",
    ),
    "dtype": (
        lambda: quantize(torch.ones(2, 8).int(), Format.of("int8:row")),
        "got torch.int32 of shape (2, 8); convert or reshape it",
    ),
    "static_shape": (
        lambda: quantize(torch.ones(2, 8), Format.of("int8:row"), torch.ones(2)),
        "scale must be one value or have shape (2, 1), got shape (2,)",
    ),
    "static_dtype": (
        lambda: quantize(torch.ones(2, 8), Format.of("int8:row:bfloat16"), torch.ones(2, 1)),
        "scales of int8:row:bfloat16 must be torch.bfloat16, got torch.float32",
    ),
    "no_global": (
        lambda: quantize(torch.ones(1, 32), Format.of("mxfp4"), None, torch.ones(1)),
        "mxfp4 has no global scale, got one; fold it into the scales",
    ),
    "global_shape": (
        lambda: quantize(torch.ones(3, 1, 16), Format.of("nvfp4"), None, torch.ones(2)),
        "global_scale must be one value or have shape (3,), got shape (2,)",
    ),
    "no_zero": (
        lambda: dequantize(
            torch.zeros(1, 4, dtype=torch.uint8), torch.ones(1, 1), Format.of("uint4:row")
        ),
        "uint4:row wants a zero point, got none",
    ),
    "a_zero": (
        lambda: dequantize(
            torch.zeros(1, 4, dtype=torch.int8), torch.ones(1, 1), Format.of("int8:row"),
            torch.zeros(1, 1, dtype=torch.uint8),
        ),
        "int8:row has no zero point, got one",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD)
def test_errors_say_what_was_wrong(call, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        call()

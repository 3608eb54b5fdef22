"""How checkpoints lay out the matrices of an expert, and the way from there to what ops read.

A layer stores every weight with its outputs as rows, packed along the columns, and its scales and
zero points as [groups of rows, groups of columns]. A checkpoint may have axes exchanged, pack along
the rows, or put values into words; a `Coding` says which, so that a part can be cut out of the
stored tensor first and converted after.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops.checks.shapes import FLOATS
from moe_ops.quant.formats import Format
from moe_ops.quant.packing import pack, unpack
from moe_ops.quant.scales import e8m0_to_float32, float32_to_e8m0
from moe_ops.weights.advice import advising


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis of a matrix in a stored tensor: its place, and `elements` for `values` units."""

    place: int
    values: int = 1
    elements: int = 1

    def stored(self, units: int) -> int | None:
        """So many units counted in stored elements; None if they are no whole words or blocks."""
        whole, left = divmod(units, self.values)
        return None if left else whole * self.elements


ROWS, COLUMNS = Axis(place=0), Axis(place=1)
AS_WORDS = ("int4", "uint4", "uint8")  # int8 has no offset
WORD_BYTES = 4
_LOW = 0x0F0F0F0F  # the lower nibbles of a word
_OFFSETS = 0x88  # between two's complement and the offset of 8 that int4 has, for two in a byte
Block = tuple[int, int] | None  # rows and columns of float8 that share a scale, if they are said
Convert = Callable[[Tensor, Any], Tensor]  # of a part as it is stored, for a Format or None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Matrix:
    """The axes of a matrix in a stored tensor, and the conversion of a part of it.

    `convert` takes the part as it is stored, for the layer's format; without one the part is what
    the ops read, but for the order of its axes. `block` is the size of a last axis into which the
    columns' elements are split.
    """

    rows: Axis = ROWS
    columns: Axis = COLUMNS
    convert: Convert | None = None
    as_words: tuple[str, ...] = ()
    block: int | None = None

    def in_words(self, target: Tensor, format: Format | None) -> tuple[Tensor, Matrix]:
        """A layer's tensor, and how the stored part goes there: as it is where words allow it."""
        fits = target.shape[-1] * target.element_size() % WORD_BYTES == 0
        if format is None or format.element not in self.as_words or not fits:
            return target, self
        return target.view(torch.int32), replace(self, convert=None)

    def shape(self, rows: int, columns: int) -> tuple[int, ...] | None:
        """The shape of the stored tensor of so many units; None if they do not fill it."""
        sizes = [0, 0]
        for axis, units in ((self.rows, rows), (self.columns, columns)):
            stored = axis.stored(units)
            if stored is None:
                return None
            sizes[axis.place] = stored
        if self.block is None:
            return tuple(sizes)
        return None if sizes[1] % self.block else (sizes[0], sizes[1] // self.block, self.block)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Coding:
    """How a checkpoint codes the weights of its experts.

    `bits` is the width of an integer code, None where the dtype says it. A `weight` of None is what
    the ops read for the layer's format. Of codings that hold scales and values in one tensor,
    `formats` are those that they hold exactly; all of them `decodes` to layers without a format.
    Where zero points are left out because all are the middle of the codes, it is `symmetric`.
    `stored`: the dtype of integer codes; `plain_names`: they are called as weights in floats are.
    `block`: what shares a scale in float8 matrices, if the checkpoint says it; a layer's blocks may
    have fewer rows, so that gate and up have none in common. `scale_of_blocks`: of blocks that hold
    their own scales, what makes the one that a layer has above them. `told_by`: the function that
    says which formats the layers of such files have, if there is one.
    """

    name: str
    weight: Matrix | None = None
    scale: Matrix = Matrix()
    zero: Matrix = Matrix()
    bits: int | None = None
    formats: tuple[str, ...] = ()
    decodes: bool = False
    symmetric: bool = False
    stored: torch.dtype = torch.int32
    plain_names: bool = False
    block: Block = None
    scale_of_blocks: Callable[[Tensor], Tensor] | None = None
    told_by: str = ""

    def matrix(self, part: str, format: Format | None) -> Matrix:
        """The layout of weight, scale or zero of a layer of this format (None: not quantised).

        Raises ValueError for a format whose codes are not those of the checkpoint.
        """
        if self.decodes and format is not None and format.name not in self.formats:
            held = f"holds {self.formats[0]}" if self.formats else "is in no format of the ops"
            raise advising(
                ValueError,
                f"{self.name} {held}, but the layer has {format.name}",
                f"give the layer {'that' if self.formats else 'none (quant=None)'}"
                + f", as `{self.told_by}` says" * bool(self.told_by),
            )
        if part != "weight":
            return self.scale if part == "scale" else self.zero
        if self.bits is not None and (
            format is None or format.integer is None or format.bits != self.bits
        ):
            raise advising(
                ValueError,
                f"{self.name} holds integers of {self.bits} bits, but the layer has "
                f"{'no format' if format is None else format.name}",
                f"give the layer one of int{self.bits} or, for weights with zero points, "
                f"uint{self.bits}",
            )
        if self.weight is not None:
            return self.weight
        storage = None if format is None else format.parsed.storage
        if storage is None:
            return Matrix()
        return Matrix(columns=Axis(place=1, values=storage.values, elements=storage.units))


class Stored(NamedTuple):
    """An entry of a file: how to read its tensor, and its coding where the file says it.

    Where reading makes a tensor instead of mapping it, `like` checks all that it is made of, and
    gives a tensor on the meta device that is like it: it is read last, and kept for a short time.
    """

    name: str
    read: Callable[[], Tensor]
    coding: Coding | None = None
    like: Callable[[], Tensor] | None = None


def scale_above(coding: Coding, stored: Stored) -> Stored:
    """The one scale that a layer has above the blocks of an entry, as an entry."""
    make = coding.scale_of_blocks
    assert make is not None
    return stored._replace(read=lambda: make(stored.read()))


PLAIN = Coding(name="plain")
# Unquantised weights with their columns as outputs.
TRANSPOSED = Coding(name="transposed", weight=Matrix(rows=COLUMNS, columns=ROWS))


def gptq(bits: int = 4, *, plus_one: bool = True) -> Coding:
    """GPTQ: words along the columns, which lie on axis 0, the first value in the lowest bits.

    Values of int4 and int8 are stored with an offset of half their range. The first version of the
    format (`plus_one`) stores zero points less one, so that the largest stands for 0. Source:
    Frantar et al., "GPTQ", arXiv:2210.17323; the layout is AutoGPTQ's.
    """
    per = _per_word(bits)

    def values(t: Tensor, format: Format) -> Tensor:
        return gptq_values(t, bits=bits, symmetric=not format.has_zero)

    def zeros(t: Tensor, format: Format) -> Tensor:
        return gptq_zeros(t, bits=bits, plus_one=plus_one)

    return Coding(
        name="GPTQ",
        weight=Matrix(
            rows=COLUMNS, columns=Axis(place=0, values=per), convert=values, as_words=AS_WORDS
        ),
        scale=Matrix(rows=COLUMNS, columns=ROWS),
        zero=Matrix(rows=Axis(place=1, values=per), columns=ROWS, convert=zeros),
        bits=bits,
    )


def awq() -> Coding:
    """AWQ of four bits: words along the rows, which lie on axis 1. Nibble i of a word, from the
    lowest bits, is value (0, 2, 4, 6, 1, 3, 5, 7)[i]. Source: Lin et al., "AWQ", arXiv:2306.00978;
    the layout is that of its GEMM kernel.
    """
    words = Axis(place=1, values=8)
    return Coding(
        name="AWQ",
        weight=Matrix(rows=words, columns=ROWS, convert=lambda t, format: awq_values(t)),
        scale=Matrix(rows=COLUMNS, columns=ROWS),
        zero=Matrix(rows=words, columns=ROWS, convert=lambda t, format: awq_zeros(t)),
        bits=4,
    )


def compressed(bits: int = 4) -> Coding:
    """pack-quantized of compressed-tensors: words along the columns; zero points along the rows.

    Codes and zero points are stored with an offset of half their range.
    """
    per = _per_word(bits)

    def values(t: Tensor, format: Format) -> Tensor:
        codes = t.contiguous().view(torch.uint8)
        return (codes ^ 128).view(torch.int8) if format.element == "int8" else codes

    def zeros(t: Tensor, format: Format) -> Tensor:
        # Those of GPTQ with axes exchanged, and without the one that it takes off.
        return gptq_zeros(t.T, bits=bits, plus_one=False)

    return Coding(
        name="compressed-tensors",
        weight=Matrix(columns=Axis(place=1, values=per), convert=values, as_words=AS_WORDS),
        zero=Matrix(rows=Axis(place=0, values=per), convert=zeros),
        bits=bits,
    )


def int4_pairs() -> Coding:
    """W4AFP8: two integers in a byte along the columns, the first in the lower bits, as two's
    complement and without zero points. Source: TensorRT-LLM's and SGLang's checkpoints of
    DeepSeek.
    """

    def values(t: Tensor, format: Format) -> Tensor:
        if t.dtype != torch.int8:
            raise TypeError(f"pairs of int4 must be int8, got {t.dtype}; view them as int8")
        return t.view(torch.uint8) ^ _OFFSETS

    return Coding(
        name="W4AFP8",
        weight=Matrix(columns=Axis(place=1, values=2), convert=values),
        bits=4,
        symmetric=True,
        stored=torch.int8,
        plain_names=True,
    )


def mxfp4_blocks() -> Coding:
    """gpt-oss: MXFP4 as [rows, columns / 32, 16] bytes."""
    packed = Matrix(columns=Axis(place=1, values=2), block=16)
    return Coding(name="MXFP4 blocks", weight=packed)


def gptq_values(words: Tensor, *, bits: int, symmetric: bool) -> Tensor:
    """Packed values [F, D packed] of GPTQ words [D / n, F]; symmetric: those of int4 or int8."""
    values = _bytes(_transposed(words))
    # Four bits are stored with the offset that int4 has; eight bits with one of 128.
    return (values ^ 128).view(torch.int8) if symmetric and bits == 8 else values


def gptq_zeros(words: Tensor, *, bits: int, plus_one: bool) -> Tensor:
    """Zero points [F, G] of GPTQ words [G, F / n]."""
    zero_GF = unpack(_bytes(words), f"uint{bits}")
    return _transposed((zero_GF + int(plus_one)) & (2**bits - 1))


def awq_values(words: Tensor) -> Tensor:
    """Packed values [F, D / 2] of AWQ words [D, F / 8].

    Words of two columns become a word of their even nibbles and one of their odd ones, in which a
    byte has a value of both columns: the axes of words are exchanged, not those of nibbles.
    """
    if words.dtype != torch.int32 or words.shape[-2] % 2:
        return pack(awq_zeros(words), "uint4")  # which raises
    first, second = words[..., 0::2, :], words[..., 1::2, :]
    even = (first & _LOW) | ((second & _LOW) << 4)
    odd = ((first >> 4) & _LOW) | (second & ~_LOW)
    both = _transposed(torch.stack((even, odd), -3))  # [..., 2, F / 8, D / 2]
    # Byte 2i + j of word h has value 4j + 2h + i of eight: nibble 2 (2i + j) + h in `awq`.
    values = both.view(torch.uint8).unflatten(-1, (both.shape[-1], 2, 2))
    return values.movedim((-4, -1, -5, -2, -3), (-5, -4, -3, -2, -1)).flatten(-5, -2)


def awq_zeros(words: Tensor) -> Tensor:
    """Zero points [F, G] of AWQ words [G, F / 8]."""
    nibbles = unpack(_bytes(words), "uint4")
    # Column 2a + b of eight is nibble a + 4b: the two halves of a word interleave.
    halves = nibbles.unflatten(-1, (words.shape[-1], 2, 4))
    return _transposed(halves.transpose(-1, -2).flatten(-3))


def _transposed(t: Tensor) -> Tensor:
    return t.transpose(-1, -2).contiguous()


def _bytes(words: Tensor) -> Tensor:
    """The bytes of int32 words [..., n], lowest first: [..., 4 n]."""
    if words.dtype != torch.int32:
        raise TypeError(f"words must be int32, got {words.dtype}; view them as int32")
    # An axis of one word has the stride 1 that this view wants, whatever strides the others have.
    return words.unsqueeze(-1).view(torch.uint8).flatten(-2)


def _per_word(bits: int) -> int:
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, got {bits}; other widths straddle words")
    return 32 // bits


def to_dtype(t: Tensor, dtype: torch.dtype, part: str) -> Tensor:
    """A tensor's numbers in the dtype of the layer's tensor, or in one that a copy rounds to it.

    Floating-point weights and biases are rounded; scales and codes are not, because that would
    change the weights. Raises TypeError for codes of another dtype, ValueError for scales that the
    dtype does not hold.
    """
    if t.dtype == dtype:
        return t
    if part in ("weight", "bias") and t.dtype in FLOATS and dtype in FLOATS:
        return t  # the copy rounds, without memory of its own
    if part == "scale" and t.dtype == torch.float8_e8m0fnu:
        if dtype == torch.uint8:
            return t.view(torch.uint8)
        t = e8m0_to_float32(t)
    if part == "scale" and t.dtype in FLOATS:
        if dtype == torch.uint8:
            return float32_to_e8m0(t)
        if dtype in FLOATS:
            found = t.to(dtype)
            if not torch.equal(found.double(), t.double()):
                raise advising(
                    ValueError,
                    f"has {short(t.dtype)} scales that {short(dtype)} would round",
                    f"give the layer's format {short(t.dtype)} scales",
                )
            return found
    raise advising(
        TypeError,
        f"is {short(t.dtype)}, but the layer's tensor is {short(dtype)}",
        "give the layer the checkpoint's format",
    )


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

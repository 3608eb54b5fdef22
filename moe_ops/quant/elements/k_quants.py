"""The K quants of ggml, Q4_K, Q5_K and Q6_K: 256 values in a block with scales of scales.

A value of Q4_K and Q5_K is d * scale * code - d_min * minimum in float32, with a scale and a
minimum of six bits for 32 values, and of Q6_K d * scale * (code - 32), with a scale of int8 for 16
values; d and d_min are float16. Source: `ggml-quants.c` and `ggml-common.h` of ggml.

A block has the bytes of ggml's in another order: those of scales are as they are, and codes lie in
the order of columns, the lowest four bits of all 256 before what they have above these:

    q4_k   d, d_min, 12 bytes of scales and minima, 128 bytes of four bits
    q5_k   d, d_min, 12 bytes of scales and minima, 128 bytes of four bits, 32 of one bit
    q6_k   128 bytes of four bits, 64 of two bits, 16 scales, d
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops.fake_impls.formats import Storage
from moe_ops.quant.elements.bits import joined, split
from moe_ops.quant.elements.kinds import Blocks
from moe_ops.quant.elements.table import add

VALUES = 256  # of a block
HEADER = 16  # bytes before the codes of blocks with minima
LOW = Storage(dtype=torch.uint8, values=2)  # bytes of the lowest four bits
ABOVE = {1: Storage(dtype=torch.uint8, values=8), 2: Storage(dtype=torch.uint8, values=4)}
MOST_SCALE = 63  # of six bits
LARGEST_HALF = 65504.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Minima(Blocks):
    """Codes of four or five bits from 0 on, of which each group of 32 has a scale and a minimum."""

    @property
    def code_bits(self) -> int:
        return (self.storage.units - HEADER) * 8 // VALUES

    def decode(self, codes: Tensor) -> Tensor:
        blocks = codes.unflatten(-1, (-1, self.storage.units))
        d, d_min = _halves(blocks[..., :4]).unbind(-1)
        scale, minimum = _sixes(blocks[..., 4:HEADER])
        q = _codes(blocks[..., HEADER:], self.code_bits).unflatten(-1, (8, 32)).float()
        scale, minimum = d[..., None] * scale, d_min[..., None] * minimum
        return (scale[..., None] * q - minimum[..., None]).flatten(-3)

    def encode(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, 8, 32))
        most = float(2**self.code_bits - 1)
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        d, scale = _in_steps((high - low) / most)
        d_min, minimum = _in_steps(-low)
        step, least = (a[..., None] * b for a, b in ((d, scale), (d_min, minimum)))
        q = _ratio(groups + least[..., None], step[..., None]).round().clamp(0, most)
        parts = (
            _bytes_of_halves(torch.stack((d, d_min), -1)), _packed_sixes(scale, minimum),
            *_packed(q.nan_to_num(0.0).to(torch.uint8).flatten(-2), self.code_bits),
        )  # fmt: skip
        return torch.cat(parts, -1).flatten(-2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sixes(Blocks):
    """Codes of six bits from -32 to 31, of which each group of 16 has a scale of int8."""

    def decode(self, codes: Tensor) -> Tensor:
        blocks = codes.unflatten(-1, (-1, self.storage.units))
        q, scale, d = blocks.split((192, 16, 2), -1)
        scale = _halves(d) * scale.contiguous().view(torch.int8).float()
        return (scale[..., None] * (_codes(q, 6).unflatten(-1, (16, 16)).float() - 32)).flatten(-3)

    def encode(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, 16, 16))
        # The value of the largest magnitude becomes -32, and the largest scale -128.
        scale = _extreme(groups) / -32
        d = _half(_extreme(scale) / -128)
        steps = _ratio(scale, d[..., None]).round().clamp(-128, 127)
        q = _ratio(groups, (d[..., None] * steps)[..., None]).round().clamp(-32, 31)
        parts = (
            *_packed((q.nan_to_num(0.0) + 32).to(torch.uint8).flatten(-2), 6),
            steps.nan_to_num(0.0).to(torch.int8).view(torch.uint8), _bytes_of_halves(d[..., None]),
        )  # fmt: skip
        return torch.cat(parts, -1).flatten(-2)


def _codes(stored: Tensor, bits: int) -> Tensor:
    """The codes [..., 256] of the bytes of a block that hold them."""
    low = split(stored[..., : VALUES // 2].contiguous(), LOW)
    if bits == 4:
        return low
    return low | split(stored[..., VALUES // 2 :].contiguous(), ABOVE[bits - 4]) << 4


def _packed(codes: Tensor, bits: int) -> tuple[Tensor, ...]:
    """The bytes that hold codes [..., 256]."""
    low = joined(codes & 15, LOW)
    return (low,) if bits == 4 else (low, joined(codes >> 4, ABOVE[bits - 4]))


def _halves(stored: Tensor) -> Tensor:
    """Float16 numbers of their bytes, as float32."""
    return stored.contiguous().view(torch.float16).float()


def _bytes_of_halves(x: Tensor) -> Tensor:
    return x.half().contiguous().view(torch.uint8)


def _half(x: Tensor) -> Tensor:
    """What float16 holds of numbers, saturated, and NaN of infinities."""
    x = torch.where(x.isfinite(), x, torch.nan)
    return x.clamp(-LARGEST_HALF, LARGEST_HALF).half().float()


def _in_steps(x: Tensor) -> tuple[Tensor, Tensor]:
    """(d, steps) for numbers [..., groups] from 0 on: close to d * steps, steps from 0 to 63."""
    d = _half(x.amax(-1) / MOST_SCALE)
    return d, _ratio(x, d[..., None]).round().clamp(0, MOST_SCALE).nan_to_num(0.0)


def _ratio(x: Tensor, by: Tensor) -> Tensor:
    """x / by, and 0 where by is."""
    return torch.where(by == 0, 0.0, x / by)


def _extreme(x: Tensor) -> Tensor:
    """The value of the largest magnitude on the last axis; NaN and infinities are NaN."""
    at = x.abs().argmax(-1, keepdim=True)
    found = x.gather(-1, at).squeeze(-1)
    return torch.where(found.isfinite(), found, torch.nan)


def _sixes(stored: Tensor) -> tuple[Tensor, Tensor]:
    """(scales, minima) [..., 8] in float32 of their 12 bytes. The first four of each have a byte,
    the others four bits there and two above those of the first ones."""
    a, b, c = (part.int() for part in stored.split(4, -1))
    scale = torch.cat((a & 63, (c & 15) | (a >> 6 << 4)), -1)
    minimum = torch.cat((b & 63, (c >> 4) | (b >> 6 << 4)), -1)
    return scale.float(), minimum.float()


def _packed_sixes(scale: Tensor, minimum: Tensor) -> Tensor:
    """The bytes that `_sixes` takes apart."""
    scale, minimum = scale.int(), minimum.int()
    first, last = scale.split(4, -1)
    first_min, last_min = minimum.split(4, -1)
    parts = (
        first | (last >> 4 << 6), first_min | (last_min >> 4 << 6),
        (last & 15) | ((last_min & 15) << 4),
    )  # fmt: skip
    return torch.cat(parts, -1).to(torch.uint8)


def _storage(units: int) -> Storage:
    return Storage(dtype=torch.uint8, values=VALUES, units=units, block=True)


def reordered(blocks: Tensor, kind: str) -> Tensor:
    """Blocks of ggml [..., n * units] of a type, a key of `K_QUANTS`, as the element has them."""
    units = K_QUANTS[kind].storage.units
    blocks = blocks.unflatten(-1, (-1, units))
    if kind == "Q6_K":
        low, above, rest = blocks.split((128, 64, 18), -1)
        # Of each half of the values a byte has those 64 apart, and above these those 32 apart.
        low = torch.stack((low & 15, low >> 4), -1).unflatten(-2, (2, 64)).transpose(-1, -2)
        parts = [above >> shift & 3 for shift in (0, 2, 4, 6)]
        above = torch.stack(parts, -1).unflatten(-2, (2, 32)).transpose(-1, -2)
        codes = low.flatten(-3) | above.flatten(-3) << 4
        return torch.cat((*_packed(codes, 6), rest), -1).flatten(-2)
    header, rest = blocks.split((HEADER, units - HEADER), -1)
    low = rest[..., -VALUES // 2 :].unflatten(-1, (4, 32))
    codes = torch.stack((low & 15, low >> 4), -2).flatten(-3)
    if kind == "Q5_K":  # bit i of byte j is that of value 32 i + j
        above = rest[..., :32]
        codes = codes | torch.stack([above >> i & 1 for i in range(8)], -2).flatten(-2) << 4
    return torch.cat((header, *_packed(codes, 4 if kind == "Q4_K" else 5)), -1).flatten(-2)


K_QUANTS: dict[str, Blocks] = {  # by the types of ggml
    "Q4_K": Minima(name="q4_k", storage=_storage(144)),
    "Q5_K": Minima(name="q5_k", storage=_storage(176)),
    "Q6_K": Sixes(name="q6_k", storage=_storage(210)),
}
for _kind, _element in K_QUANTS.items():
    add(_element, published={_kind.lower(): f"{_element.name}:tensor"})

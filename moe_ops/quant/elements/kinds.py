"""The kinds of elements: floats, integers, tables of values, and blocks that hold their own scales;
what their codes stand for, in plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops.fake_impls.formats import Storage

# Of IEEE float32, whose fields are read and written here.
FLOAT32_BIAS, FLOAT32_MANTISSA = 127, 23


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """A type of values: its name in format strings, and how its codes are stored.

    Of another package's element `triton_decoder` may say where a `triton.jit` function is, as
    "module:function", which the Triton kernels decode codes by. It is imported when a kernel first
    asks for it; moe_ops/kernels/triton/experts/formats/registered.py says what it takes and gives.
    """

    name: str
    storage: Storage
    triton_decoder: str = ""

    @property
    def bits(self) -> int:
        return self.storage.bits

    @property
    def code_of_zero(self) -> int:
        return 0

    @property
    def zeros(self) -> tuple[int, ...]:
        """The units of stored values that are all zero."""
        codes = (self.code_of_zero << (i * self.bits) for i in range(self.storage.values))
        together, size = sum(codes), 8 * self.storage.dtype.itemsize
        return tuple(together >> (i * size) & (2**size - 1) for i in range(self.storage.units))

    def encode(self, x: Tensor) -> Tensor:
        """Codes of float32 values, one for each, as `moe_ops.quant.packing.encode` has them."""
        raise NotImplementedError

    def decode(self, codes: Tensor) -> Tensor:
        """The exact float32 value of every code."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Minifloat(Element):
    """A floating-point element: sign, exponent and mantissa bits.

    `largest` is the largest finite magnitude; `top_exponent` its binary exponent, which the OCP
    Microscaling rules call emax_elem.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    top_exponent: int

    def __post_init__(self) -> None:
        bits = 1 + self.exponent_bits + self.mantissa_bits
        if bits != self.bits:
            raise ValueError(
                f"{self.name} has {bits} bits of sign, exponent and mantissa, but {self.bits} in "
                "its storage; give fields and storage of one size"
            )

    @property
    def native(self) -> bool:
        """Whether torch has a dtype of it, which converts, and has codes of NaN."""
        return self.storage.dtype.is_floating_point

    def encode(self, x: Tensor) -> Tensor:
        if self.native:
            # The conversion alone gives infinities (e5m2) or NaN (e4m3 before torch 2.12).
            return x.clamp(-self.largest, self.largest).to(self.storage.dtype)
        x = x.nan_to_num(0.0).clamp(-self.largest, self.largest)
        a = x.abs()
        lowest = 1 - self.bias  # exponent of the smallest normal, and of all subnormals
        exponent = (a.view(torch.int32) >> FLOAT32_MANTISSA) - FLOAT32_BIAS
        exponent = exponent.clamp(min=lowest)
        # The hidden bit of a normal adds one to the exponent field, and so does a carry of
        # rounding.
        mantissa = (a * power_of_two(self.mantissa_bits - exponent)).round().int()
        code = ((exponent - lowest) << self.mantissa_bits) + mantissa
        magnitude_bits = self.exponent_bits + self.mantissa_bits
        sign = (x.view(torch.int32) >> (31 - magnitude_bits)) & (1 << magnitude_bits)
        return (code | sign).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        if self.native:
            return codes.float()
        code = codes.int()
        field = (code >> self.mantissa_bits) & ((1 << self.exponent_bits) - 1)
        hidden = (field > 0).int() << self.mantissa_bits
        mantissa = (code & ((1 << self.mantissa_bits) - 1)) | hidden
        power = power_of_two(field.clamp(min=1) - self.bias - self.mantissa_bits)
        sign = 1 - 2 * (code >> (self.exponent_bits + self.mantissa_bits))
        return mantissa.float() * sign.float() * power  # float * float: integers have no -0


@dataclass(frozen=True, slots=True, kw_only=True)
class Integer(Element):
    """An integer element with values from `lowest` to `highest`; stored as value + `offset`.

    Elements without a zero point are quantised to [-highest, highest].
    """

    lowest: int
    highest: int
    offset: int = 0
    zero_point: bool = False

    def __post_init__(self) -> None:
        signed = self.storage.dtype.is_signed
        least = -(2 ** (self.bits - 1)) if signed else 0
        most = least + 2**self.bits - 1
        if not least <= self.lowest + self.offset <= self.highest + self.offset <= most:
            raise ValueError(
                f"{self.name} stores {self.lowest} to {self.highest} with the offset {self.offset} "
                f"in codes from {least} to {most}; give a range and an offset that fit"
            )
        if self.zero_point and (self.lowest or self.offset):
            raise ValueError(
                f"{self.name} has zero points, so its values are its codes, from 0 on; got "
                f"lowest={self.lowest} and offset={self.offset}"
            )

    @property
    def code_of_zero(self) -> int:
        return self.offset

    def encode(self, x: Tensor) -> Tensor:
        q = x.round().clamp(self.lowest, self.highest).nan_to_num(0.0)
        return (q + self.offset).to(self.storage.dtype)

    def decode(self, codes: Tensor) -> Tensor:
        return codes.float() - self.offset


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Element):
    """An element whose code is a place in a table of values, which ascend.

    Values are rounded to the nearest one, from halfway to the lower one; NaN is coded as 0.
    """

    table: tuple[float, ...]

    def __post_init__(self) -> None:
        wanted = 2**self.bits
        if len(self.table) != wanted or sorted({*self.table}) != [*self.table]:
            raise ValueError(
                f"{self.name} has {len(self.table)} values for codes of {self.bits} bits; give "
                f"{wanted} that ascend"
            )

    @property
    def largest(self) -> float:
        return max(map(abs, self.table))

    @property
    def code_of_zero(self) -> int:
        return self.table.index(0.0)

    def values(self, device: torch.device) -> Tensor:
        """The table in float32, of numbers, which a traced graph may hold where it holds no tensor
        that is made of a list."""
        return torch.stack([torch.full((), value, device=device) for value in self.table])

    def encode(self, x: Tensor) -> Tensor:
        table = self.values(x.device)
        middles = (table[1:] + table[:-1]) / 2
        codes = torch.bucketize(x, middles)
        return torch.where(x.isnan(), self.code_of_zero, codes).to(self.storage.dtype)

    def decode(self, codes: Tensor) -> Tensor:
        return self.values(codes.device)[codes.int()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks(Element):
    """An element of which `storage.values` values in a row share a block of bytes, which holds
    codes, their scales, and what scales these.

    Codes are such blocks: `encode` makes bytes [..., n * units] of values [..., n * values], and
    `decode` undoes it. Formats of it have one scale more, for a row or a matrix, which is 1 unless
    it is given.
    """


def power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent in float32, exactly, for int32 exponents from -126 to 127."""
    return ((exponent + FLOAT32_BIAS) << FLOAT32_MANTISSA).view(torch.float32)

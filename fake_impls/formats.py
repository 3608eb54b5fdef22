"""Formats as strings, and the shapes that they give to tensors.

A format says how one operand of a matrix product is stored. Ops take it as a string,

    element:group[:scale]        float8_e4m3fn:128x128        uint4:1x64:bfloat16

`element` is a key of ELEMENTS. `group` is the part of the [rows, columns] matrix that shares one
scale: "tensor", "row", "column", or rows x columns ("128x128", "1x32"). `scale` is a key of SCALES,
float32 if left out. Names of published formats stand for the whole: see PUBLISHED. The empty string
means not quantised.

Values are packed along the columns (the axis that a product sums over), the first value in the
lowest bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How values of an element type lie in memory: `values` of them in `units` of a dtype.

    Several values share bytes (torch.uint8), each with as many bits, the first in the lowest bits
    of a little-endian number. With `block` the bytes hold scales beside the codes, in an order that
    the element alone knows. Raises ValueError for values that do not fill their bytes.
    """

    dtype: torch.dtype
    values: int = 1
    units: int = 1
    block: bool = False

    def __post_init__(self) -> None:
        if self.block and (self.dtype != torch.uint8 or not 0 < self.values <= 8 * self.units):
            raise ValueError(
                f"a block of {self.values} values in {self.units} of {self.dtype} must be of "
                "torch.uint8, with a bit for each value at least; give its values and bytes"
            )
        if self.block or self.values == self.units == 1:
            return
        if self.dtype != torch.uint8:
            raise ValueError(
                f"values are packed in torch.uint8, got {self.dtype}; leave out values and units, "
                "or take torch.uint8"
            )
        bits = 8 * self.units
        if self.values < 2 or bits % self.values or not 0 < bits // self.values < 8:
            raise ValueError(
                f"{self.values} values in {self.units} bytes do not have 1 to 7 bits each; give "
                "numbers whose quotient is that, such as values=4, units=3 for 6 bits"
            )

    @property
    def bits(self) -> int:
        """Bits of one value; of a block, with its share of the scales, rounded down."""
        return 8 * self.dtype.itemsize * self.units // self.values


# By name. `moe_ops/quant/elements/` says what the codes mean, and fills both this and PUBLISHED.
ELEMENTS: dict[str, Storage] = {}

# float8_e8m0fnu scales are held as the uint8 that checkpoints hold.
SCALES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "e8m0": torch.uint8,
    "float8_e4m3fn": torch.float8_e4m3fn,
}

PUBLISHED: dict[str, str] = {}  # short names, and what they stand for

ALL = -1
GROUPS = {"tensor": (ALL, ALL), "row": (1, ALL), "column": (ALL, 1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A format string, taken apart."""

    element: str
    group: tuple[int, int]  # rows and columns that share a scale; -1: all of them
    scale: str

    @property
    def storage(self) -> Storage:
        return ELEMENTS[self.element]

    @property
    def scale_dtype(self) -> torch.dtype:
        return SCALES[self.scale]

    def packed(self, columns: int) -> int:
        """Columns of the stored tensor for so many values in a row."""
        return columns // self.storage.values * self.storage.units

    def unpacked(self, columns: int) -> int:
        """Values in a row of so many stored columns."""
        return columns // self.storage.units * self.storage.values

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the scales of a [rows, columns] matrix."""
        down, across = self.group
        return (
            1 if down == ALL else (rows + down - 1) // down,
            1 if across == ALL else (columns + across - 1) // across,
        )


@functools.cache
def parse(name: str) -> Parsed:
    """Take a format string apart. Raises ValueError, naming the part, if it is not one."""
    parts = PUBLISHED.get(name, name).split(":")
    if len(parts) not in (2, 3):
        raise ValueError(
            f"format {name!r} is not element:group[:scale] or one of {', '.join(PUBLISHED)}"
        )
    element, group, scale = (*parts, "float32")[:3]
    for what, value, known in (("element", element, ELEMENTS), ("scale", scale, SCALES)):
        if value not in known:
            raise ValueError(
                f"format {name!r} has the unknown {what} {value!r}; "
                f"choose one of {', '.join(known)}"
            )
    return Parsed(element=element, group=_group(name, group), scale=scale)


def _group(name: str, text: str) -> tuple[int, int]:
    if text in GROUPS:
        return GROUPS[text]
    rows, by, columns = text.partition("x")
    if not by or not rows.isdecimal() or not columns.isdecimal() or "0" in (rows, columns):
        raise ValueError(
            f"format {name!r} has the group {text!r}; "
            f"choose {', '.join(GROUPS)} or rows x columns such as 1x128"
        )
    return int(rows), int(columns)

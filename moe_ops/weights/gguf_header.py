"""The header of a GGUF file: which tensors there are, of which types, and where they lie.

Every length is compared with what the file has, as one wrong bit makes a count of 2^63. Source of
the layout: docs/gguf.md of ggml; of the types: ggml-common.h. Little-endian files of versions 2 and
3 are read.
"""

from __future__ import annotations

import itertools
import math
import mmap
import struct
from pathlib import Path
from typing import NamedTuple

MAGIC, VERSIONS = b"GGUF", (2, 3)
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes by type
UINT32, STRING, ARRAY = 4, 8, 9
ALIGNMENT = "general.alignment"
MOST_AXES, MOST_DEPTH = 4, 4
MOST_VALUES = 2**63 - 1  # as indices are of int64, also where another axis has no values


class Type(NamedTuple):
    """A type of tensors: its name, and the values and bytes of a block."""

    name: str
    values: int
    size: int


# By number.
TYPES = {
    0: Type("F32", 1, 4), 1: Type("F16", 1, 2), 2: Type("Q4_0", 32, 18), 3: Type("Q4_1", 32, 20),
    6: Type("Q5_0", 32, 22), 7: Type("Q5_1", 32, 24), 8: Type("Q8_0", 32, 34),
    9: Type("Q8_1", 32, 40), 10: Type("Q2_K", 256, 84), 11: Type("Q3_K", 256, 110),
    12: Type("Q4_K", 256, 144), 13: Type("Q5_K", 256, 176), 14: Type("Q6_K", 256, 210),
    15: Type("Q8_K", 256, 292), 16: Type("IQ2_XXS", 256, 66), 17: Type("IQ2_XS", 256, 74),
    18: Type("IQ3_XXS", 256, 98), 19: Type("IQ1_S", 256, 50), 20: Type("IQ4_NL", 32, 18),
    21: Type("IQ3_S", 256, 110), 22: Type("IQ2_S", 256, 82), 23: Type("IQ4_XS", 256, 136),
    24: Type("I8", 1, 1), 25: Type("I16", 1, 2), 26: Type("I32", 1, 4), 27: Type("I64", 1, 8),
    28: Type("F64", 1, 8), 29: Type("IQ1_M", 256, 56), 30: Type("BF16", 1, 2),
    34: Type("TQ1_0", 256, 54), 35: Type("TQ2_0", 256, 66), 39: Type("MXFP4", 32, 17),
    40: Type("NVFP4", 64, 36), 41: Type("Q1_0", 128, 18),
}  # fmt: skip


class Placed(NamedTuple):
    """A tensor of a file: its name, shape (the longest axis of a row last), type and bytes."""

    name: str
    shape: tuple[int, ...]
    type: Type
    first: int
    size: int


def tensors_of(file: Path) -> list[Placed]:
    """The tensors of a file, in the order of its header.

    Raises ValueError, naming the entry, unless all of the header, and the tensors that it places,
    are inside the file.
    """
    if not file.stat().st_size:
        raise ValueError("is empty")
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(data)
        try:
            return reader.tensors()
        except struct.error as error:
            raise ValueError(f"ends inside its header, at byte {len(data)}") from error


class _Reader:
    """A place in the bytes of a file, which moves on as they are read."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def number(self, code: str) -> int:
        (found,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(code)
        return int(found)

    def skip(self, size: int, what: str) -> None:
        if size > len(self.data) - self.at:
            raise ValueError(f"{what} has {size} bytes from byte {self.at} on, past the file's end")
        self.at += size

    def text(self, what: str) -> str:
        size, start = self.number("Q"), self.at
        self.skip(size, what)
        return self.data[start : self.at].decode()

    def tensors(self) -> list[Placed]:
        magic, self.at = self.data[: len(MAGIC)], len(MAGIC)
        version = self.number("I")
        if magic != MAGIC:
            raise ValueError(f"starts with {magic!r}, not with {MAGIC!r}")
        if version not in VERSIONS:
            raise ValueError(_why_not(version))
        tensors, keys = self.number("Q"), self.number("Q")
        alignment, seen = 32, set()
        for i in range(keys):
            key = self.text(f"key {i}")
            if key in seen:
                raise ValueError(f"has the key {key!r} twice")
            seen.add(key)
            kind = self.number("I")
            if key == ALIGNMENT:
                alignment = self._alignment(kind)
            else:
                self.value(kind, f"key {key!r}", 0)
        return self._placed(tensors, alignment)

    def _alignment(self, kind: int) -> int:
        found = self.number("I")
        if kind != UINT32 or found.bit_count() != 1:
            raise ValueError(f"{ALIGNMENT} must be a power of two as uint32, got {found}")
        return found

    def value(self, kind: int, what: str, depth: int) -> None:
        """Go past a value of a type."""
        if kind in SCALARS:
            self.skip(SCALARS[kind], what)
        elif kind == STRING:  # any bytes: tokens of a vocabulary may be no text
            self.skip(self.number("Q"), what)
        elif kind == ARRAY and depth < MOST_DEPTH:
            kind, count = self.number("I"), self.number("Q")
            if kind in SCALARS:
                self.skip(SCALARS[kind] * count, what)
                return
            for _ in range(count):  # each has eight bytes at least
                self.value(kind, what, depth + 1)
        else:
            raise ValueError(f"{what} has a value of the unknown type {kind}")

    def _placed(self, count: int, alignment: int) -> list[Placed]:
        placed: dict[str, Placed] = {}
        for i in range(count):
            name = self.text(f"the name of tensor {i}")
            axes = self.number("I")
            if axes > MOST_AXES:
                raise ValueError(f"{name}: has {axes} axes, but tensors have {MOST_AXES} at most")
            shape = tuple(self.number("Q") for _ in range(axes))[::-1]
            number, offset = self.number("I"), self.number("Q")
            if name in placed:
                raise ValueError(f"{name}: comes twice")
            if math.prod(max(size, 1) for size in shape) > MOST_VALUES:
                raise ValueError(f"{name}: has the shape {list(shape)}, of more than 2^63 values")
            if number not in TYPES:
                raise ValueError(f"{name}: is of the unknown type {number}")
            size = _bytes(name, shape, TYPES[number])
            placed[name] = Placed(name, shape, TYPES[number], offset, size)
            if offset % alignment:
                raise ValueError(f"{name}: begins at byte {offset}, no multiple of {alignment}")
        first = -(-self.at // alignment) * alignment
        found = [one._replace(first=first + one.first) for one in placed.values()]
        for one in found:
            if one.first + one.size > len(self.data):
                raise ValueError(
                    f"{one.name}: has {one.size} bytes from byte {one.first} on, past the file's "
                    "end"
                )
        _check_apart(found)
        return found


def _why_not(version: int) -> str:
    """Why a version is not read."""
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        return "is big-endian; convert it to little-endian, as gguf_convert_endian.py does"
    return f"has the version {version}, but {' and '.join(map(str, VERSIONS))} are read"


def _check_apart(tensors: list[Placed]) -> None:
    """Raise ValueError if two tensors have bytes in common, as those of no right file have."""
    there = sorted((one for one in tensors if one.size), key=lambda one: one.first)
    for one, following in itertools.pairwise(there):
        if one.first + one.size > following.first:
            raise ValueError(
                f"{following.name}: begins at byte {following.first}, inside {one.name}, which has "
                f"{one.size} bytes from byte {one.first} on"
            )


def _bytes(name: str, shape: tuple[int, ...], kind: Type) -> int:
    row = shape[-1] if shape else 1
    if row % kind.values:
        raise ValueError(
            f"{name}: has rows of {row} values, which are no whole blocks of {kind.values}"
        )
    return row // kind.values * kind.size * math.prod(shape[:-1])

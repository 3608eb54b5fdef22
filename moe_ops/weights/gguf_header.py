"""Checks that the header of a GGUF file is one, before the package gguf reads it.

That package believes what counts and sizes say: one wrong bit lets it read past the end of the
file, or count to 2^63. Here every length is compared with what the file has. Source of the layout:
docs/gguf.md of ggml. Little-endian files of versions 2 and 3 are read.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path

MAGIC, VERSIONS = b"GGUF", (2, 3)
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes by type
UINT32, STRING, ARRAY = 4, 8, 9
ALIGNMENT = "general.alignment"
MOST_AXES, MOST_DEPTH = 4, 4
Sizes = Mapping[int, tuple[int, int]]  # values and bytes of a block, by the number of a type


def check_header(file: Path, sizes: Sizes) -> None:
    """Raise ValueError, naming the entry, unless all of a header, and the tensors that it places,
    are inside the file.
    """
    if not file.stat().st_size:
        raise ValueError("is empty")
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(data)
        try:
            reader.check(sizes)
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

    def check(self, sizes: Sizes) -> None:
        magic, self.at = self.data[: len(MAGIC)], len(MAGIC)
        version = self.number("I")
        if magic != MAGIC or version not in VERSIONS:
            raise ValueError(f"starts with {magic!r} and the version {version}, not with {MAGIC!r}")
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
        self._check_tensors(tensors, alignment, sizes)

    def _alignment(self, kind: int) -> int:
        found = self.number("I")
        if kind != UINT32 or found.bit_count() != 1:
            raise ValueError(f"{ALIGNMENT} must be a power of two as uint32, got {found}")
        return found

    def value(self, kind: int, what: str, depth: int) -> None:
        """Go past a value of a type."""
        if kind in SCALARS:
            self.skip(SCALARS[kind], what)
        elif kind == STRING:
            self.text(what)
        elif kind == ARRAY and depth < MOST_DEPTH:
            kind, count = self.number("I"), self.number("Q")
            if kind in SCALARS:
                self.skip(SCALARS[kind] * count, what)
                return
            for _ in range(count):  # each has eight bytes at least
                self.value(kind, what, depth + 1)
        else:
            raise ValueError(f"{what} has a value of the unknown type {kind}")

    def _check_tensors(self, count: int, alignment: int, sizes: Sizes) -> None:
        placed: dict[str, tuple[int, int]] = {}
        for i in range(count):
            name = self.text(f"the name of tensor {i}")
            axes = self.number("I")
            if axes > MOST_AXES:
                raise ValueError(f"{name}: has {axes} axes, but tensors have {MOST_AXES} at most")
            shape = [self.number("Q") for _ in range(axes)]
            kind, offset = self.number("I"), self.number("Q")
            if name in placed:
                raise ValueError(f"{name}: comes twice")
            placed[name] = (offset, _bytes(name, shape, kind, sizes))
            if offset % alignment:
                raise ValueError(f"{name}: begins at byte {offset}, no multiple of {alignment}")
        first = -(-self.at // alignment) * alignment
        for name, (offset, size) in placed.items():
            if first + offset + size > len(self.data):
                raise ValueError(
                    f"{name}: has {size} bytes from byte {first + offset} on, past the file's end"
                )


def _bytes(name: str, shape: list[int], kind: int, sizes: Sizes) -> int:
    if kind not in sizes:
        raise ValueError(f"{name}: is of the unknown type {kind}")
    values, size = sizes[kind]
    row = shape[0] if shape else 1
    if row % values:
        raise ValueError(f"{name}: has rows of {row} values, which are no whole blocks of {values}")
    blocks = row // values
    for axis in shape[1:]:
        blocks *= axis
    return blocks * size

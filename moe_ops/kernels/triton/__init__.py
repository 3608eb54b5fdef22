"""Triton device code, from router logits to the sum of expert outputs.

This file is free of Triton, which its modules import.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

# What `tiny` can run: every program compares all pairs of token and choice with each other, and
# all tokens are the columns of one tile.
TINY_PAIRS, TINY_TOKENS = 64, 16

STEP = 128  # columns of codes that are multiplied at once
# Rows an expert on average, of codes of four bits whose sums are scaled, and of others.
MOST_OF_SUMS, MOST_STREAMED = 6, 10
LARGE = 2**23  # elements of W2, from which on an expert is large


class Constant:
    """A record that kernels are compiled for: a frozen dataclass that is equal by value and keeps
    its hash, for which every launch asks. Kernels read fields alone: the code of a property is no
    part of what Triton's cache on the disk knows a kernel by."""

    _hash: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self._key()))

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]

    def _key(self) -> tuple[Any, ...]:
        return type(self), *self._values()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self._key() == other._key()

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._values()  # a kept hash is that of this process alone


@dataclass(frozen=True, eq=False)
class Weight(Constant):
    """The format of a weight, W of kernels: element, rows (down) and columns (across) of a group,
    -1 for all, kind of scale, whether inputs have 8 bits, too, and the bits of a code."""

    element: str
    down: int
    across: int
    kind: str
    inputs_8: bool
    bits: int

    @property
    def together(self) -> tuple[int, int]:
        """(columns, pieces): so many columns share so many words, or bytes, and are decoded
        together. Words are those of `as_stored`."""
        if not in_words(self):
            return 1, 1
        bits = math.lcm(32, self.bits)
        return bits // self.bits, bits // 32

    def columns(self, pieces: int) -> int:
        """How many columns lie in so many words or bytes."""
        each, shared = self.together
        return pieces // shared * each


@dataclass(frozen=True, eq=False)
class RegisteredWeight(Weight):
    """The format of a weight whose element another package registered: its codes are stored,
    `values` of them in `units` bytes, and a Triton function of that package decodes them."""

    values: int
    units: int
    decoder: Any

    def __repr__(self) -> str:
        """The fields, with the key of the decoder's source in its place: Triton's caches, in memory
        and on the disk, know kernels by this text. Its interpreter has no keys, and no caches."""
        key = getattr(self.decoder, "cache_key", self.decoder)
        return f"RegisteredWeight{(*self._values()[:-1], key)}"

    @property
    def together(self) -> tuple[int, int]:
        return self.values, self.units


@dataclass(frozen=True, eq=False)
class BlockWeight(Weight):
    """The format of a weight in blocks with scales of their own, `values` columns in `units` bytes,
    which decoders of ours know by the element."""

    values: int
    units: int

    @property
    def together(self) -> tuple[int, int]:
        return self.values, self.units


@dataclass(frozen=True, eq=False)
class Act(Constant):
    """The activation of a product, ACT of kernels, as the op `activate` has it; without a kind,
    none."""

    kind: str | None
    gated: bool = True
    interleaved: bool = False
    alpha: float = 1.0
    limit: float | None = None
    up_shift: float = 0.0


LINEAR = Act(None, gated=False)  # of a second product


class Inputs(NamedTuple):
    """A format of inputs that are emulated: rounded to its codes, which stay floats of 16 bits.

    Values have `mantissa` bits behind the first one, those below 2**`lowest` as many fewer, up to
    `largest`, below 2**(`top` + 1). Scales are "e8m0", "float8_e4m3fn" or "float32" ones of `group`
    columns, or "row" or "tensor": float32 ones.
    """

    lowest: int
    mantissa: int
    largest: float
    top: int
    has_nan: bool
    scale: str
    group: int


def in_words(weight: Weight | None) -> bool:
    """Whether kernels load codes as words of 32 bits, for which they arrange tokens."""
    in_bytes = isinstance(weight, (RegisteredWeight, BlockWeight))
    return weight is not None and weight.bits < 8 and not in_bytes


def brings_decoder(weight: Weight | None) -> bool:
    """Whether codes are bytes that a decoder makes numbers of, and tokens are not arranged for it:
    of an element that another package registered, or in blocks."""
    return isinstance(weight, (RegisteredWeight, BlockWeight))


def in_blocks(weight: Weight | None) -> bool:
    """Whether codes come in blocks with scales of their own."""
    return isinstance(weight, BlockWeight)


def one_a_step(weight: Weight) -> bool:
    """Whether a row has one scale for all columns of a step, which its sum can be scaled by."""
    return weight.across in (-1, STEP)


def most_streamed(weight: Weight) -> int:
    """Rows an expert on average, up to which codes stream through registers: with more of them
    shared memory serves weights better."""
    return MOST_OF_SUMS if weight.bits == 4 and one_a_step(weight) else MOST_STREAMED

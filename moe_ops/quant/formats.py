"""How one operand of a matrix product is stored: element type, groups and scales.

`Format` is the exact meaning of a format string (its grammar is in `fake_impls/formats.py`, which
also knows the shapes). A value is

    (code - zero) * scale * global_scale

with the code decoded as the element type says. All scales are multipliers of decoding. The zero
point exists for unsigned elements alone, the global scale (one float32 per expert) for formats
whose scales are float8_e4m3fn, as in NVFP4. Blocks of the K quants of ggml are decoded with the
scales that they hold, and the scale of the format is one more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from moe_ops.checks.options import MOST_SIZE, check_int, check_text
from moe_ops.checks.signature import described, did_you_mean
from moe_ops.fake_impls.formats import ALL, GROUPS, PUBLISHED, SCALES, Parsed, parse
from moe_ops.quant.elements.kinds import Blocks, Element, Integer, Minifloat, Table
from moe_ops.quant.elements.table import ELEMENTS

R = TypeVar("R")

TENSOR, ROW, COLUMN = GROUPS["tensor"], GROUPS["row"], GROUPS["column"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Element type, group shape and scale type of a quantised operand."""

    element: str
    group: tuple[int, int]  # rows and columns that share a scale; -1: all of them
    scale: str = "float32"

    def __post_init__(self) -> None:
        check_text("element", self.element)  # each by itself, as Dynamo traces this
        check_text("scale", self.scale)
        for what, value, known in (
            ("element", self.element, ELEMENTS),
            ("scale", self.scale, SCALES),
        ):
            if value not in known:
                raise ValueError(
                    f"{what} {value!r} is unknown; choose one of {', '.join(known)}"
                    f"{did_you_mean(value, known)}"
                )
        if not isinstance(self.group, tuple) or len(self.group) != 2:
            raise TypeError(
                "group must be a pair of rows and columns, such as (1, 128), got "
                f"{described(self.group)}"
            )
        for size in self.group:
            check_int("each of group", size, most=MOST_SIZE)
        if any(n != ALL and n < 1 for n in self.group):
            raise ValueError(f"group {self.group} must hold sizes above 0, or -1 for all")
        if self.minifloat is None and self.scale in ("e8m0", "float8_e4m3fn"):
            raise ValueError(
                f"the element {self.element} wants floating-point scales, got scale={self.scale!r}"
            )

    @staticmethod
    def of(name: str) -> Format:
        """The format of a string. Raises ValueError if it is not one, TypeError for no string."""
        if not isinstance(name, str):
            check_text("the name of a format", name)
        return of_name(name)

    @property
    def name(self) -> str:
        """The shortest string of this format."""
        shapes = {shape: word for word, shape in GROUPS.items()}
        group = shapes.get(self.group, f"{self.group[0]}x{self.group[1]}")
        long = f"{self.element}:{group}" + ("" if self.scale == "float32" else f":{self.scale}")
        return next((short for short, full in PUBLISHED.items() if full == long), long)

    @property
    def parsed(self) -> Parsed:
        """The format as the shape functions take it."""
        return Parsed(element=self.element, group=self.group, scale=self.scale)

    @property
    def element_type(self) -> Element:
        """What the codes stand for."""
        return ELEMENTS[self.element]

    @property
    def minifloat(self) -> Minifloat | None:
        of = ELEMENTS[self.element]
        return of if isinstance(of, Minifloat) else None

    @property
    def integer(self) -> Integer | None:
        of = ELEMENTS[self.element]
        return of if isinstance(of, Integer) else None

    @property
    def middle(self) -> int:
        """The zero point that unsigned codes of an integer element have if they are symmetric."""
        assert self.integer is not None
        return 2 ** (self.integer.bits - 1)

    @property
    def largest(self) -> float:
        """The largest magnitude that symmetric quantisation maps to."""
        of = self.element_type
        if isinstance(of, (Minifloat, Table)):
            return of.largest
        assert self.integer is not None
        return float(self.integer.highest)

    @property
    def in_blocks(self) -> bool:
        """Whether codes come in blocks with scales of their own."""
        return isinstance(self.element_type, Blocks)

    @property
    def has_zero(self) -> bool:
        return self.integer is not None and self.integer.zero_point

    @property
    def has_global_scale(self) -> bool:
        return self.scale == "float8_e4m3fn"

    @property
    def bits(self) -> int:
        """Bits of one value, without its share of the scales."""
        return ELEMENTS[self.element].bits


_KEPT: list[functools._lru_cache_wrapper[object]] = []


def keep_by_format(function: Callable[..., R]) -> functools._lru_cache_wrapper[R]:
    """Keep what a function of names of formats returns, until a format is forgotten."""
    kept = functools.cache(function)
    _KEPT.append(kept)
    return kept


def forget_kept() -> None:
    """Let functions that `keep_by_format` look at formats anew."""
    for kept in _KEPT:
        kept.cache_clear()


@keep_by_format
def of_name(name: str) -> Format:
    """`Format.of` a string, which is looked up after the first time."""
    parsed = parse(name)
    return Format(element=parsed.element, group=parsed.group, scale=parsed.scale)

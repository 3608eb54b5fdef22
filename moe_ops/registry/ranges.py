"""A plan: the backends of an op by its number of rows, and how that is written."""

from __future__ import annotations

from moe_ops.registry.invariance import PLANNED

# Backends by the most rows of the first argument up to which each runs; None: any number.
Ranges = tuple[tuple[int | None, str], ...]


def parse_plan(text: str) -> Ranges:
    """The ranges of a plan in writing: "cpu", or "64:cpu,:aten" for cpu up to 64 rows, then aten;
    what says that they are batch invariant may stand before.

    Raises ValueError for anything else.
    """
    text = text.removeprefix(PLANNED)
    if ":" not in text:
        return ((None, text),)
    pairs = [part.partition(":") for part in text.split(",")]
    *counts, last = [count for count, _, _ in pairs]
    if last or not all(count.isdecimal() for count in counts):
        raise ValueError(
            f"plan {text!r} is neither a backend nor ranges such as 64:cpu,:aten, the last open"
        )
    return tuple((int(count) if count else None, name) for count, _, name in pairs)

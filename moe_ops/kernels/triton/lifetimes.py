"""Where tensors of one call lie in one buffer: those that no launch needs at the same time may lie
in the same place, as they would if each were allocated and freed where it is made and last read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 256  # bytes: as the allocator of CUDA aligns


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """The bytes of a tensor, and the first and the last launch that it is given to."""

    nbytes: int
    first: int
    last: int

    def meets(self, other: Life) -> bool:
        return self.first <= other.last and other.first <= self.last


def offsets(lives: Sequence[Life]) -> tuple[list[int], int]:
    """The bytes of the buffer ahead of each tensor, and those of the whole buffer.

    The largest tensor is placed first, each at the lowest offset that is free during its life.
    """
    found: dict[int, int] = {}
    end = 0
    for i in sorted(range(len(lives)), key=lambda i: -lives[i].nbytes):
        size = -(-lives[i].nbytes // ALIGNMENT) * ALIGNMENT
        begin = 0
        for at, taken in sorted(
            (found[j], lives[j].nbytes) for j in found if lives[i].meets(lives[j])
        ):
            if begin + size <= at:
                break
            begin = max(begin, -(-(at + taken) // ALIGNMENT) * ALIGNMENT)
        found[i] = begin
        end = max(end, begin + size)
    return [found[i] for i in range(len(lives))], end

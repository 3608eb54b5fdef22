"""Codes of fewer than eight bits in bytes and back, whatever their number of bits.

Value i of b bits lies in bits b*i to b*i + b - 1 of a little-endian number, of which `Storage` says
how many values and bytes are one.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.fake_impls.formats import Storage

BYTE = 8


class Piece(NamedTuple):
    """Bits that a value and a byte share: how many, from which one of the value (`at`) and of the
    byte (`to`) on.
    """

    value: int
    unit: int
    bits: int
    at: int
    to: int


def joined(codes: Tensor, storage: Storage) -> Tensor:
    """Bytes of uint8 codes; of a last axis that the values packed together divide."""
    parts = codes.unflatten(-1, (codes.shape[-1] // storage.values, storage.values)).unbind(-1)
    pieces = _pieces(storage)
    units = [
        _any(
            [
                _moved(parts[p.value], p.at, storage.bits, p.bits, p.to)
                for p in pieces
                if p.unit == i
            ]
        )
        for i in range(storage.units)
    ]
    return units[0] if storage.units == 1 else torch.stack(units, -1).flatten(-2)


def split(stored: Tensor, storage: Storage) -> Tensor:
    """The codes that `joined` joined."""
    units: tuple[Tensor, ...] = (stored,)
    if storage.units > 1:
        n = stored.shape[-1] // storage.units
        units = stored.unflatten(-1, (n, storage.units)).unbind(-1)
    pieces = _pieces(storage)
    codes = [
        _any([_moved(units[p.unit], p.to, BYTE, p.bits, p.at) for p in pieces if p.value == i])
        for i in range(storage.values)
    ]
    return torch.stack(codes, -1).flatten(-2)


@functools.cache
def _pieces(storage: Storage) -> tuple[Piece, ...]:
    """What each value has in each byte that it reaches into."""
    found = []
    for value in range(storage.values):
        first, end = value * storage.bits, (value + 1) * storage.bits
        for unit in range(first // BYTE, (end - 1) // BYTE + 1):
            low, high = max(first, unit * BYTE), min(end, (unit + 1) * BYTE)
            found.append(Piece(value, unit, high - low, low - first, low - unit * BYTE))
    return tuple(found)


def _moved(t: Tensor, at: int, size: int, bits: int, to: int) -> Tensor:
    """So many bits of uint8 numbers of this size, those from bit `at` on, as those from `to` on."""
    t = t >> at if at else t
    # Masked before they move, so that nothing depends on bits that uint8 drops.
    t = t & ((1 << bits) - 1) if at + bits < size else t
    return t << to if to else t


def _any(parts: list[Tensor]) -> Tensor:
    """All bits of numbers that have none in common."""
    found = parts[0]
    for part in parts[1:]:
        found = found | part
    return found

"""Tokens packed for other ranks, unpacked where they arrive, and their results summed.

A packed row is one of 32-bit words: the token, its scales, the weights and the ids of its experts,
each from a multiple of 16 bytes on, as `moe_ops/ranks/packed.py` lays it out. What lies between
them is not written, and not read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.launch import on_its_device

EVERY, HOME = tl.constexpr(-1), tl.constexpr(-2)  # of rank_of_P, see moe_ops/ranks/tables.py
BLOCK = 1024  # words, or columns, of a program at once
ALIGNMENT = 4  # words


class Rows(NamedTuple):
    """Tokens, the scales of their codes (of no width, if they are floats), and the weights and ids
    of their experts."""

    x_TD: Tensor
    scale_TS: Tensor
    weights_TK: Tensor
    ids_TK: Tensor

    @property
    def device(self) -> torch.device:
        return self.x_TD.device


class Words(NamedTuple):
    """The words of a token, of its scales and of its weights, and its ids; where these begin, and a
    row ends."""

    x: int
    scales: int
    weights: int
    K: int
    at_scales: int
    at_weights: int
    at_ids: int
    row: int

    @classmethod
    def of(cls, sent: Rows) -> Words:
        parts = (sent.x_TD, sent.scale_TS, sent.weights_TK)
        x, scales, weights = (t.shape[1] * t.dtype.itemsize // 4 for t in parts)
        K = sent.ids_TK.shape[1]
        at_scales = x + -x % ALIGNMENT
        at_weights = at_scales + scales + -scales % ALIGNMENT
        at_ids = at_weights + weights + -weights % ALIGNMENT
        row = at_ids + K + -K % ALIGNMENT
        return cls(x, scales, weights, K, at_scales, at_weights, at_ids, row)

    @property
    def blocks(self) -> tuple[int, int, int]:
        """Words of scales and of weights that are copied at once, and ids."""
        smalls = (max(1, self.scales), self.weights, self.K)
        scales, weights, K = map(triton.next_power_of_2, smalls)
        return scales, weights, K


@triton.jit
def copy_words(source, to, held, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Copy as many words as are held; -1, which is NaN in floats, takes the place of the others."""
    for start in tl.static_range(0, WORDS, BLOCK):
        words = start + tl.arange(0, BLOCK)
        read = tl.load(source + words, mask=words < held, other=-1)
        tl.store(to + words, read, mask=words < WORDS)


@triton.jit
def pack_kernel(
    x_ptr, scale_ptr, weights_ptr, ids_ptr, packed_ptr, T, P,
    X: tl.constexpr, S: tl.constexpr, W: tl.constexpr, K: tl.constexpr, AT_S: tl.constexpr,
    AT_W: tl.constexpr, AT_I: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
    SP: tl.constexpr, WP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """A row of the packed ones: a token with the ids of its physical experts, else padding."""
    t = tl.program_id(0).to(tl.int64)
    to = packed_ptr + t * ROW
    copy_words(x_ptr + t * X, to, tl.where(t < T, X, 0), X, BLOCK)
    copy_words(scale_ptr + t * S, to + AT_S, tl.where(t < T, S, 0), S, SP)
    copy_words(weights_ptr + t * W, to + AT_W, tl.where(t < T, W, 0), W, WP)
    k = tl.arange(0, KP)
    ids = tl.load(ids_ptr + t * K + k, mask=k < tl.where(t < T, K, 0), other=-1)
    ids = tl.where((ids >= 0) & (ids < P), ids, -1)
    tl.store(to + AT_I + k, ids.to(tl.int32), mask=k < K)


@triton.jit
def unpack_kernel(
    packed_ptr, rank_of_ptr, slot_of_ptr, x_ptr, scale_ptr, weights_ptr, ids_ptr, rows, me,
    X: tl.constexpr, S: tl.constexpr, W: tl.constexpr, K: tl.constexpr, AT_S: tl.constexpr,
    AT_W: tl.constexpr, AT_I: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
    SP: tl.constexpr, WP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """A row that arrived, with the slots of the experts that this rank serves; -1 for others."""
    g = tl.program_id(0).to(tl.int64)
    source = packed_ptr + g * ROW
    k = tl.arange(0, KP)
    ids = tl.load(source + AT_I + k, mask=k < K, other=-1)
    rank = tl.load(rank_of_ptr + ids, mask=ids >= 0, other=-3)
    slot = tl.load(slot_of_ptr + ids, mask=ids >= 0, other=-1)
    at_home = (rank == HOME) & (g // rows == me)
    slot = tl.where((rank == me) | (rank == EVERY) | at_home, slot, -1)
    tl.store(ids_ptr + g * K + k, slot, mask=k < K)
    copy_words(source, x_ptr + g * X, X, X, BLOCK)
    copy_words(source + AT_S, scale_ptr + g * S, S, S, SP)
    copy_words(source + AT_W, weights_ptr + g * W, W, W, WP)


@triton.jit
def combine_kernel(
    back_ptr, ids_ptr, rank_of_ptr, out_ptr, rows, P, ranks, me,
    D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """A part of a token's result: the rows of the ranks that it needed, in their order."""
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, KP)
    ids = tl.load(ids_ptr + t * K + k, mask=k < K, other=-1)
    known = (ids >= 0) & (ids < P)
    rank = tl.load(rank_of_ptr + ids, mask=known, other=-3)
    rank = tl.where(rank == HOME, me, rank)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for r in range(ranks):
        needed = tl.max(((rank == r) | (rank == EVERY)).to(tl.int32), 0)
        row = back_ptr + (r * rows + t) * D
        total += tl.load(row + column, mask=column < needed * D, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * D + column, total.to(out_ptr.dtype.element_ty), mask=column < D)


@on_its_device
def pack(sent: Rows, rows: int, physical: int) -> Tensor:
    """int32 [rows, words]: contiguous tokens as they go to every rank, and padding behind them."""
    words, (T, _) = Words.of(sent), sent.x_TD.shape
    packed = torch.empty((rows, words.row), dtype=torch.int32, device=sent.x_TD.device)
    pack_kernel[(rows,)](
        *map(words_of, (sent.x_TD, sent.scale_TS, sent.weights_TK)), sent.ids_TK, packed, T,
        physical, *words, _block(words), *words.blocks,
    )  # fmt: skip
    return packed


@on_its_device
def unpack(
    packed: Tensor, tables: tuple[Tensor, Tensor], like: Rows, rows: int, rank: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x_GD, scale_GS, weights_GK and local ids_GK of packed rows of tokens like these."""
    G, words = packed.shape[0], Words.of(like)
    parts = (like.x_TD, like.scale_TS, like.weights_TK)
    x_GD, scale_GS, weights_GK = (t.new_empty((G, t.shape[1])) for t in parts)
    ids_GK = packed.new_empty((G, words.K))
    unpack_kernel[(G,)](
        packed, *tables, *map(words_of, (x_GD, scale_GS, weights_GK)), ids_GK, rows, rank,
        *words, _block(words), *words.blocks,
    )  # fmt: skip
    return x_GD, scale_GS, weights_GK, ids_GK


@on_its_device
def combine(
    back_GD: Tensor, ids_TK: Tensor, rank_of_P: Tensor, rows: int, ranks: int, rank: int
) -> Tensor:
    """[T, D]: each token's sum over the ranks that it needed, of rows [ranks * rows, D]."""
    (T, K), D = ids_TK.shape, back_GD.shape[1]
    out_TD = back_GD.new_empty((T, D))
    if out_TD.numel():
        block = min(BLOCK, triton.next_power_of_2(D))
        combine_kernel[(T, triton.cdiv(D, block))](
            back_GD, ids_TK, rank_of_P, out_TD, rows, rank_of_P.shape[0], ranks, rank,
            D, K, block, triton.next_power_of_2(K),
        )  # fmt: skip
    return out_TD


def words_of(t: Tensor) -> Tensor:
    """A contiguous tensor as words of four bytes; a copy if it begins amid one."""
    if t.storage_offset() * t.itemsize % 4:
        t = t.clone()
    return t.view(-1).view(torch.int32)


def _block(words: Words) -> int:
    """Words of a token at once."""
    return min(BLOCK, triton.next_power_of_2(words.x))

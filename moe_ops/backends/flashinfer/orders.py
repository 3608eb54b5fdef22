"""The orders in which FlashInfer's kernels read rows, codes and scales, each with its inverse.

Every function takes tensors of stacked experts, [E, rows, columns] as they are loaded (rows of the
gate, then of up), and returns another order of the same elements in the same shape. Sizes that an
order does not fit raise ValueError.
"""

from __future__ import annotations

import torch
from torch import Tensor

SWIZZLE_ROWS, SWIZZLE_COLUMNS = 128, 4  # of scales, in a tile of the tensor cores
FOLDED_ROWS, FOLDED_GROUPS = 64, 4  # of scales, in a block of the mixed product
MIXED_ROWS, MIXED_BYTES = 16, 32  # of four-bit codes, in a block of the mixed product
SHUFFLED_ROWS = 32
BLOCK_BYTES = 128  # of a row, in a block of columns


def up_first(t: Tensor) -> Tensor:
    """The rows of up, then those of the gate; its own inverse."""
    gate, up = _bytes(t).chunk(2, dim=1)
    return torch.cat((up, gate), dim=1).view(t.dtype)


def chunked(t: Tensor, size: int) -> Tensor:
    """`size` rows of up and as many of the gate in turn."""
    _require("rows of the gate", t.shape[1] // 2, size)
    halves = _bytes(up_first(t)).unflatten(1, (2, -1, size))
    return halves.transpose(1, 2).flatten(1, 3).view(t.dtype)


def unchunked(t: Tensor, size: int) -> Tensor:
    """The inverse of `chunked`."""
    pairs = _bytes(t).unflatten(1, (-1, 2, size))
    return up_first(pairs.transpose(1, 2).flatten(1, 3).view(t.dtype))


def swizzled(scale_ERG: Tensor) -> Tensor:
    """Scales in tiles of 128 rows and 4 groups; in a tile, rows 32 apart lie side by side."""
    _require("rows of scales", scale_ERG.shape[1], SWIZZLE_ROWS)
    _require("groups of a row", scale_ERG.shape[2], SWIZZLE_COLUMNS)
    tiles = _bytes(scale_ERG).unflatten(1, (-1, 4, 32)).unflatten(4, (-1, SWIZZLE_COLUMNS))
    return _as(tiles.permute(0, 1, 4, 3, 2, 5), scale_ERG)


def unswizzled(scale_ERG: Tensor) -> Tensor:
    """The inverse of `swizzled`."""
    E, rows, groups = scale_ERG.shape
    tiles = _bytes(scale_ERG).reshape(E, rows // SWIZZLE_ROWS, groups // SWIZZLE_COLUMNS, 32, 4, 4)
    return _as(tiles.permute(0, 1, 4, 3, 2, 5), scale_ERG)


def mma_view(scale_ERG: Tensor) -> Tensor:
    """Swizzled scales as CuTe's kernels index them: a view [32, 4, row tiles, 4, group tiles, E] of
    the same bytes.
    """
    E, rows, groups = scale_ERG.shape
    tiles = scale_ERG.view(E, rows // SWIZZLE_ROWS, groups // SWIZZLE_COLUMNS, 32, 4, 4)
    return tiles.permute(3, 4, 1, 5, 2, 0)


def folded(scale_ERG: Tensor) -> Tensor:
    """Scales of one byte in blocks of 64 rows and 4 groups, of which 16 bytes lie side by side:
    4 groups of each of 4 rows that are 16 apart.
    """
    _require("rows of scales", scale_ERG.shape[1], FOLDED_ROWS)
    _require("groups of a row", scale_ERG.shape[2], FOLDED_GROUPS)
    blocks = scale_ERG.unflatten(1, (-1, 4, 16)).unflatten(4, (-1, FOLDED_GROUPS))
    return _as(blocks.permute(0, 1, 4, 3, 2, 5), scale_ERG)


def unfolded(scale_ERG: Tensor) -> Tensor:
    """The inverse of `folded`."""
    E, rows, groups = scale_ERG.shape
    blocks = scale_ERG.reshape(E, rows // FOLDED_ROWS, groups // FOLDED_GROUPS, 16, 4, 4)
    return _as(blocks.permute(0, 1, 4, 3, 2, 5), scale_ERG)


def folded_view(scale_ERG: Tensor) -> Tensor:
    """Folded scales as the mixed product indexes them: [E, row blocks, group blocks, 16, 4] int32
    of the same bytes.
    """
    E, rows, groups = scale_ERG.shape
    blocks = scale_ERG.view(E, rows // FOLDED_ROWS, groups // FOLDED_GROUPS, 16, 16)
    return blocks.view(torch.int32)


# Where the bits of a word of eight codes go, by runs: the first bit, how many, the first
# destination. A kernel then makes bfloat16 values of two codes by one mask and one shift.
BIT_RUNS = (
    (7, 1, 31), (4, 3, 22), (3, 1, 15), (0, 3, 6),
    (15, 1, 28), (12, 3, 19), (11, 1, 12), (8, 3, 3),
    (23, 1, 25), (20, 3, 16), (19, 1, 9), (16, 3, 0),
    (31, 1, 30), (28, 1, 29), (29, 2, 26), (27, 1, 14), (24, 1, 13), (25, 2, 10),
)  # fmt: skip


def mixed(codes_ERC: Tensor) -> Tensor:
    """Four-bit floats as the mixed product of Hopper reads them: bytes of rows that are 8 apart
    become words, whose bits are spread.
    """
    _require("rows of a weight", codes_ERC.shape[1], MIXED_ROWS)
    _require("bytes of a row", codes_ERC.shape[2], MIXED_BYTES)
    # [E, blocks, half, row, parts, pair, one of a pair, quad, byte of a quad]
    apart = codes_ERC.unflatten(1, (-1, 2, 8)).unflatten(4, (-1, 2, 2, 2, 4))
    words = apart.permute(0, 1, 6, 3, 4, 5, 8, 7, 2)
    return _as(_spread(words.reshape(-1, 4), BIT_RUNS), codes_ERC)


def unmixed(codes_ERC: Tensor) -> Tensor:
    """The inverse of `mixed`."""
    runs = tuple((to, count, first) for first, count, to in BIT_RUNS)
    E, rows, columns = codes_ERC.shape
    blocks, parts = rows // MIXED_ROWS, columns // MIXED_BYTES
    words = _spread(codes_ERC.reshape(-1, 4), runs)
    apart = words.view(E, blocks, 2, 8, parts, 2, 4, 2, 2)
    return _as(apart.permute(0, 1, 8, 3, 4, 5, 2, 7, 6), codes_ERC)


def _spread(bytes_N4: Tensor, runs: tuple[tuple[int, int, int], ...]) -> Tensor:
    """Words of four bytes with their bits elsewhere."""
    words_N = bytes_N4.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    spread_N = torch.zeros_like(words_N)
    for first, count, to in runs:
        spread_N |= ((words_N >> first) & (2**count - 1)) << to
    signed_N = torch.where(spread_N >= 2**31, spread_N - 2**32, spread_N)
    return signed_N.to(torch.int32).view(torch.uint8).view(-1, 4)


def shuffled_rows(t: Tensor, gated: bool) -> Tensor:
    """Rows of up and gate in turn where gated, then in each 32 rows those that are 4 apart side by
    side.
    """
    _require("rows of a weight", t.shape[1], SHUFFLED_ROWS)
    rows = chunked(t, 1) if gated else t
    return _as(_bytes(rows).unflatten(1, (-1, 8, 4)).transpose(2, 3), t)


def unshuffled_rows(t: Tensor, gated: bool) -> Tensor:
    """The inverse of `shuffled_rows`."""
    back = _as(_bytes(t).unflatten(1, (-1, 4, 8)).transpose(2, 3), t)
    return unchunked(back, 1) if gated else back


def shuffled(t: Tensor, gated: bool) -> Tensor:
    """Shuffled rows in blocks of 128 bytes of all rows, one after the other."""
    _require("bytes of a row", t.shape[2] * t.element_size(), BLOCK_BYTES)
    rows = shuffled_rows(t, gated)
    return _as(rows.unflatten(2, (-1, BLOCK_BYTES // t.element_size())).transpose(1, 2), t)


def unshuffled(t: Tensor, gated: bool) -> Tensor:
    """The inverse of `shuffled`."""
    E, rows = t.shape[:2]
    blocks = t.reshape(E, -1, rows, BLOCK_BYTES // t.element_size()).transpose(1, 2)
    return unshuffled_rows(_as(blocks, t), gated)


def block_view(t: Tensor) -> Tensor:
    """Shuffled 16-bit weights as kernels index them: [E, blocks, rows, 64] of the same bytes."""
    E, rows = t.shape[:2]
    return t.view(E, -1, rows, BLOCK_BYTES // t.element_size())


def _bytes(t: Tensor) -> Tensor:
    """One-byte floats as bytes, which every operator takes."""
    return t.view(torch.uint8) if t.element_size() == 1 else t


def _as(elements: Tensor, like: Tensor) -> Tensor:
    return elements.reshape(-1).view(like.dtype).view(like.shape)


def _require(what: str, size: int, multiple: int) -> None:
    if size % multiple:
        raise ValueError(
            f"{what} must be a multiple of {multiple} for this order, got {size}; make the layer "
            "for its backend (padding=, which names it) or take another backend"
        )

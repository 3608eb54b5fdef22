"""The sum of the ranks' parts in one launch, in which each rank stores its part to all others.

A one-shot all-reduce over an arena of its own (see `push.py`) with one phase: it shares no counter,
flag or buffer with tokens that are dispatched, so that only sums have to be in the same order among
themselves. What `push.py` says of exchanges holds for them: two buffers take turns, and each launch
waits for the flags of all ranks.

A part is cut into units of 16 bytes, or as few as divide a row, and these into blocks. Program b
stores the blocks b, b + programs, ... to the slot of this rank at each other, sets its flags,
waits for the flags b of all, and adds the same blocks of all ranks. They are added in the order of
ranks in float32 and rounded once, also this rank's own: every rank has the same bits.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.launch import on_its_device, pdl_options, take_turn
from moe_ops.kernels.triton.push import (
    BOTH,
    FAILED,
    MOST_PROGRAMS,
    Arena,
    Halves,
    arrived,
    begin,
    polls_by_asm,
    programs_of,
    signal,
    slots_of,
    tag_of,
)

SUM = tl.constexpr(0)  # the phase
ALIGNMENT = 16  # bytes, of a unit at most, and of a slot
# Units of a block, and warps: one a thread where programs have one block each, to be quick; four
# where they have many, to have as much under way as the links take.
SMALL, LARGE = (128, 4), (1024, 8)


@triton.jit
def read_block(part_ptr, block, units, BLOCK: tl.constexpr, VEC: tl.constexpr):
    """A block of the part of this rank."""
    unit = (block * BLOCK + tl.arange(0, BLOCK))[:, None]
    return tl.load(part_ptr + unit * VEC + tl.arange(0, VEC)[None, :], mask=unit < units, other=0.0)


@triton.jit(do_not_specialize=("units", "half", "limit", "tag", "share", "me"))
def sum_pushed_kernel(
    arena_ptr, table_ptr, error_ptr, part_ptr, out_ptr, units, half, limit, tag, share, me,
    BLOCK: tl.constexpr, VEC: tl.constexpr, RANKS: tl.constexpr, RP: tl.constexpr,
    SENDS: tl.constexpr, RECEIVES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The sum of the parts of all ranks. Loads go ahead of what waits."""
    take_turn(PDL)
    first, programs = tl.program_id(0), tl.num_programs(0)
    blocks = tl.cdiv(units, BLOCK)
    zero = tl.zeros((), dtype=tl.int64)
    half, limit = half.to(tl.int64), limit.to(tl.int64)
    r = tl.arange(0, RP)
    u, v = tl.arange(0, BLOCK)[:, None], tl.arange(0, VEC)[None, :]
    slot = (zero + units) * (VEC * part_ptr.dtype.element_ty.primitive_bitwidth // 8)
    slot = tl.cdiv(slot, 16) * 16
    failed = tl.load(arena_ptr + FAILED)
    own = read_block(part_ptr, first, units, BLOCK, VEC)
    epoch = zero
    if SENDS:
        base = tl.load(table_ptr + r, mask=r < RANKS, other=0)
        epoch = begin(arena_ptr, 2 * SUM, share)
        mine = slots_of(me * slot, half, epoch, SUM, RANKS)
        stored = tl.where(failed == 0, units, 0)
        x = own
        for block in range(first, blocks, programs):
            unit = block * BLOCK + u
            for other in tl.static_range(1, RANKS):  # no two ranks begin with the same one
                to = tl.load(table_ptr + (me + other) % RANKS) + mine
                to = tl.multiple_of(to.to(part_ptr.dtype), 16)
                tl.store(to + unit * VEC + v, x, mask=unit < stored)
            x = read_block(part_ptr, block + programs, units, BLOCK, VEC)
        reached = r < tl.where(failed == 0, RANKS, 0)
        signal(base, epoch, tag, me, reached, SUM, RANKS)
    if RECEIVES:
        number = begin(arena_ptr, 2 * SUM + 1, share)
        epoch = epoch if SENDS else number
        ok = arrived(arena_ptr, error_ptr, epoch, tag, limit, failed, SUM, RANKS, RP, ASM)
        slots = slots_of(arena_ptr.to(tl.int64), half, epoch, SUM, RANKS)
        for block in range(first, blocks, programs):
            unit = block * BLOCK + u
            total = tl.zeros((BLOCK, VEC), dtype=tl.float32)
            for source in tl.static_range(RANKS):
                at = tl.multiple_of((slots + source * slot).to(part_ptr.dtype), 16)
                came = unit < tl.where(source == me, 0, units)
                read = tl.load(at + unit * VEC + v, mask=came, other=0.0)
                total += tl.where(source == me, own, read).to(tl.float32)
            out = tl.where(ok, total, 0.0).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + unit * VEC + v, out, mask=unit < units)
            own = read_block(part_ptr, block + programs, units, BLOCK, VEC)


def sum_bytes(part_TD: Tensor, ranks: int) -> int:
    """The bytes of a buffer that holds the parts of all ranks."""
    return ranks * ALIGNMENT * -(-part_TD.numel() * part_TD.itemsize // ALIGNMENT)


@on_its_device
def sum_parts(part_TD: Tensor, arena: Arena, halves: Halves = BOTH) -> Tensor:
    """[T, D], the sum of the contiguous parts of all ranks, in an arena of one phase.

    The halves of an exchange may be launched apart; one that only sends returns nothing of use.
    """
    out_TD = part_TD.new_empty(part_TD.shape)
    if not part_TD.numel():  # on every rank
        return out_TD
    (T, D), dtype = part_TD.shape, part_TD.dtype
    vec = math.gcd(ALIGNMENT // dtype.itemsize, D)
    units = T * D // vec
    block, warps = SMALL if units <= SMALL[0] * arena.programs else LARGE
    programs = programs_of(triton.cdiv(units, block), arena)
    sum_pushed_kernel[(programs,)](
        arena.memory, arena.table_R, arena.error, part_TD, out_TD, units, arena.half, arena.limit,
        tag_of("sum", T, D, str(dtype)), MOST_PROGRAMS // programs, arena.me, block, vec,
        arena.ranks, triton.next_power_of_2(arena.ranks), *halves, polls_by_asm(part_TD),
        num_warps=warps, **pdl_options(part_TD),
    )  # fmt: skip
    return out_TD

"""Tokens stored right into the memory of other ranks' GPUs, and their results stored back.

Each rank has an arena that all ranks of a group can write to (`moe_ops/ranks/peers.py` makes it):

    counters    of exchanges begun, by phase and half; then whether one failed
    flags       [phase, source rank, program]: the last exchange whose rows of that program arrived
    data        [phase, parity of the exchange]: rows in slots [source rank, token]

A phase is dispatch or combine. A launch does both halves of an exchange: program b stores the rows
b, b + programs, ... of this rank into its slots at the others, then its flags there, then waits for
the flags b of all ranks, and reads their rows of the same numbers. Nobody counts anything: slots
are static, and what a slot without a token holds are ids of -1.

A slow rank is never overwritten, without any barrier. Exchanges of a phase take turns in two
buffers. Before a rank stores into the buffer of exchange n + 1, its launch of exchange n is done,
which waited for a flag of every rank; a rank sets flags of n after its launch of n - 1 is done, and
that one has read all that it ever reads of this buffer. So each wait is for all ranks, also for
those that sent nothing, and each rank runs a program, also without tokens.

The number of an exchange is counted here, on the device, so that a CUDA graph can be replayed any
number of times. Whatever their grid, the programs of a launch add up to one turn of the counter.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.launch import on_its_device, pdl_options, take_turn
from moe_ops.kernels.triton.ranks import EVERY, HOME, Rows, Words, words_of

# Programs of a launch at most, a power of two: they wait for each other, so all must fit on a GPU.
MOST_PROGRAMS = 128
TURN = tl.constexpr(MOST_PROGRAMS)
DISPATCH, COMBINE = tl.constexpr(0), tl.constexpr(1)
FAILED, FLAGS = tl.constexpr(4), tl.constexpr(16)  # in words of eight bytes; flags go on a line
TAGS = tl.constexpr(2**16)  # a flag is the number of an exchange times this, and what is exchanged
# Arguments of which no value is compiled apart.
NUMBERS = ("T", "rows", "P", "half", "limit", "tag", "share", "me")
TILE = 8192  # words of a program at once, of all ranks

# Loads that see what was stored before a flag, until it is there. Now and then the time is read,
# which takes longer than a load.
POLL = tl.constexpr("""{
    .reg .pred go;
    .reg .u32 polls, low;
    .reg .u64 begin, now;
    mov.u32 polls, 0;
    mov.u64 begin, 0;
poll:
    ld.acquire.sys.global.s64 $0, [$1];
    setp.ge.s64 go, $0, $2;
    @go bra done;
    add.u32 polls, polls, 1;
    and.b32 low, polls, 255;
    setp.ne.u32 go, low, 0;
    @go bra poll;
    mov.u64 now, %globaltimer;
    setp.eq.u64 go, begin, 0;
    selp.u64 begin, now, begin, go;
    sub.u64 now, now, begin;
    setp.lt.u64 go, now, $3;
    @go bra poll;
done:
}""")


class Arena(NamedTuple):
    """The arena of a rank, and those of its peers."""

    memory: Tensor  # int64; of this rank
    table_R: Tensor  # int64: where the arena of each rank begins, as seen from here
    error: Tensor  # int64 [1], that the host can read at any time; 0 as long as all is well
    half: int  # bytes of a buffer of a phase
    me: int
    programs: int
    limit: int  # nanoseconds; polls in Triton's interpreter

    @property
    def ranks(self) -> int:
        return self.table_R.shape[0]


Halves = tuple[bool, bool]
BOTH, SEND, RECEIVE = (True, True), (True, False), (False, True)


@triton.jit
def begin(arena_ptr, half: tl.constexpr, share):
    """The number of this exchange, from 1 on; share: what a program adds to a turn."""
    return tl.atomic_add(arena_ptr + half, share.to(tl.int64), sem="relaxed") // TURN + 1


@triton.jit
def flag_of(source, PHASE: tl.constexpr, RANKS: tl.constexpr):
    """The word of an arena that says that the rows of this program arrived from a rank."""
    return FLAGS + (PHASE * RANKS + source) * TURN + tl.program_id(0)


@triton.jit
def slots_of(base, half, epoch, PHASE: tl.constexpr, RANKS: tl.constexpr):
    """Where the slots of an exchange begin in arenas at these addresses."""
    return base + 8 * (FLAGS + 2 * RANKS * TURN) + (2 * PHASE + epoch % 2) * half


@triton.jit
def words_at(address):
    """A column of addresses as pointers to words; rows begin at multiples of 16 bytes."""
    words = tl.expand_dims(address, 1).to(tl.pointer_type(tl.int32))
    return tl.multiple_of(words, [16, 16])


@triton.jit
def read_row(source, wanted, WIDTH: tl.constexpr, word):
    """Words of a row, if it is wanted."""
    return tl.load(source + word, mask=word < tl.where(wanted, WIDTH, 0), other=0)


@triton.jit
def signal(base, epoch, tag, me, reached, PHASE: tl.constexpr, RANKS: tl.constexpr):
    """Say to the ranks that the rows of this program are there."""
    tl.debug_barrier()  # what other threads stored goes before
    flags = (base + 8 * flag_of(me, PHASE, RANKS)).to(tl.pointer_type(tl.int64))
    value = tl.zeros_like(base) + epoch * TAGS + tag
    tl.atomic_xchg(flags, value, mask=reached, sem="release", scope="sys")


@triton.jit
def arrived(
    arena_ptr, error_ptr, epoch, tag, limit, failed,
    PHASE: tl.constexpr, RANKS: tl.constexpr, RP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Wait for the rows of this program from all ranks; False where a rank did not come in time, or
    exchanges something else, which the host is told: phase + 2 * (it is something else) +
    256 * rank + 2**24 * number."""
    r = tl.arange(0, RP)
    source = tl.where(r < RANKS, r, 0)
    flags = arena_ptr + flag_of(source, PHASE, RANKS)
    want = tl.zeros((RP,), dtype=tl.int64) + epoch * TAGS
    most = tl.zeros((RP,), dtype=tl.int64) + tl.where(failed == 0, limit, 0)
    if ASM:
        found = tl.inline_asm_elementwise(
            POLL, "=&l,l,l,l", [flags.to(tl.int64), want, most], dtype=tl.int64, is_pure=False,
            pack=1,
        )  # fmt: skip
    else:
        zero = tl.zeros((RP,), dtype=tl.int64)
        found = tl.atomic_add(flags, zero, sem="acquire", scope="sys")
        polls = tl.max(most, 0)
        while (tl.min((found >= want).to(tl.int32), 0) == 0) & (polls > 0):
            found = tl.atomic_add(flags, zero, sem="acquire", scope="sys")
            polls -= 1
    tl.debug_barrier()  # a thread has seen the flag of one rank, and reads rows of all
    number = found // TAGS
    other = (number == epoch) & (found % TAGS != tag)
    who = tl.min(tl.where((number < epoch) | other, source, RP), 0)
    wrong = tl.where(failed == 0, who, RP) < RP
    differs = tl.max((other & (source == who)).to(tl.int64), 0)
    said = PHASE + 2 * differs + 256 * who.to(tl.int64) + epoch * (1 << 24)
    tl.store(error_ptr, said, mask=wrong)
    tl.store(arena_ptr + FAILED, said, mask=wrong)
    return tl.where(failed == 0, who, 0) == RP


@triton.jit(do_not_specialize=NUMBERS)
def dispatch_kernel(
    arena_ptr, table_ptr, error_ptr, x_ptr, scale_ptr, weights_ptr, ids_ptr, rank_of_ptr,
    slot_of_ptr, x_out, scale_out, weights_out, ids_out, served_out,
    T, rows, P, half, limit, tag, share, me,
    X: tl.constexpr, S: tl.constexpr, W: tl.constexpr, K: tl.constexpr, AT_S: tl.constexpr,
    AT_W: tl.constexpr, AT_I: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
    SP: tl.constexpr, WP: tl.constexpr, KP: tl.constexpr,
    RANKS: tl.constexpr, RP: tl.constexpr, SENDS: tl.constexpr, RECEIVES: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tokens to the ranks that they need, with the slots of their experts there; and what came.

    Loads go ahead of what waits: a row's of the exchange's number, and of those of the row before.
    """
    take_turn(PDL)
    programs = tl.num_programs(0)
    zero = tl.zeros((), dtype=tl.int64)
    r, k = tl.arange(0, RP), tl.arange(0, KP)
    word, column = tl.arange(0, BLOCK)[None, :], tl.arange(0, WP)[None, :]
    part = tl.arange(0, SP)[None, :]
    half, limit = half.to(tl.int64), limit.to(tl.int64)
    failed = tl.load(arena_ptr + FAILED)
    epoch = zero
    if SENDS:
        reached = r < tl.where(failed == 0, RANKS, 0)
        base = tl.load(table_ptr + r, mask=r < RANKS, other=0)
        t = zero + tl.program_id(0)
        ids = tl.load(ids_ptr + t * K + k, mask=k < tl.where(t < T, K, 0), other=-1)
        x = read_row(x_ptr + t * X, t < T, X, word)
        if S > 0:
            scales = read_row(scale_ptr + t * S, t < T, S, part)
        weights = read_row(weights_ptr + t * W, t < T, W, column)
        epoch = begin(arena_ptr, 2 * DISPATCH, share)
        slots = slots_of(base, half, epoch, DISPATCH, RANKS)
        for row in range(tl.program_id(0), rows, programs):
            t = zero + row
            known = (ids >= 0) & (ids < P)
            rank = tl.load(rank_of_ptr + ids, mask=known, other=-3)
            slot = tl.load(slot_of_ptr + ids, mask=known, other=-1)
            rank = tl.where(rank == HOME, me, rank)
            here = (rank[None, :] == r[:, None]) | (rank == EVERY)[None, :]
            slot = tl.where(here, slot[None, :], -1)
            needed = (reached & (tl.max(here.to(tl.int32), 1) > 0))[:, None]
            to = words_at(slots + (me * rows + t) * (4 * ROW))
            tl.store(to + (AT_I + k)[None, :], slot, mask=reached[:, None] & (k < K)[None, :])
            tl.store(to + word, x, mask=(word < X) & needed)
            if S > 0:
                tl.store(to + AT_S + part, scales, mask=(part < S) & needed)
            tl.store(to + AT_W + column, weights, mask=(column < W) & needed)
            for start in tl.static_range(BLOCK, X, BLOCK):
                x = read_row(x_ptr + t * X, t < T, X, start + word)
                tl.store(to + start + word, x, mask=(start + word < X) & needed)
            t += programs
            ids = tl.load(ids_ptr + t * K + k, mask=k < tl.where(t < T, K, 0), other=-1)
            x = read_row(x_ptr + t * X, t < T, X, word)
            if S > 0:
                scales = read_row(scale_ptr + t * S, t < T, S, part)
            weights = read_row(weights_ptr + t * W, t < T, W, column)
        signal(base, epoch, tag, me, reached, DISPATCH, RANKS)
    if RECEIVES:
        number = begin(arena_ptr, 2 * DISPATCH + 1, share)
        epoch = epoch if SENDS else number
        ok = arrived(arena_ptr, error_ptr, epoch, tag, limit, failed, DISPATCH, RANKS, RP, ASM)
        slots = slots_of(arena_ptr.to(tl.int64), half, epoch, DISPATCH, RANKS)
        exists = r < RANKS
        for row in range(tl.program_id(0), rows, programs):
            g = tl.where(exists, r, 0).to(tl.int64) * rows + row
            source = words_at(slots + g * (4 * ROW))
            slot = tl.load(source + AT_I + k[None, :], mask=k[None, :] < K, other=-1)
            came = tl.load(source + word, mask=word < X, other=0)
            if S > 0:
                factors = tl.load(source + AT_S + part, mask=part < S, other=0)
            shares = tl.load(source + AT_W + column, mask=column < W, other=0)
            slot = tl.where(ok, slot, -1)
            serves = exists & (tl.max(slot, 1) >= 0)
            served, at = serves[:, None], g[:, None]
            tl.store(x_out + at * X + word, came, mask=(word < X) & served)
            if S > 0:
                tl.store(scale_out + at * S + part, factors, mask=(part < S) & served)
            tl.store(weights_out + at * W + column, shares, mask=(column < W) & served)
            tl.store(ids_out + at * K + k[None, :], slot, mask=exists[:, None] & (k < K)[None, :])
            tl.store(served_out + g, serves.to(tl.int32), mask=exists)
            for start in tl.static_range(BLOCK, X, BLOCK):
                came = tl.load(source + start + word, mask=start + word < X, other=0)
                tl.store(x_out + at * X + start + word, came, mask=(start + word < X) & served)


@triton.jit(do_not_specialize=NUMBERS)
def combine_pushed_kernel(
    arena_ptr, table_ptr, error_ptr, y_ptr, served_ptr, ids_ptr, rank_of_ptr, out_ptr,
    T, rows, P, half, limit, tag, share, me,
    Y: tl.constexpr, D: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, KP: tl.constexpr, RANKS: tl.constexpr, RP: tl.constexpr,
    SENDS: tl.constexpr, RECEIVES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows that were served back to their tokens, each of which sums those that it needed, in the
    order of ranks. Loads go ahead of what waits, as in dispatch."""
    take_turn(PDL)
    programs = tl.num_programs(0)
    zero = tl.zeros((), dtype=tl.int64)
    r, k = tl.arange(0, RP), tl.arange(0, KP)
    word = tl.arange(0, BLOCK)[None, :]
    half, limit = half.to(tl.int64), limit.to(tl.int64)
    failed = tl.load(arena_ptr + FAILED)
    epoch = zero
    t = zero + tl.program_id(0)
    ids = tl.load(ids_ptr + t * K + k, mask=k < tl.where(t < T, K, 0), other=-1)
    if SENDS:
        reached = r < tl.where(failed == 0, RANKS, 0)
        base = tl.load(table_ptr + r, mask=r < RANKS, other=0)
        g = tl.where(r < RANKS, r, 0).to(tl.int64) * rows + tl.program_id(0)
        # With more programs than rows some have none; they wait for the others all the same.
        served = tl.load(served_ptr + g, mask=r < tl.where(t < rows, RP, 0), other=0)
        y = tl.load(y_ptr + g[:, None] * Y + word, mask=word < tl.where(t < rows, Y, 0), other=0)
        epoch = begin(arena_ptr, 2 * COMBINE, share)
        slots = slots_of(base, half, epoch, COMBINE, RANKS)
        for row in range(tl.program_id(0), rows, programs):
            goes = (reached & (served > 0))[:, None]
            to = words_at(slots + (me * rows + zero + row) * (4 * ROW))
            tl.store(to + word, y, mask=(word < Y) & goes)
            for start in tl.static_range(BLOCK, Y, BLOCK):
                y = tl.load(y_ptr + g[:, None] * Y + start + word, mask=start + word < Y, other=0)
                tl.store(to + start + word, y, mask=(start + word < Y) & goes)
            g += programs
            t = zero + row + programs
            served = tl.load(served_ptr + g, mask=r < tl.where(t < rows, RP, 0), other=0)
            y = tl.load(
                y_ptr + g[:, None] * Y + word, mask=word < tl.where(t < rows, Y, 0), other=0
            )
        signal(base, epoch, tag, me, reached, COMBINE, RANKS)
    if RECEIVES:
        number = begin(arena_ptr, 2 * COMBINE + 1, share)
        epoch = epoch if SENDS else number
        rank = tl.load(rank_of_ptr + ids, mask=(ids >= 0) & (ids < P), other=-3)
        ok = arrived(arena_ptr, error_ptr, epoch, tag, limit, failed, COMBINE, RANKS, RP, ASM)
        slots = slots_of(arena_ptr.to(tl.int64), half, epoch, COMBINE, RANKS)
        column = tl.arange(0, COLUMNS)
        for row in range(tl.program_id(0), T, programs):
            t = zero + row
            rank = tl.where(ok, tl.where(rank == HOME, me, rank), -3)
            for start in tl.static_range(0, D, COLUMNS):
                total = tl.zeros((COLUMNS,), dtype=tl.float32)
                for source in tl.static_range(RANKS):
                    at = (slots + (source * rows + t) * (4 * ROW)).to(out_ptr.dtype)
                    part = tl.multiple_of(at, 16) + start + column
                    read = tl.load(part, mask=start + column < D, other=0.0).to(tl.float32)
                    needed = tl.max(((rank == source) | (rank == EVERY)).to(tl.int32), 0)
                    total += tl.where(needed > 0, read, 0.0)
                out = total.to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + t * D + start + column, out, mask=start + column < D)
            t += programs
            ids = tl.load(ids_ptr + t * K + k, mask=k < tl.where(t < T, K, 0), other=-1)
            rank = tl.load(rank_of_ptr + ids, mask=(ids >= 0) & (ids < P), other=-3)


def dispatch_bytes(sent: Rows, ranks: int, rows: int) -> int:
    """The bytes of a buffer that holds the tokens of all ranks."""
    return 4 * ranks * rows * Words.of(sent).row


def combine_bytes(y_GD: Tensor) -> int:
    """The bytes of a buffer that holds the rows of all ranks."""
    return y_GD.shape[0] * 4 * _row_words(y_GD)


def arena_bytes(ranks: int, half: int, phases: int) -> int:
    """The bytes of an arena whose buffers hold `half` bytes each, a multiple of 16, two for each of
    its phases. Flags have room for two phases always."""
    return 8 * (FLAGS.value + 2 * ranks * MOST_PROGRAMS) + 2 * phases * half


@on_its_device
def dispatch(
    sent: Rows, tables: tuple[Tensor, Tensor], rows: int, arena: Arena, halves: Halves = BOTH
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x_GD, scale_GS, weights_GK and local ids_GK, G = ranks * rows, of rows that this rank serves,
    and served_G, whether it serves a row; of what it does not serve only ids and served are
    written. What is sent is contiguous.

    The halves of an exchange may be launched apart; one that only sends returns nothing of use.
    """
    words, G, P = Words.of(sent), arena.ranks * rows, tables[0].shape[0]
    parts = (sent.x_TD, sent.scale_TS, sent.weights_TK)
    x_GD, scale_GS, weights_GK = (t.new_empty((G, t.shape[1])) for t in parts)
    ids_GK, served_G = tables[0].new_empty((G, words.K)), tables[0].new_empty((G,))
    RP = triton.next_power_of_2(arena.ranks)
    block = _block(words.x, RP)
    programs = programs_of(rows, arena)
    dispatch_kernel[(programs,)](
        arena.memory, arena.table_R, arena.error, *map(words_of, parts), sent.ids_TK, *tables,
        *map(words_of, (x_GD, scale_GS, weights_GK)), ids_GK, served_G, sent.x_TD.shape[0],
        rows, P, arena.half, arena.limit,
        tag_of("dispatch", rows, P, *words, *(t.dtype for t in parts)),
        MOST_PROGRAMS // programs, arena.me, *words, block, *words.blocks, arena.ranks, RP, *halves,
        polls_by_asm(x_GD), num_warps=_warps(RP * block), **pdl_options(x_GD),
    )  # fmt: skip
    return x_GD, scale_GS, weights_GK, ids_GK, served_G


@on_its_device
def combine(
    y_GD: Tensor, served_G: Tensor, ids_TK: Tensor, rank_of_P: Tensor, rows: int, arena: Arena,
    halves: Halves = BOTH,
) -> Tensor:  # fmt: skip
    """[T, D]: each token's sum over the ranks that it needed, of rows [ranks * rows, D] there."""
    (T, K), D = ids_TK.shape, y_GD.shape[1]
    out_TD = y_GD.new_empty((T, D))
    Y, row = D * y_GD.dtype.itemsize // 4, _row_words(y_GD)
    RP, P = triton.next_power_of_2(arena.ranks), rank_of_P.shape[0]
    block = _block(Y, RP)
    programs = programs_of(rows, arena)
    combine_pushed_kernel[(programs,)](
        arena.memory, arena.table_R, arena.error, words_of(y_GD), served_G, ids_TK, rank_of_P,
        out_TD, T, rows, P, arena.half, arena.limit,
        tag_of("combine", rows, P, D, Y, K, y_GD.dtype),
        MOST_PROGRAMS // programs, arena.me, Y, D, K, row, block,
        min(4096, triton.next_power_of_2(D)),
        triton.next_power_of_2(K), arena.ranks, RP, *halves, polls_by_asm(y_GD),
        num_warps=_warps(RP * block), **pdl_options(y_GD),
    )  # fmt: skip
    return out_TD


def polls_by_asm(t: Tensor) -> bool:
    """Whether programs wait by instructions of a GPU, which Triton's interpreter has not."""
    return t.is_cuda


def programs_of(rows: int, arena: Arena) -> int:
    """How many programs a launch gets for this many rows."""
    return min(triton.next_power_of_2(rows), arena.programs)


def _block(words: int, RP: int) -> int:
    """Words of a row at once."""
    return min(TILE // RP, triton.next_power_of_2(words))


def _warps(words: int) -> int:
    """The warps of a program, at 16 words a thread. Registers do not hold more words, of eight
    ranks."""
    return max(4, words // 512)


def _row_words(y_GD: Tensor) -> int:
    """Words of a row of results, which begins at a multiple of 16 bytes."""
    words = y_GD.shape[1] * y_GD.dtype.itemsize // 4
    return words + -words % 4


@functools.lru_cache(maxsize=1024)
def tag_of(*what: Any) -> int:
    """What is exchanged, in the bits of a flag."""
    return zlib.crc32(repr(what).encode()) % TAGS.value

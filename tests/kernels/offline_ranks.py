"""What one of several ranks launches to send tokens, and to sum parts."""

from __future__ import annotations

import torch

from moe_ops.kernels.triton import push, push_sum, ranks
from moe_ops.testing import Case


def over_ranks(case: Case) -> None:
    """What one of two ranks launches."""
    x, weights = torch.empty(4, case.D, dtype=torch.bfloat16), torch.empty(4, case.K)
    ids, table = torch.empty(4, case.K, dtype=torch.int64), torch.empty(case.E, dtype=torch.int32)
    packed = ranks.pack(x, weights, ids, 4, case.E)
    ranks.unpack(packed.repeat(2, 1), (table, table), (x, weights, case.K), 4, 1)
    ranks.combine(x.repeat(2, 1), ids, table, 4, 2, 1)


def arena_of(R: int) -> push.Arena:
    """The memory that R ranks share."""
    words = torch.empty(R, dtype=torch.int64)
    return push.Arena(words, words, words, 2**20, 1, push.MOST_PROGRAMS, 10**10)


def summed(R: int) -> None:
    """Parts of a step and of a prompt, of rows that units of 16 bytes divide, and of odd ones."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for T, D in ((4, 2048), (4096, 2048), (3, 33)):
            push_sum.sum_parts(torch.empty(T, D, dtype=dtype), arena_of(R))


def pushed(case: Case, R: int) -> None:
    """What a rank launches, in one launch for both halves of an exchange, and in two."""
    x, weights = torch.empty(4, case.D, dtype=torch.bfloat16), torch.empty(4, case.K)
    table = torch.empty(case.E, dtype=torch.int32)
    arena = arena_of(R)
    for halves in (push.BOTH, push.SEND, push.RECEIVE):
        for ids in (torch.empty(4, case.K, dtype=d) for d in (torch.int32, torch.int64)):
            for count in (4, push.MOST_PROGRAMS):
                sent = push.dispatch(x, weights, ids, (table, table), count, arena, halves)
                push.combine(sent[0], sent[3], ids, table, count, arena, halves)

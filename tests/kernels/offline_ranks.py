"""What one of several ranks launches to send tokens, and to sum parts."""

from __future__ import annotations

import itertools

import torch

from moe_ops.backends import triton_batched
from moe_ops.kernels.triton import batches, push, push_sum, ranks
from moe_ops.kernels.triton.experts.schedule.batches import order_batches, put_back
from moe_ops.kernels.triton.ranks import Rows
from moe_ops.ops.experts_batched import experts_batched
from moe_ops.testing import Case
from tests.kernels.offline_codes import quantized_call
from tests.kernels.offline_floats import layer_call


def over_ranks(case: Case) -> None:
    """What one of two ranks launches."""
    table = torch.empty(case.E, dtype=torch.int32)
    for sent in tokens(case, torch.int64):
        packed = ranks.pack(sent, 4, case.E)
        ranks.unpack(packed.repeat(2, 1), (table, table), sent, 4, 1)
    x_GD = torch.empty(8, case.D, dtype=torch.bfloat16)
    ranks.combine(x_GD, sent.ids_TK, table, 4, 2, 1)


def tokens(case: Case, dtype: torch.dtype) -> list[Rows]:
    """Floats, and codes with a scale for each row, and each 128 columns."""
    weights, ids = torch.empty(4, case.K), torch.empty(4, case.K, dtype=dtype)
    floats, codes = (torch.empty(4, case.D, dtype=d) for d in (torch.bfloat16, torch.int8))
    return [
        Rows(x, torch.empty(4, scales), weights, ids)
        for x, scales in ((floats, 0), (codes, 1), (codes, (case.D + 127) // 128))
    ]


def in_batches(case: Case) -> None:
    """Rows that arrived into batches, in one launch and in two, their order for products, and both
    ways back."""
    counts_E, ids_GK = torch.empty(case.E, dtype=torch.int32), torch.empty(8, case.K)
    for sent, times in itertools.product(tokens(case, torch.int32), (1, 256)):
        x_GD, scale_GS = (t.repeat(2 * times, 1) for t in (sent.x_TD, sent.scale_TS))
        batches.in_batches(x_GD, scale_GS, ids_GK.int().repeat(times, 1), case.E)
    y_EMD = torch.empty(case.E, 8, case.D, dtype=torch.bfloat16)
    batches.from_batches(y_EMD, ids_GK, ids_GK.int())
    ids_TK = torch.empty(8 * case.E, 1, dtype=torch.int32)
    _, _, ends_E = order_batches(counts_E, ids_TK, torch.empty(8 * case.E, 1))
    put_back(y_EMD.flatten(0, 1), counts_E, ends_E)


def experts_in_batches(case: Case, rows: int, w_format: str, x_format: str) -> None:
    """Few rows of an expert where there may be sixteen times as many."""
    layer = quantized_call(case, 1, w_format, x_format) if w_format else layer_call(case, 1, False)
    by_name = {n: getattr(layer, n) for n in experts_batched.arguments.paths if hasattr(layer, n)}
    x_EMD = layer.x_TD.new_empty(case.E, 16 * rows, case.D)
    counts_E = layer.ids_TK.new_empty(case.E)
    call = experts_batched.call(x_EMD=x_EMD, counts_E=counts_E, expected=rows, **by_name)
    triton_batched.run(call)


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
    table = torch.empty(case.E, dtype=torch.int32)
    arena = arena_of(R)
    for halves in (push.BOTH, push.SEND, push.RECEIVE):
        for dtype in (torch.int32, torch.int64):
            floats, _, codes = tokens(case, dtype)
            for count in (4, push.MOST_PROGRAMS):
                push.dispatch(codes, (table, table), count, arena, halves)
                x_GD, *_, served_G = push.dispatch(floats, (table, table), count, arena, halves)
                push.combine(x_GD, served_G, floats.ids_TK, table, count, arena, halves)

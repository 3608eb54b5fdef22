"""`experts_batched` by the products of triton.rows and triton.grouped, whose rows are found by
counts in place of a sort, and read and written where they lie."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops.backends import reads
from moe_ops.backends import triton_paths as paths
from moe_ops.backends.strides import WORD, contiguous
from moe_ops.backends.triton import (
    TENSORS,
    call_of,
    emulates,
    formats_named,
    layer_of,
    supports_many,
    tensors_of,
)
from moe_ops.backends.triton_limits import most_rows_tokens
from moe_ops.backends.triton_support import inputs_of, supports_codes
from moe_ops.ops.experts import ExpertsCall
from moe_ops.ops.experts_batched import (
    LEFT_OUT,
    ExpertsBatchedCall,
    experts_batched,
    of_one,
)
from moe_ops.registry.gradients import needs_grad

NAME = "triton"
# How many rows kernels of inputs of 8 bits are picked for, where one is expected. The limits of
# `experts` are for pairs, of which those of other ranks take no time, and half of them are for two
# ranks. On two H200 (`bench ep --modes push batched`, 333787b) DeepSeek-V3's share with 8
# rows an expert took 418 µs by rows/stream, and by push, which picks rows, 365; Qwen3-30B with 16
# took 148 by rows and 134 by grouped/blocks. Floats take their limits as they are.
PICKED_FOR = 2
OF_ROWS = ("x_TD", "ids_TK", "weights_TK", "x_scale_TG")
READ = tuple(n for n in (*reads.SCALED_EXPERTS, *reads.CODES) if n not in LEFT_OUT)


def supports(call: ExpertsBatchedCall) -> str | None:
    b = call.batches
    if needs_grad(b.x_EMD):
        return "is not differentiable, and an argument requires grad"
    if not b.x_EMD.is_contiguous():
        return f"needs contiguous x_EMD, got strides {b.x_EMD.stride()}"
    if b.x_scale_EMG is not None and b.x_EMD.storage_offset() % WORD:
        return f"needs codes that begin at a multiple of {WORD} bytes"
    expected = as_expected(call)
    few = supports_codes(expected)
    return few if few is None else supports_many(expected)


def as_expected(call: ExpertsBatchedCall) -> ExpertsCall:
    """A call of as many tokens as rows are expected, of one choice; of all slots if that is not
    said."""
    E, M, _ = call.batches.x_EMD.shape
    return of_one(call, E * min(M, call.batches.expected or M))


def kernel_of(call: ExpertsCall) -> str:
    """Which of the two runs a call, by the rows of an expert."""
    if supports_many(call) is not None:
        return "rows"
    if supports_codes(call) is not None:  # float32
        return "grouped"
    most = most_rows_tokens(call)
    return "rows" if most is None or call.x_TD.shape[0] <= most else "grouped"


@experts_batched.backend(
    NAME,
    reads=("x_scale_EMG", "expected", *READ),
    supports=supports,
    devices=("cuda",),
    priority=1,
)
def run(call: ExpertsBatchedCall) -> Tensor:
    """`experts_batched` in the launches of `experts`, without its sort and its sum."""
    from moe_ops.kernels.triton.replay import replay

    b, (E, M, D) = call.batches, call.batches.x_EMD.shape
    if M == 0:
        return b.x_EMD.new_empty((E, M, D), dtype=call.dtype)
    expected = as_expected(call)
    rest = (call.layer.transposed, expected.activation, formats_named(expected), b.expected)
    named = dict(zip(TENSORS, tensors_of(of_one(call, min(M, 1))), strict=True))
    scale = None if b.x_scale_EMG is None else contiguous(b.x_scale_EMG.flatten(0, 1))
    named |= {"x_TD": b.x_EMD.view(E * M, D), "x_scale_TG": scale, "ids_TK": None}
    named["weights_TK"] = None
    out_TD = replay(_launch, (*named.values(), contiguous(b.counts_E)), rest)
    return out_TD.view(E, M, D)


def _launch(*given: Any) -> Tensor:
    """Launch with the tensors of `run`, and its other arguments behind them."""
    from moe_ops.kernels.triton.experts.schedule.batches import Batches

    named: dict[str, Any] = dict(zip(TENSORS, given, strict=False))
    counts_E, transposed, act, formats, expected = given[len(TENSORS) :]
    x_TD, E = named["x_TD"], named["w13_EFD"].shape[0]
    named["ids_TK"] = x_TD.new_empty((x_TD.shape[0], 1), dtype=torch.int32)
    named["weights_TK"] = x_TD.new_empty((x_TD.shape[0], 1), dtype=torch.float32)
    slots = x_TD.shape[0] // E
    rows = min(slots, expected or slots)

    def call_of_rows(rows: int) -> ExpertsCall:
        some = {n: None if named[n] is None else named[n][: E * rows] for n in OF_ROWS}
        return call_of(named | some, transposed, act, formats)

    call = call_of_rows(rows)
    taken = _pick(call_of_rows(min(slots, PICKED_FOR * rows)) if _multiplies_8_bits(call) else call)
    path, layer = taken.path, layer_of(named, transposed, act, formats)
    tiles, tiles_of = None, path.tiles_of(invariant=False)
    if tiles_of is not None:
        tiles = tiles_of(call.x_TD, call.ids_TK, layer, None)
    out_TD: Tensor = path.launcher()(
        x_TD, named["weights_TK"], named["ids_TK"], layer, None, None, tiles, None,
        **path.options(call), batches=Batches(counts_E=counts_E, slots=slots, expected=rows),
    )  # fmt: skip
    return out_TD


def _pick(call: ExpertsCall) -> paths.Taken:
    """The path of a call of so many rows, which is told."""
    kernel = kernel_of(call)
    taken = paths.pick(kernel, call)
    paths.tell(kernel, str(taken))
    return taken


def _multiplies_8_bits(call: ExpertsCall) -> bool:
    """Whether inputs are multiplied as codes of 8 bits."""
    return bool(call.x_format) and inputs_of(call) is None


def _emulates(call: ExpertsBatchedCall) -> bool:
    """Whether the inputs of a call are emulated, by the kernels of as many rows as are expected."""
    expected = as_expected(call)
    return emulates(kernel_of(expected), expected)


experts_batched.emulates(NAME, _emulates)

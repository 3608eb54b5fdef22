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
READ = tuple(n for n in (*reads.SCALED_EXPERTS, *reads.CODES) if n not in LEFT_OUT)


def supports(call: ExpertsBatchedCall) -> str | None:
    b = call.batches
    if needs_grad(b.x_EMD):
        return "is not differentiable, and an argument requires grad"
    if not b.x_EMD.is_contiguous():
        return f"needs contiguous x_EMD, got strides {b.x_EMD.stride()}"
    if b.x_scale_EMG is not None and b.x_EMD.storage_offset() % WORD:
        return f"needs codes that begin at a multiple of {WORD} bytes"
    expected = _as_expected(call)
    few = supports_codes(expected)
    return few if few is None else supports_many(expected)


def _as_expected(call: ExpertsBatchedCall) -> ExpertsCall:
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
    expected = _as_expected(call)
    rest = (call.layer.transposed, expected.activation, formats_named(expected), b.expected)
    named = dict(zip(TENSORS, tensors_of(of_one(call, min(M, 1))), strict=True))
    scale = None if b.x_scale_EMG is None else contiguous(b.x_scale_EMG.flatten(0, 1))
    named |= {"x_TD": b.x_EMD.view(E * M, D), "x_scale_TG": scale, "ids_TK": None}
    named["weights_TK"] = None
    out_TD = replay(_launch, (*named.values(), contiguous(b.counts_E)), rest)
    return out_TD.view(E, M, D)


def _launch(*given: Any) -> Tensor:
    """Launch with the tensors of `run`, and its other arguments behind them."""
    named: dict[str, Any] = dict(zip(TENSORS, given, strict=False))
    counts_E, transposed, act, formats, expected = given[len(TENSORS) :]
    from moe_ops.kernels.triton.experts.schedule.batches import Batches

    x_TD, E = named["x_TD"], named["w13_EFD"].shape[0]
    T = x_TD.shape[0]
    ids_TK = x_TD.new_empty((T, 1), dtype=torch.int32)
    weights_TK = x_TD.new_empty((T, 1), dtype=torch.float32)
    tokens = E * min(T // E, expected or T)
    some = {"x_TD": x_TD[:tokens], "ids_TK": ids_TK[:tokens], "weights_TK": weights_TK[:tokens]}
    if named["x_scale_TG"] is not None:
        some["x_scale_TG"] = named["x_scale_TG"][:tokens]
    call = call_of(named | some, transposed, act, formats)
    kernel = kernel_of(call)
    taken = paths.pick(kernel, call)
    paths.tell(kernel, str(taken))
    path, layer = taken.path, layer_of(named, transposed, act, formats)
    tiles = None
    if path.tiles:
        tiles = path.function(path.tiles)(call.x_TD, call.ids_TK, layer, None)
    out_TD: Tensor = path.function(path.run)(
        x_TD, weights_TK, ids_TK, layer, None, None, tiles, None, **path.options(call),
        batches=Batches(counts_E=counts_E, slots=T // E, expected=tokens // E),
    )  # fmt: skip
    return out_TD


experts_batched.emulates(NAME, lambda call: inputs_of(of_one(call)) is not None)

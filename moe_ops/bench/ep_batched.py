"""A layer over ranks whose tokens arrive in batches: dispatch, experts and combine as three ops."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from moe_ops.ops import combine_tokens, dispatch_tokens, experts_batched, quantize
from moe_ops.ops.experts_over_ranks import ExpertsOverRanksCall
from moe_ops.ranks.batches import BATCHED
from moe_ops.ranks.groups import Group
from moe_ops.ranks.transport import GATHER, PUSH


def call(layer: ExpertsOverRanksCall) -> Callable[[], Tensor]:
    """`experts_over_ranks` by batches: on GPUs by push, elsewhere by gather."""
    c, ranks = layer.layer, layer.ranks
    collective = PUSH if c.x_TD.is_cuda else GATHER
    rows, group, tables = ranks.rows, ranks.group, (ranks.rank_of_P, ranks.slot_of_P)
    pairs = Group.of(group).size * c.ids_TK.numel()
    experts, expected = c.w13_EFD.shape[0], max(1, pairs // tables[0].shape[0])
    given = {n: getattr(c, n) for n in experts_batched.arguments.paths if hasattr(c, n)}
    given["expected"] = expected
    if c.x_format:
        given["out_dtype"] = str(c.dtype).removeprefix("torch.")

    def run() -> Tensor:
        x_TD, scale_TS = quantize(c.x_TD, c.x_format) if c.x_format else (c.x_TD, None)
        x_EMD, scale_EMS, weights_GK, slot_GK, counts_E, splits_2R = dispatch_tokens(
            x_TD, c.weights_TK, c.ids_TK, *tables, rows, group, scale_TS, collective,
            layout=BATCHED, experts=experts,
        )  # fmt: skip
        scales = {} if scale_TS is None else {"x_scale_EMG": scale_EMS}
        y_EMD = experts_batched(x_EMD=x_EMD, counts_E=counts_E, **scales, **given)
        out_TD: Tensor = combine_tokens(
            y_EMD, c.ids_TK, *tables, counts_E, splits_2R, rows, group, collective, BATCHED,
            weights_GK, slot_GK,
        )  # fmt: skip
        return out_TD

    return run

"""The experts of all ranks in one op: dispatch over ranks, the experts here, combine over ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.ops.combine_tokens import CombineTokensCall, combine_tokens
from moe_ops.ops.dispatch_tokens import (
    DispatchTokensCall,
    check_rows,
    check_tables,
    dispatch_tokens,
)
from moe_ops.ops.experts import OF_CODES, ExpertsCall, experts
from moe_ops.ops.experts import check as check_experts
from moe_ops.quant.formats import TENSOR, Format
from moe_ops.ranks.groups import Group
from moe_ops.ranks.links import Traffic
from moe_ops.ranks.packed import row_bytes
from moe_ops.ranks.transport import AUTO, GATHER, TRANSPORTS
from moe_ops.shapes import check_choice
from moe_ops.spec import op


@dataclass(slots=True)
class Ranks:
    """Who serves which expert, and how tokens get there: see `dispatch_tokens`."""

    rank_of_P: Tensor
    slot_of_P: Tensor
    rows: int
    group: str = ""
    collective: str = AUTO


def _flat() -> dict[str, str]:
    """The arguments by flat name, and where they are: what has no default first."""
    first = [f"layer.{n}" for n in ("x_TD", "weights_TK", "ids_TK", "w13_EFD", "w2_EDI")]
    first += [f"ranks.{f.name}" for f in fields(Ranks)]
    out = ("expert_map", *OF_CODES)
    rest = [f"layer.{f.name}" for f in fields(ExpertsCall) if f.name not in out]
    return {path.partition(".")[2]: path for path in dict.fromkeys((*first, *rest))}


@dataclass(slots=True)
class ExpertsOverRanksCall:
    """The arguments of `experts_over_ranks`: those of `experts` but the map, and the ranks'."""

    layer: ExpertsCall
    ranks: Ranks

    FLAT: ClassVar[dict[str, str]] = _flat()
    ROWS: ClassVar[str] = "rows"


def check(call: ExpertsOverRanksCall) -> None:
    """Raise ValueError or TypeError unless `experts_over_ranks` takes these arguments."""
    layer, ranks = call.layer, call.ranks
    check_experts(layer)
    check_tables(layer.x_TD, ranks.rank_of_P, ranks.slot_of_P)
    check_choice("collective", ranks.collective, (AUTO, *TRANSPORTS))
    check_rows(ranks.rows, ranks.group)
    why = why_not_apart(layer.x_format, layer.x_scale is not None and layer.h_scale is not None)
    if why is not None:
        raise ValueError(why)


def why_not_apart(x_format: str, static: bool) -> str | None:
    """Why inputs of a format cannot be quantised where tokens of several ranks meet, or None."""
    if not x_format or static:
        return None
    found = Format.of(x_format)
    if found.group != TENSOR and not found.has_global_scale:
        return None
    return (
        f"x_format={x_format!r} takes one scale from all tokens, which differ from rank to rank; "
        "give static scales (x_scale and h_scale), or a format with a scale for each row or group"
    )


@op(check=check)
def experts_over_ranks(call: ExpertsOverRanksCall) -> Tensor:
    """Run this rank's tokens through their experts, wherever these are: `combine_tokens` of
    `experts` of `dispatch_tokens`.

    Each rank gives its own tokens, at most `rows`, and gets their results: out_t = sum_k w_tk *
    (W2_e act(W13_e x_t + b13_e) + b2_e) with e = ids_TK[t, k] among the physical experts of all
    ranks. Arguments and their meaning are those of `experts`, of which the weights are those here,
    and of `dispatch_tokens`. collective: "gather", "exchange", "push", or "auto" for the
    cheapest one of `rows` rows, whose backends have the same names. Results differ between
    transports by no more than rounding.

    Every rank of the group has to call it, also one without tokens. Result [T, D] in x's dtype.
    Raises as `experts` and `dispatch_tokens` do, and ValueError for an x_format with a dynamic
    scale of all tokens.
    """
    return over_ranks(call, GATHER if call.ranks.collective == AUTO else call.ranks.collective)


def over_ranks(call: ExpertsOverRanksCall, collective: str) -> Tensor:
    """The definition, by one transport."""
    layer, ranks = call.layer, call.ranks
    there = (ranks.rank_of_P, ranks.slot_of_P)
    rows, group = ranks.rows, ranks.group
    sent = DispatchTokensCall(
        layer.x_TD, layer.weights_TK, layer.ids_TK, *there, rows, group, collective=collective
    )
    x_GD, _, weights_GK, ids_GK, token_N, splits_2R = dispatch_tokens.part(sent)
    here = replace(layer, x_TD=x_GD, weights_TK=weights_GK, ids_TK=ids_GK)
    y_GD = experts.part(here)
    back = CombineTokensCall(
        y_GD, layer.ids_TK, *there, token_N, splits_2R, rows, group, collective
    )
    out_TD: Tensor = combine_tokens.part(back)
    return out_TD


def traffic(call: ExpertsOverRanksCall) -> Traffic:
    """What a call's ranks send each other."""
    layer, ranks = call.layer, call.ranks
    K, fields = layer.ids_TK.shape[1], (layer.x_TD, layer.weights_TK)
    return Traffic(
        ranks=Group.of(ranks.group).size,
        experts=ranks.rank_of_P.shape[0],
        top_k=K,
        there=row_bytes([*((t.shape[1], t.dtype) for t in fields), (K, torch.int32)]),
        back=layer.x_TD.shape[1] * layer.x_TD.dtype.itemsize,
    )


experts_over_ranks.fake(fake_impls.experts_over_ranks)

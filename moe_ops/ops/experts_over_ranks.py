"""The experts of all ranks in one op: dispatch over ranks, the experts here, combine over ranks.

Where calls have to be batch invariant, ranks send back a row for each choice of a token and add
nothing (`moe_ops/ranks/choices.py`): a token's own rank sums its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.shapes import check_choice
from moe_ops.ops.combine import CombineCall, combine
from moe_ops.ops.combine_tokens import CombineTokensCall, combine_tokens
from moe_ops.ops.combine_tokens import started as start_combine
from moe_ops.ops.dispatch_tokens import (
    Arrived,
    DispatchTokensCall,
    check_rows,
    check_tables,
    dispatch_tokens,
)
from moe_ops.ops.dispatch_tokens import started as start_dispatch
from moe_ops.ops.experts import OF_CODES, ExpertsCall, experts
from moe_ops.ops.experts import check as check_experts
from moe_ops.ops.quantize import quantize
from moe_ops.quant.arguments import not_codes
from moe_ops.quant.formats import TENSOR, Format
from moe_ops.ranks.choices import by_choice, rows_of_pairs, why_in_parts
from moe_ops.ranks.groups import Group
from moe_ops.ranks.kept import keep
from moe_ops.ranks.links import Traffic
from moe_ops.ranks.packed import row_bytes
from moe_ops.ranks.transport import AUTO, GATHER, TRANSPORTS, Tables
from moe_ops.ranks.turns import Steps, Turns
from moe_ops.registry.gradients import needs_grad
from moe_ops.registry.invariance import INVARIANT, by_parts
from moe_ops.registry.spec import FORCED, REFERENCE, op

WORD_BYTES = 4  # bytes: what kernels copy
# Arguments of `experts` that are one layer's on all ranks. Biases are not: of shards that are added
# one has b2.
ALIKE = (
    "kind", "gated", "interleaved", "alpha", "limit", "up_shift", "w_format", "x_format", "layout",
)  # fmt: skip


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
    why = why_not_apart(layer.x_format, layer.has_input_scales)
    if why is not None:
        raise ValueError(why)


def why_not_apart(x_format: str, static: bool) -> str | None:
    """Why inputs of a format cannot be quantised where tokens of several ranks meet, or None."""
    if not x_format or static:
        return None
    if Format.of(x_format).group != TENSOR:
        return None
    return (
        f"x_format={x_format!r} takes one scale from all tokens, which differ from rank to rank; "
        "give static scales (x_scale and h_scale), or a format with a scale for each row or group"
    )


@op(check=check, arithmetic=by_parts)
def experts_over_ranks(call: ExpertsOverRanksCall) -> Tensor:
    """Run this rank's tokens through their experts, wherever these are: `combine_tokens` of
    `experts` of `dispatch_tokens`.

    Each rank gives its own tokens, at most `rows`, and gets their results: out_t = sum_k w_tk *
    (W2_e act(W13_e x_t + b13_e) + b2_e) with e = ids_TK[t, k] among the physical experts of all
    ranks. Arguments and their meaning are those of `experts`, of which the weights are those here,
    and of `dispatch_tokens`. collective: "gather", "exchange", "push", or "auto" for the
    cheapest one of `rows` rows, whose backends have the same names. Results differ between
    transports by no more than rounding.

    Tokens of an x_format of 8 bits with scales of their own are quantised before they are sent, and
    travel as codes with their scales, unless `why_floats` says why not: the bits of the result are
    those that the same transport gives of floats.

    A batch invariant call gives a token's result the bits that `experts` gives it, with the experts
    of all ranks, on one: ranks send back a row for each choice, and the token's own one sums them.

    Every rank of the group has to call it, also one without tokens. Result [T, D] in x's dtype.
    Raises as `experts` and `dispatch_tokens` do, ValueError for an x_format with a dynamic scale of
    all tokens, and NotImplementedError for experts in shards where calls are batch invariant.
    """
    return over_ranks(call, GATHER if call.ranks.collective == AUTO else call.ranks.collective)


def over_ranks(call: ExpertsOverRanksCall, collective: str) -> Tensor:
    """The definition, by one transport."""
    sent, apart = _sent(call, collective), INVARIANT.get()
    arrived = dispatch_tokens.part(sent)
    if apart:
        arrived = _apart(call, collective, arrived)
    y_GD = experts.part(_here(call, sent, arrived))
    out_TD: Tensor = combine_tokens.part(_back(call, collective, y_GD, arrived))
    return _weighed(call, out_TD) if apart else out_TD


def in_steps(call: ExpertsOverRanksCall, collective: str) -> Steps:
    """The definition by "gather" or "exchange", without gradients, in steps of `turns.py`."""
    sent, apart = _sent(call, collective), INVARIANT.get()
    send = start_dispatch(sent)
    yield
    arrived = send()
    if apart:
        arrived = _apart(call, collective, arrived)
    y_GD = experts.part(_here(call, sent, arrived))
    send_back = start_combine(_back(call, collective, y_GD, arrived))
    yield
    out_TD = send_back()
    return _weighed(call, out_TD) if apart else out_TD


def _sent(call: ExpertsOverRanksCall, collective: str) -> DispatchTokensCall:
    """The tokens of a call on their way: as codes, where these travel.

    Raises NotImplementedError for a call that is to be batch invariant, and cannot be.
    """
    layer, ranks = call.layer, call.ranks
    why = why_in_parts(ranks.rank_of_P, Group.of(ranks.group)) if INVARIANT.get() else None
    if why is not None:
        raise NotImplementedError(f"experts_over_ranks is not batch invariant: {why}")
    x_TD, scale_TS = layer.x_TD, None
    if sends_codes(layer):
        x_TD, scale_TS = quantize(x_TD, layer.x_format)
    return DispatchTokensCall(
        x_TD, layer.weights_TK, layer.ids_TK, ranks.rank_of_P, ranks.slot_of_P, ranks.rows,
        ranks.group, scale_TS, collective,
        alike(lambda name: getattr(layer, name), x_TD, ranks.group, INVARIANT.get()),
    )  # fmt: skip


def _apart(call: ExpertsOverRanksCall, collective: str, arrived: Arrived) -> Arrived:
    """What arrived, with a row for each choice, whose weight is left to the token's own rank."""
    ranks = call.ranks
    tables = Tables(ranks.rank_of_P, ranks.slot_of_P)
    apart = by_choice(arrived, call.layer.ids_TK, tables, collective, ranks.group)
    x_RD, scale_RS, weights_R1, ids_R1, pair_N, splits_2R = apart
    return x_RD, scale_RS, torch.ones_like(weights_R1), ids_R1, pair_N, splits_2R


def _weighed(call: ExpertsOverRanksCall, y_ND: Tensor) -> Tensor:
    """The weighted sum of each token's rows, of which row t * K + k is of choice k."""
    rows_N = rows_of_pairs(call.layer.ids_TK, call.ranks.rank_of_P.shape[0])
    out_TD: Tensor = combine.part(CombineCall(y_ND, call.layer.weights_TK, rows_N))
    return out_TD


def _here(call: ExpertsOverRanksCall, sent: DispatchTokensCall, arrived: Arrived) -> ExpertsCall:
    """The experts here on the rows that arrived."""
    x_GD, scale_GS, weights_GK, ids_GK, _, _ = arrived
    here = replace(call.layer, x_TD=x_GD, weights_TK=weights_GK, ids_TK=ids_GK)
    if sent.scale_TS is not None:
        here.x_scale_TG = scale_GS
        here.out_dtype = str(call.layer.x_TD.dtype).removeprefix("torch.")
    return here


def _back(
    call: ExpertsOverRanksCall, collective: str, y_GD: Tensor, arrived: Arrived
) -> CombineTokensCall:
    """The way back of what the experts here made, rows of tokens or of their choices."""
    ranks, ids_TK, (ids_GK, token_N, splits_2R) = call.ranks, call.layer.ids_TK, arrived[3:]
    K = ids_GK.shape[1]
    return CombineTokensCall(
        y_GD, ids_TK.reshape(-1, K), ranks.rank_of_P, ranks.slot_of_P, token_N, splits_2R,
        ranks.rows * (ids_TK.shape[1] // K), ranks.group, collective,
    )  # fmt: skip


def in_turn(call: ExpertsOverRanksCall, turns: Turns) -> Tensor:
    """`experts_over_ranks` in its turn, by the transport of the turns, for their rows.

    Raises as the op does, and ValueError where a gradient is asked for.
    """
    check(call)
    layer = call.layer
    if needs_grad(layer.x_TD, layer.weights_TK, layer.w13_EFD, layer.w2_EDI):
        raise ValueError(
            "two_halves has no gradients, and one is asked for; call the block itself, or under "
            "torch.no_grad()"
        )

    def begin(rows: int, absent: bool) -> Steps:
        given = (layer.x_TD, layer.weights_TK, layer.ids_TK)
        x_TD, weights_TK, ids_TK = [t[:0] for t in given] if absent else given
        mine = ExpertsOverRanksCall(
            replace(layer, x_TD=x_TD, weights_TK=weights_TK, ids_TK=ids_TK),
            replace(call.ranks, rows=rows),
        )
        return in_steps(mine, turns.collective)

    return turns.exchange(begin)


def alike(argument: Callable[[str], Any], x_TD: Tensor, group: str, invariant: bool = False) -> str:
    """What `dispatch_tokens` compares of arguments of experts, given by name, and of what a call is
    to be; nothing where ranks compare nothing.

    Dynamo traces it in a layer, and can look neither into a group nor into `json`.
    """
    if not x_TD.is_cpu or not group:
        return ""
    said = [f'"{name}": {_as_json(argument(name))}' for name in ALIKE]
    said += [f'"batch_invariant": {_as_json(invariant)}']
    return "{" + ", ".join(said) + "}"


def _as_json(value: str | float | None) -> str:
    """A value as JSON: a word without quotes, a bool, a finite number, or a limit, which may be
    infinite."""
    if isinstance(value, str):
        return f'"{value}"'
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if torch.compiler.is_compiling():  # where sizes vary, a number may be symbolic
        from torch.fx.experimental.symbolic_shapes import guard_scalar  # takes long to import

        value = guard_scalar(value)
    return "Infinity" if value == math.inf else repr(value)


def sends_codes(layer: ExpertsCall) -> bool:
    """Whether the tokens of a layer travel as codes and scales. All ranks say the same: it depends
    on formats, widths and what is asked for, not on tokens."""
    return bool(layer.x_format) and why_floats(layer) is None


def why_floats(layer: ExpertsCall) -> str | None:
    """Why tokens travel as floats, though the experts quantise them to x_format; or None."""
    reason = not_codes(layer.x_format, layer.x_scale)
    if reason is not None:
        return f"{layer.x_format} {reason}"
    if needs_grad(layer.x_TD, layer.weights_TK):
        return "a gradient is asked for, which codes have not"
    parts = _codes_of(layer)
    if any(width * dtype.itemsize % WORD_BYTES for width, dtype in parts):
        said = " and ".join(str(width * dtype.itemsize) for width, dtype in parts)
        return f"codes and scales of a token are {said} bytes, which fill no words of {WORD_BYTES}"
    forced = FORCED.get() or {}
    name = forced.get(experts.name) or forced.get("*")
    # Neither in most calls, which come here several times.
    for backend in experts.backends.values() if layer.layout or name else ():
        prepared = backend.layout is not None and backend.layout.name == layer.layout
        only = prepared or (backend.name == name != REFERENCE)
        if only and "x_scale_TG" not in backend.reads:
            return f"the experts run on {backend.name}, which quantises floats itself"
    return None


def sent_as(layer: ExpertsCall) -> str:
    """How tokens travel that experts quantise, and results that are batch invariant, in words;
    empty for others."""
    dtype, said = str(layer.x_TD.dtype).removeprefix("torch."), []
    if layer.x_format:
        reason = why_floats(layer)
        how = f"{dtype}: {reason}" if reason is not None else f"{layer.x_format} codes"
        said.append(f"tokens are sent as {how}")
    if INVARIANT.get():
        row = layer.x_TD.shape[1] * layer.x_TD.dtype.itemsize
        said.append(f"each of {layer.ids_TK.shape[1]} choices comes back as a row of {row} bytes")
    return "; ".join(said)


def _codes_of(layer: ExpertsCall) -> list[tuple[int, torch.dtype]]:
    """Width and dtype of the codes of a token, and of its scales."""
    parsed, D = Format.of(layer.x_format).parsed, layer.x_TD.shape[1]
    return [(D, parsed.storage.dtype), (parsed.scale_shape(1, D)[1], parsed.scale_dtype)]


def traffic(call: ExpertsOverRanksCall) -> Traffic:
    """What a call's ranks send each other."""
    layer, ranks = call.layer, call.ranks
    weights_TK, K = layer.weights_TK, layer.ids_TK.shape[1]
    floats = [(layer.x_TD.shape[1], layer.x_TD.dtype)]
    tokens = _codes_of(layer) if sends_codes(layer) else floats
    return Traffic(
        ranks=Group.of(ranks.group).size,
        experts=ranks.rank_of_P.shape[0],
        top_k=K,
        there=row_bytes([*tokens, (weights_TK.shape[1], weights_TK.dtype), (K, torch.int32)]),
        back=layer.x_TD.shape[1] * layer.x_TD.dtype.itemsize,
        by_choice=INVARIANT.get(),
    )


experts_over_ranks.fake(fake_impls.experts_over_ranks)
experts_over_ranks.keeps(keep)

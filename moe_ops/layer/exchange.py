"""How the ranks of a layer exchange the tokens that each has of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ops.checks.options import MOST_SIZE, check_int, check_text
from moe_ops.checks.shapes import check_choice
from moe_ops.ops.dispatch_tokens import MOST_ROWS
from moe_ops.ops.experts_over_ranks import why_not_apart
from moe_ops.parallel.config import (
    ALLGATHER,
    AUTO,
    HIGH_THROUGHPUT,
    LOW_LATENCY,
    ParallelConfig,
)
from moe_ops.quant.config import QuantConfig
from moe_ops.ranks import transport
from moe_ops.ranks.agree import require_alike, said_by_all
from moe_ops.ranks.groups import Group
from moe_ops.ranks.turns import agreed
from moe_ops.registry.watched import counting, dispatch_modes, tracing, transforms

ALL_TOKENS, OWN_TOKENS = "replicated", "own"
TOKENS = (ALL_TOKENS, OWN_TOKENS)
TRANSPORT_OF = {
    ALLGATHER: transport.GATHER, HIGH_THROUGHPUT: transport.EXCHANGE,
    LOW_LATENCY: transport.PUSH, AUTO: transport.AUTO,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """The groups over which a layer's tokens go to their experts.

    sharers: how many neighbours in `group` have the same tokens, of which each sends a part; they
    are `tp_group`. most: the largest number of tokens that a rank sends at once.
    """

    group: str
    tp_group: str
    sharers: int
    most: int
    collective: str

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Exchange | None:
        """What the arguments of a layer ask for; None where its forward sends nothing.

        Raises ValueError, saying what to do, for groups and sizes that do not fit.
        """
        check_tokens(given)
        parallel: ParallelConfig = given["parallel"]
        if given["tokens"] != OWN_TOKENS or parallel.size == 1:
            return None
        if given["max_num_tokens"] is None:
            raise ValueError(
                "tokens='own' needs max_num_tokens, the most tokens that a rank sends at once, "
                "alike on all ranks"
            )
        if given["reduce_results"] is not None:
            raise ValueError(
                "tokens='own' gives each rank the whole result of its tokens; leave out "
                "reduce_results, which would add those of different tokens"
            )
        quant = QuantConfig.of(given["quant"])
        why = why_not_apart(quant.inputs, quant.static_inputs) if quant is not None else None
        if why is not None:
            raise ValueError(why)
        sharers = parallel.sharers
        check_group("group", given["group"], parallel.size, parallel.rank)
        if sharers > 1:
            check_group("tp_group", given["tp_group"], sharers, parallel.rank % sharers)
        elif given["tp_group"]:
            raise ValueError(
                f"tp_group={given['tp_group']!r} is for ranks that start with the same tokens, and "
                f"in {parallel.describe()} there are none; leave it out"
            )
        auto = parallel.collective == AUTO and not parallel.uses_ep  # every rank needs each token
        collective = transport.GATHER if auto else TRANSPORT_OF[parallel.collective]
        return cls(
            group=given["group"], tp_group=given["tp_group"], sharers=sharers,
            most=given["max_num_tokens"], collective=collective,
        )  # fmt: skip


def check_tokens(given: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError unless the arguments that speak of tokens and groups are of the
    types that a layer takes, and meant for the tokens that it is given."""
    if given["tokens"] is not None:
        check_text("tokens", given["tokens"])
        check_choice("tokens", given["tokens"], TOKENS)
    check_text("group", given["group"])
    check_text("tp_group", given["tp_group"])
    if given["max_num_tokens"] is not None:
        check_int("max_num_tokens", given["max_num_tokens"], least=1, most=MOST_ROWS)
    if given["tokens"] != OWN_TOKENS:
        unread = [n for n in ("group", "tp_group", "max_num_tokens") if given[n] not in ("", None)]
        if unread:
            raise ValueError(
                f"{', '.join(unread)} is read where ranks exchange tokens of their own, and "
                f"tokens={given['tokens']!r}; ask for tokens='own', or leave it out: "
                "reduce_results names the group that adds the parts of replicated tokens"
            )


def agreed_rows(rows: Any, x_TD: Tensor, exchange: Exchange) -> Any:
    """The most tokens that a rank has in a call, as all ranks agree: what they agreed on for this
    context, or `rows`, where one is given, else what they tell each other, but at least those that
    are sent at once.

    What is traced or captured asks nobody. Raises TypeError or ValueError for a number that cannot
    be and for more tokens than can be sent, and RuntimeError where ranks differ: on all of them
    where the host can tell.
    """
    most = exchange.most
    in_context = agreed()
    rows = rows if in_context is None else in_context
    known = most if rows is None else rows
    if torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return known  # the op looks at the tokens, when it is run
    if rows is not None:
        check_int("rows", rows, least=1, most=MOST_SIZE)
    if _is_traced(x_TD):
        return known
    tokens = x_TD.shape[0]
    if is_captured(x_TD):
        if tokens > known:
            raise ValueError(
                f"{tokens} tokens are more than {'max_num_tokens' if rows is None else 'rows'}="
                f"{known}, and ranks cannot ask each other while a CUDA graph is captured; give "
                "rows=, the most tokens of a rank, alike on all ranks"
            )
        return known
    group, said = Group.of(exchange.group), {"max_num_tokens": most}
    if rows is None:
        told = {**said, "tokens": tokens}
        every = said_by_all("MoELayer", told, group, own=("tokens",), device=x_TD.device)
        return max(most, *(values["tokens"] for values in every))
    if rows > most and x_TD.is_cpu:  # else the op compares
        require_alike("MoELayer", said, group, tokens, rows)
    return rows


def is_captured(x_TD: Tensor) -> bool:
    """Whether a CUDA graph is captured on the current stream of a tensor's device."""
    return x_TD.is_cuda and torch.cuda.is_current_stream_capturing()


def _is_traced(x_TD: Tensor) -> bool:
    """Whether a call is not run, but looked at by a tracer or a transform."""
    seen = transforms() or tracing() or (dispatch_modes() and not counting())
    return bool(seen) or x_TD.is_meta


def check_group(argument: str, name: str, size: int, rank: int, who: str = "tokens='own'") -> None:
    """Raise ValueError unless a group has so many ranks, of which this process is that one."""
    if not name:
        raise ValueError(
            f"{who} needs {argument}, the group_name of a group of torch.distributed with "
            f"{size} ranks, of which this is {rank}"
        )
    found = Group.of(name, argument)
    if (found.size, found.rank) != (size, rank):
        raise ValueError(
            f"{argument}={name!r} has {found.size} ranks, of which this is {found.rank}, but "
            f"parallel says rank {rank} of {size}; give the group of these ranks, in their order"
        )

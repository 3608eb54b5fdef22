"""Parts of a layer's result: of which tokens, of routed and of shared experts, of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops import streams
from moe_ops.checks.shapes import check_choice
from moe_ops.layer import beside
from moe_ops.layer.exchange import ALL_TOKENS, OWN_TOKENS
from moe_ops.ops import sum_ranks
from moe_ops.ops.linear_layers import apply_linear
from moe_ops.parallel.config import ALLGATHER, AUTO, ParallelConfig
from moe_ops.parallel.expert_map import ExpertPlacement
from moe_ops.ranks.groups import default_group

PARTIAL, REPLICATED = "partial", "replicated"
LEFT = (
    "the rank of this layer left its group by resize_layer, so that others serve its experts now; "
    "make a layer for the group that this rank is in"
)
Reduction = str | Callable[[Tensor], Tensor] | None
ALONE = ""  # the name of a group of one rank, over which nothing has to be added


def missing_exchange(parallel: ParallelConfig, tokens: str | None) -> str | None:
    """What ranks would have to exchange for the sum of their forwards to be the layer's result, and
    what to do; None where the layer does, or where each rank is given all tokens.
    """
    if parallel.size == 1 or tokens == OWN_TOKENS:
        return None
    said = f"this layer is {parallel.describe()}, and sends no tokens to other ranks: "
    own = "forward would return this rank's experts' part of the sum for this rank's tokens alone. "
    asked = "Ask for the exchange: MoELayer(..., tokens='own', group=..., max_num_tokens=...)"
    around = "call `route` and `run_experts` around an exchange of your own"
    if parallel.collective not in (ALLGATHER, AUTO):
        return (
            f"{said}{parallel.collective!r} is an exchange by all-to-all. {own}{asked}; or take "
            f"{ALLGATHER!r} and give every rank all tokens; or {around}"
        )
    sizes = {"dp": parallel.dp_size, "pcp": parallel.pcp_size, "sp": parallel.sp_size}
    apart = ", ".join(f"{name}_size={size}" for name, size in sizes.items() if size > 1)
    if tokens == ALL_TOKENS or not apart:
        return None
    return (
        f"{said}with {apart} each starts with tokens of its own. {own}{asked}; or gather the "
        "tokens of all ranks first, add the parts afterwards, and say so: tokens='replicated'; "
        f"leave out what holds a whole copy of the layer (dp) of the ParallelConfig; or {around}"
    )


@dataclass(slots=True, kw_only=True)
class Combination:
    """How a layer's result is made of what its routed experts return on this rank.

    shared: a module of shared experts, whose result is added, and what that is by shared_reduction;
    transform: what routed experts' sum goes through; reduction: what adds the parts of the ranks;
    beside: whether the module runs on a second stream; batch_invariant: what the layer was made
    with.
    """

    shared: nn.Module | None
    transform: nn.Module | None
    shared_reduction: str
    separate: bool
    reduction: Reduction
    rank: int
    beside: bool | None
    batch_invariant: bool

    @classmethod
    def of(cls, layer: Any) -> Combination:
        """How the result of a `MoELayer` is made."""
        return cls(
            shared=layer.shared_experts, transform=layer.routed_output_transform,
            shared_reduction=layer.shared_reduction, separate=layer.separate,
            reduction=layer.reduce_results, rank=layer.parallel.rank, beside=layer.beside,
            batch_invariant=layer.batch_invariant,
        )  # fmt: skip

    def start_shared(
        self, x_TD: Tensor, asked: bool | None, priority: int = streams.AHEAD
    ) -> Callable[[], Tensor]:
        """Start the module of shared experts; what is returned gives its result."""
        assert self.shared is not None
        run = partial(apply_linear, self.shared, batch_invariant=self.batch_invariant)
        return beside.start(self.shared, run, x_TD, asked, priority)

    def transformed(self, routed_TD: Tensor) -> Tensor:
        """The sum of routed experts, in the layer's width."""
        if self.transform is None:
            return routed_TD
        return apply_linear(self.transform, routed_TD, self.batch_invariant)

    def check(self, ranks: int, apart: bool) -> None:
        """Raise ValueError, saying what to do, unless `result_of` can make something of it.

        apart: no two ranks have the same tokens.
        """
        check_choice("shared_reduction", self.shared_reduction, (PARTIAL, REPLICATED))
        if apart and self.shared is not None and self.shared_reduction == PARTIAL:
            raise ValueError(
                "shared_reduction='partial' says that shared experts return a part of a sum over "
                "the ranks, but each rank has tokens of its own; give shared experts that are "
                "whole on every rank, and say so: shared_reduction='replicated'"
            )
        if self.separate and self.shared is None:
            raise ValueError(
                "separate=True returns what a module of shared experts returns by itself, but "
                "there is no such module; give it as shared_experts, or leave out separate"
            )
        if self.beside and self.shared is None:
            raise ValueError(
                "beside=True runs a module of shared experts on a second stream, but there is none "
                "(fused ones are launched with routed experts); give it as shared_experts, or "
                "leave out beside"
            )
        biased = isinstance(self.transform, nn.Linear) and self.transform.bias is not None
        if biased and ranks > 1 and self.reduction is None:
            raise ValueError(
                f"each of {ranks} ranks would add the bias of routed_output_transform to its part "
                "of a sum; give reduce_results, so that the sum is transformed, or leave out the "
                "bias and add it after the sum"
            )


def result_of(how: Combination, x_TD: Tensor, routed: Callable[[], Tensor]) -> tuple[Tensor, ...]:
    """A layer's result, of which `routed` gives this rank's routed part; if separate, that of
    shared experts and the rest. Shared experts run beside it where that pays."""
    shared, reduction = how.shared, how.reduction
    in_parts = how.shared_reduction == PARTIAL
    # Where nothing reduces, the first rank adds what is replicated for all.
    here = in_parts or how.separate or reduction is not None or how.rank == 0
    started = None if shared is None or not here else how.start_shared(x_TD, how.beside)
    routed_TD = routed()
    if in_parts and started is not None and how.transform is None and not how.separate:
        return (_reduced(_added(routed_TD, started()), reduction),)  # at once
    # The sum of the ranks is transformed, by whatever module, and mostly less wide than the result.
    routed_TD = how.transformed(_reduced(routed_TD, reduction))
    if started is None:
        return (routed_TD,)
    shared_TD = _reduced(started(), reduction) if in_parts else started()
    return (shared_TD, routed_TD) if how.separate else (_added(routed_TD, shared_TD),)


def result_over_ranks(
    how: Combination, tp_group: str, x_TD: Tensor, routed: Callable[[], Tensor]
) -> tuple[Tensor, ...]:
    """A layer's result for tokens of a rank's own, of which `routed` gives the whole routed part.
    Shared experts run beside it, unless they are not to. tp_group: neighbours with the same
    tokens."""
    asked = how.beside is not False  # what ranks wait for each other is theirs
    started = None
    if how.shared is not None:
        started = how.start_shared(x_TD, asked, streams.ALIKE)
    routed_TD = how.transformed(routed())
    if started is None:
        return (routed_TD,)
    shared_TD = started()
    if how.shared_reduction == PARTIAL and tp_group:
        shared_TD = sum_ranks(shared_TD, tp_group)
    return (shared_TD, routed_TD) if how.separate else (_added(routed_TD, shared_TD),)


def reduction_of(asked: Reduction | bool, parallel: ParallelConfig) -> Reduction:
    """What adds the parts of a layer's ranks: of True the name of the default group, and of False
    nothing. Raises ValueError, saying what to do, for a default group that is not of these ranks.
    """
    if not isinstance(asked, bool):
        return asked
    if not asked:
        return None
    if parallel.size == 1:
        return ALONE
    found = default_group("reduce_results=True")
    if (found.size, found.rank) != (parallel.size, parallel.rank):
        raise ValueError(
            f"reduce_results=True takes the default group, which has {found.size} ranks, of which "
            f"this is {found.rank}, but parallel says rank {parallel.rank} of {parallel.size}; "
            "give the group_name of the group of these ranks"
        )
    return found.name


def _reduced(part_TD: Tensor, reduction: Reduction) -> Tensor:
    """The sum of the ranks' parts, or this rank's if nothing reduces them."""
    if reduction is None or reduction == ALONE:
        return part_TD
    return sum_ranks(part_TD, reduction) if isinstance(reduction, str) else reduction(part_TD)


def _added(routed_TD: Tensor, shared_TD: Tensor) -> Tensor:
    """The sum of what routed and shared experts return. Raises ValueError for unlike widths."""
    if routed_TD.shape[-1] != shared_TD.shape[-1]:
        raise ValueError(
            f"routed experts return a width of {routed_TD.shape[-1]} and the shared ones "
            f"{shared_TD.shape[-1]}, which cannot be added; give a routed_output_transform from "
            f"{routed_TD.shape[-1]} to {shared_TD.shape[-1]}, or take both with separate=True"
        )
    return routed_TD + shared_TD


def counted_ids(ids_TK: Tensor, part: Tensor) -> Tensor:
    """The ids of the first part[0] / part[1] of the tokens; -1 for those of others."""
    T = ids_TK.shape[0]
    places_T1 = torch.arange(T, device=ids_TK.device)[:, None]
    return torch.where(places_T1 * part[1] < T * part[0], ids_TK, -1)


def with_fused(
    weights_TK: Tensor, ids_TK: Tensor, placement: ExpertPlacement, own: bool
) -> tuple[Tensor, Tensor]:
    """Weights and ids with those of fused shared experts behind them; -1 where another rank serves
    the token, unless the tokens are this rank's own.
    """
    T, S, first = ids_TK.shape[0], placement.shared, placement.num_physical
    ids_S = torch.arange(first, first + S, dtype=ids_TK.dtype, device=ids_TK.device)
    ids_TS = ids_S.expand(T, S)
    if placement.config.uses_ep and not own:
        # Every rank holds the shared experts whole: each token's are to be added once.
        tokens_T1 = torch.arange(T, device=ids_TK.device)[:, None]
        mine_T1 = tokens_T1 % placement.config.ep_size == placement.config.ep_rank
        ids_TS = torch.where(mine_T1, ids_TS, -1)
    return (
        torch.cat((weights_TK, weights_TK.new_ones(T, S)), dim=1),
        torch.cat((ids_TK, ids_TS), dim=1),
    )


def ordered_rows(
    x_TD: Tensor, ids_TK: Tensor, order_ED: Tensor, expert_map: Tensor | None
) -> Tensor:
    """A row [T * K, D] for each pair of a token and an expert, columns in the expert's order.

    Rows of experts that live elsewhere are in any order. One of a token's K experts at a time, so
    that indices take 8 bytes for each value of x, and not K times as many.
    """
    slots_TK = ids_TK.clamp(min=0).long()
    if expert_map is not None:
        slots_TK = expert_map[slots_TK].clamp(min=0).long()
    rows = [x_TD.gather(1, order_ED[slots_T]) for slots_T in slots_TK.unbind(1)]
    return torch.stack(rows, 1).flatten(0, 1)

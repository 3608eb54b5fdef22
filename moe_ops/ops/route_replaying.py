"""The router whose choice was made before: weights of given experts by logits of now."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

import torch
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.shapes import wide
from moe_ops.ops.route import (
    RouteCall,
    beyond_groups,
    finished,
    formula_of,
    route,
    score_of,
)
from moe_ops.ops.route import check as check_route
from moe_ops.ops.route_recording import check_ids, route_first
from moe_ops.registry.invariance import INVARIANT
from moe_ops.registry.spec import op


@dataclass(slots=True)
class RouteReplayingCall:
    """The arguments of `route_replaying`: a call of `route`, and the experts that it takes."""

    routing: RouteCall
    given_ids_SK: Tensor

    FLAT: ClassVar[dict[str, str]] = route_first("given_ids_SK")


def check(call: RouteReplayingCall) -> None:
    """Raise ValueError or TypeError unless `route_replaying` takes these arguments."""
    routing, given = call.routing, call.given_ids_SK
    check_route(routing)
    check_ids("given_ids_SK", given, routing)
    T, E = routing.logits_TE.shape
    if given.shape[0] < T:
        raise ValueError(f"given_ids_SK has {given.shape[0]} rows for {T} tokens; give as many")
    beyond = beyond_groups(E, routing.top_k, routing.n_group, routing.topk_group)
    if beyond is not None and routing.group_fill == "zero_weight":
        raise ValueError(f"{beyond}, of which others weigh nothing; lower top_k")


@op(check=check)
def route_replaying(call: RouteReplayingCall) -> tuple[Tensor, Tensor]:
    """`route` with given experts: the weights of these, by the logits. Returns (weights_TK, ids_TK
    in int32).

        ids      i_t = given_ids_SK[t] for the first T rows; of a row that begins with a negative
                 number the ids that `route` chooses
        weights  as `route` defines them, of the scores at these ids: with its softmax, sum, eps,
                 min_sum, scale and per_expert_scale_E. Groups and bias choose experts and weigh
                 none, so given ones keep their scores wherever the best groups are now.

    Where `route` chooses what is given the results are its own. Gradients reach the logits, and
    per_expert_scale_E, through the weights.

    given_ids_SK: int16 [S, top_k], contiguous, S at least T, ids below E; the other arguments are
    those of `route`. Raises ValueError or TypeError for what `route` does, for ids that do not fit,
    and for more choices than the groups that are kept have experts.
    """
    c = call.routing
    logits = wide(c.logits_TE)
    T = logits.shape[0]
    given_TK = call.given_ids_SK[:T].to(torch.int64)
    own_TK = route.part(c)[1].to(torch.int64)
    ids_TK = torch.where(given_TK[:, :1] >= 0, given_TK, own_TK)
    scores_TE = _scores_of_rows(c) if INVARIANT.get() else score_of(logits, c.score)
    weights_TK = finished(c, scores_TE.gather(1, ids_TK), ids_TK)
    return weights_TK, ids_TK.to(torch.int32)


def _scores_of_rows(routing: RouteCall) -> Tensor:
    """The scores of a call that has to be batch invariant, as `route` computes them where it
    chooses all experts: PyTorch computes the last numbers of a tensor by other functions than the
    rest."""
    E = routing.logits_TE.shape[1]
    sorted_TE, ids_TE = route.part(RouteCall(routing.logits_TE, E, score=routing.score))
    return torch.zeros_like(sorted_TE).scatter(1, ids_TE.to(torch.int64), sorted_TE)


route_replaying.differentiated(formula_of(route_replaying, attrgetter("routing")))
route_replaying.fake(fake_impls.route_replaying)

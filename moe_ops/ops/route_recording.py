"""The router, which also writes down which experts it chose."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import ClassVar

import torch
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.shapes import check_float, wide_dtype
from moe_ops.ops.route import RouteCall, formula_of, route
from moe_ops.ops.route import check as check_route
from moe_ops.registry.spec import op

MOST_EXPERTS = 2**15  # that two bytes tell apart, -1 being none


def route_first(*behind: str) -> dict[str, str]:
    """The arguments of `route` by name, with others behind those that have no default."""
    first = {name: f"routing.{name}" for name in ("logits_TE", "top_k")}
    rest = {f.name: f"routing.{f.name}" for f in fields(RouteCall) if f.name not in first}
    return {**first, **{name: name for name in behind}, **rest}


@dataclass(slots=True)
class RouteRecordingCall:
    """The arguments of `route_recording`: a call of `route`, and the rings that it writes to."""

    routing: RouteCall
    ring_ids_SK: Tensor
    at: Tensor
    ring_weights_SK: Tensor | None = None

    MUTATED: ClassVar[tuple[str, ...]] = ("ring_ids_SK", "ring_weights_SK")
    FLAT: ClassVar[dict[str, str]] = {
        **route_first("ring_ids_SK", "at"),
        "ring_weights_SK": "ring_weights_SK",
    }


def check(call: RouteRecordingCall) -> None:
    """Raise ValueError or TypeError unless `route_recording` takes these arguments."""
    routing, at = call.routing, call.at
    check_route(routing)
    check_ids("ring_ids_SK", call.ring_ids_SK, routing)
    if at.dtype is not torch.int64 or tuple(at.shape) != (1,) or not _is_beside(at, routing):
        raise ValueError(
            f"at must be int64 [1] on {routing.logits_TE.device}, the row of the first token, got "
            f"{at.dtype} {list(at.shape)} on {at.device}"
        )
    ring = call.ring_weights_SK
    if ring is None:
        return
    check_float("ring_weights_SK", ring, 2, routing.logits_TE)
    wide = wide_dtype(routing.logits_TE)
    if not (
        ring.dtype is wide
        and ring.shape == call.ring_ids_SK.shape
        and ring.is_contiguous()
        and _is_beside(ring, routing)
    ):
        raise ValueError(
            f"ring_weights_SK must be contiguous {wide} of the shape and on the device of "
            f"ring_ids_SK, {list(call.ring_ids_SK.shape)}, got {ring.dtype} {list(ring.shape)} "
            f"with strides {ring.stride()} on {ring.device}"
        )


def check_ids(name: str, ids_SK: Tensor, routing: RouteCall) -> None:
    """Raise ValueError unless rows of a tensor hold the ids of two bytes of a routing's tokens."""
    E, K = routing.logits_TE.shape[1], routing.top_k
    if E > MOST_EXPERTS:
        raise ValueError(f"logits_TE has {E} experts; two bytes tell {MOST_EXPERTS} apart")
    if (
        ids_SK.dtype is not torch.int16
        or ids_SK.dim() != 2
        or ids_SK.shape[0] < 1
        or ids_SK.shape[1] != K
        or not ids_SK.is_contiguous()
        or not _is_beside(ids_SK, routing)
    ):
        raise ValueError(
            f"{name} must be contiguous int16 [rows, top_k={K}] with a row or more on "
            f"{routing.logits_TE.device}, got {ids_SK.dtype} {list(ids_SK.shape)} with strides "
            f"{ids_SK.stride()} on {ids_SK.device}"
        )


def _is_beside(t: Tensor, routing: RouteCall) -> bool:
    return t.device == routing.logits_TE.device


@op(check=check)
def route_recording(call: RouteRecordingCall) -> tuple[Tensor, Tensor]:
    """`route`, which also writes what it chose into rings: ring_ids[(at + t) mod S] = ids[t].

    Returns (weights_TK, ids_TK) as `route` does for the same arguments, which are its own. at is
    the row of the first token, read on the device; nothing advances it, so a call that is repeated
    writes the same rows again. Of more than S tokens the last S are written. Backends with kernels
    write in the launch that routes. T = 0 writes nothing.

    ring_ids_SK: int16 [S, top_k], contiguous, written in place; at: int64 [1]; ring_weights_SK:
    float32 [S, top_k], contiguous, written in place, or None; float64 of float64 logits. Gradients
    reach the logits as through `route`. Raises ValueError or TypeError for what `route` does, for
    rings that do not fit, and for more experts than two bytes tell apart.
    """
    weights_TK, ids_TK = route.part(call.routing)
    write_rows(call.ring_ids_SK, call.at, ids_TK)
    if call.ring_weights_SK is not None:
        write_rows(call.ring_weights_SK, call.at, weights_TK)
    return weights_TK, ids_TK


@torch.no_grad()
def write_rows(ring_SK: Tensor, at: Tensor, rows_TK: Tensor) -> None:
    """Write rows into a ring, the first at row `at`; of more than it has the last ones."""
    S, T = ring_SK.shape[0], rows_TK.shape[0]
    places_T = torch.arange(T, device=ring_SK.device) + at
    if T > S:
        places_T, rows_TK = places_T[-S:], rows_TK[-S:]
    ring_SK.index_copy_(0, places_T % S, rows_TK.detach().to(ring_SK.dtype))


route_recording.differentiated(
    formula_of(route_recording, attrgetter("routing"), ("ring_ids_SK", "ring_weights_SK"))
)
route_recording.fake(fake_impls.route_recording)

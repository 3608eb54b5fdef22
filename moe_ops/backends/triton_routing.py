"""The Triton backends of routers that write down what they choose, or take what was written: the
launch of `route`, which also stores ids in a ring, or loads them."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.backends import reads
from moe_ops.backends.triton import A_WARP, rest_of_route, supports_route, tensors_of_route
from moe_ops.backends.triton_ahead import Before, compiles_ahead
from moe_ops.ops.route_recording import RouteRecordingCall, route_recording
from moe_ops.ops.route_replaying import RouteReplayingCall, route_replaying


@route_recording.backend(
    "triton",
    reads=reads.RECORDING,
    supports=lambda call: supports_route(call.routing),
    devices=("cuda",),
    priority=1,
    arithmetic=lambda call: A_WARP,
)
def record(call: RouteRecordingCall) -> tuple[Tensor, Tensor]:
    """`route_recording` in one launch."""
    return _record(call)


def _record(call: RouteRecordingCall, before: Before = None) -> tuple[Tensor, Tensor]:
    from moe_ops.kernels.triton import routing
    from moe_ops.kernels.triton.replay import replay

    rings = call.ring_ids_SK, call.ring_weights_SK, call.at
    tensors = (*tensors_of_route(call.routing), *rings)
    out = replay(routing.route_recording, tensors, rest_of_route(call.routing), before)
    for ring in rings[:2]:
        if ring is not None and not ring.is_inference():
            torch.autograd.graph.increment_version(ring)
    return out


@route_replaying.backend(
    "triton",
    reads=reads.ROUTE,
    supports=lambda call: supports_route(call.routing),
    devices=("cuda",),
    priority=1,
    arithmetic=lambda call: A_WARP,
)
def replay_ids(call: RouteReplayingCall) -> tuple[Tensor, Tensor]:
    """`route_replaying` in one launch."""
    return _replay_ids(call)


def _replay_ids(call: RouteReplayingCall, before: Before = None) -> tuple[Tensor, Tensor]:
    from moe_ops.kernels.triton import routing
    from moe_ops.kernels.triton.replay import replay

    tensors = (*tensors_of_route(call.routing), call.given_ids_SK)
    return replay(routing.route_replaying, tensors, rest_of_route(call.routing), before)


compiles_ahead(route_recording, "triton", _record)
compiles_ahead(route_replaying, "triton", _replay_ids)

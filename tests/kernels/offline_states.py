"""What layers that keep states launch, for one token and for a prompt."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from moe_ops.kernels.triton.decode import scans, states

WITH_STATES = (scans, states)
# Heads of the keys, heads of the state, key width, value width.
STATES = [(16, 32, 128, 128), (8, 64, 128, 64), (4, 4, 256, 128), (2, 4, 24, 40)]


def with_states() -> Iterator[tuple[str, Callable[[], Any]]]:
    for sizes in STATES:
        _, H, _, V = sizes
        for B in (1, 32):
            for channels in (False, True):
                call = functools.partial(delta_rule, B, *sizes, channels)
                yield f"delta rule {B} {sizes} {channels}", call
            yield f"convolution {B} {sizes}", functools.partial(convolution, B, H * V)
            yield f"state space {B} {sizes}", functools.partial(state_space, B, *sizes)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def delta_rule(B: int, N: int, H: int, D: int, V: int, channels: bool) -> None:
    gates = empty(B, H, D, dtype=torch.float32) if channels else empty(B, H, dtype=torch.float32)
    q, v, state = empty(B, N, D), empty(B, H, V), empty(B, H, D, V, dtype=torch.float32)
    given = (q, q, v, gates, empty(B, H))
    states.step_delta_rule(*given, state, 0.088, True, ahead=B == 1, eps=1e-6)
    many = (t[:, None].expand(-1, 33, *t.shape[1:]) for t in given)
    scans.scan_delta_rule(*many, state if B > 1 else None, 0.088, True, eps=1e-6)


def state_space(B: int, N: int, H: int, D: int, V: int) -> None:
    x, b, state = empty(B, H, V), empty(B, N, D), empty(B, H, V, D, dtype=torch.float32)
    of_heads = empty(H, dtype=torch.float32)
    rest = (of_heads, empty(H), True)
    states.step_state_space(x, empty(B, H), of_heads, b, b, state, *rest, ahead=B == 1)
    x, dt, b = (t[:, None].expand(-1, 33, *t.shape[1:]) for t in (x, empty(B, H), b))
    scans.scan_state_space(x, dt, of_heads, b, b, state if B > 1 else None, 0.0, 1.0, *rest)


def convolution(B: int, D: int) -> None:
    states.step_convolution(empty(B, D), empty(B, D, 4), empty(D, 4), empty(D), True)

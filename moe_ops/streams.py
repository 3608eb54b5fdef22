"""Shared experts on a second stream of a GPU, beside routed ones: when, and how.

A second stream belongs to one stream of a device. All that it is given begins behind a wait for
that one (`fork`), which reads results behind a wait of its own (`join`). So memory that either of
them frees is given away in order: what the second stream makes comes from a pool of its own, from
which it alone takes, behind a fork. What it reads has to be held until the join.

Graphs get a pair of ops: `begin_shared` runs a shared expert, and `await_shared`, which nothing
that reads the result may come before, joins. Both take the same tokens, so that no compiler gives
their memory away in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}
MOST = 2**31 - 1
# Of second streams: that of shared experts beside routed ones, whose small launches else wait until
# all of a large one is placed; and that of what runs while ranks exchange tokens.
AHEAD, ALIKE = -1, 0
POOL = 32  # torch has so many streams of a priority


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """From how many tokens on a second stream pays for a layer's own code, in a CUDA graph and
    outside of one, and for shared experts with weights of how many bytes at most."""

    captured: int
    eager: int
    bytes: int = MOST

    def beside(self, x: Tensor) -> bool:
        """Whether shared experts of these tokens run beside routed ones, here and now."""
        if not x.is_cuda:
            return False
        least = self.captured if torch.cuda.is_current_stream_capturing() else self.eager
        return x.numel() // x.shape[-1] >= least


IN_ORDER = Limits(captured=MOST, eager=MOST)
ASKED_FOR = Limits(captured=1, eager=1)
# Of layers with shared experts of 6 to 84 MiB and 1 to 4096 tokens, the rate against that in order:
# captured 1.01 to 1.20; eager 0.79 to 1.00 up to 512 tokens, where the host is what takes the time,
# and 1.01 to 1.06 with 4096 (benchmarks/results/beside_h200.json). Of other GPUs nothing is known.
MEASURED: dict[str, Limits] = {
    "NVIDIA H200": Limits(captured=1, eager=4096, bytes=96 * 2**20),
}
# In graphs compiled with our passes: 0.61 to 0.98.
SLOWER = (
    "in compiled graphs its products were measured to be faster in order, merged with others of "
    "the same tokens; beside=True asks for it"
)

Key = tuple[int, int, int]  # a device, a stream, a priority
_seconds: dict[Key, torch.cuda.Stream] = {}
_pools: dict[tuple[int, int], list[torch.cuda.Stream]] = {}
_begun: dict[Key, int] = {}  # where the tokens are that graphs last gave to them
_names: dict[torch.device, str] = {}
_library = Library("moe_ops", "FRAGMENT")


def limits(asked: bool | None, device: torch.device, nbytes: int) -> tuple[Limits, str]:
    """For how many tokens shared experts with weights of so many bytes run beside routed ones in a
    layer's own code, and why: `asked` says, or None leaves it to what was measured."""
    if device.type != "cuda":
        return IN_ORDER, f"a {device.type} has no second stream"
    if asked is not None:
        return (ASKED_FOR, "it is asked for") if asked else (IN_ORDER, "it is not wanted")
    name = _called(device)
    found = MEASURED.get(name)
    if found is None:
        return IN_ORDER, f"on {name} it was not measured to pay"
    if nbytes > found.bytes:
        most, here = (f"{n / 2**20:.0f} MiB" for n in (found.bytes, nbytes))
        return IN_ORDER, f"it pays for weights of up to {most}, and these have {here}"
    words = f"from {found.captured} tokens on in CUDA graphs and from {found.eager} elsewhere"
    return found, f"on {name} it pays {words}"


def _called(device: torch.device) -> str:
    """What a GPU is called, kept: every eager call of a layer asks for it."""
    found = _names.get(device)
    if found is None:
        if not torch.cuda.is_available():
            return "a GPU elsewhere"
        found = _names.setdefault(device, torch.cuda.get_device_name(device))
    return found


def reserve(device: torch.device, priority: int) -> list[torch.cuda.Stream]:
    """The streams from which second ones are taken, made when first asked for: a capture that takes
    one makes none."""
    index = torch.cuda.current_device() if device.index is None else device.index
    found = _pools.get((index, priority))
    if found is None:
        made = [torch.cuda.Stream(index, priority=priority) for _ in range(POOL)]
        found = _pools.setdefault((index, priority), made)
    return found


def fork(device: torch.device, priority: int) -> torch.cuda.Stream:
    """The second stream of the current one, behind all that this one was given."""
    _, here, there = _both(device, priority)
    there.wait_stream(here)
    return there


def join(device: torch.device, priority: int) -> None:
    """Have the current stream wait for its second one."""
    _, here, there = _both(device, priority)
    here.wait_stream(there)


def _both(device: torch.device, priority: int) -> tuple[Key, torch.cuda.Stream, torch.cuda.Stream]:
    here = torch.cuda.current_stream(device)
    key = (here.device_index, here.cuda_stream, priority)
    there = _seconds.get(key)
    if there is None:
        pool = reserve(device, priority)
        there = _seconds.setdefault(key, pool[len(_seconds) % POOL])
    return key, here, there


def shared_expert(
    x: Tensor, w13: Sequence[Tensor], w2_DI: Tensor, gate_1D: Tensor | None, kind: str
) -> Tensor:
    """A shared expert of tokens [..., D]: W2 h, times sigmoid(g x) with a gate.

    h is act(W x) of one weight [I, D], act(W_g x) * W_u x of two, or the same of one [2I, D] with
    the rows of the gate first. Rounded as PyTorch does, an op at a time.
    """
    act, width = ACTIVATIONS[kind], w2_DI.shape[1]
    ys = [F.linear(x, w) for w in w13]
    if ys[0].shape[-1] == 2 * width:
        ys = [*ys[0].chunk(2, dim=-1)]
    h = act(ys[0])
    if len(ys) == 2:
        h = h * ys[1]
    out = F.linear(h, w2_DI)
    return out if gate_1D is None else torch.sigmoid(F.linear(x, gate_1D)) * out


def _begin(
    x: Tensor, w13: Sequence[Tensor], w2_DI: Tensor, gate_1D: Tensor | None, kind: str
) -> Tensor:
    if not x.is_cuda:
        return shared_expert(x, w13, w2_DI, gate_1D, kind)
    key, here, there = _both(x.device, AHEAD)
    there.wait_stream(here)
    _begun[key] = x.data_ptr()
    with torch.cuda.stream(there):
        return shared_expert(x, w13, w2_DI, gate_1D, kind)


def _await(shared: Tensor, x: Tensor, routed: Tensor) -> None:
    if x.is_cuda:
        key, here, there = _both(x.device, AHEAD)
        if _begun.pop(key) != x.data_ptr():
            raise RuntimeError(
                "the tokens that a graph holds are a copy of those that are read, whose memory may "
                "be given away; compile without beside=True, and report it"
            )
        here.wait_stream(there)


def _fake_begin(
    x: Tensor, w13: Sequence[Tensor], w2_DI: Tensor, gate_1D: Tensor | None, kind: str
) -> Tensor:
    return x.new_empty((*x.shape[:-1], w2_DI.shape[0]))


def _fake_await(shared: Tensor, x: Tensor, routed: Tensor) -> None:
    """Nothing is computed."""


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    # Neither asks for strides, for which Inductor would copy the tokens.
    _library.define(schema, tags=(torch.Tag.flexible_layout,))
    name = schema.partition("(")[0]
    _library.impl(name, run, "CompositeExplicitAutograd")
    _library.impl(name, fake, "Meta")  # `register_fake` would look through all modules


_define(
    "begin_shared(Tensor x, Tensor[] w13, Tensor w2_DI, Tensor? gate_1D, str kind) -> Tensor",
    _begin,
    _fake_begin,
)
# It says that it writes what others may read behind it alone: graphs keep that order.
_define(
    "await_shared(Tensor(a!) shared, Tensor x, Tensor routed) -> ()",
    _await,
    _fake_await,
)

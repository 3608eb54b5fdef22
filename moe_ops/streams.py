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


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """From how many tokens to how many the second stream pays, in a CUDA graph and outside of one;
    the least above the most: never. bytes: of weights of shared experts, at most."""

    captured: tuple[int, int]
    eager: tuple[int, int]
    bytes: int = MOST

    @property
    def ranges(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return self.captured, self.eager

    @property
    def flat(self) -> tuple[int, ...]:
        """All four numbers, as graphs hold them."""
        return (*self.captured, *self.eager)

    def beside(self, x: Tensor) -> bool:
        """Whether shared experts of these tokens run beside routed ones, here and now."""
        return _beside(x, self.flat)


NEVER, ALWAYS = (1, 0), (1, MOST)
IN_ORDER = Limits(captured=NEVER, eager=NEVER)
ASKED_FOR = Limits(captured=ALWAYS, eager=ALWAYS)
# Of other devices nothing is known.
MEASURED: dict[str, Limits] = {}

_seconds: dict[tuple[int, int], torch.cuda.Stream] = {}
_begun: dict[tuple[int, int], int] = {}  # where the tokens are that graphs last gave to them
_names: dict[torch.device, str] = {}
_library = Library("moe_ops", "FRAGMENT")


def limits(asked: bool | None, device: torch.device, nbytes: int) -> tuple[Limits, str]:
    """For how many tokens shared experts with weights of so many bytes run beside routed ones, and
    why: `asked` says, or None leaves it to what was measured."""
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
    inside, outside = map(_words, found.ranges)
    return found, f"on {name} it pays {inside} in CUDA graphs and {outside} elsewhere"


def _called(device: torch.device) -> str:
    """What a GPU is called, kept: every eager call of a layer asks for it."""
    found = _names.get(device)
    if found is None:
        if not torch.cuda.is_available():
            return "a GPU elsewhere"
        found = _names.setdefault(device, torch.cuda.get_device_name(device))
    return found


def _words(of: tuple[int, int]) -> str:
    least, most = of
    return f"from {least} to {most} tokens" if least <= most else "never"


def fork(device: torch.device) -> torch.cuda.Stream:
    """The second stream of the current one, behind all that this one was given."""
    _, here, there = _both(device)
    there.wait_stream(here)
    return there


def join(device: torch.device) -> None:
    """Have the current stream wait for its second one."""
    _, here, there = _both(device)
    here.wait_stream(there)


def _both(device: torch.device) -> tuple[tuple[int, int], torch.cuda.Stream, torch.cuda.Stream]:
    here = torch.cuda.current_stream(device)
    key = (here.device_index, here.cuda_stream)
    there = _seconds.get(key)
    if there is None:
        there = _seconds.setdefault(key, torch.cuda.Stream(device))
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
    x: Tensor, w13: Sequence[Tensor], w2_DI: Tensor, gate_1D: Tensor | None, kind: str,
    limits: Sequence[int],
) -> Tensor:  # fmt: skip
    if not _beside(x, limits):
        return shared_expert(x, w13, w2_DI, gate_1D, kind)
    key, _, _ = _both(x.device)
    _begun[key] = x.data_ptr()
    with torch.cuda.stream(fork(x.device)):
        return shared_expert(x, w13, w2_DI, gate_1D, kind)


def _await(shared: Tensor, x: Tensor, routed: Tensor, limits: Sequence[int]) -> None:
    if _beside(x, limits):
        key, _, _ = _both(x.device)
        same = _begun.pop(key) == x.data_ptr()
        assert same, "the tokens that a graph holds are a copy of those that are read"
        join(x.device)


def _beside(x: Tensor, limits: Sequence[int]) -> bool:
    if not x.is_cuda:
        return False
    first = 0 if torch.cuda.is_current_stream_capturing() else 2
    return limits[first] <= x.numel() // x.shape[-1] <= limits[first + 1]


def _fake_begin(
    x: Tensor, w13: Sequence[Tensor], w2_DI: Tensor, gate_1D: Tensor | None, kind: str,
    limits: Sequence[int],
) -> Tensor:  # fmt: skip
    return x.new_empty((*x.shape[:-1], w2_DI.shape[0]))


def _fake_await(shared: Tensor, x: Tensor, routed: Tensor, limits: Sequence[int]) -> None:
    """Nothing is computed."""


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    # Neither asks for strides, for which Inductor would copy the tokens.
    _library.define(schema, tags=(torch.Tag.flexible_layout,))
    name = schema.partition("(")[0]
    _library.impl(name, run, "CompositeExplicitAutograd")
    _library.impl(name, fake, "Meta")  # `register_fake` would look through all modules


_define(
    "begin_shared(Tensor x, Tensor[] w13, Tensor w2_DI, Tensor? gate_1D, str kind, int[] limits)"
    " -> Tensor",
    _begin,
    _fake_begin,
)
# It says that it writes what others may read behind it alone: graphs keep that order.
_define(
    "await_shared(Tensor(a!) shared, Tensor x, Tensor routed, int[] limits) -> ()",
    _await,
    _fake_await,
)

"""Process groups by name, and the collectives that everything here is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ops.checks.shapes import wide_dtype
from moe_ops.registry.gradients import needs_grad

ADVICE = (
    "give the group_name of a group of torch.distributed, such as dist.group.WORLD.group_name, "
    "after dist.init_process_group"
)
_functional = torch.ops._c10d_functional  # torch may be built without the operators in it


@dataclass(frozen=True, slots=True)
class Group:
    """A process group: its name in torch.distributed, its size, and this process's rank in it."""

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, name: str, argument: str = "group") -> Group:
        """The group of this name; "" is this process alone, and needs no torch.distributed.

        Raises ValueError, naming the argument, if there is no such group.
        """
        if not name:
            return cls("", 1, 0)
        found = resolve(name, argument)
        return cls(name, found.size(), found.rank())


def default_group(argument: str) -> Group:
    """The group of all processes. Raises ValueError, naming who asks, where there is none yet."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise ValueError(
            f"{argument} takes the default group of torch.distributed, and there is none yet; call "
            "dist.init_process_group first, or give the group_name of another group"
        )
    world: Any = torch.distributed.group.WORLD
    return Group.of(world.group_name, argument)


def resolve(name: str, argument: str = "group") -> Any:
    """torch's group of this name. Raises ValueError, naming the argument, if there is none."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise ValueError(
            f"{argument}={name!r}: torch.distributed has no process group yet; {ADVICE}"
        )
    from torch.distributed.distributed_c10d import _resolve_process_group

    given: Any = name  # torch has a type of its own for names
    try:
        return _resolve_process_group(given)
    except RuntimeError:
        raise ValueError(f"{argument}={name!r} names no process group; {ADVICE}") from None


def known_sizes() -> tuple[tuple[str, int], ...]:
    """The process groups that this process is in, by name, and their sizes: what is planned for one
    of a name may not suit another one of it."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return ()
    from torch.distributed.distributed_c10d import _world

    return tuple(sorted((str(name), group.size()) for group, name in _world.pg_names.items()))


def all_gather(t: Tensor, group: Group) -> Tensor:
    """The tensors of all ranks, equal in shape, one after the other on axis 0.

    The gradient of a rank's tensor is the sum of what the ranks have for it, in the order of ranks.
    """
    if group.size == 1:
        return t
    if needs_grad(t):
        gathered: Tensor = _Gathered.apply(t, group)
        return gathered
    return start_all_gather(t, group)()


def all_to_all(t: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """Send the first sent[0] rows to rank 0, the next sent[1] to rank 1, ...; what comes is in the
    order of ranks, received[r] rows of rank r. Gradients go the way back."""
    if group.size == 1:
        return t
    if needs_grad(t):
        swapped: Tensor = _Swapped.apply(t, sent, received, group)
        return swapped
    return start_all_to_all(t, sent, received, group)()


def start_all_gather(t: Tensor, group: Group) -> Callable[[], Tensor]:
    """Start `all_gather` of a tensor without gradients; what is returned waits and gives it, once.

    Ranks start what they send each other in one order. A GPU goes on beside it.
    """
    if group.size == 1:
        return lambda: t
    given = t.contiguous()
    begun = _functional.all_gather_into_tensor(given, group.size, group.name)
    return _Under(begun, given).wait


def start_all_to_all(
    t: Tensor, sent: Sequence[int], received: Sequence[int], group: Group
) -> Callable[[], Tensor]:
    """Start `all_to_all` of a tensor without gradients, as `start_all_gather` does its own."""
    if group.size == 1:
        return lambda: t
    given = t.contiguous()
    begun = _functional.all_to_all_single(given, received, sent, group.name)
    return _Under(begun, given).wait


@dataclass(slots=True)
class _Under:
    """A collective under way, and what it reads until then."""

    received: Tensor
    given: Tensor

    def wait(self) -> Tensor:
        done: Tensor = _functional.wait_tensor(self.received)
        return done


def all_reduce(t: Tensor, group: Group) -> Tensor:
    """The sum over all ranks, in the order of the backend of the group; it has no gradient."""
    begun = _functional.all_reduce(t.contiguous(), "sum", group.name)
    done: Tensor = _functional.wait_tensor(begun)
    return done


def sum_in_order(parts_RTD: Tensor) -> Tensor:
    """The sum over axis 0, taken in float32 (float64 of float64) and rounded once."""
    return parts_RTD.sum(0, dtype=wide_dtype(parts_RTD)).to(parts_RTD.dtype)


class _Gathered(torch.autograd.Function):
    """`all_gather` with its gradient."""

    @staticmethod
    def forward(t: Tensor, group: Group) -> Tensor:
        return start_all_gather(t, group)()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.group, ctx.rows = inputs[1], inputs[0].shape[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        each = [ctx.rows] * ctx.group.size
        parts = all_to_all(grad, each, each, ctx.group)
        return sum_in_order(parts.unflatten(0, (ctx.group.size, ctx.rows))), None


class _Swapped(torch.autograd.Function):
    """`all_to_all` with its gradient."""

    @staticmethod
    def forward(t: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
        return start_all_to_all(t, sent, received, group)()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.sent, ctx.received, ctx.group = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grad, ctx.received, ctx.sent, ctx.group), None, None, None

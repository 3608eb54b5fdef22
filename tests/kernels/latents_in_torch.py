"""The Gluon kernel over latents by torch, where there is no GPU: what it computes, every address
that it loads from or stores to, and that its groups of warps wait for each other. These are
threads; shared memory holds NaN until something is copied to it, and again once it is read.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moe_ops.kernels.triton import launch as launches
from moe_ops.kernels.triton.decode import latents_hopper, latents_slots, one_query
from tests.kernels.gluon_in_torch import LANGUAGE, functions_of, load, of_two, pointer, value

HANGS_S = 60.0  # for a barrier that nobody reaches


class Barrier:
    """An mbarrier: so many arrivals end a phase."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.missing = self.phase = 0

    def arrive(self, count: int) -> None:
        with self.changed:
            self.missing -= count
            assert self.missing >= 0, f"{self.count} arrivals wanted, {-self.missing} more came"
            if self.missing == 0:
                self.missing, self.phase = self.count, self.phase + 1
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            done = self.changed.wait_for(lambda: self.phase % 2 != parity, HANGS_S)
        assert done, "a barrier that nobody reaches"


class Shared:
    """A tensor in shared memory, or a view of one; of int64 barriers."""

    def __init__(self, held: Any) -> None:
        self.held = held
        self.shape = tuple(held.shape) if isinstance(held, Tensor) else (len(held),)
        self.dtype = getattr(held, "dtype", torch.int64)

    def index(self, i: Any) -> Any:
        found = self.held[int(i)]
        return Shared(found) if isinstance(found, Tensor) else found

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.held.narrow(dim, start, length))

    def permute(self, order: list[int]) -> Shared:
        return Shared(self.held.permute(order))

    def load(self, layout: Any) -> Any:
        return value(self.held.clone())

    def store(self, what: Any) -> None:
        assert what.dtype == self.dtype, f"{what.dtype} into {self.dtype}"
        self.held.copy_(what)


def allocate(dtype: torch.dtype, shape: list[int], _: Any) -> Any:
    if dtype == torch.int64:
        barriers = [Barrier() for _ in range(shape[0])]
        return barriers[0] if len(shape) == 1 else Shared(barriers)
    return Shared(torch.full(shape, float("nan"), dtype=dtype))


def prepare(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.missing = count


def copy(buffer: Shared, source: Any, mask: Any) -> None:
    buffer.store(load(source, mask))


def multiply(a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    a = a.held if isinstance(a, Shared) else a
    product = value(a.float() @ b.held.float())
    return product + acc if use_acc else product


def run_at_once(groups: list[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
    """Each group of warps in a thread; raises what one of them raised."""
    raised: list[BaseException] = []

    def caught(run: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            run(*args)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=caught, args=group) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def extreme(of: Callable[..., Tensor]) -> Callable[..., Any]:
    return lambda t, axis: value(of(t, axis))


PROGRAM, PROGRAMS = [0, 0, 0], [1, 1, 1]
OURS = SimpleNamespace(
    **vars(LANGUAGE)
    | {
        "program_id": lambda axis: value(PROGRAM[axis]),
        "num_programs": lambda axis: value(PROGRAMS[axis]),
        "allocate_shared_memory": allocate,
        "warp_specialize": run_at_once,
        "full": lambda shape, what, dtype, *_: value(torch.full(shape, what, dtype=dtype)),
        "exp2": torch.exp2,
        "min": extreme(torch.amin),
        "minimum": of_two(torch.minimum),
    }
)


def functions() -> dict[str, Any]:
    names = functions_of((launches, one_query, latents_slots, latents_hopper))
    names |= {n: v for n, v in vars(latents_hopper).items() if n.isupper()}
    names |= {"LOG2_E": latents_hopper.LOG2_E.value, "gl": OURS, "tl": OURS}
    names |= {"rows_of": lambda columns: None, "PLAIN": None, "cp_async": copy}
    names["fence_async_shared"] = lambda: None
    names["warpgroup_mma"] = multiply
    names["warpgroup_mma_wait"] = lambda _, deps: deps[0]
    names["mbarrier"] = SimpleNamespace(
        init=prepare, wait=Barrier.wait, arrive=lambda barrier: barrier.arrive(1),
        MBarrierLayout=lambda: None,
    )  # fmt: skip
    names["async_copy"] = SimpleNamespace(
        mbarrier_arrive=lambda barrier, increment_count: barrier.arrive(128)
    )
    return names


def launch(kernel: Any, grid: Iterable[int], *args: Any, **options: Any) -> None:
    """In the place of `replay.launch`; any other kernel is left to Triton's interpreter."""
    if kernel is not latents_hopper.latents_hopper_kernel:
        kernel[grid](*args, **options)
        return
    given = dict(zip(kernel.arg_names, args, strict=False))
    given |= {n: v for n, v in options.items() if n in kernel.arg_names}
    for name, given_as in given.items():
        if isinstance(given_as, Tensor):
            given[name] = pointer(given_as if given_as.numel() else given_as.new_empty(1))
    PROGRAMS[:] = grid
    for program in itertools.product(*map(range, grid)):
        PROGRAM[:] = program
        functions()[kernel.fn.__name__](**given)

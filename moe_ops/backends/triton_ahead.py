"""All variants of Triton kernels that the calls of a compiled graph may ask for, compiled before
the first of them runs, and begun while Inductor compiles the graph.

A plan such as "4:triton.tiny,:triton.grouped" is of a graph for any number of rows, of tokens or of
routed rows. A call tells everything else that host code decides by. So the backends of the plan are
run on shadows of its tensors with other numbers of rows. A plan that is the name of a backend is of
a graph for one number: no other is compiled for.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from moe_ops.registry.invariance import as_planned
from moe_ops.registry.ranges import Ranges, parse_plan
from moe_ops.registry.spec import Op
from moe_ops.terminal import waiting_for

log = logging.getLogger("moe_ops")

WAITS = "compiling Triton kernels"

Before = Callable[[], None] | None

# Each number up to EACH is tried, and of larger ones so many between powers of two, odd and even:
# what a kernel is compiled for changes at numbers further apart, and at none from MOST on.
EACH, BETWEEN, MOST = 16, 8, 2**17


class PlanAhead:
    """A plan of an op, and the kinds of calls for which it is compiled."""

    def __init__(self, op: Op, plan: str) -> None:
        self._op, self._plan = op, plan
        self._ranges: Ranges = parse_plan(plan)
        self._any_number = ":" in plan
        self._compiled: set[Hashable] = set()
        self._locks: dict[Hashable, threading.Lock] = {}
        self._begun: list[threading.Thread] = []

    def compile(self, call: Any) -> None:
        """Compile what calls like this one launch, whatever their numbers of rows, unless that was
        done. The device of the call is the current one."""
        kind = self._kind(call)
        if kind not in self._compiled:
            self.wait()
            with waiting_for(WAITS):
                self._compile(call, kind)

    def begin(self, call: Any, device: torch.device) -> None:
        """Begin with what `compile` does for a call on shadows, in a thread."""
        from moe_ops.kernels.triton.ahead import compiles

        def work() -> None:
            try:
                with torch.cuda.device(device):
                    self._compile(call, self._kind(call))
            except Exception as error:  # which the call raises, too
                log.info("kernels are not compiled ahead: %s: %s", type(error).__name__, error)

        named = (self._op.named(name) for _, name in self._ranges)
        ours = any(backend is not None and backend.in_plan is not None for backend in named)
        if ours and compiles():
            thread = threading.Thread(target=work, name="moe_ops begins")
            thread.start()
            self._begun.append(thread)

    def wait(self) -> None:
        """Wait for what was begun."""
        if self._begun:
            with waiting_for(WAITS):
                for thread in self._begun:
                    thread.join()
            self._begun = [thread for thread in self._begun if thread.is_alive()]

    def _compile(self, call: Any, kind: Hashable) -> None:
        from moe_ops.kernels.triton.ahead import compile_ahead

        with self._locks.setdefault(kind, threading.Lock()):
            if kind not in self._compiled:
                compile_ahead(self.calls(call))
                self._compiled.add(kind)

    def calls(self, call: Any) -> Iterator[Callable[[], object]]:
        """Calls on shadows that launch every variant; those of many rows come first, as their
        kernels take longest."""
        given = self._op.arguments.by_name(call)
        rows = self._op.arguments.rows(call)
        for low, high, name in reversed([*self._spans(rows)]):
            backend = self._op.named(name)
            if backend is None or backend.in_plan is None:
                continue
            possible = backend.rows.possible
            most = MOST if possible is None else possible(call)
            for n in reversed([*numbers(low, min(high, most))]):
                other = None if n == rows else n
                yield functools.partial(self._run, backend.run, given, other)

    def _spans(self, rows: int) -> Iterator[tuple[int, int, str]]:
        """The numbers of rows, from and to, of each range."""
        if not self._any_number:
            yield rows, rows, self._ranges[0][1]
            return
        low = 1
        for upto, name in self._ranges:
            yield low, MOST if upto is None else upto, name
            low = (upto or 0) + 1

    def _run(self, run: Callable[[Any], Any], given: dict[str, Any], rows: int | None) -> None:
        """Run a call on shadows, of another number of rows if one is given."""
        letter = _rows_of(next(iter(given)))
        shadows = {
            name: _shadow(value, rows if _rows_of(name) == letter else None)
            for name, value in given.items()
        }
        as_planned(self._plan, run)(self._op.call(**shadows))

    def _kind(self, call: Any) -> Hashable:
        """What tells calls apart besides their numbers of rows."""
        given = self._op.arguments.by_name(call)
        letter = _rows_of(next(iter(given)))
        rows = None if self._any_number else self._op.arguments.rows(call)
        return rows, *(_kind(value, _rows_of(name) == letter) for name, value in given.items())


def _rows_of(name: str) -> str:
    """The letter of what the rows of a tensor are, by its name; empty for a name without."""
    suffix = name.rpartition("_")[2]
    return suffix[0] if suffix.isupper() else ""


def _shadow(value: Any, rows: int | None) -> Any:
    from moe_ops.kernels.triton.shadows import shadow_of

    if isinstance(value, (list, tuple)):
        return [_shadow(each, rows) for each in value]
    return shadow_of(value, rows) if isinstance(value, Tensor) else value


def _kind(value: Any, has_rows: bool) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(_kind(each, has_rows) for each in value)
    if not isinstance(value, Tensor):
        return value
    shape, stride = value.shape, value.stride()
    if has_rows:
        shape = shape[1:]
        stride = () if value.is_contiguous() else stride
    return shape, stride, value.dtype, value.device, value.data_ptr() % 16


def numbers(low: int, high: int) -> Iterator[int]:
    """Numbers of rows between them that stand for all, the ends included."""
    found = set(range(1, EACH + 1))
    power = EACH
    while power < MOST:
        found.update(power + power * part // BETWEEN - part % 2 for part in range(1, BETWEEN + 1))
        power *= 2
    found |= {low, high}
    return iter(sorted(n for n in found if low <= n <= high))


@functools.cache
def of_plan(op: Op, plan: str) -> PlanAhead:
    return PlanAhead(op, plan)


def compiles_ahead(op: Op, name: str, run: Callable[..., Any]) -> None:
    """Let a backend or a path of an op compile ahead. `run` is given a record of the op and, as
    `before`, what to call before anything is launched for calls of a kind that did not come yet."""

    def in_plan(plan: str) -> Callable[[Any], Any]:
        ahead = of_plan(op, plan)
        return lambda call: run(call, before=functools.partial(ahead.compile, call))

    op.in_plan(name, in_plan)


def begins_alone(op: Op, name: str, run: Callable[[Any], Any]) -> None:
    """Let a backend of an op compile what was begun with a graph, and nothing else ahead."""

    def in_plan(plan: str) -> Callable[[Any], Any]:
        ahead = of_plan(op, plan)

        def waited_for(call: Any) -> Any:
            ahead.wait()
            return run(call)

        return waited_for

    op.in_plan(name, in_plan)

"""What is registered of an op: its record, its schema, and its backends in the order in which they
are asked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from inspect import Parameter
from typing import Any

from moe_ops.checks.shapes import DOUBLE
from moe_ops.checks.signature import Signature, did_you_mean
from moe_ops.registry import outside
from moe_ops.registry.backend import (
    ANY_NUMBER,
    LAYOUT,
    Backend,
    Binds,
    InPlan,
    Needs,
    Rounds,
    Rows,
)
from moe_ops.registry.invariance import INVARIANT, PLANNED, Arithmetic, unknown
from moe_ops.registry.layouts import Layout
from moe_ops.registry.memo import Memo
from moe_ops.registry.record import Annotations, Arguments

NAMESPACE = "moe_ops"
REFERENCE = "reference"
ANY_ROWS = sys.maxsize
PATH = "/"  # from the name of a backend to that of one of its paths

Runs = tuple[tuple[int | None, Callable[[Any], Any], str], ...]


class Registration:
    """An op's record and backends, without what calls them; of `remembers` see `Op`."""

    def __init__(
        self, body: Callable[[Any], Any], remembers: bool, arithmetic: Arithmetic = unknown
    ) -> None:
        self.name, self.body = body.__name__, body
        self.__doc__ = body.__doc__
        self.annotations = Annotations.of(body)
        self.arguments = Arguments(self.annotations.record)
        self.call = self.arguments.of
        returns, parameters = self.annotations.given, self.arguments.signature.parameters
        self.schema = self.arguments.schema(returns)
        self.__signature__ = self.arguments.signature.replace(return_annotation=returns)
        found = ((n, p.default) for n, p in parameters.items())
        self._defaults = {n: default for n, default in found if default is not Parameter.empty}
        self.optional = tuple(self._defaults)  # the arguments that a backend names if it reads them
        self.signature = Signature(f"{NAMESPACE}.{self.name}", self.arguments.signature)
        self.memo = Memo(self.signature, remembers)
        definition = Backend(name=REFERENCE, run=body, arithmetic=arithmetic)
        self._backends: dict[str, Backend] = {REFERENCE: definition}
        # Ways in which backends run calls, by names that alone ask for them.
        self.paths: dict[str, Backend] = {}
        # Candidates by device type in the order in which they are asked; the reference is the last.
        self._order: dict[str, tuple[Backend, ...]] = {}
        # Backends that are asked where calls have to be batch invariant, and nowhere else.
        self._layouts: dict[str, Layout] = {}
        self._plans: dict[str, Runs] = {}  # what runs a plan, by its text
        self.keep: Callable[[Any], None] | None = None  # of what compiled code must not drop

    @property
    def backends(self) -> dict[str, Backend]:
        """The backends by name; those of installed packages are loaded when this is first read."""
        outside.load()
        return self._backends

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layouts of the weights, as backends read them, by name."""
        outside.load()
        return self._layouts

    def backend(
        self,
        name: str,
        *,
        reads: tuple[str, ...] = (),
        supports: Callable[[Any], str | None] | None = None,
        rows: Rows = ANY_NUMBER,
        devices: tuple[str, ...] | None = None,
        priority: int = 0,
        composed: bool = False,
        layout: Layout | None = None,
        arithmetic: Arithmetic = unknown,
    ) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
        """Register the decorated function as a backend; `Backend` says what the arguments mean.

        Backends of higher priority are asked first, among equals those registered first.

        Raises ValueError if the name, or that of its layout, is taken, if `reads` names what is no
        argument with a default, if a layout is given and the op takes none, or if the function does
        not take the op's record or gives another result, by its annotations.
        """
        optional, reads = self.optional, (*reads, *([] if layout is None else [LAYOUT]))
        unknown = [n for n in reads if n not in optional]
        if unknown:
            raise ValueError(
                f"backend {name!r} reads {', '.join(unknown)}, but the arguments with defaults of "
                f"{NAMESPACE}.{self.name} are {', '.join(optional)}"
                f"{did_you_mean(unknown[0], optional)}"
            )
        wanted = {n: default for n, default in self._defaults.items() if n not in reads}
        if layout is not None:
            if self._layouts.setdefault(layout.name, layout) is not layout:
                raise ValueError(f"another layout of {NAMESPACE}.{self.name} is {layout.name!r}")
            wanted[LAYOUT] = layout.name

        def register(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
            if name in self._backends:
                raise ValueError(f"{NAMESPACE}.{self.name} has a backend {name!r} already")
            theirs = Annotations.of(fn)
            if theirs != self.annotations:
                raise ValueError(
                    f"backend {name!r} of {NAMESPACE}.{self.name} is a function {theirs}, but the "
                    f"op is one {self.annotations}; take its record, and annotate argument and "
                    "result"
                )
            self._backends[name] = Backend(
                name=name,
                run=fn,
                reads=reads,
                supports=supports,
                rows=rows,
                devices=frozenset(devices) if devices else None,
                priority=priority,
                composed=composed,
                layout=layout,
                arithmetic=arithmetic,
                unread=self.arguments.differing(wanted),
                ignores=self.arguments.any_differing(wanted),
                in_double=self._in_double,
            )
            self._forget()
            outside.registered(lambda: self._undo(name))
            return fn

        return register

    def _in_double(self, call: Any) -> bool:
        """Whether a record that was checked is in float64, as its first tensor then is."""
        return self.arguments.first(call).dtype is DOUBLE

    def remove_backend(self, name: str) -> None:
        """Forget a backend, the paths by which it runs calls, and its layout if no other reads it.

        Graphs that were compiled with it in their plans raise ValueError when they are called.
        Weights that are stored in its layout cannot be restored after it: do that before, by
        `moe_ops.prepare(model, "")`.

        Raises ValueError for a name that the op has not, and for the reference.
        """
        if name == REFERENCE:
            raise ValueError(
                f"{NAMESPACE}.{self.name} cannot do without {REFERENCE!r}, its definition"
            )
        if name not in self._backends:
            known = [n for n in self._backends if n != REFERENCE]
            raise ValueError(
                f"{NAMESPACE}.{self.name} has no backend {name!r}; there are "
                f"{', '.join(known) or 'none'}{did_you_mean(name, known)}"
            )
        layout = self._backends.pop(name).layout
        if layout is not None and all(b.layout is not layout for b in self._backends.values()):
            del self._layouts[layout.name]
        for path in [p for p in self.paths if p.startswith(f"{name}{PATH}")]:
            del self.paths[path]
        self._forget()

    def _undo(self, name: str) -> None:
        """Undo a registration that its package may have undone itself."""
        if name in self._backends:
            self.remove_backend(name)

    def keeps(self, keep: Callable[[Any], None]) -> None:
        """Say what compiled code does with each result of an op that it may neither leave out nor
        put elsewhere."""
        self.keep = keep

    def emulates(self, name: str, when: Callable[[Any], bool]) -> None:
        """Say of which calls a backend emulates the inputs; `Backend` says what that is."""
        self._put(self._backends[name].changed(emulates=when))

    def waits(self, name: str, when: Callable[[Any], bool]) -> None:
        """Say of which calls the host waits for the device in a backend; `Backend` says why."""
        self._put(self._backends[name].changed(waits=when))

    def needs(self, name: str, needs: Needs) -> None:
        """Say what a backend needs of a machine, whatever the call."""
        self._put(self._backends[name].changed(needs=needs))

    def remembers(
        self, name: str, *asks: ContextVar[Any], alike: Binds | None = None, aligned: bool = False
    ) -> None:
        """Say that a backend's `supports` and `rows` look at nothing but what a memo compares and
        these context variables; `Backend` says what `alike` and `aligned` are."""
        self._put(self._backends[name].changed(asks=asks, alike=alike, aligned=aligned))

    def path(
        self,
        backend: str,
        name: str,
        run: Callable[[Any], Any],
        *,
        refusal: Callable[[Any], str | None],
        most: Callable[[Any], int | None],
        arithmetic: Arithmetic = unknown,
    ) -> None:
        """Register one of the ways in which a backend runs calls. Its name runs those that the
        backend supports, of which `refusal` gives None, of at most so many rows (None: any number);
        `arithmetic` is that of the path.

        Raises ValueError if the name is taken.
        """
        if name in self._backends or name in self.paths:
            raise ValueError(f"{NAMESPACE}.{self.name} has a backend or a path {name!r} already")
        of = self._backends[backend]

        def supports(call: Any) -> str | None:
            reason = None if of.supports is None else of.supports(call)
            return refusal(call) if reason is None else reason

        def possible(call: Any) -> int:
            limits = (most(call), None if of.rows.possible is None else of.rows.possible(call))
            return min((n for n in limits if n is not None), default=ANY_ROWS)

        rows = Rows(possible=possible)
        self.paths[name] = of.changed(
            name=name, run=run, supports=supports, rows=rows, arithmetic=arithmetic,
            told=None, in_plan=None,
        )  # fmt: skip

    def in_plan(self, name: str, runs: InPlan) -> None:
        """Say what runs calls of a plan by a backend or a path; `Backend` says what is given."""
        of = self._backends if name in self._backends else self.paths
        of[name] = of[name].changed(in_plan=runs)
        self._forget()

    def tells(self, name: str, told: Callable[[Any], str]) -> None:
        """Say in words by which path a backend runs a call; `Backend` says what is told."""
        self._put(self._backends[name].changed(told=told))

    def rounds(self, name: str, multiples: Rounds) -> None:
        """Say of which multiples a backend needs the widths of a layer to be, by its formats."""
        self._put(self._backends[name].changed(rounds=multiples))

    def named(self, name: str) -> Backend | None:
        """A backend, or a path of one, by its name."""
        return self.backends.get(name) or self.paths.get(name)

    def keeps_for_invariant(self, name: str) -> None:
        """Say that a backend is asked where calls have to be batch invariant, and nowhere else."""
        self._put(self._backends[name].changed(only_invariant=True))

    def _put(self, backend: Backend) -> None:
        self._backends[backend.name] = backend
        self._forget()

    def _forget(self) -> None:
        """Drop what was decided with the backends as they were."""
        self._order.clear()
        self._plans.clear()
        self.memo.clear()

    def candidates(self, device: str) -> tuple[Backend, ...]:
        """The backends that run on a device type, in the order in which they are asked."""
        key = f"{PLANNED}{device}" if INVARIANT.get() else device
        found = self._order.get(key)
        if found is None:
            others = [b for b in self.backends.values() if b.name != REFERENCE]
            others.sort(key=lambda b: -b.priority)  # stable
            here = (b for b in others if b.devices is None or device in b.devices)
            if key == device:
                here = (b for b in here if not b.only_invariant)
            found = self._order[key] = (*here, self.backends[REFERENCE])
        return found

    def invariant(self, device: str, call: Any) -> tuple[Backend, ...]:
        """The candidates for a call in a block of `invariant`: of those that do not refuse it, for
        any number of rows, the ones of one arithmetic.

        Raises NotImplementedError, with every refusal, if there is none.
        """
        refusals = [(b, b.refusal(device, None, call)) for b in self.candidates(device)]
        found = of_one_arithmetic([b for b, why in refusals if why is None], call)
        if found:
            return found
        lines = [f"  {b.name}: {why or SOME_ROWS}" for b, why in refusals]
        said = f"no backend of {NAMESPACE}.{self.name} gives these rows the same bits in any batch:"
        raise NotImplementedError("\n".join([said, *lines]))


SOME_ROWS = "runs a limited number of rows, and others of its arithmetic do not run more"


def of_one_arithmetic(asked: Sequence[Backend], call: Any) -> tuple[Backend, ...]:
    """The backends of one arithmetic, of those that can run an invariant call, given and returned
    in the order in which they are asked: that of the first which is the better choice for any
    number of rows, else of the first that can run any number. The definition's is taken only where
    no other can."""
    every = [b for b in asked if b.rows.possible is None or b.rows.possible(call) == ANY_ROWS]
    others = [b for b in every if b.name != REFERENCE]
    best = (b for b in others if b.rows.preferred is None or b.rows.preferred(call) is None)
    chosen = next(best, None) or next(iter((*others, *every)), None)
    if chosen is None:
        return ()
    name = chosen.arithmetic(call)
    return tuple(b for b in asked if b.arithmetic(call) == name)

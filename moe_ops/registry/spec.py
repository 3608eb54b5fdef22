"""Define an op once, and pick one of its backends per call.

An :class:`Op` is made from its reference body, a function of one record (`record.py`): the record's
fields are the schema, the body's docstring the documentation, its code the decomposition and the
last-resort backend. A :class:`Backend` (`backend.py`) is another function of the same record, with
what it says of the calls that it cannot run; `registration.py` is where it is registered.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import _C
from torch.library import Library, register_fake

from moe_ops.checks.shapes import DOUBLE
from moe_ops.checks.signature import did_you_mean
from moe_ops.registry.advice import advise
from moe_ops.registry.backend import Backend
from moe_ops.registry.definitions import define
from moe_ops.registry.formulas import Formula, recorded
from moe_ops.registry.gradients import forward_mode, grad_wanted, refuse_tangents
from moe_ops.registry.invariance import INVARIANT, PLANNED, Arithmetic, as_planned, unknown
from moe_ops.registry.ranges import parse_plan
from moe_ops.registry.registration import NAMESPACE, PATH, REFERENCE, Registration, Runs
from moe_ops.registry.rules import Rules, sharding
from moe_ops.registry.watched import (
    autocasting,
    below_autograd,
    compiling,
    counting,
    dispatch_modes,
    function_modes,
    profiler,
    run_as,
    tracing,
    transforms,
    watched,
)

_library = Library(NAMESPACE, "FRAGMENT")
# Op name -> backend name, as `using` forces it. The key "*" stands for every op.
FORCED: ContextVar[dict[str, str] | None] = ContextVar("moe_ops_forced_backends", default=None)

OPS: dict[str, Op] = {}  # the stages of a layer, and fusions of them
DECODE_OPS: dict[str, Op] = {}  # what else a decoding step consists of


class Op(Registration):
    """A stage of a Mixture-of-Experts layer or of a decoding step, callable, and visible to
    compilers as `torch.ops.moe_ops.<name>`. `table` is the registry that holds it.

    `check` validates a record and raises ValueError or TypeError; it runs before any backend and
    before the fake, so backends trust their arguments. It lets float64 pass where all floats of a
    call are; then the first tensor is, and the body runs: no other backend is asked, and none gets
    the call by a plan. An op that `remembers` neither checks a call nor picks for it if two like it
    (`memo.py`) were run, as long as its backends stay the same and each that runs on the device
    said, by `remembers`, what decides whether it runs.
    """

    def __init__(
        self,
        body: Callable[[Any], Any],
        check: Callable[[Any], None],
        table: dict[str, Op],
        remembers: bool = False,
        arithmetic: Arithmetic = unknown,
    ) -> None:
        if body.__name__ in OPS or body.__name__ in DECODE_OPS:
            raise ValueError(f"op {NAMESPACE}.{body.__name__} is defined twice; rename one of them")
        super().__init__(body, remembers, arithmetic)
        name, self.check = self.name, check
        self._first = self.arguments.first
        self._rows, self._rows_at = self.arguments.rows, self.arguments.rows_at or 0
        self._is_counted = self.arguments.rows_at is None  # by the rows of its first argument
        self._renamed, self._by_new_names = self.signature.renamed, self.signature.by_new_names
        self._plain = self.memo.find
        self.fake_impl: Callable[..., Any] | None = None
        self.formula: Formula | None = None  # of its gradients
        self.rules: Rules | None = None
        self._is_cast = False  # by autocast

        define(name, self.schema, self._run, _library)
        # An autograd formula registered with torch.library would cost several microseconds a call.
        _library.impl(name, self._run_recorded, "Autograd")
        # The same op for compiled graphs: arguments were checked and backends chosen in tracing.
        define(f"{name}.planned", self.planned_schema, self._run_planned, _library)
        packet = getattr(getattr(torch.ops, NAMESPACE), name)
        self.overload, self.planned = packet.default, packet.planned
        self.waiting: torch._ops.OpOverload | None = None  # `planned`, which no graph may hold
        self._below_autograd = self.overload
        table[name] = self

    @property
    def planned_schema(self) -> str:
        """The schema of the overload that compiled graphs call."""
        return self.schema.replace(") -> ", ", *, str plan) -> ", 1)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if compiling():
            out = self.overload(*args, **(kwargs and self._by_new_names(kwargs)))
            if self.keep is not None:
                self.keep(out)
            return out
        values = (*args, *kwargs.values()) if kwargs else args
        types = (*map(type, values), *kwargs) if kwargs else tuple(map(type, args))
        alike = self._plain(types)
        if alike is None:
            if kwargs and not self._renamed.keys().isdisjoint(kwargs):
                return self(*args, **self._by_new_names(kwargs))
            alike = self.memo.alike(types, args, kwargs)
        # Unless somebody watches, or a subclass of Tensor has a say, the dispatcher would bring the
        # call back to `_run`, two to three microseconds later.
        if (
            alike is not None
            and args
            and not function_modes()  # as in `watched`, whose call takes a tenth of all this
            and not dispatch_modes()  # of which guards see all but those of torch itself
            and not profiler()
            and not forward_mode()
        ):
            remembers = alike.remembers and FORCED.get() is None
            found = alike.find(values) if remembers else None
            if found is not None:
                if found.direct is not None:
                    return found.direct(*args, **kwargs)
                # Passing on an empty dict takes longer than looking up `types`.
                return found.run(self.call(*args, **kwargs) if kwargs else self.call(*args))
            # Which guards see, too.
            seen = transforms() or tracing() or args[0].is_meta
            if not (seen or (self._is_cast and autocasting())):
                call = self.call(*args, **kwargs) if kwargs else self.call(*args)
                self.check(call)
                if self._by_formula(call, args, kwargs):
                    assert self.formula is not None
                    if below_autograd():  # what runs is not kept: other calls like it are recorded
                        return self._run(*args, **kwargs)
                    return recorded(self.formula, self.arguments, call)
                backend = self.pick(call)
                out = backend.run(call)
                if remembers:
                    here = self.candidates(self._first(call).device.type)
                    alike.keep(values, call, backend, here)
                return out
        if alike is None and self.rules is not None and sharding.given(values):
            # Without autograd, as in inference mode, torch would ask DTensor and not the op.
            return sharding.run(self, self.rules.sharding, args, kwargs)
        try:
            return self.overload(*args, **kwargs)
        except RuntimeError as error:
            failed = error  # perhaps as an int has too many bits
        self.signature.require(args, kwargs)
        raise failed

    def __repr__(self) -> str:
        return f"<op {NAMESPACE}.{self.name}{self.schema}>"

    def part(self, call: Any) -> Any:
        """The op on a record that was checked, as a part of another op's definition."""
        args = self.arguments.flat(call)
        plain = not compiling() and self._plain(tuple(map(type, args))) is not None
        if plain and not watched() and not args[0].is_meta and not self._by_formula(call, args, {}):
            return self.pick(call).run(call)
        return self(*args)

    def _by_formula(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a formula has the gradients that are wanted of a record, and of the arguments
        that it is made of. A backend that is forced is differentiated itself, or refuses."""
        if self.formula is None or not grad_wanted(args, kwargs):
            return False
        forced = FORCED.get()
        if forced is not None and (self.name in forced or "*" in forced):
            return False
        return self.formula.takes(call)

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call by its definition."""
        return self.body(self.call(*args, **self._by_new_names(kwargs)))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        call = self._checked(args, kwargs)
        backend = self.pick(call)
        if profiler():
            return run_as(self._in_traces(backend.name), backend.run, call)
        return backend.run(call)

    def _in_traces(self, backend: str) -> str:
        """What the profiler's traces call what a backend runs of the op."""
        return f"{NAMESPACE}::{self.name} by {backend}"

    def _run_recorded(self, *args: Any, **kwargs: Any) -> Any:
        """What autograd calls. An eager call picks a backend; those without gradients refuse one
        that wants them, also where modes only count what is run. In a trace or a transform the
        definition, whose operators have gradients, stands for the op where one may be wanted. An op
        with a formula has its gradients by that, everywhere."""
        if forward_mode():
            refuse_tangents(f"{NAMESPACE}.{self.name}", args, kwargs)
        plain = self.signature.is_plain(args, kwargs)
        if not plain and self.rules is not None and sharding.given((*args, *kwargs.values())):
            return sharding.run(self, self.rules.sharding, args, kwargs)
        if self.formula is not None and grad_wanted(args, kwargs):
            call = self._checked(args, kwargs)
            if self._by_formula(call, args, kwargs):
                return recorded(self.formula, self.arguments, call)
        seen = dispatch_modes() or transforms() or not plain
        if seen and grad_wanted(args, kwargs):
            if counting() and plain and not args[0].is_meta:
                return self._run(*args, **kwargs)
            return self.body(self._checked(args, kwargs))
        if seen or not args or args[0] is None or args[0].is_meta:
            with _C._AutoDispatchBelowAutograd():
                return self._below_autograd(*args, **kwargs)
        return self._run(*args, **kwargs)

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The record of a call that came through the dispatcher, which lets None be a Tensor."""
        try:
            call = self.call(*args, **kwargs)
            self.check(call)
            return call
        except AttributeError as error:
            failed = error
        self.signature.require(args, kwargs)
        raise failed

    def _run_planned(self, *args: Any, plan: str, **kwargs: Any) -> Any:
        if args[0].dtype is DOUBLE:
            return self.body(self.call(*args, **kwargs))
        runs = self._plans.get(plan) or self._runs(plan)
        rows = args[0].shape[0] if self._is_counted else args[self._rows_at]
        for upto, run, name in runs:
            if upto is None or rows <= upto:
                call = self.call(*args, **kwargs)
                return run_as(self._in_traces(name), run, call) if profiler() else run(call)
        raise AssertionError(f"the last range of the plan {plan!r} has no end")

    def _runs(self, plan: str) -> Runs:
        """The functions of a plan; kept, as a graph asks for the same one at every call."""
        if plan == PLANNED:
            return ((None, as_planned(plan, lambda call: self.pick(call).run(call)), "its pick"),)
        ranges = parse_plan(plan)
        found = [(upto, name, self.named(name)) for upto, name in ranges]
        unknown = [name for _, name, backend in found if backend is None]
        if unknown:
            raise ValueError(
                f"plan {plan!r} names {', '.join(unknown)}, but the backends of "
                f"{NAMESPACE}.{self.name} are {', '.join(self.backends)}"
            )
        runs = tuple(
            (upto, as_planned(plan, b.run if b.in_plan is None else b.in_plan(plan)), name)
            for upto, name, b in found
            if b is not None
        )
        self._plans[plan] = runs
        return runs

    def fake(self, fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Bind the shape function that stands for this op during tracing; a second one raises."""
        if self.fake_impl is not None:
            raise ValueError(
                f"{NAMESPACE}.{self.name} has a fake already: {self.fake_impl.__qualname__}"
            )
        self.fake_impl = fn

        def checked(*args: Any, **kwargs: Any) -> Any:
            return fn(self._checked(args, kwargs))

        def planned(*args: Any, plan: str, **kwargs: Any) -> Any:
            return fn(self.call(*args, **kwargs))

        register_fake(f"{NAMESPACE}::{self.name}", checked, lib=_library)
        register_fake(f"{NAMESPACE}::{self.name}.planned", planned, lib=_library)
        return fn

    def differentiated(self, formula: Formula) -> None:
        """Give the op a formula of its gradients; a second one raises ValueError."""
        if self.formula is not None:
            raise ValueError(f"{NAMESPACE}.{self.name} has a formula already; change that one")
        self.formula = formula

    def obeys(self, rules: Rules) -> None:
        """Tell torch of the op's rules; a second time raises ValueError."""
        if self.rules is not None:
            raise ValueError(f"{NAMESPACE}.{self.name} has rules already; change those")
        self.rules, self._is_cast = rules, not isinstance(rules.autocast, str)
        rules.implement(self.name, self.arguments, _library)
        rules.register(self.name, self.call)

    def waits(self, name: str, when: Callable[[Any], bool]) -> None:
        """Say of which calls the host waits for the device in a backend. The op has then another
        overload, `planned_waiting`: one with a plan that Inductor leaves out of its CUDA graphs."""
        super().waits(name, when)
        if self.waiting is not None:
            return
        fake, overload = self.fake_impl, f"{self.name}.planned_waiting"
        assert fake is not None, "bind the fake first"
        schema = str(self.planned._schema).partition(".planned")[2]
        tags = (torch.Tag.needs_exact_strides, torch.Tag.cudagraph_unsafe)
        _library.define(f"{overload}{schema}", tags=tags)
        _library.impl(overload, self._run_planned, "CompositeExplicitAutograd")

        def planned(*args: Any, plan: str, **kwargs: Any) -> Any:
            return fake(self.call(*args, **kwargs))

        register_fake(f"{NAMESPACE}::{overload}", planned, lib=_library)
        self.waiting = getattr(getattr(torch.ops, NAMESPACE), self.name).planned_waiting
        if self.rules is not None:  # by which torch knows a new packet of overloads not yet
            self.rules.register(self.name, self.call)

    def pick(self, call: Any) -> Backend:
        """The backend that runs this call: the forced one, else the reference of a call in float64,
        else the first that does not refuse and for which there are not too many rows, else the
        first that does not refuse. Of an invariant call only those of one arithmetic are asked.

        Raises NotImplementedError, with every refusal, if the forced backend, or none, can run it.
        """
        first = self._first(call)
        device = "cpu" if first.is_cpu else first.device.type
        forced = FORCED.get()
        if forced is not None:
            name = forced.get(self.name) or forced.get("*")
            if name is not None:
                return self._pick_forced(name, device, call)
        if INVARIANT.get():
            return self._first_of(self.invariant(device, call), call)
        candidates = self._order.get(device) or self.candidates(device)
        if len(candidates) == 1:
            return candidates[0]
        if first.dtype is DOUBLE:
            return candidates[-1]
        backend = self._first_of(candidates, call)
        if self._layouts:
            advise(self, candidates, backend, call)
        return backend

    def _first_of(self, candidates: tuple[Backend, ...], call: Any) -> Backend:
        """The first backend that does not refuse, see `pick`."""
        beyond: Backend | None = None
        for backend in candidates:
            if backend.ignores is not None and backend.ignores(call):
                continue
            if backend.supports is not None and backend.supports(call) is not None:
                continue
            if backend.name == REFERENCE:
                return beyond or backend
            possible, preferred = backend.rows.possible, backend.rows.preferred
            if possible is not None and self._rows(call) > possible(call):
                continue
            most = None if preferred is None else preferred(call)
            if most is None or self._rows(call) <= most:
                return backend
            beyond = beyond or backend
        assert beyond is not None, "the reference takes every valid call"
        return beyond

    def refusals(self, *args: Any, **kwargs: Any) -> dict[str, str | None]:
        """Why each backend cannot run this call (None: it can), by backend name.

        Raises ValueError or TypeError, as the call itself, if the op does not take it.
        """
        kwargs = self._by_new_names(kwargs)
        self.signature.require(args, kwargs)
        call = self.call(*args, **kwargs)
        self.check(call)
        return self.refusals_of(call)

    def refusals_of(self, call: Any) -> dict[str, str | None]:
        """Why each backend cannot run a record that was checked (None: it can)."""
        first = self._first(call)
        device, rows = first.device.type, self._rows(call)
        return {name: b.refusal(device, rows, call) for name, b in self.backends.items()}

    def _pick_forced(self, name: str, device: str, call: Any) -> Backend:
        backend, rows = self.named(name), self._rows(call)
        reason = None if backend is None else backend.refusal(device, rows, call)
        if backend is not None and reason is None:
            return backend
        lines = [f"backend {name!r} is forced, but {NAMESPACE}.{self.name} cannot run on it:"]
        if backend is None:
            said = f"not a backend of this op; using({name!r}, <ops>) forces it on some ops"
            hint = did_you_mean(name, self.paths if PATH in name else self.backends)
            lines.append(f"  {name}: {said}{hint}")
        refusals = {name: reason} if name in self.paths else {}
        for other, why in (refusals | self.refusals_of(call)).items():
            lines.append(f"  {other}: {why or 'can run'}")
        raise NotImplementedError("\n".join(lines))


def op(
    *,
    check: Callable[[Any], None],
    table: dict[str, Op] = OPS,
    remembers: bool = False,
    arithmetic: Arithmetic = unknown,
) -> Callable[[Callable[[Any], Any]], Op]:
    """Make the decorated reference body an op; `arithmetic` is that of the body."""
    return lambda body: Op(body, check, table, remembers, arithmetic)

"""Decide which backends run an op in a graph: by the user, by measurements, by the backends."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import symbolic_shapes

from moe_ops.ops.experts_over_ranks import ExpertsOverRanksCall, sent_as
from moe_ops.planning import tuned
from moe_ops.planning.cost import cost, device_of
from moe_ops.planning.plan import Choice, Range, Source
from moe_ops.planning.thresholds import THRESHOLD_OPS
from moe_ops.quant.formats import Format
from moe_ops.registry.advice import advise
from moe_ops.registry.invariance import invariant
from moe_ops.registry.ranges import Ranges
from moe_ops.registry.registration import ANY_ROWS, SOME_ROWS, of_one_arithmetic
from moe_ops.registry.spec import NAMESPACE, REFERENCE, Op

# What is raised by a decision on a symbolic size, which would add a guard.
GUARDS = tuple(
    getattr(symbolic_shapes, name)
    for name in ("GuardOnDataDependentSymNode", "_ShapeEnvGuardError")
    if hasattr(symbolic_shapes, name)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Where an op is called: the name of the graph's node, and its layer, empty if unknown."""

    name: str
    layer: str

    def __str__(self) -> str:
        return f"node {self.name}{f' of {self.layer}' if self.layer else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a choice goes by besides what backends say: the user's thresholds, measurements, whether
    a refusal is an error, and whether calls have to be batch invariant."""

    thresholds: Ranges | None
    strict: bool
    table: tuned.Table
    batch_invariant: bool = False


def choose(op: Op, call: Any, node: Node, rules: Rules) -> Choice:
    """Decide which backends run an op on a record whose tensors are a graph's fake ones.

    Raises ValueError for thresholds that give it to a backend which cannot run it, and RuntimeError
    if every backend refuses and the rules are strict, or want what is batch invariant.
    """
    with invariant(rules.batch_invariant):
        return _choose(op, call, node, rules)


def _choose(op: Op, call: Any, node: Node, rules: Rules) -> Choice:
    named = op.arguments.by_name(call)
    first = op.arguments.first(call)
    device, rows = device_of(first.device), bounds(op.arguments.rows(call))
    cells = _cells(device.name, op, call, rules.table)
    paths = {cell.backend for cell in cells} | {name for _, name in rules.thresholds or ()}
    asked = _ask(op, call, op.paths.keys() & paths)
    if rules.batch_invariant:
        asked = _of_one_arithmetic(op, call, node, asked, _forced(op, rules.thresholds))
    times = tuned.Times.of(cells, _limits(asked), frozenset(asked.paths))
    ranges, source = _decide(op, node, asked, rows, rules, times)

    def describe(low: int, upto: int | None, backend: str) -> Range:
        high = rows[1] if upto is None else upto
        at = times.largest(low, high) or high
        found = None if at is None else cost(op.name, call, at)
        return Range(
            upto=upto,
            backend=backend,
            source=source,
            at=at,
            predicted_us=None if found is None else round(device.microseconds(found), 2),
            measured_us=None if at is None else times.by_tokens.get(at, {}).get(backend),
        )

    lows = (rows[0], *(upto + 1 for upto, _ in ranges if upto is not None))
    return Choice(
        node=node.name,
        op=op.name,
        layer=node.layer,
        rows=rows,
        shapes=_shapes(named),
        dtype=str(asked.first.dtype).removeprefix("torch."),
        format="+".join(filter(None, (named.get(f) for f in ("format", "w_format", "x_format")))),
        candidates=(*asked.usable, REFERENCE),
        refusals=asked.refusals,
        ranges=tuple(describe(low, *r) for low, r in zip(lows, ranges, strict=True)),
        emulated=tuple(n for n in asked.usable if op.backends[n].emulates(call)),
        paths=_paths(op, call, [name for _, name in ranges]),
        elsewhere=_elsewhere(op, asked),
        sends=sent_as(call.layer) if isinstance(call, ExpertsOverRanksCall) else "",
        batch_invariant=rules.batch_invariant and op.name not in OF_OPS,
    )


def _of_one_arithmetic(op: Op, call: Any, node: Node, asked: Asked, forced: Ranges | None) -> Asked:
    """What backends say to a call that has to be batch invariant: those of another arithmetic than
    that of the user's, or else than the first for any number of rows, refuse it, too.

    Raises RuntimeError if nobody is left, and the definition is none of ops that are asked in turn.
    """
    definition = op.backends[REFERENCE]
    device, named = asked.first.device.type, [n for _, n in forced or () if n in op.backends]
    with no_new_guards(op.arguments.flat(call)):
        usable = [op.backends[name] for name in (named or asked.usable) if name in asked.usable]
        itself = definition.refusal(device, None, call)
        found = of_one_arithmetic([*usable, *([definition] if itself is None else [])], call)
    if not found and op.name not in OF_OPS:
        refusals = {**asked.refusals, REFERENCE: itself}
        reasons = [f"  {name}: {why or SOME_ROWS}" for name, why in refusals.items()]
        said = f"batch_invariant: no backend gives {_called(op, node)} the same bits in any batch"
        raise RuntimeError("\n".join([said, *reasons]))
    kept = tuple(name for name in asked.usable if any(b.name == name for b in found))
    others = {n: OTHER_ARITHMETIC for n in asked.usable if n not in kept}
    return replace(asked, usable=kept, refusals=asked.refusals | others)


OTHER_ARITHMETIC = "is not batch invariant beside those that are taken: it sums in another order"


def _elsewhere(op: Op, asked: Asked) -> dict[str, str]:
    """What backends of other devices that say what they need lack here, or that the tensors are not
    where they run."""
    found = {}
    for name, reason in asked.elsewhere.items():
        backend = op.backends[name]
        if backend.needs is not None:
            on = torch.device(min(backend.devices or {"cpu"}))
            found[name] = backend.needs.missing(on) or reason
    return found


def _paths(op: Op, call: Any, backends: Iterable[str]) -> dict[str, str]:
    """What backends tell of the paths by which they run a call."""
    found = {}
    for backend in filter(None, map(op.named, backends)):
        if backend.told is not None:
            try:
                with no_new_guards(op.arguments.flat(call)):
                    found[backend.name] = backend.told(call)
            except GUARDS:
                found[backend.name] = "by a size that is not known when compiling"
    return found


OF_OPS = ("moe",)  # whose definition calls ops that are asked in turn


def _decide(
    op: Op,
    node: Node,
    asked: Asked,
    rows: tuple[int, int | None],
    rules: Rules,
    times: tuned.Times,
) -> tuple[Ranges, Source]:
    """The backends by number of rows, and what they were chosen by."""
    forced = _forced(op, rules.thresholds)
    if forced is not None:
        ranges = _clip(forced, rows)
        _require_served(op, node, ranges, asked)
        return ranges, "forced"
    source: Source = "limit"
    if len(asked.usable) < 2:
        if rules.strict and not asked.usable and op.name not in OF_OPS:
            _require_no_refusal(op, node, asked)
        ranges, source = ((None, (*asked.usable, REFERENCE)[0]),), "only candidate"
    elif times.by_tokens:
        ranges, source = _clip(times.ranges(), rows), "tuned"
    else:
        ranges = _clip(_by_limits(asked), rows)
    only = op.backends.get(ranges[0][1])
    if len(ranges) == 1 and only is not None and only.composed:
        return ((None, REFERENCE),), source
    return ranges, source


def bounds(n: int | SymInt) -> tuple[int, int | None]:
    """The smallest and the largest value of a size; None: it has no bound."""
    if isinstance(n, int):
        return n, n
    found = n.node.shape_env.bound_sympy(n.node.expr)
    low = int(found.lower) if found.lower > 0 else 0
    return low, int(found.upper) if found.upper < sys.maxsize else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the backends of an op say to a call: those that can run it, in order, and the reasons of
    those that cannot. The reference can, and is left out.
    """

    first: Tensor
    usable: tuple[str, ...]
    preferred: dict[str, int]  # the limits of `Rows`, of those that have one
    possible: dict[str, int]
    refusals: dict[str, str]
    elsewhere: dict[str, str]  # the refusals of backends of other devices
    paths: tuple[str, ...] = ()  # those that were named, and can run it


def _ask(op: Op, call: Any, paths: Iterable[str] = ()) -> Asked:
    """`paths`: those of backends that somebody named."""
    first = op.arguments.first(call)
    device, rows = first.device.type, op.arguments.rows(call)
    usable: list[str] = []
    preferred: dict[str, int] = {}
    possible: dict[str, int] = {}
    refusals = {}
    here = {b.name: b for b in op.candidates(device)}
    others = (b for name, b in op.backends.items() if name not in here)
    elsewhere = {b.name: b.refusal(device, rows, call) or "" for b in others}
    named = {name: op.paths[name] for name in sorted(paths)}
    for backend in (*here.values(), *named.values()):
        if backend.name == REFERENCE:
            continue
        try:
            with no_new_guards(op.arguments.flat(call)):
                reason = backend.refusal(device, rows, call)
                if reason is None:
                    limit = backend.rows.preferred and backend.rows.preferred(call)
                    if isinstance(limit, int):
                        preferred[backend.name] = limit
                    if backend.rows.possible is not None:
                        possible[backend.name] = backend.rows.possible(call)
                    usable.append(backend.name)
                    continue
        except GUARDS:
            reason = "decides by a size that is not known when compiling"
        refusals[backend.name] = reason
    chosen = next((name for name in usable if name in here), REFERENCE)
    with contextlib.suppress(*GUARDS), no_new_guards(op.arguments.flat(call)):
        advise(op, op.candidates(device), here[chosen], call)
    return Asked(
        first=first,
        usable=tuple(name for name in usable if name not in named),
        preferred=preferred,
        possible={name: most for name, most in possible.items() if most != ANY_ROWS},
        refusals=refusals,
        elsewhere=elsewhere,
        paths=tuple(name for name in usable if name in named),
    )


@contextlib.contextmanager
def no_new_guards(args: Iterable[Any]) -> Iterator[None]:
    """Make a decision on a symbolic size raise: it would hold for one size and guard all others."""
    fake = next((t for t in args if isinstance(t, FakeTensor)), None)
    env = None if fake is None else fake.fake_mode.shape_env
    if env is None:
        yield
    elif hasattr(env, "error_on_new_guards"):  # torch 2.12
        with env.error_on_new_guards():
            yield
    else:
        # What torch calls just before it adds a guard, and what later ones raise from.
        vars(env)["_check_frozen"] = _refuse_guard
        try:
            yield
        finally:
            del vars(env)["_check_frozen"]


def _refuse_guard(expr: Any, value: Any) -> None:
    raise symbolic_shapes.GuardOnDataDependentSymNode(expr, f"a guard would be added: {expr}")


def _forced(op: Op, thresholds: Ranges | None) -> Ranges | None:
    """The user's thresholds, if they are meant for this op."""
    if op.name not in THRESHOLD_OPS or thresholds is None:
        return None
    if op.name == "moe" and any(op.named(name) is None for _, name in thresholds):
        return ((None, REFERENCE),)  # for the `experts` in it
    return thresholds


def _cells(device: str, op: Op, call: Any, table: tuned.Table) -> dict[tuned.Cell, float]:
    """The measured times of a layer."""
    layer = tuned.layer_of_call(device, op.name, call)
    return {} if layer is None else table.get(layer, {})


def _limits(asked: Asked) -> dict[str, int | None]:
    return {name: asked.possible.get(name) for name in (*asked.usable, *asked.paths)}


def _by_limits(asked: Asked) -> Ranges:
    """What `Op.pick` picks: the first backend with not too many rows, else the first that can run
    any number.
    """
    found: list[tuple[int | None, str]] = []
    done = -1
    for name in asked.usable:
        limits = [rows[name] for rows in (asked.preferred, asked.possible) if name in rows]
        if not limits:
            return (*found, (None, name))
        if min(limits) > done:
            done = min(limits)
            found.append((done, name))
    any_number = (name for name in asked.usable if name not in asked.possible)
    return (*found, (None, next(any_number, REFERENCE)))


def _clip(ranges: Ranges, rows: tuple[int, int | None]) -> Ranges:
    """The ranges that the numbers of rows can meet, neighbours of one backend merged."""
    low, high = rows
    found: list[tuple[int | None, str]] = []
    for upto, backend in ranges:
        if upto is not None and upto < low:
            continue
        last = upto is None or (high is not None and upto >= high)
        if found and found[-1][1] == backend:
            found.pop()
        found.append((None if last else upto, backend))
        if last:
            break
    return tuple(found)


def _require_served(op: Op, node: Node, ranges: Ranges, asked: Asked) -> None:
    """Raise unless every backend of the user's can run the node."""
    for upto, name in ranges:
        reason = asked.refusals.get(name) or asked.elsewhere.get(name)
        if op.named(name) is None:
            reason = f"there are {', '.join(op.backends)}"
        possible = asked.possible.get(name)
        if possible is not None and (upto is None or upto > possible):
            reason = f"takes at most {possible} rows"
        if reason is not None:
            tokens = "more" if upto is None else f"up to {upto}"
            tokens = "" if len(ranges) == 1 else f" for {tokens} tokens"
            raise ValueError(
                f"thresholds give {_called(op, node)} to {name!r}{tokens}, but: {reason}"
            )


def _require_no_refusal(op: Op, node: Node, asked: Asked) -> None:
    """Raise if a backend of this device refuses; an op without any is meant to be compiled."""
    here = [b.name for b in op.candidates(asked.first.device.type) if b.name != REFERENCE]
    if here:
        reasons = [f"  {name}: {reason}" for name, reason in asked.refusals.items()]
        raise RuntimeError("\n".join([f"strict: no backend runs {_called(op, node)}", *reasons]))


def _called(op: Op, node: Node) -> str:
    return f"{NAMESPACE}.{op.name} ({node})"


# The arguments that may be codes, packed along their last axis, by those that name their formats.
CODES = {"w13_EFD": "w_format", "w2_EDI": "w_format", "w_EFD": "w_format", "x_RD": "x_format"}


def _shapes(a: dict[str, Any]) -> dict[str, int]:
    """The sizes that are known, by the letters in the names of the tensors; rows are left out."""
    found: dict[str, int] = {}
    for name, t in a.items():
        letters = name.rpartition("_")[2]
        if not isinstance(t, Tensor) or not letters.isupper() or t.dim() != len(letters):
            continue
        if a.get("transposed") and name.startswith("w") and t.dim() == 3:
            letters = letters[0] + letters[:0:-1]
        sizes = [*t.shape]
        if format := a.get(CODES.get(name, ""), ""):
            sizes[-1] = Format.of(format).parsed.unpacked(sizes[-1])
        for letter, size in zip(letters, sizes, strict=True):
            if letter not in "TRG" and isinstance(size, int):
                found.setdefault(letter, size)
    return found

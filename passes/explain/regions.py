"""Regions: what is to be told of each MoE layer in a graph, and of equal ones together."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from moe_ops.passes.explain.explanation import At, LeftAlone, Region, Run
from moe_ops.passes.inductor.pipeline import GraphRun
from moe_ops.passes.lower import RULE
from moe_ops.passes.rewriting.context import Note
from moe_ops.passes.run_beside import RULE as BESIDE
from moe_ops.planning.cost import Cost, Device, cost
from moe_ops.planning.plan import Choice
from moe_ops.registry.spec import OPS, REFERENCE

CURVE = tuple(4**n for n in range(7))  # numbers of tokens to plot: 1 to 4096
# What the lifted router of a layer ends up in.
ROUTERS = ("moe", "route", "route_recording", "route_replaying")
PER_ROUTED_ROW = ("expert_gemm", "activate", "combine")  # of these a token has K rows
# The ops that do most of the work.
MAIN = ("moe", "experts_over_ranks", "experts", "experts_adapted", "expert_gemm")

Calls = dict[str, Any]  # records of our ops before backends were chosen, by node


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLayer:
    """One op that the passes left for backends."""

    region: Region
    block: str  # the module that has all of what was lifted


def layers(
    run: GraphRun, calls: Calls, device: Device, tokens: Sequence[int] | None
) -> Iterator[ReadLayer]:
    """Every op of ours in a graph, in its order; `tokens` None takes the number it was traced with.

    Ops of a definition that was compiled belong to the op that they define.
    """
    choices = [choice for choice in run.choices if choice.node in calls]
    parts: dict[str, list[Choice]] = defaultdict(list)  # by layer
    for choice in run.choices:
        if choice.node not in calls:
            parts[choice.layer].append(choice)
    lifted: dict[str, list[Note]] = defaultdict(list)  # by the node of the choice
    for note in run.rewrites:
        found = _made_of(note, choices) if note.rule.startswith("lift_") else None
        if found is not None:
            lifted[found.node].append(note)
    shared = _shared(run, choices)
    opaque = {note.node for note in run.refusals if note.rule == RULE}
    for choice in choices:
        notes = lifted[choice.node]
        own = [choice] if choice.backends != (REFERENCE,) else parts[choice.layer] or [choice]
        runs: list[Run] = []
        for part in own:
            entry = Run(
                op=part.op,
                ranges=part.ranges,
                refusals=part.refusals,
                emulated=part.emulated,
                elsewhere=part.elsewhere,
                paths=part.paths,
                sends=part.sends,
                opaque=part.node in opaque,
            )
            if entry not in runs:
                runs.append(entry)
        measured = _Measured(choice, calls[choice.node], _top_k(choice, choices, calls), runs)
        counts = measured.traced_with() if tokens is None else tokens
        yield ReadLayer(
            region=Region(
                op=choice.op,
                layers=(choice.layer,),
                shapes=_ordered(choice.shapes | ({"K": measured.K} if measured.K else {})),
                dtype=choice.dtype,
                format=choice.format,
                rows=choice.rows,
                lifted_from=tuple(f"{note.rule}: {note.text}" for note in notes),
                runs=tuple(runs),
                at=tuple(measured.at(n, device) for n in counts),
                curve=tuple(measured.at(n, device) for n in measured.curve()),
                shared=shared.get(choice.node, ""),
            ),
            block=_common([choice.layer, *(note.layer for note in notes)]),
        )


def _shared(run: GraphRun, choices: Sequence[Choice]) -> dict[str, str]:
    """Where shared experts run that are added to what the op of a choice gives, by its node."""
    found = {}
    for note in run.rewrites:
        choice = _made_of(note, choices) if note.rule == BESIDE else None
        if choice is not None:
            found[choice.node] = note.text
    return found


def grouped(regions: Iterable[Region]) -> tuple[Region, ...]:
    """Regions that differ in nothing but their layers become one."""
    groups: dict[str, list[Region]] = defaultdict(list)
    for region in regions:
        groups[repr(replace(region, layers=()))].append(region)
    return tuple(
        replace(same[0], layers=tuple(layer for region in same for layer in region.layers))
        for same in groups.values()
    )


def left_alone(refusals: Iterable[Note]) -> tuple[LeftAlone, ...]:
    """What passes would not rewrite; reasons that differ in the numbers of nodes count as equal."""
    groups: dict[tuple[str, str], list[Note]] = defaultdict(list)
    for note in refusals:
        groups[note.rule, re.sub(r"_\d+\b", "", note.text)].append(note)
    return tuple(
        LeftAlone(rule=rule, reason=same[0].text, layers=tuple(note.layer for note in same))
        for (rule, _), same in groups.items()
    )


class _Measured:
    """One call of an op at any number of tokens."""

    def __init__(self, choice: Choice, call: Any, K: int | None, runs: Sequence[Run]) -> None:
        self.choice, self.call, self.K = choice, call, K
        self.main = min(runs, key=lambda run: (run.is_compiled, (*MAIN, run.op).index(run.op)))

    def traced_with(self) -> tuple[int, ...]:
        """The number of tokens of the inputs, if it is known."""
        rows: Any = OPS[self.choice.op].arguments.rows(self.call)
        if not isinstance(rows, int):
            if not rows.node.has_hint():
                return ()
            rows = int(rows.node.hint)
        return (rows // self._rows_of(self.choice.op, 1),)

    def curve(self) -> list[int]:
        """The numbers of tokens to plot, with those that were measured."""
        found = {r.at for r in self.main.ranges if r.at is not None and r.measured_us is not None}
        per_token = self._rows_of(self.main.op, 1)
        return sorted({*CURVE, *(rows // per_token for rows in found)})

    def at(self, tokens: int, device: Device) -> At:
        rows = self._rows_of(self.choice.op, tokens)
        low, high = self.choice.rows
        # A graph of a varying number is joined by others for 0 and 1, with the same plan.
        here = rows == low if low == high else high is None or rows <= high
        found = cost(self.choice.op, self.call, rows)
        of_main = self._rows_of(self.main.op, tokens)
        ranges = self.main.ranges
        backend = next(r.backend for r in ranges if r.upto is None or of_main <= r.upto)
        measured = next((r.measured_us for r in ranges if r.at == of_main), None)
        said = At(tokens=tokens, backend=backend if here else "", measured_us=measured)
        if found is None:
            return said
        return replace(
            said,
            bytes=found.bytes,
            flops=found.flops,
            floor_us=device.microseconds(found),
            bound=_bound(found, device),
        )

    def _rows_of(self, op: str, tokens: int) -> int:
        return tokens * (self.K or 1) if op in PER_ROUTED_ROW else tokens


def _bound(found: Cost, device: Device) -> str:
    here = replace(found, link_us=0.0)
    compute = device.microseconds(replace(here, bytes=0.0)) - device.launch_us
    memory = device.microseconds(replace(here, flops=0.0)) - device.launch_us
    if found.link_us > max(compute, memory, device.launch_us):
        return "link"
    if max(compute, memory) < device.launch_us:
        return "launch"
    return "memory" if memory >= compute else "compute"


def _top_k(choice: Choice, choices: Sequence[Choice], calls: Calls) -> int | None:
    """The number of experts for each token, which some stages know by their neighbours alone."""
    near = [c for c in choices if c.layer == choice.layer and c.node != choice.node]
    for call in (calls[c.node] for c in (choice, *near)):
        K = getattr(getattr(call, "routing", call), "top_k", None)
        ids = getattr(call, "ids_TK", getattr(call, "weights_TK", None))
        if K is None and ids is not None:
            K = ids.shape[1]
        if isinstance(K, int):
            return K
    return None


def _made_of(note: Note, choices: Sequence[Choice]) -> Choice | None:
    """The op that what a pass lifted ended up in: the nearest in the tree of modules."""
    is_router = note.rule == "lift_router"
    fitting = [c for c in choices if c.op == "moe" or (c.op in ROUTERS) == is_router]

    def nearness(choice: Choice) -> int:
        return len(_common([choice.layer, note.layer]))

    best = max(fitting, key=nearness, default=None)
    return best if best and (best.layer == note.layer or nearness(best)) else None


def _common(modules: Sequence[str]) -> str:
    """The innermost module that holds all of these modules."""
    levels = zip(*(module.split(".") for module in modules), strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))


def _ordered(shapes: dict[str, int]) -> dict[str, int]:
    return {letter: shapes[letter] for letter in sorted(shapes, key="EKDFI".find)}

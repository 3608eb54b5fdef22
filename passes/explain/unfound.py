"""What a model without a MoE region has in the place of one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from moe_ops.passes.explain.explanation import Seen
from moe_ops.passes.explain.trace import Break
from moe_ops.passes.report.found import Found
from moe_ops.passes.report.summary import LOOP, is_by_value


def seen(found: Iterable[Found], breaks: Iterable[Break]) -> tuple[Seen, ...]:
    """What chooses in graphs, equal sightings as one, and where a graph ended at a size that only
    values tell."""
    where: dict[str, list[str]] = defaultdict(list)
    choices = ((s.what, s.module) for graph in found for s in graph.sightings)
    loops = ((LOOP, b.where) for b in breaks if is_by_value(b.reason))
    for text, place in dict.fromkeys((*choices, *loops)):
        where[text].append(place)
    return tuple(Seen(what=text, where=tuple(places)) for text, places in where.items())

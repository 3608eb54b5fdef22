"""One line on a compiled model: how many of its MoE layers run on our ops, on what, and why the
others do not."""

from __future__ import annotations

import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from moe_ops.passes.report.found import Found, Layer, block_of, inside, is_experts
from moe_ops.passes.report.names import names
from moe_ops.passes.report.sightings import Sighting

BY_VALUE = ("Dynamic shape operator", "Data dependent", "Data-dependent")  # reasons of breaks
LOOP = "sizes that depend on values, as in a loop over the experts that were chosen"
NONE = "no MoE layer was found"
ADVICE = "strict=True raises this, and moe_ops.explain(model, inputs) tells more"

Left = tuple[tuple[str, tuple[str, ...]], ...]  # reasons, and the modules that have them


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A MoE layer of a model: the name of its experts, and the classes whose code runs them."""

    name: str
    kinds: tuple[type[nn.Module], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where Dynamo ended a graph, and why: files and lines of the calls, the innermost last."""

    reason: str
    stack: tuple[tuple[str, int], ...]

    @staticmethod
    def of(reason: Any) -> Place:
        """A break as Dynamo lists it; at a function that it is to leave, with the reason given."""
        text = str(reason.reason)
        first = next(iter(text.strip().splitlines()), "")
        given = text.partition("(reason: ")[2].partition("\n")[0].rpartition(")")[0]
        stack = tuple((frame.filename, frame.lineno or 0) for frame in reason.user_stack)
        return Place(reason=given or first, stack=stack)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the MoE layers of a model run on. `str` gives the one line."""

    title: str
    layers: int  # that the model has
    on_ours: int
    routers: int  # that run on ours
    runs_on: tuple[tuple[str, int], ...]  # and how many layers do
    left: Left  # experts
    left_routers: Left
    unseen: tuple[str, ...]  # layers that are in no graph
    seen: Left  # what else chooses, in a model without a layer

    def __str__(self) -> str:
        if not self.layers:
            saw = (f"; seen instead: {what}{_where(at)}" for what, at in self.seen)
            return "".join([f"{self.title}: {NONE}", *saw])
        of = self.layers
        line = f"{self.title}: {self.on_ours} of {of} MoE layers and {self.routers} of {of} routers"
        how = [text if len(self.runs_on) == 1 else f"{text} ({n})" for text, n in self.runs_on]
        unseen = [f"{len(self.unseen)} in no graph yet"] if self.unseen else []
        return "; ".join([f"{line} run on moe_ops", *how, *unseen])

    def complaints(self) -> Iterator[str]:
        """A sentence for each reason for which experts were left alone."""
        for reason, at in self.left:
            what = f"leaves {len(at)} of {self.layers} MoE layers as they were, which is slower"
            yield f"{self.title}: moe_ops {what}{_where(at)}: {reason}. {ADVICE}"

    def remarks(self) -> Iterator[str]:
        """A sentence for each reason for which routers were left alone."""
        for reason, at in self.left_routers:
            what = f"leaves {len(at)} of {self.layers} routers as they were"
            yield f"{self.title}: moe_ops {what}{_where(at)}: {reason}"


@dataclass(slots=True, kw_only=True)
class _One:
    """A MoE layer: what the model says of it, and what graphs do."""

    name: str
    experts: Experts | None
    layers: Sequence[Layer]

    def reason(self, found: Sequence[Found], places: Sequence[Place], at_last: bool) -> str:
        """Why the layer was left alone; empty if it was not, or is in no graph."""
        said = next((layer.reason for layer in self.layers if layer.reason), "")
        if said or self.layers or self.experts is None:
            return said
        # Where its block's code ends a graph, the experts may be in another, which is to come.
        for kind in self.experts.kinds if at_last else self.experts.kinds[:1]:
            for place in places:
                where = next((at for at in reversed(place.stack) if _is_code_of(kind, *at)), None)
                if where is not None:
                    what = LOOP if is_by_value(place.reason) else place.reason
                    return f"its code ends the graph: {what} ({where[0]}:{where[1]})"
        chosen = (s.what for graph in found for s in graph.sightings if self._is_near(graph, s))
        return next(chosen, "") if at_last else ""

    def _is_near(self, graph: Found, sighting: Sighting) -> bool:
        """Whether a choice is made in the block of these experts."""
        assert self.experts is not None
        if not sighting.module:
            return graph.model in [kind.__name__ for kind in self.experts.kinds]
        block = block_of(self.experts.name)
        near = (sighting.module, block_of(sighting.module))
        return any(name and (name == block or block.endswith(f".{name}")) for name in near)


def summarize(
    title: str,
    model: Any,
    found: Sequence[Found],
    places: Sequence[Place] = (),
    at_last: bool = True,
) -> Summary:
    """What became of the MoE layers of a module, or of another callable, in its graphs, which ended
    in these places. Unless `at_last`, more graphs may come of the call."""
    ones = list(_ones(model, found))
    how: Counter[str] = Counter()
    left: dict[str, list[str]] = defaultdict(list)
    routers: dict[str, list[str]] = defaultdict(list)
    unseen: list[str] = []
    for one in ones:
        reason = one.reason(found, places, at_last)
        if reason:
            left[reason].append(one.name)
        elif not one.layers:
            unseen.append(one.name)
        else:
            how[one.layers[0].runs_on] += 1
            routers[next((x.router for x in one.layers if x.router), "")].append(one.name)
    seen: dict[str, list[str]] = defaultdict(list)
    for graph in () if ones else found:
        for s in graph.sightings:
            where = left if _has_experts(model, graph, s.module, s.of) else seen
            where[graph.skipped or s.what].append(s.module)
    return Summary(
        title=title,
        layers=len(ones) or sum(map(len, left.values())),
        on_ours=sum(how.values()),
        routers=len(routers.pop("", [])),
        runs_on=tuple((text, n) for text, n in how.items() if text),
        left=_frozen(left),
        left_routers=_frozen(routers),
        unseen=tuple(unseen),
        seen=_frozen(seen),
    )


def experts_of(module: Any, name: str = "", within: nn.Module | None = None) -> Iterator[Experts]:
    """The MoE layers of a module, in its order; none of another callable."""
    if not isinstance(module, nn.Module):
        return
    if is_experts(name, type(module)):
        if next(module.parameters(), None) is not None:
            kinds = (type(module),) if within is None else (type(module), type(within))
            yield Experts(name=name, kinds=kinds)
        return
    parts = [
        each
        for part, child in module.named_children()
        for each in experts_of(child, f"{name}.{part}".lstrip("."), module)
    ]
    own = [each for each in parts if block_of(each.name) == name and each.kinds[1:]]
    if len(own) > 1 and not any(each.name.endswith("experts") for each in own):
        parts = [each for each in parts if each not in own]  # each product has a module of its own
        yield Experts(name=name, kinds=(type(module), *own[0].kinds[:1]))
    yield from parts


def is_by_value(reason: str) -> bool:
    """Whether a graph ended because a size depends on values."""
    return reason.startswith(BY_VALUE)


def _ones(model: Any, found: Sequence[Found]) -> Iterator[_One]:
    experts, taken = list(experts_of(model)), set[int]()
    ones = []
    for each in experts:
        layers = _layers_of(each, found)
        taken.update(map(id, layers))
        ones.append(_One(name=each.name, experts=each, layers=layers))
    if any(graph.shares for graph in found):
        like = {_digitless(one.name): one.layers for one in ones if one.layers}
        for one in ones:
            one.layers = one.layers or like.get(_digitless(one.name), ())
    yield from ones
    others: dict[tuple[str, str, int], list[Layer]] = defaultdict(list)
    for graph in found:
        count: Counter[str] = Counter()
        for layer in graph.layers:
            if id(layer) not in taken:
                others[graph.model, layer.module, count[layer.module]].append(layer)
                count[layer.module] += 1
    for (_, module, _), layers in others.items():
        yield _One(name=module, experts=None, layers=layers)


def _layers_of(experts: Experts, found: Iterable[Found]) -> list[Layer]:
    """What graphs say of these experts."""
    name, block = experts.name, block_of(experts.name)
    exact, partly = [], []
    for graph in found:
        for layer in graph.layers:
            module = layer.module
            if module == name or (name and inside(module, name)) or (name and module == block):
                exact.append(layer)
            elif _may_be(experts, graph.model, module):
                partly.append(layer)
    return exact or partly


def _may_be(experts: Experts, root: str, module: str) -> bool:
    """Whether a module in a graph of a part of the model, or of a larger one, may be these experts:
    by the end of the name, as in a graph of a decoder layer, or by the class of the part itself."""
    own, *around = (kind.__name__ for kind in experts.kinds)
    if root == own or not module:
        return root in (own, *around)
    name = experts.name
    ends = any(name.endswith(f".{part}") for part in _beginnings(module))
    larger = name != "" and module.endswith(f".{name}")
    return ends or larger or block_of(name).endswith(f".{module}")


def _beginnings(module: str) -> Iterator[str]:
    """The names of what a module is in, and its own."""
    words = module.split(".")
    return (".".join(words[: i + 1]) for i in range(len(words)))


def _has_experts(model: Any, graph: Found, module: str, E: int | None) -> bool:
    """Whether what chooses of E is in a module of a model, or beside one, that has E of something:
    parts in a list, or matrices in a stack."""
    if not isinstance(model, nn.Module) or E is None or E < 2:
        return False
    modules = dict(model.named_modules())
    for name, part in modules.items():
        at_root = not module and type(part).__name__ == graph.model
        if name == module or (module and name.endswith(f".{module}")) or at_root:
            for near in (part, modules[block_of(name)]):
                lists = (c for c in near.children() if isinstance(c, nn.ModuleList))
                if any(len(parts) == E for parts in lists):
                    return True
                if any(p.dim() > 2 and p.shape[0] == E for p in near.parameters(recurse=False)):
                    return True
    return False


def _is_code_of(kind: type, file: str, line: int) -> bool:
    """Whether a line is in a method of a class."""
    for base in kind.__mro__[:-1]:
        if base is nn.Module or base.__module__.startswith("torch."):
            break
        for method in vars(base).values():
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            if code is not None and code.co_filename == file:
                lines = [at for _, _, at in code.co_lines() if at is not None]
                if min(lines) <= line <= max(lines):
                    return True
    return False


def _digitless(name: str) -> str:
    return re.sub(r"\d+", "", name)


def _where(modules: Sequence[str]) -> str:
    return f" ({names(modules)})" if any(modules) else ""


def _frozen(by_reason: Mapping[str, Sequence[str]]) -> Left:
    """Reasons that differ in the numbers of nodes count as equal."""
    groups: dict[str, tuple[str, dict[str, None]]] = {}
    for reason, at in by_reason.items():
        _, modules = groups.setdefault(re.sub(r"_\d+\b", "", reason), (reason, {}))
        modules.update(dict.fromkeys(at))
    return tuple((reason, tuple(modules)) for reason, modules in groups.values())

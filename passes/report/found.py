"""The MoE layers of a graph and what became of them, kept with the compiled graph.

Inductor counts by name what it does to a graph, keeps the counts with the code that it made, and
adds them again where it takes that code from a cache, where no pass runs. What the passes found is
the name of such a count.
"""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from torch import fx, nn
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import counters

from moe_ops.passes.report.sightings import Sighting, sightings
from moe_ops.passes.rewriting.context import Context, Note
from moe_ops.passes.rewriting.graph import aten, layer_of, path_of
from moe_ops.planning.plan import Choice, Range
from moe_ops.prepared import HoldsExperts
from moe_ops.registry.spec import REFERENCE

COUNT = "moe_ops "  # what the name of a count of ours begins with
LIFTS = ("lift_grouped_mm", "lift_batched_mm")
ROUTER = "lift_router"
# Ops of tokens that run all of a layer's experts.
WHOLE = (
    "moe", "experts_over_ranks", "experts", "experts_saving", "experts_adapted",
    "experts_adapted_saving",
)  # fmt: skip
MAIN = (*WHOLE, "expert_gemm")  # the ops that do most of the work
NO_FORM = "its products are in no form that a pass knows"

_PRODUCTS = frozenset(
    {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
    | {aten._grouped_mm.default, aten._scaled_grouped_mm.default, aten._scaled_mm.default}
)
# Whose ops do no work of experts. Of higher order those that call a Triton kernel may.
_PLAIN = frozenset(
    {"aten", "prims", "moe_ops", "_c10d_functional", "inductor", "inductor_prims", "higher_order"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A MoE layer in a graph: what its experts run on, or why they were left alone."""

    module: str  # of the experts, such as model.layers.0.mlp.experts; empty if unknown
    runs_on: str = ""
    reason: str = ""
    router: str = ""  # why its router was left alone; empty if an op of ours is the router


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What became of the MoE layers of a graph, what else chooses in it, and whether it calls
    regions that are compiled once for several modules."""

    model: str  # the class of the module whose code the graph is; empty if it is a function's
    layers: tuple[Layer, ...] = ()
    sightings: tuple[Sighting, ...] = ()
    shares: bool = False
    skipped: str = ""  # why no pass ran

    def left_for(self, reason: str) -> Found:
        """What is found if nothing of the graph was rewritten, for this reason."""
        layers = tuple(Layer(module=layer.module, reason=reason) for layer in self.layers)
        return replace(self, layers=layers, skipped=reason)

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Found:
        values = json.loads(text)
        layers = tuple(Layer(**layer) for layer in values.pop("layers"))
        seen = tuple(Sighting(**sighting) for sighting in values.pop("sightings"))
        return Found(**values, layers=layers, sightings=seen)


def is_experts(name: str, kind: Any) -> bool:
    """Whether a module of this name and class holds the experts of a MoE layer: as transformers
    decorates them, as we store them, or as models call them."""
    if name.rpartition(".")[2] == "experts":
        return True
    if not isinstance(kind, type):
        return False
    named = kind.__name__.endswith("Experts") and "Shared" not in kind.__name__
    return named or hasattr(kind, "_apply_gate") or issubclass(kind, HoldsExperts)


class Unlifted(NamedTuple):
    """Why stock experts and routers are left, where no pass looks for them."""

    experts: str = ""
    routers: str = ""


NONE = Unlifted()


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A graph before the passes: the experts that each layer of it belongs to, those with products
    in it, and those that run on our ops already."""

    found: Found
    experts: dict[str, str]
    products: tuple[str, ...]
    ours: tuple[str, ...]

    @staticmethod
    def at(graph: fx.Graph) -> Look:
        experts: dict[str, str] = {}
        products: dict[str, None] = {}
        ours: list[str] = []
        root, shares = _traced_module(), False
        model = "" if root is None else type(root).__name__
        is_whole = root is not None and is_experts("", type(root))  # no node names the root
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            layer = layer_of(node)
            shares = shares or "invoke_subgraph" in str(node.target)
            inside = "" if is_whole else _experts_of(node)
            experts.setdefault(layer, layer if inside is None else inside)
            if getattr(node.target, "namespace", "") == "moe_ops":
                if str(node.target).split(".")[1] in (*WHOLE, "combine"):
                    ours.append(experts[layer])
            elif inside is not None and _is_product(node):
                products[inside] = None
        found = Found(model=model, sightings=tuple(sightings(graph)), shares=shares)
        return Look(found=found, experts=experts, products=tuple(products), ours=tuple(ours))

    def after(self, context: Context, unlifted: Unlifted = NONE) -> Found:
        """What the passes made of it; `unlifted` says why code is left that none looked at."""
        lifted = [self._of(note) for note in context.rewrites if note.rule in LIFTS]
        refused = {
            self._of(note): note.text
            for note in context.refusals
            # Gathered weights may be those of adapters, too; grouped products are of experts.
            if note.rule == LIFTS[0] or (note.rule == LIFTS[1] and self._of(note) in self.products)
        }
        routers = {self._of(note): note.text for note in context.refusals if note.rule == ROUTER}
        by_layer: dict[str, list[Choice]] = defaultdict(list)
        for choice in context.choices:
            by_layer[self.experts.get(choice.layer, choice.layer)].append(choice)
        layers = [
            Layer(
                module=module,
                runs_on=runs_on(by_layer[module]),
                router=routers.get(module, unlifted.routers if self._chosen_by(module) else ""),
            )
            for module in _each(lifted + list(self.ours))
            if module not in refused
        ]
        known = {layer.module for layer in layers}
        left = {m: unlifted.experts or self._seen(m) for m in self.products if m not in known}
        left |= refused
        layers += [Layer(module=module, reason=reason) for module, reason in left.items()]
        if not layers:
            sure = [s for s in self.found.sightings if s.is_sure]
            layers = [Layer(module=s.module, reason=s.what) for s in sure]
        return replace(self.found, layers=tuple(layers))

    def untouched(self, reason: str) -> Found:
        """What is to be told of it if no pass runs."""
        modules = dict.fromkeys((*self.products, *self.ours))
        return replace(self.found, layers=tuple(Layer(module=m) for m in modules)).left_for(reason)

    def _of(self, note: Note) -> str:
        return self.experts.get(note.layer, note.layer)

    def _seen(self, module: str) -> str:
        """What chooses these experts, in words."""
        return next(iter(self._chosen_by(module)), NO_FORM)

    def _chosen_by(self, module: str) -> list[str]:
        """What of the graph, that is no op, may choose these experts, in words."""
        block = block_of(module)
        return [s.what for s in self.found.sightings if inside(s.module, block)]


def runs_on(choices: Iterable[Choice]) -> str:
    """The backends of a layer, such as "cpu to 128 tokens, then aten"; empty if none was chosen."""
    main = sorted((c for c in choices if c.op in MAIN), key=lambda c: MAIN.index(c.op))
    if not main:
        return ""
    planned = [c for c in main if c.backends != (REFERENCE,)]
    if not planned:
        return "their definition, compiled"
    choice = planned[0]
    unit = "tokens" if choice.op in WHOLE else "rows"
    text = _ranges(choice.ranges, unit)
    if len(choice.ranges) == 1 and choice.rows[0] == choice.rows[1]:
        text += f" for {choice.rows[0]} {unit}"
    return text if choice.op in WHOLE else f"their definition, with products on {text}"


def _ranges(ranges: Sequence[Range], unit: str) -> str:
    parts = []
    for i, r in enumerate(ranges):
        name = "their definition" if r.backend == REFERENCE else r.backend
        last = i == len(ranges) - 1
        upto = "" if last else f" to {r.upto}" + ("" if i else f" {unit}")
        parts.append(("then " if last and i else "") + name + upto)
    return ", ".join(parts)


def block_of(experts: str) -> str:
    """The module that has a module of experts."""
    return experts.rpartition(".")[0]


def inside(module: str, block: str) -> bool:
    """Whether a module is this one or a part of it."""
    return not block or module == block or module.startswith(f"{block}.")


def keep(found: Found) -> None:
    """Keep it with the graph that is being compiled, if there is anything to tell of it."""
    counters["inductor"][COUNT + found.to_text()] += 1


class _Watching(threading.local):
    depth = 0


_watching = _Watching()


def is_watched() -> bool:
    """Whether `kept` is around what runs now."""
    return _watching.depth > 0


@contextmanager
def kept() -> Iterator[list[Found]]:
    """A list that has, at the end, what was kept with the graphs that were compiled inside, or that
    a cache gave."""
    before, found = counts(), list[Found]()
    _watching.depth += 1
    try:
        yield found
    finally:
        _watching.depth -= 1
        found += since(before)


def counts() -> Counter[str]:
    """Everything that was kept so far in this process."""
    ours = (item for item in counters["inductor"].items() if item[0].startswith(COUNT))
    return Counter(dict(ours))


def since(before: Counter[str]) -> list[Found]:
    """What was kept after these counts were taken."""
    return [Found.from_text(text.removeprefix(COUNT)) for text in counts() - before]


def _each(modules: Iterable[str]) -> Iterator[str]:
    """Each module once, but layers of no known module as often as there are any."""
    seen = set()
    for module in modules:
        if module not in seen or not module:
            yield module
        seen.add(module)


def _experts_of(node: fx.Node) -> str | None:
    """The outermost experts that a node belongs to."""
    for path, kind in (node.meta.get("nn_module_stack") or {}).values():
        name = path_of(path)
        if is_experts(name, kind):
            return name
        head, found, _ = f"{name}.".partition(".experts.")  # of a list of experts
        if found:
            return f"{head}.experts"
    return None


def _is_product(node: fx.Node) -> bool:
    """Whether a node may do the work of experts: a product, or an op of somebody else."""
    if node.target in _PRODUCTS or "triton_kernel_wrapper" in str(node.target):
        return True
    return getattr(node.target, "namespace", "aten") not in _PLAIN


def _traced_module() -> nn.Module | None:
    """The module whose code Dynamo traces in this thread, if it is a module's."""
    try:
        tx = InstructionTranslator.current_tx()
    except AttributeError:  # nothing is being traced
        return None
    return next((v for v in tx.f_locals.values() if isinstance(v, nn.Module)), None)

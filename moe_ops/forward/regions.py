"""A twin of a model whose repeated layers are compiled one by one, all by the same code.

Compiling a layer takes seconds where the whole of a deep model takes a minute; what is lost, a
kernel launch or two between layers, costs nothing in a captured graph.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from moe_ops.forward.caches import seen_by
from moe_ops.forward.inputs import note
from moe_ops.forward.layer_cache import CACHE, Filled, Incoming
from moe_ops.interop.code_objects import with_own_code_object
from moe_ops.interop.switches import may_branch, switches
from moe_ops.ops.linear_layers import apply_linear
from moe_ops.prepared import HoldsExperts
from moe_ops.registry.invariance import INVARIANT
from moe_ops.terminal import waiting_for

Form = tuple[bool, type, type]
Kind = tuple[type, ...]  # of a module and all in it
Region = Callable[..., Any]  # (module, *args, **kwargs) -> what module(*args, **kwargs) returns


def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def region(name: str) -> Region:
    """A region to be compiled by itself."""
    return with_own_code_object(call_module, name)


class ByKind:
    """A region that is compiled apart for modules of unlike parts: Dynamo gives up on code that it
    has compiled a few times, and each kind needs some for its sizes and masks."""

    def __init__(self, name: str, compile_region: Callable[[Region], Region]) -> None:
        self._name = name
        self._compile = compile_region
        self._kinds: dict[Kind, int] = {}  # numbered as they came
        self._expected: set[Kind] = set()
        self._compiled: dict[tuple[Kind, Form], Region] = {}
        self._calls: WeakKeyDictionary[nn.Module, dict[Form, Region]] = WeakKeyDictionary()

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls, form = self._calls.get(module), form_of(args, kwargs)
        if calls is None:
            calls = self._calls[module] = {}
        if form in calls:
            return calls[form](module, *args, **kwargs)
        kind = kind_of(module)
        if (kind, form) in self._compiled:
            calls[form] = self._compiled[kind, form]
            return calls[form](module, *args, **kwargs)
        name = f"{self._name}_{type(module).__name__}_{len(self._compiled)}"
        calls[form] = self._compiled[kind, form] = self._compile(region(name))
        with waiting_for(self._said(module, kind, form)):
            return calls[form](module, *args, **kwargs)

    def expect(self, modules: Iterable[nn.Module]) -> None:
        """Count the kinds of these modules among those that are to come."""
        self._expected.update(map(kind_of, modules))

    def _said(self, module: nn.Module, kind: Kind, form: Form) -> str:
        number = self._kinds.setdefault(kind, len(self._kinds) + 1)
        kinds = len(self._expected | self._kinds.keys())
        one = " for one token" if form[0] else ""
        return f"compiling {type(module).__name__}{one} ({number} of {kinds} kinds)"


def kind_of(module: nn.Module) -> Kind:
    """What modules of one code have in common."""
    return tuple(type(part) for part in module.modules())


def form_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
    """What calls that share code have in common: whether sequences have one token, on which
    attention functions branch, and what there is for a mask and a cache."""
    x = args[0] if args else None
    one = isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == 1
    return one, type(kwargs.get("attention_mask")), type(kwargs.get(CACHE))


def layer_lists(model: nn.Module) -> list[str]:
    """The names of the lists of decoder layers in a model."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) > 0
        and all(isinstance(m, GradientCheckpointingLayer) for m in module)
    ]


def decoder_layers(model: Any) -> str:
    """The name of the list of a model's decoder layers: the only list of layers, or of several, as
    encoders have some, the one of the text decoder. Raises LookupError if that is not clear."""
    found = layer_lists(model)
    if len(found) > 1 and hasattr(model, "get_decoder"):
        count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
        inside = set(model.get_decoder().modules())
        lists = {name: model.get_submodule(name) for name in found}
        found = [name for name, x in lists.items() if x in inside and len(x) == count]
    if len(found) != 1:
        raise LookupError(f"has {len(layer_lists(model))} lists of decoder layers, not one")
    return found[0]


def chain_to_layers(model: nn.Module) -> list[nn.Module]:
    """The model, and the modules down to the list of its layers."""
    path = decoder_layers(model)
    chain = [model]
    for name in path.split("."):
        chain.append(chain[-1].get_submodule(name))
    return chain


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Whatever the caller's mode, what is made here is a normal tensor without gradient, so that
    one compiled variant serves all callers."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """How the layers of a twin run: through `region`, or with `stand_ins` in place of some layers.

    Layers that are `unmasked` get no mask: while a graph is captured models make one that hides
    nothing beyond what is causal. Layers with `views` get a view of a cache also where the model
    keeps none, so that calls with and without `use_cache` share code. The module that has the list
    of layers is called by `around`, which is given what runs it.

    What is beside the layers and has no weights, as rotary embeddings, runs through the region only
    if that is for `one_size`: it is called once where layers are called many times, and code for
    any size takes seconds to compile, in torch 2.11 another time for one sequence.
    """

    region: Region
    stand_ins: Mapping[nn.Module, nn.Module] = field(default_factory=dict)
    unmasked: bool = False
    views: bool = False
    one_size: bool = False
    around: Callable[..., Any] | None = None

    def compiles(self, beside: nn.Module) -> bool:
        """Whether a module beside the layers runs through the region."""
        return self.one_size or next(beside.parameters(), None) is not None


def divided(model: PreTrainedModel, way: Way) -> PreTrainedModel:
    """A twin that runs like the model it was made of, its layers, and the modules beside them (the
    last norm, rotary embeddings), in this way. Weights are shared."""
    path = decoder_layers(model)
    twin = parent = copy.copy(model)
    for name in path.split("."):
        parent._modules = dict(parent._modules)
        child = copy.copy(parent._modules[name])
        if isinstance(child, nn.ModuleList):
            _divide(parent, child, name, way)
            if way.around is not None:
                parent._compiled_call_impl = functools.partial(way.around, parent._call_impl)
        parent._modules[name] = child
        assert child is not None
        parent = child
    head = model.get_output_embeddings()
    for name, module in twin._modules.items():
        if module is head and isinstance(head, nn.Linear):
            twin._modules[name] = _of_rows(head)
    return twin


def _of_rows(head: nn.Linear) -> nn.Linear:
    """A copy of the head for the last tokens of prompts. They are a slice [B, 1, D] whose rows lie
    apart, of which torch makes B products, on a CPU with a copy of the weight for each. One row is
    contiguous in torch's eyes, and still such a slice, so rows get one axis. It runs beside
    compiled code, and so is told here whether calls have to be batch invariant."""
    copied = copy.copy(head)

    def of_rows(x: Tensor) -> Tensor:
        rows = x.flatten(0, -2).contiguous()
        return apply_linear(head, rows, INVARIANT.get()).unflatten(0, x.shape[:-1])

    copied._compiled_call_impl = of_rows
    return copied


def _divide(parent: nn.Module, layers: nn.ModuleList, name: str, way: Way) -> None:
    beside = {
        key: module
        for key, module in parent._modules.items()
        if key != name and module is not None and not isinstance(module, nn.Embedding)
    }
    if isinstance(way.region, ByKind):
        compiled = (module for module in beside.values() if way.compiles(module))
        way.region.expect((*(way.stand_ins.get(x, x) for x in layers), *compiled))
    layers._modules = {key: _routed(layer, int(key), way) for key, layer in layers._modules.items()}
    for key, module in beside.items():
        parent._modules[key] = _routed(module, None, way)


def _routed(module: nn.Module | None, index: int | None, way: Way) -> nn.Module:
    """A copy of a module that runs the module through the region."""
    assert module is not None
    routed = copy.copy(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        if index is None:
            args, kwargs = of_whole_batch(args, kwargs)
            run = way.region if way.compiles(module) else call_module
            return run(module, *args, **kwargs)
        return _call_layer(way, module, index, *args, **kwargs)

    routed._compiled_call_impl = call
    return routed


def of_whole_batch(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with positions [1, S] as [B, S], and none of them expanded, if there are states
    [B, S, D] to tell B: code for any batch cannot tell a size that is always 1 from a batch of 1,
    nor a stride that is always 0 from that of several sequences."""
    found = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if not found or found[0].dim() != 3:
        return args, kwargs
    B, S, _ = found[0].shape

    def whole(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.is_floating_point():
            return x
        return (x.expand(B, S) if x.shape == (1, S) else x).contiguous()

    return tuple(map(whole, args)), {name: whole(x) for name, x in kwargs.items()}


def _call_layer(way: Way, layer: nn.Module, index: int, *args: Any, **kwargs: Any) -> Any:
    if way.unmasked and "attention_mask" in kwargs:
        kwargs["attention_mask"] = None
    if args and "attention_mask" in kwargs:
        kwargs["attention_mask"] = _of_each_sequence(kwargs["attention_mask"], len(args[0]))
    note(args, kwargs)
    layer = way.stand_ins.get(layer, layer)
    cache = kwargs.get(CACHE)
    if cache is None:
        if way.views and CACHE in kwargs:
            kwargs[CACHE] = Incoming()
        return way.region(layer, *args, **kwargs)
    view, put = seen_by(cache, index)
    if isinstance(view, Filled):
        kwargs = {**kwargs, "attention_mask": _of_every_row(kwargs.get("attention_mask"))}
    out = way.region(layer, *args, **{**kwargs, CACHE: view})
    put()
    return out


def _of_each_sequence(mask: Any, B: int) -> Any:
    """A mask [1, N, S, tokens seen] that several sequences share as [B, N, S, tokens seen]. Where
    others came before that have a row for each, Dynamo takes its rows for any number, and torch
    2.13 then does not broadcast them."""
    is_shared = isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[0] == 1 < B
    return mask.expand(B, -1, -1, -1) if is_shared else mask


def _of_every_row(mask: Any) -> Any:
    """A mask [1, 1, S, tokens seen] strided as those of more sequences without padding are: they
    share one, expanded, and Dynamo takes a stride of 0 to be always 0. Masks of floats, which are
    added, each sequence has for itself."""
    is_one = isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[0] == 1
    if not is_one or mask.dtype != torch.bool:
        return mask
    return mask.as_strided(mask.shape, (0, *mask.stride()[1:]), mask.storage_offset())


def addresses(model: nn.Module) -> tuple[object, ...]:
    """Where a model's weights and buffers are, how experts are stored, and what modules branch on:
    the same until somebody replaces or prepares one, or chooses other adapters.

    Every call of `generate` asks, so this walks by itself: `parameters` and `buffers`, which name
    what they find, take four times as long.
    """
    found: list[object] = []
    left: list[nn.Module | None] = [model]
    seen: set[nn.Module] = set()
    while left:
        module = left.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        for held in (module._parameters, module._buffers):
            found += [t.data_ptr() for t in held.values() if t is not None]
        if isinstance(module, HoldsExperts):
            found.append(module.stored_as)
        kind: Any = type(module)
        if may_branch(kind):
            found.append(switches(module))
        left += module._modules.values()
    return tuple(found)

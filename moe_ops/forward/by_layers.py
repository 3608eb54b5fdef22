"""A forward whose layers run one after the other from Python, like ones by the same compiled code.

To compile a whole model takes as many times longer as it has layers, and the code is that of one
layer, again and again. What is lost, a kernel launch or two between layers, costs nothing in a
captured graph.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe_ops.forward import caches
from moe_ops.forward.calls import capture_refusal
from moe_ops.forward.captured import Forwards
from moe_ops.forward.layer_cache import CACHE, Unviewable, kept_until_the_end
from moe_ops.forward.loops import around_loops
from moe_ops.forward.recorders import unrecorded
from moe_ops.forward.regions import (
    Region,
    Way,
    chain_to_layers,
    divided,
    layer_lists,
    plain_tensors,
)
from moe_ops.interop.hooks import are_on_every_module, hooks_of
from moe_ops.interop.switches import batch_of, boards_of, switches
from moe_ops.interop.told import told_of
from moe_ops.twin import Contents

log = logging.getLogger("moe_ops")

EXTRA_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")


class ByLayers:
    """Runs the forward of a transformers model layer by layer, each through `region`.

    The model's own Python runs around its layers: embeddings, masks, the head, losses. What was
    done to the model since the last call is seen: each call looks whether its modules hold the
    same, and at the addresses of weights. Sizes that come again are captured.
    """

    def __init__(self, model: PreTrainedModel, region: Region, forwards: Forwards) -> None:
        self.model = model
        self.forwards = forwards
        self._region = region
        self._divided: nn.Module | None = None
        self._unmasked: Any = None
        self._contents = Contents([])
        self._weights: list[Tensor] = []
        self._addresses: list[object] = []
        self._switched: list[nn.Module] = []
        self._refusal: str | None = None
        self._own_cache: str | None = None  # why layers cannot run on one that the model makes
        self.refused: Counter[str] = Counter()  # calls by the reason why they run as one graph

    def refusal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why a call runs as one graph instead, or None."""
        model = self.model
        if self._divided is None or not self._contents.same():
            self._renew()
        if self._refusal is not None:
            return self._refusal
        if are_on_every_module():
            return "a hook is on every module"
        if torch.is_grad_enabled():
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            if any(x.requires_grad for x in (*given, *self._weights)):
                return "a gradient is asked for"
        asked = [n for n in EXTRA_OUTPUTS if kwargs.get(n) or getattr(model.config, n, False)]
        if asked:
            return f"{', '.join(asked)} is asked for"
        cache = kwargs.get(CACHE)
        if cache is None and self._own_cache is not None and self._makes_cache(kwargs):
            return self._own_cache
        return caches.refusal(cache)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives for a call that is not refused; NotImplemented, and nothing has
        changed, for one that turns out not to run layer by layer."""
        try:
            return self._with_room(args, kwargs)
        except Unviewable as error:
            reason = str(error)
        if kwargs.get(CACHE) is None and self._own_cache is None:
            self._own_cache = reason
            self._divide()
            if not self._makes_cache(kwargs):
                return self._with_room(args, kwargs)
        self.tell(reason)
        return NotImplemented

    def _with_room(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._lay_out(args, kwargs)
        addresses: list[object] = [t.data_ptr() for t in self._weights]
        addresses += map(switches, self._switched)
        if addresses != self._addresses:
            self._addresses = addresses
            self.forwards.forget()
        return self.forwards.with_room(lambda: self._run(args, kwargs))

    def _lay_out(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have the adapters of the sequences of a call where its layers read them, and say who is
        told of its sizes."""
        batch = batch_of(args, kwargs)
        for board in boards_of(self._switched):
            if batch is not None:
                board.use(batch, batch)
        self.forwards.told = told_of(self.model)

    def tell(self, reason: str) -> None:
        self.refused[reason] += 1
        if self.refused[reason] == 1:
            log.info("%s runs as one graph: %s", type(self.model).__name__, reason)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._divided is not None, "ask for a refusal first"
        with plain_tensors(), kept_until_the_end():
            args = tuple(map(_plain, args))
            return self._divided(*args, **{name: _plain(x) for name, x in kwargs.items()})

    def _makes_cache(self, kwargs: dict[str, Any]) -> bool:
        asked = kwargs.get("use_cache")
        return bool(getattr(self._config, "use_cache", False) if asked is None else asked)

    def _decode(self, decoder: Any, *args: Any, **kwargs: Any) -> Any:
        if self._uncaptured is not None:
            self.forwards.refused[self._uncaptured] += 1
            return decoder(*args, **kwargs)
        if len(args) > len(self._names):
            return decoder(*args, **kwargs)
        kwargs.update(zip(self._names, args, strict=False))
        return self.forwards.run(decoder, self._unmasked, self._config, kwargs)

    def _renew(self) -> None:
        """Divide the model as it is now."""
        modules = list(self.model.modules())
        self._unrecorded = unrecorded(self.model)
        hooks = hooks_of(self._unrecorded)
        self._refusal = f"a hook is on {hooks[0][0] or 'the model'}" if hooks else None
        *_, decoder, _ = chain_to_layers(self._unrecorded)
        self._config = decoder.config
        self._names = named(decoder.forward)
        self._own_cache = caches.own_refusal(self._config)
        self._divide()
        self._uncaptured = capture_refusal(decoder)
        if any(part.training for part in modules):
            self._uncaptured = "it is in training mode, whose dropout a graph would repeat"
        self._contents = Contents(modules)
        self._weights = [*self.model.parameters(), *self.model.buffers()]
        self._addresses = []
        self._switched = [part for part in modules if switches(part) is not None]

    def _divide(self) -> None:
        """Divide the model; without a cache, too, layers get views of keys and values if they can
        run on these."""
        keys_alone = self._own_cache is None and caches.keys_refusal(self._config) is None
        way = Way(around_loops(self._unrecorded, self._region), views=keys_alone)
        self._divided = divided(self._unrecorded, replace(way, around=self._decode))
        unmasked = divided(self._unrecorded, replace(way, unmasked=True))
        *_, self._unmasked, _ = chain_to_layers(unmasked)


def named(function: Callable[..., Any]) -> list[str]:
    """The names of arguments that may be given by their place."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]


def _plain(value: Any) -> Any:
    """A tensor of inference mode as one of none: layers get both kinds otherwise."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def shape_refusal(model: PreTrainedModel) -> str | None:
    """Why no call of a model can run layer by layer, or None."""
    if getattr(model.config, "is_encoder_decoder", False):
        return "it has an encoder"
    lists = layer_lists(model)
    if len(lists) != 1:
        return f"it has {len(lists)} lists of decoder layers, not one"
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        return "it is spread over devices"
    return None


def by_layers_of(twin: Any, region: Region) -> ByLayers | None:
    """What runs the forward of a transformers model layer by layer; None, with a logged reason, for
    one that cannot be divided."""
    reason = shape_refusal(twin)
    if reason is None:
        return ByLayers(twin, region, Forwards())
    log.info("%s is compiled as a whole: %s", type(twin).__name__, reason)
    return None

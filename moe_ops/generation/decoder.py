"""A model for `generate`: leases of buffers to calls, and the code that runs the model in them."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from moe_ops.forward.kinds import kinds_of
from moe_ops.forward.layer_cache import CACHE
from moe_ops.forward.loops import around_loops
from moe_ops.forward.masks import attention_of
from moe_ops.forward.regions import Way, addresses, divided, plain_tensors
from moe_ops.generation.by_rows import store_by_rows
from moe_ops.generation.own_attention import layers_of_steps
from moe_ops.generation.prompts import Captures, Prompt
from moe_ops.generation.steps import Code, Steps, Tools, shown
from moe_ops.graphs.report import StepsReport
from moe_ops.graphs.room import with_room

log = logging.getLogger("moe_ops")
T = TypeVar("T")

LEAST_SLOTS = 256
COARSE_SLOTS = 4096
MOST_STEPS = 8  # sizes whose buffers and graph are kept


def rows_for(batch: int) -> int:
    """The rows that serve a batch: the next power of two."""
    return 1 << (batch - 1).bit_length()


def slots_for(length: int) -> int:
    """The slots that serve a length, so that lengths share a graph: the next power of two, and from
    `COARSE_SLOTS` on, where doubling takes too much memory, the next multiple of that."""
    if length > COARSE_SLOTS:
        return -(-length // COARSE_SLOTS) * COARSE_SLOTS
    return max(LEAST_SLOTS, 1 << (length - 1).bit_length())


class Decoder:
    """A model for `generate`: its compiled regions, and the steps of the sizes used last."""

    def __init__(self, model: PreTrainedModel, tools: Tools, *, most: int = MOST_STEPS) -> None:
        self.model = model
        self.tools = tools
        self.most = most
        self._idle: OrderedDict[tuple[int, int], Steps] = OrderedDict()
        self._addresses: tuple[object, ...] = ()
        self._compiled = False  # the layers, for prompts
        self._renew()

    def _renew(self) -> None:
        """Forget what holds modules or weights: whole modules may be others by now."""
        self._captures = Captures(self.tools.pool)
        self._prompts: tuple[nn.Module, nn.Module] | None = None
        self._stand_ins: dict[str | None, Mapping[nn.Module, nn.Module]] = {}
        self._codes: WeakKeyDictionary[Steps, dict[str | None, Code]] = WeakKeyDictionary()

    def lease(self, batch: int, length: int) -> Lease:
        """Steps that nobody else has, for `batch` sequences of `length` tokens.

        Graphs of weights that are no longer where they were are forgotten first.
        """
        now = addresses(self.model)
        if now != self._addresses:
            if self._addresses:
                log.info("generate: weights were replaced, so graphs are captured again")
            if self.model.device.type == "cuda":
                with plain_tensors():
                    store_by_rows(self.model)
                now = addresses(self.model)
            self._renew()
            for idle in self._idle.values():
                idle.forget_graphs()
            kind = self.model.device, self.model.dtype
            if any((s.like.device, s.like.dtype) != kind for s in self._idle.values()):
                self._idle.clear()
            self._addresses = now
        key = rows_for(batch), slots_for(length)
        steps = self._idle.pop(key, None)
        if steps is None:
            steps = Steps(self.model, kinds_of(self.model.config), *key, self.tools)
        return Lease(self, steps, self._code(steps))

    def give_back(self, steps: Steps) -> None:
        self._idle[steps.rows, steps.slots] = steps
        while len(self._idle) > self.most:
            (rows, slots), _ = self._idle.popitem(last=False)
            log.info("generate: dropped the buffers of %d x %d, used longest ago", rows, slots)

    def with_room(self, run: Callable[[], T]) -> T:
        """What `run` returns; if memory does not suffice it runs again without the idle buffers."""
        return with_room(run, self._drop)

    def _drop(self) -> str:
        sizes = len(self._idle)
        self._idle.clear()
        return f"{sizes} sizes lose their buffers in generate" if sizes else ""

    def report(self) -> list[StepsReport]:
        """The sizes that are kept, the one used last at the end."""
        return [steps.report() for steps in self._idle.values()]

    @contextmanager
    def compiling_prompts(self) -> Iterator[None]:
        """A context around a prompt. For the first prompt it says that the layers are compiled."""
        with nullcontext() if self._compiled else shown("compiling the layers for prompts"):
            yield
        if not self._compiled:
            self.tools.tell()
        self._compiled = True

    def _code(self, steps: Steps) -> Code:
        """What runs the model in these steps, with the attention that it has now."""
        attention = attention_of(self.model.config)
        codes = self._codes.setdefault(steps, {})
        if attention not in codes:
            if self._prompts is None:
                region = around_loops(self.model, self.tools.layers)
                prompt, unmasked = (
                    divided(self.model, Way(region, unmasked=unmasked))
                    for unmasked in (False, True)
                )
                self._prompts = prompt, unmasked
            prompt, unmasked = self._prompts
            codes[attention] = Code(
                model=self.model,
                prompt=prompt,
                unmasked=unmasked,
                step=divided(
                    self.model,
                    Way(steps.region, self._layers_of_steps(attention), one_size=True),
                ),
                captures=self._captures,
            )
        return codes[attention]

    def _layers_of_steps(self, attention: str | None) -> Mapping[nn.Module, nn.Module]:
        """The layers with the attention of one query, where that computes the same."""
        if attention not in self._stand_ins:
            self._stand_ins[attention] = layers_of_steps(self.model, attention)
        return self._stand_ins[attention]


class Lease(Cache):
    """Steps that one call of `generate` has, as the cache that it hands on from token to token.

    While the prompt is read, in one part or several, it is to transformers like a dynamic cache.
    """

    def __init__(self, decoder: Decoder, steps: Steps, code: Code) -> None:
        super().__init__(layers=steps.cache.layers)
        self._decoder = decoder
        self.steps = steps
        self.code = code
        self.stock: Cache | None = (
            None  # what transformers made for the call, empty, or the caller's
        )
        self.taken: int | None = None  # tokens that it had, if it is the caller's
        self.batch: int | None = None  # of the prompt, once some of it is read
        self.prompt = 0  # the tokens of it that are read
        self.reading = True  # more of it may come

    def read(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The model's output for the prompts, or for more of them, which are then in the cache."""
        given = input_ids if inputs_embeds is None else inputs_embeds
        assert given is not None
        B, S = given.shape[:2]
        mask = attention_mask
        if mask is not None and bool(mask.all()):
            mask = None  # what is not masked can take the quickest attention
        if position_ids is None:
            position_ids = torch.arange(S, device=given.device)[None] + self.prompt
        with plain_tensors():  # as the forward's, whose compiled layers these share
            axes = position_ids.shape[:-2]
            positions = position_ids.expand(*axes, B, S).clone()
            embeds = None if inputs_embeds is None else inputs_embeds.clone()
            prompt = Prompt(input_ids, mask, positions, self.prompt, embeds)
        with self._decoder.compiling_prompts():
            out = self._decoder.with_room(lambda: self.steps.read(self.code, prompt, kwargs))
        self.batch = B
        self.prompt += S
        out[CACHE] = self
        return out

    def take(self, cache: Cache, rows: int) -> None:
        """Begin with what is in the caller's cache, to which `give` adds."""
        self.batch = rows
        self.taken = self.prompt = int(cache.get_seq_length())
        self._is_user_defined = True  # so transformers takes no step too much
        self.steps.take(cache, self.prompt)

    def give(self) -> None:
        """Add to the caller's cache what is new since it was taken."""
        if self.taken is not None and self.stock is not None and self.batch is not None:
            self.steps.add_to(self.stock, self.batch, self.taken)

    def step(self, ids: Tensor) -> Tensor:
        """The logits [B, 1, V] after one more token per sequence, valid until the next step."""
        return self.steps.step(self.code, ids, self._decoder.with_room)

    def handed_out(self) -> Cache:
        """The cache that transformers made, with a copy of what is kept; or the caller's."""
        assert self.stock is not None
        if self.batch is not None and self.taken is None:
            self.steps.copy_into(self.stock, self.batch, self.prompt)
        return self.stock

    @property
    def is_compileable(self) -> bool:
        return not self.reading

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.prompt if self.reading else super().get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        if self.reading:
            return self.prompt + query_length, 0
        return super().get_mask_sizes(query_length, layer_idx)

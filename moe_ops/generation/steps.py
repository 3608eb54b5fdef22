"""The steps of `generate`: a prompt through compiled layers, then one token per step from buffers
that stay where they are. Where there are CUDA graphs a step is captured whole, and so are prompts
of sizes that come again."""

from __future__ import annotations

import gc
import logging
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from moe_ops.generation.by_rows import store_by_rows
from moe_ops.generation.masks import Sizes, attention_of, masks
from moe_ops.generation.own_attention import stand_ins, step_attention
from moe_ops.generation.prompts import Prompt, Prompts
from moe_ops.generation.regions import ByKind, Region, Regions, addresses, own_code
from moe_ops.generation.slots import Slots
from moe_ops.terminal import rewrite

log = logging.getLogger("moe_ops")
T = TypeVar("T")

LEAST_SLOTS = 256
COARSE_SLOTS = 4096
MOST_STEPS = 8  # sizes whose buffers and graph are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What compiles and captures.

    `compile_prompt` compiles a region for any number of sequences and tokens, `compile_step` for
    the sizes of its first call. `capture(function, state)` makes a call that repeats
    `function` without the host; the tensors of `state` are those that function changes. It gives
    None where there is nothing to capture with, and raises RuntimeError if it fails.
    """

    compile_prompt: Callable[[Region], Region]
    compile_step: Callable[[Callable[..., Any]], Callable[..., Any]]
    capture: Callable[[Callable[[], None], Sequence[Tensor]], Callable[[], None] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsReport:
    """The buffers and the graphs for one size: its steps so far, its memory, its graphs of prompts
    and how many prompts they served."""

    rows: int
    slots: int
    steps: int
    captured: bool
    cache_bytes: int
    prompt_graphs: int
    prompts_replayed: int


def rows_for(batch: int) -> int:
    """The rows that serve a batch: the next power of two."""
    return 1 << (batch - 1).bit_length()


def slots_for(length: int) -> int:
    """The slots that serve a length, so that lengths share a graph: the next power of two, and from
    `COARSE_SLOTS` on, where doubling takes too much memory, the next multiple of that."""
    if length > COARSE_SLOTS:
        return -(-length // COARSE_SLOTS) * COARSE_SLOTS
    return max(LEAST_SLOTS, 1 << (length - 1).bit_length())


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Whatever the caller's mode, what is made here is a normal tensor without gradient, so that
    one compiled variant serves all callers."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def shown(text: str) -> Iterator[None]:
    """Around what takes a while: logged or, where nobody reads the log, on a terminal meanwhile."""
    log.info("generate: %s", text)
    logged = log.isEnabledFor(logging.INFO)
    if not logged:
        rewrite(sys.stderr, f"moe_ops: {text}")
    try:
        yield
    finally:
        if not logged:
            rewrite(sys.stderr, "")


class Steps:
    """Buffers for up to `rows` sequences of up to `slots` tokens, and the code of one step.

    A batch smaller than `rows` is padded with copies of its first sequence, which choose the same
    experts and so read no further weights.
    """

    def __init__(self, decoder: Decoder, rows: int, slots: int) -> None:
        self.decoder = decoder
        self.rows = rows
        self.slots = slots
        self.batch = rows
        self.count = 0
        self.replay: Callable[[], None] | None = None
        self.captured = False
        device = decoder.model.device
        with plain_tensors():
            self.ids = torch.zeros(rows, 1, dtype=torch.int64, device=device)
            self.positions = torch.zeros(rows, 1, dtype=torch.int64, device=device)
            self.filled = torch.zeros((), dtype=torch.int64, device=device)
            self.valid = torch.zeros(rows, slots, dtype=torch.bool, device=device)
            self.like = torch.empty(rows, 1, 0, dtype=decoder.model.dtype, device=device)
        self.logits: Tensor | None = None
        self.cache = Slots(decoder.regions.layers, rows, slots, self.filled)
        self.cache.steps = weakref.ref(self)
        self.prompts = Prompts()
        self.sizes = Sizes(slots, self.filled)
        self.region = ByKind(f"step_{rows}x{slots}", decoder.tools.compile_step)
        self.masks = decoder.tools.compile_step(own_code(masks, f"masks_{rows}x{slots}"))

    def read(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The model's output for the prompts, whose keys and values are then in the slots."""
        B, S = input_ids.shape
        mask = attention_mask
        if mask is not None and bool(mask.all()):
            mask = None  # what is not masked can take the quickest attention
        if position_ids is None:
            position_ids = torch.arange(S, device=input_ids.device)[None]
        prompt = Prompt(input_ids, mask, position_ids.expand(B, S).contiguous())
        self.batch = B

        def read() -> Any:
            with plain_tensors():
                return self.prompts.read(self, prompt, kwargs)

        with self.decoder.compiling_prompts():
            out = self.decoder.with_room(read)
        self.cache.filling = False
        return out

    def fill(self, prompt: Prompt, attention_mask: Any, kwargs: dict[str, Any]) -> Any:
        """What of `read` runs on the device, and nothing else: the model, its keys and values into
        the slots, and the buffers of the steps to come. `attention_mask` is what the model gets for
        the prompt's."""
        B, S = prompt.ids.shape
        regions = self.decoder.regions
        regions.region, regions.stand_ins = self.decoder.prompt_region, {}
        out = regions.model(
            input_ids=prompt.ids,
            attention_mask=attention_mask,
            position_ids=prompt.positions,
            past_key_values=self.cache,
            **kwargs,
        )
        self.valid.zero_()
        self.valid[:B, :S] = True if prompt.mask is None else prompt.mask.bool()
        self.positions[:B].copy_(prompt.positions[:, -1:] + 1)
        for buffer in (self.valid, self.positions):
            buffer[B:].copy_(buffer[:1].expand(self.rows - B, -1))
        self.filled.fill_(S)
        return out

    def step(self, ids: Tensor) -> Tensor:
        """The logits [B, 1, V] after one more token per sequence, valid until the next step."""
        self.ids[: self.batch].copy_(ids)
        if self.batch < self.rows:
            self.ids[self.batch :].copy_(ids[:1].expand(self.rows - self.batch, -1))
        if self.replay is None:
            self.replay = self.decoder.with_room(self._captured)
        self.replay()
        self.count += 1
        assert self.logits is not None
        return self.logits[: self.batch]

    def _run(self) -> None:
        """One step, of which everything but the ids is in buffers that it advances itself."""
        regions, model = self.decoder.regions, self.decoder.model
        regions.region, regions.stand_ins = self.region, self.decoder.stand_ins()
        with plain_tensors():
            self.valid.index_fill_(1, self.filled.view(1), True)
            mask = self.masks(model.config, self.like, self.valid, self.sizes, self.positions)
            out = regions.model(
                input_ids=self.ids,
                attention_mask=mask,
                position_ids=self.positions,
                past_key_values=self.cache,
                use_cache=True,
            )
            self.logits = out.logits
            self.positions.add_(1)
            self.filled.add_(1)

    def _captured(self) -> Callable[[], None]:
        start, state = time.perf_counter(), (self.valid, self.positions, self.filled)
        try:
            with shown(f"making a step of {self.rows} rows, {self.slots} slots"):
                replay = self.decoder.tools.capture(self._run, state)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            log.warning("generate: steps run uncaptured, as they cannot be captured: %s", error)
            return self._run
        if replay is None:
            return self._run
        self.captured = True
        log.info("generate: a step is ready after %.1f s", time.perf_counter() - start)
        return replay

    def forget_graphs(self) -> None:
        # The logits are in the memory of the graphs, which goes when nothing is in it.
        self.replay, self.captured, self.logits = None, False, None
        self.prompts.forget()

    def dynamic_cache(self) -> DynamicCache:
        """A copy of the keys and values that the caller may keep."""
        cache = DynamicCache()
        n = int(self.filled)
        for i, layer in enumerate(self.cache.layers):
            keys, values = (b[: self.batch, :, :n].clone() for b in (layer.keys, layer.values))
            cache.update(keys, values, i)
        return cache

    def report(self) -> StepsReport:
        return StepsReport(
            rows=self.rows,
            slots=self.slots,
            steps=self.count,
            captured=self.captured,
            cache_bytes=self.cache.nbytes,
            prompt_graphs=self.prompts.graphs,
            prompts_replayed=self.prompts.replayed,
        )


class Decoder:
    """A model for `generate`: its compiled regions, and the steps of the sizes used last."""

    def __init__(self, model: PreTrainedModel, tools: Tools, *, most: int = MOST_STEPS) -> None:
        self.model = model
        self.tools = tools
        self.most = most
        self.regions = Regions(model)
        self.prompt_region = ByKind("prompt", tools.compile_prompt)
        self._idle: OrderedDict[tuple[int, int], Steps] = OrderedDict()
        self.captures_prompts = True  # until one cannot be
        self._addresses: tuple[int, ...] = ()
        self._compiled = False  # the layers, for prompts
        self._stand_ins: dict[str | None, Mapping[nn.Module, nn.Module]] = {}

    def lease(self, batch: int, length: int) -> Steps:
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
            self.captures_prompts = True
            self.regions = Regions(self.model)  # whole modules may be others
            self._stand_ins.clear()
            for idle in self._idle.values():
                idle.forget_graphs()
            kind = self.model.device, self.model.dtype
            if any((s.like.device, s.like.dtype) != kind for s in self._idle.values()):
                self._idle.clear()
            self._addresses = now
        key = rows_for(batch), slots_for(length)
        steps = self._idle.pop(key, None) or Steps(self, *key)
        steps.cache.filling = True
        steps.batch = batch
        return steps

    def with_room(self, run: Callable[[], T]) -> T:
        """What `run` returns; if memory does not suffice it runs again without the idle buffers."""
        try:
            return run()
        except torch.OutOfMemoryError:
            if not self._idle:
                raise
        log.warning("generate: out of memory, so %d sizes lose their buffers", len(self._idle))
        self._idle.clear()
        gc.collect()
        torch.cuda.empty_cache()
        return run()

    def give_back(self, steps: Steps) -> None:
        self._idle[steps.rows, steps.slots] = steps
        while len(self._idle) > self.most:
            (rows, slots), _ = self._idle.popitem(last=False)
            log.info("generate: dropped the buffers of %d x %d, used longest ago", rows, slots)

    def report(self) -> list[StepsReport]:
        """The sizes that are kept, the one used last at the end."""
        return [steps.report() for steps in self._idle.values()]

    @contextmanager
    def compiling_prompts(self) -> Iterator[None]:
        """Around a prompt; the first is said to be compiled."""
        with nullcontext() if self._compiled else shown("compiling the layers for prompts"):
            yield
        self._compiled = True

    def stand_ins(self) -> Mapping[nn.Module, nn.Module]:
        """The layers with the attention of one query, where that computes the same."""
        name = attention_of(self.model.config)
        if name not in self._stand_ins:
            ours = step_attention(self.model, name)
            self._stand_ins[name] = {} if ours is None else stand_ins(self.model, ours)
        return self._stand_ins[name]

"""Prompts whose sizes come again, as captured graphs."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from moe_ops.forward.masks import REPEATABLE, attention_of, masks, repeatable
from moe_ops.generation.slots import Empty, Slots
from moe_ops.interop.interrupts import let_through

log = logging.getLogger("moe_ops")

MOST_TOKENS = 4096
MOST_SIZES = 16
TIMES = 3  # that a size has to come before it is captured
CONSTANTS = {"logits_to_keep", "use_cache", "return_dict"}  # that `generate` gives a model
Key = tuple[Any, ...]
Capture = Callable[[Callable[[], None], Sequence[Tensor]], Callable[[], None] | None]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Sequences: ids [B, S], and positions likewise; a mask, if there is one, hides some tokens."""

    ids: Tensor
    mask: Tensor | None
    positions: Tensor


@dataclass(slots=True)
class Size:
    """How often a size of prompts came, and what repeats it."""

    seen: int = 0
    replay: Callable[[], None] | None = None


class Captures:
    """Captures prompts, until one cannot be: then others cannot either, for the same reason."""

    def __init__(self, tool: Capture) -> None:
        self.tool = tool
        self.work = True

    def capture(
        self, function: Callable[[], None], state: Sequence[Tensor], size: str
    ) -> Callable[[], None] | None:
        start = time.perf_counter()
        try:
            replay = self.tool(function, state)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever it is, the way without a graph is still there
            let_through(error)
            log.warning(
                "generate: prompts run uncaptured, as those of %s cannot be captured: %s",
                *(size, error),
            )
            replay = None
        self.work = replay is not None
        if self.work:
            seconds = time.perf_counter() - start
            log.info("generate: a graph of prompts of %s took %.1f s", size, seconds)
        return replay


@dataclass(frozen=True, slots=True, eq=False)
class Filling:
    """How a prompt gets into one cache.

    `fill(prompt, mask, unmasked, kwargs)` runs the model, given this mask for the prompt's, without
    a mask for its layers if `unmasked`, and puts keys and values into `slots`. It changes `state`.
    """

    fill: Callable[[Prompt, Any, bool, dict[str, Any]], Any]
    slots: Slots
    state: tuple[Tensor, ...]
    like: Tensor  # [rows, 1, 0], of the model's dtype and device
    config: Any
    captures: Captures


class Prompts:
    """The graphs of the prompts that go into one cache, by size: sequences, tokens, masked or not.

    Run from Python a prompt takes the host about a millisecond a layer, whatever its length; a
    graph takes it nothing. From `MOST_TOKENS` on the kernels take as long, so there is nothing to
    gain. A capture costs several prompts, so it waits until a size comes the third time. The
    `MOST_SIZES` sizes that came last are remembered, with or without graph: where more of them take
    turns none comes often enough, and nothing is captured in vain.

    All graphs of a model share memory, and any may write over what another left there. So what is
    read after a replay is not in it: keys and values, whose buffers the first prompt of all makes,
    what `Steps` holds, and here the inputs and the logits. Of a replay these are the last token's
    alone, as `generate` reads no others; they hold until the next prompt of this cache.
    """

    def __init__(self) -> None:
        self.replayed = 0
        self._sizes: OrderedDict[Key, Size] = OrderedDict()
        self._inputs: Tensor | None = None
        self._logits: Tensor | None = None

    def read(self, filling: Filling, prompt: Prompt, kwargs: dict[str, Any]) -> Any:
        """The model's output for a prompt, whose keys and values are then in the slots."""
        replay = self._graph(filling, prompt, kwargs)
        if replay is None:
            return filling.fill(prompt, prompt.mask, False, kwargs)
        replay()
        self.replayed += 1
        assert self._logits is not None
        logits = self._logits[: prompt.ids.shape[0]]
        return CausalLMOutputWithPast(logits=logits)

    def _graph(
        self, filling: Filling, prompt: Prompt, kwargs: dict[str, Any]
    ) -> Callable[[], None] | None:
        """What repeats prompts of this size, with this one in its inputs; None if nothing does."""
        key, attention = key_of(prompt, kwargs), attention_of(filling.config)
        if key is None or attention not in REPEATABLE or not filling.captures.work:
            return None
        size = self._came((attention, *key))
        if size.seen < TIMES:
            return None
        inputs = self._copied(prompt)
        if size.replay is None:
            size.replay = self._captured(filling, inputs, kwargs)
        return size.replay

    @property
    def graphs(self) -> int:
        return sum(size.replay is not None for size in self._sizes.values())

    def forget(self) -> None:
        """Forget all graphs, and how often sizes came."""
        self._sizes.clear()
        self._logits = None

    def _came(self, key: Key) -> Size:
        size = self._sizes.pop(key, None) or Size()
        size.seen += 1
        self._sizes[key] = size
        if len(self._sizes) > MOST_SIZES:
            self._sizes.popitem(last=False)
        return size

    def _copied(self, prompt: Prompt) -> Prompt:
        """Copy a prompt into the buffers that graphs read, and return it there."""
        ids, mask = prompt.ids, prompt.mask
        if self._inputs is None:
            self._inputs = torch.zeros(3, MOST_TOKENS, dtype=torch.int64, device=ids.device)

        def copied(x: Tensor, buffer: Tensor) -> Tensor:
            return buffer[: ids.numel()].view(ids.shape).copy_(x)

        of_ids, of_mask, of_positions = self._inputs
        return Prompt(
            copied(ids, of_ids),
            None if mask is None else copied(mask.bool(), of_mask),
            copied(prompt.positions, of_positions),
        )

    def _captured(
        self, filling: Filling, prompt: Prompt, kwargs: dict[str, Any]
    ) -> Callable[[], None] | None:
        B, S = prompt.ids.shape
        like = filling.like.new_empty(B, S, 0)

        def run() -> None:
            config, empty = repeatable(filling.config), Empty(filling.slots)
            made = masks(config, like, prompt.mask, empty, prompt.positions)
            out = filling.fill(prompt, made, made is None, kwargs)
            last = out.logits[:, -1:]
            if self._logits is None:  # the first run of all, of which nothing is captured
                self._logits = last.new_empty(len(filling.like), *last.shape[1:])
            self._logits[:B].copy_(last)

        return filling.captures.capture(run, filling.state, f"{B} x {S}")


def key_of(prompt: Prompt, kwargs: dict[str, Any]) -> Key | None:
    """What prompts that share a graph have in common; None for a call that no graph repeats."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    plain = all(isinstance(value, int) for value in given.values())
    if not plain or not given.keys() <= CONSTANTS or given.get("return_dict") is False:
        return None
    ids = prompt.ids
    if ids.dim() != 2 or not 0 < ids.numel() <= MOST_TOKENS:
        return None
    return (
        *ids.shape,
        prompt.mask is not None,
        *sorted((name, repr(v)) for name, v in given.items()),
    )

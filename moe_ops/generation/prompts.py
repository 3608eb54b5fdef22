"""Prompts whose sizes come again, as captured graphs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from moe_ops.forward.masks import REPEATABLE, attention_of, maker_of, masks, repeatable
from moe_ops.generation.slots import Empty, Slots
from moe_ops.graphs.cuda_graph import GraphPool, refusing
from moe_ops.graphs.report import ForwardReport, of_sizes
from moe_ops.graphs.runner import TIMES, Recent, Size, put

MOST_TOKENS = 4096
MOST_SIZES = 16  # of a cache, of which there are several
CONSTANTS = {"logits_to_keep", "use_cache", "return_dict"}  # that `generate` gives a model
Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Sequences: ids [B, S], or embeddings [B, S, D] in place of ids; positions [B, S] or along
    several axes [axes, B, S]; a mask, if there is one, hides some tokens."""

    ids: Tensor | None
    mask: Tensor | None  # of these tokens, behind those that begun it
    positions: Tensor
    begun: int = 0  # tokens of it that are in the cache
    embeds: Tensor | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Sequences and tokens."""
        given = self.embeds if self.ids is None else self.ids
        assert given is not None
        return given.shape[0], given.shape[1]

    @property
    def inputs(self) -> dict[str, Tensor | None]:
        """What a model gets for the tokens."""
        if self.embeds is None:
            return {"input_ids": self.ids}
        return {"input_ids": self.ids, "inputs_embeds": self.embeds}


@dataclass(slots=True, eq=False)
class Captures:
    """Where prompts and steps of a model are captured. Prompts are until one cannot be: then others
    cannot either, for the same reason."""

    pool: GraphPool
    refusal: str | None = None


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
    model: Any
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
        self._sizes = Recent(Size, MOST_SIZES)
        self._inputs: Tensor | None = None
        self._logits: Tensor | None = None

    def read(self, filling: Filling, prompt: Prompt, kwargs: dict[str, Any]) -> Any:
        """The model's output for a prompt, whose keys and values are then in the slots."""
        size = self._captured(filling, prompt, kwargs)
        if size is None:
            return filling.fill(prompt, prompt.mask, False, kwargs)
        size.replay()
        self.replayed += 1
        assert self._logits is not None
        logits = self._logits[: prompt.size[0]]
        return CausalLMOutputWithPast(logits=logits)

    def _captured(self, filling: Filling, prompt: Prompt, kwargs: dict[str, Any]) -> Size | None:
        """What repeats prompts of this size, with this one in its inputs; None if nothing does."""
        key, attention = key_of(prompt, kwargs), attention_of(filling.model.config)
        captures, device = filling.captures, filling.like.device
        if key is None or attention not in REPEATABLE or not captures.pool.captures_on(device):
            return None
        size = self._sizes.came((attention, *key))
        if size.seen < TIMES:
            return None
        if captures.refusal is not None:
            size.refuse(captures.refusal)
            return None
        inputs = self._copied(prompt)
        if size.graph is None:
            B, S = prompt.size
            run, what = self._runner(filling, inputs, kwargs), f"prompts of generate ({B} x {S})"
            size.capture(captures.pool, run, filling.state, device=device, what=what)
            captures.refusal = size.refusal
        return size if size.is_ready else None

    def report(self) -> tuple[ForwardReport, ...]:
        """The sizes that came last, the newest at the end."""
        return of_sizes(self._sizes.items())

    @property
    def graphs(self) -> int:
        return self._sizes.graphs

    def forget(self) -> None:
        """Forget all graphs, and how often sizes came."""
        self._sizes.forget()
        self._logits = self._inputs = None

    def _copied(self, prompt: Prompt) -> Prompt:
        """Copy a prompt into the buffers that graphs read, and return it there."""
        ids, mask = prompt.ids, prompt.mask
        assert ids is not None
        axes = math.prod(prompt.positions.shape[:-2])
        if self._inputs is None:
            size = 2 + axes, MOST_TOKENS
            self._inputs = torch.zeros(size, dtype=torch.int64, device=ids.device)

        def copied(x: Tensor, buffer: Tensor) -> Tensor:
            return put(x, buffer.flatten()[: x.numel()].view(x.shape))

        of_ids, of_mask, of_positions = self._inputs[0], self._inputs[1], self._inputs[2:]
        return Prompt(
            copied(ids, of_ids),
            None if mask is None else copied(mask.bool(), of_mask),
            copied(prompt.positions, of_positions),
        )

    def _runner(
        self, filling: Filling, prompt: Prompt, kwargs: dict[str, Any]
    ) -> Callable[[], None]:
        """What is captured for prompts like this one, which is in the inputs."""
        B, S = prompt.size
        like = filling.like.new_empty(B, S, 0)

        def run() -> None:
            config, empty = repeatable(filling.model.config), Empty(filling.slots, S)
            make = maker_of(filling.model)
            with refusing("with masks that a graph can repeat they fail"):
                made = masks(config, like, prompt.mask, empty, prompt.positions, make)
                out = filling.fill(prompt, made, made is None, kwargs)
            last = out.logits[:, -1:]
            if self._logits is None:  # the first run of all, of which nothing is captured
                self._logits = last.new_empty(len(filling.like), *last.shape[1:])
            self._logits[:B].copy_(last)

        return run


def key_of(prompt: Prompt, kwargs: dict[str, Any]) -> Key | None:
    """What prompts that share a graph have in common; None for a call that no graph repeats. One
    with embeddings is among these, as one with pictures is: it seldom comes again, and from
    embeddings some models find by the values which of them stand for text."""
    given = {name: value for name, value in kwargs.items() if value is not None and value != {}}
    plain = all(isinstance(value, int) for value in given.values())
    if not plain or not given.keys() <= CONSTANTS or given.get("return_dict") is False:
        return None
    ids = prompt.ids
    if ids is None or prompt.embeds is not None or prompt.begun > 0:
        return None
    if ids.dim() != 2 or not 0 < ids.numel() <= MOST_TOKENS:
        return None
    return (
        *ids.shape,
        prompt.mask is not None,
        *sorted((name, repr(v)) for name, v in given.items()),
    )

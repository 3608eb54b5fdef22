"""What one call of `generate` has of a model's buffers, as the cache that transformers hands on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from moe_ops.forward.layer_cache import CACHE
from moe_ops.forward.regions import plain_tensors
from moe_ops.generation.prompts import Prompt
from moe_ops.generation.steps import Code, Steps
from moe_ops.generation.wide import WIDTHS, width_for
from moe_ops.interop.told import told_of

T = TypeVar("T")


class Lender(Protocol):
    """Whose steps are leased."""

    def lease(self, batch: int, length: int) -> Lease: ...

    def give_back(self, steps: Steps) -> None: ...

    def with_room(self, run: Callable[[], T]) -> T: ...

    def compiling_prompts(self) -> AbstractContextManager[None]: ...


@dataclass(slots=True)
class Held:
    """The steps of a lease, for whoever gives them back when it is gone."""

    steps: Steps


class Lease(Cache):
    """Steps that one call of `generate` has, as the cache that it hands on from token to token.

    While the prompt is read, in one part or several, it is to transformers like a dynamic cache.
    Of an assistant's calls it is also what each hands out, and the next goes on with.
    """

    def __init__(self, decoder: Lender, steps: Steps, code: Code) -> None:
        super().__init__(layers=steps.cache.layers)
        self._decoder = decoder
        self._held = Held(steps)
        self.code = code
        self.stock: Cache | None = (
            None  # what transformers made for the call, empty, or the caller's
        )
        self.taken: int | None = None  # tokens that it had, if it is the caller's
        self.batch: int | None = None  # of the prompt, once some of it is read
        self.prompt = 0  # the tokens of it that are read
        self.tokens = 0  # that are in the buffers
        self.reading = True  # more of the prompt may come
        self.candidates = False  # tokens may come that are forgotten again
        self.outlives = False  # its call

    @property
    def steps(self) -> Steps:
        return self._held.steps

    def outlive(self) -> None:
        """Have the steps until nobody has this lease any more."""
        self.outlives = True
        finalize = weakref.finalize(self, _give_back, self._decoder, self._held)
        finalize.atexit = False

    def go_on(self, length: int) -> None:
        """Have more of the text read, which is to have so many tokens."""
        self.reading = True
        self._have_slots(length + width_for(1))

    def read(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The model's output for the prompts, or for more of them, which are then in the cache."""
        if self.outlives and self.tokens > 0:
            assert input_ids is not None
            return self.steps_of(input_ids)
        states = bool(kwargs.pop("output_hidden_states", False))  # -1: the last ones
        if self.candidates:
            kwargs.setdefault("return_dict", True)  # as for other prompts, which share a graph
            behind = kwargs.get("logits_to_keep", 1) - 1
            others = any(isinstance(x, Tensor) for x in kwargs.values())
            if behind > 0 and not others and not states:
                assert input_ids is not None  # no candidates are behind embeddings
                return self._read_apart(behind, input_ids, attention_mask, position_ids, kwargs)
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
            out = self._decoder.with_room(
                lambda: self.steps.read(self.code, prompt, kwargs, states)
            )
        self.batch = B
        self.prompt += S
        self.tokens = self.prompt
        out[CACHE] = self
        return out

    def _read_apart(
        self, behind: int, ids: Tensor, mask: Tensor | None, positions: Tensor | None, kwargs: Any
    ) -> CausalLMOutputWithPast:
        """The output of prompts with so many candidates behind them, which are a step: the text
        alone has the code and the graph of others."""
        mask = None if mask is None else mask[:, :-behind]
        positions = None if positions is None else positions[..., :-behind]
        text = self.read(ids[:, :-behind], mask, positions, **{**kwargs, "logits_to_keep": 1})
        last = text.logits[:, -1:].clone()
        out = self.steps_of(ids[:, -behind:])
        out.logits = torch.cat([last, out.logits], 1)
        return out

    def take(self, cache: Cache, rows: int) -> None:
        """Begin with what is in the caller's cache, to which `give` adds."""
        self.batch = rows
        self.taken = self.prompt = self.tokens = int(cache.get_seq_length())
        self._is_user_defined = True  # so transformers takes no step too much
        self.steps.take(cache, self.prompt)

    def give(self) -> None:
        """Add to the caller's cache what is new since it was taken."""
        if self.taken is not None and self.stock is not None and self.batch is not None:
            self.steps.add_to(self.stock, self.batch, self.taken)

    def step(self, ids: Tensor) -> Tensor:
        """The logits [B, 1, V] after one more token per sequence, valid until the next step."""
        self._have_slots(self.tokens + 1)
        self.tokens += 1
        return self.steps.step(self.code, ids, self._decoder.with_room)

    def steps_of(self, ids: Tensor, states: bool = False) -> CausalLMOutputWithPast:
        """The model's output for more tokens per sequence, one or several, with its last states if
        `states`. Valid until the next step, but for copies where what checks candidates would keep
        and change what it gets."""
        if ids.shape[1] == 1 and not states:
            return self._output(self.step(ids), None)
        if ids.shape[1] > WIDTHS[-1]:
            return self._in_parts(ids.split(WIDTHS[-1], 1))
        self._have_slots(self.tokens + width_for(ids.shape[1]))
        self.tokens += ids.shape[1]
        return self._output(*self.steps.wide_step(self.code, ids, self._decoder.with_room))

    def _in_parts(self, parts: Sequence[Tensor]) -> CausalLMOutputWithPast:
        logits, states = [], []
        for ids in parts:
            out = self.steps_of(ids, states=True)
            logits.append(out.logits.clone())
            states.append(out.hidden_states[-1].clone())
        return self._output(torch.cat(logits, 1), torch.cat(states, 1))

    def _output(self, logits: Tensor, states: Tensor | None) -> CausalLMOutputWithPast:
        if self.candidates and logits.dtype == torch.float32:
            logits = logits.clone()  # transformers copies others, to convert them
        hidden_states = None if states is None else (states,)
        return CausalLMOutputWithPast(
            **{"logits": logits, CACHE: self}, hidden_states=hidden_states
        )

    def _have_slots(self, slots: int) -> None:
        """Go on with larger buffers if these have fewer slots."""
        if slots <= self.steps.slots:
            return
        larger = self._decoder.lease(self.steps.rows, slots)
        larger.steps.move(self.steps, self.tokens)
        self._decoder.give_back(self.steps)
        self._held.steps, self.code = larger.steps, larger.code
        self.layers = self.steps.cache.layers

    def crop(self, tokens_to_remove: Any) -> None:
        """Forget so many tokens, the last ones, given as a negative number."""
        tokens = -int(tokens_to_remove)
        if not 0 <= tokens <= self.tokens:
            raise ValueError(
                f"a cache of {self.tokens} tokens cannot forget {tokens}; give their number, "
                "negative, as transformers does"
            )
        self.reading = False
        self.tokens -= tokens
        self.prompt = min(self.prompt, self.tokens)
        if tokens > 0:
            self.steps.go_back(tokens)
            told = told_of(self.code.model)
            if told is not None:
                told.forget(tokens)

    @property
    def is_croppable(self) -> bool:
        return self.candidates or self.outlives

    def activate_past_recording(self) -> None:
        """What forgets tokens again needs nothing; but a copy says that it could."""
        if self.stock is not None:
            self.stock.activate_past_recording()

    def handed_out(self) -> Cache:
        """The cache that transformers made, with a copy of what is kept; or the caller's."""
        assert self.stock is not None
        if self.batch is not None and self.taken is None:
            self.steps.copy_into(self.stock, self.batch, self.prompt)
            if self.candidates:
                self.stock.crop(0)  # as transformers leaves it
        return self.stock

    @property
    def is_compileable(self) -> bool:
        return not self.reading

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        if self.reading:
            return self.prompt + query_length, 0
        return super().get_mask_sizes(query_length, layer_idx)


def _give_back(decoder: Lender, held: Held) -> None:
    decoder.give_back(held.steps)

"""Steps of several tokens at once: the last one and candidates for those that come next, which the
model checks. Those that it would not have chosen are forgotten again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_ops.forward.masks import masks
from moe_ops.forward.regions import ByKind, plain_tensors
from moe_ops.graphs.report import WideReport
from moe_ops.graphs.runner import Size, put
from moe_ops.interop.code_objects import with_own_code_object

# Few, as each has code and a graph of its own, while numbers of candidates differ from step to
# step.
WIDTHS = (8, 32, 128)


def width_for(tokens: int) -> int:
    """The size of the steps that take so many tokens. Raises ValueError for more than any does."""
    for width in WIDTHS:
        if tokens <= width:
            return width
    raise ValueError(f"a step takes at most {WIDTHS[-1]} tokens, got {tokens}; split them")


class Wide:
    """The buffers and the graph of steps of up to `width` tokens for each of `rows` sequences.

    Fewer tokens are padded with copies of the last one, of its position and with its mask: they
    choose the same experts and so read no further weights. What is kept of the copies goes into the
    slots behind, which are hidden until something else is written there.
    """

    def __init__(
        self,
        rows: int,
        slots: int,
        width: int,
        like: Tensor,
        compile_step: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self.width = width
        self.count = 0
        self.graph = Size()
        self.logits: Tensor | None = None
        self.states: Tensor | None = None  # the last ones, which the head gets
        self._given = 0
        device, integers = like.device, torch.int64
        with plain_tensors():
            self.ids = torch.zeros(rows, width, dtype=integers, device=device)
            self.given = torch.zeros((), dtype=integers, device=device)
            self.numbers = torch.arange(width, dtype=integers, device=device)
            self.like = like.new_empty(rows, width, 0)
        name = f"{rows}x{slots}_{width}"
        self.region = ByKind(f"step_{name}", compile_step)
        self.masks = compile_step(with_own_code_object(masks_of, f"masks_{name}"))

    def put(self, ids: Tensor) -> None:
        """Have these tokens [B, n] be those of the next step."""
        batch, n = ids.shape
        put(ids, self.ids[:batch, :n])
        with plain_tensors():
            if n < self.width:
                self.ids[:batch, n:].copy_(ids[:, -1:].expand(batch, self.width - n))
            if batch < len(self.ids):
                self.ids[batch:].copy_(self.ids[:1].expand(len(self.ids) - batch, -1))
            if n != self._given:
                self.given.fill_(n)
                self._given = n

    @property
    def at(self) -> Tensor:
        """The number of the token that each one is, or is a copy of."""
        return torch.minimum(self.numbers, self.given - 1)

    def forget_graph(self) -> None:
        self.graph, self.logits, self.states = Size(), None, None

    def report(self) -> WideReport:
        return WideReport(
            tokens=self.width,
            steps=self.count,
            captured=self.graph.is_ready,
            bytes=self.graph.bytes,
            refusal=self.graph.refusal,
        )


def masks_of(
    config: Any,
    like: Tensor,
    valid: Tensor,
    sizes: Any,
    positions: Tensor,
    make: Callable[..., Any],
    at: Tensor,
) -> Any:
    """The masks of a step of several tokens, each that of the token whose number `at` names."""
    return _chosen(masks(config, like, valid, sizes, positions, make), at)


def _chosen(made: Any, at: Tensor) -> Any:
    if isinstance(made, dict):
        return {name: _chosen(mask, at) for name, mask in made.items()}
    return made.index_select(2, at) if isinstance(made, Tensor) else made


def with_last_states(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a model's decoder gives, with its last states also where transformers would have those
    that hooks record."""
    out = run(*args, **kwargs)
    out.hidden_states = (out.last_hidden_state,)
    return out

"""How many graphs Dynamo makes, and Dynamo with room for few."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import counters


@contextmanager
def few_graphs(limit: int) -> Iterator[None]:
    """Inside, a function is compiled so many times at most; before and after, nothing is kept."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=limit):
        yield
    torch._dynamo.reset()


@contextmanager
def counted_anew() -> Iterator[None]:
    """Inside, no graph was compiled before."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    """How many graphs were compiled."""
    return counters["stats"]["unique_graphs"]


class Traced:
    """In the place of `Net`: graphs run as they are, so that they are counted without code."""

    needed_for = ""

    def __init__(self, *args: Any, name: str = "a graph", **kwargs: Any) -> None:
        self.waits_as, self.made = name, 0

    def __call__(self, model_: fx.GraphModule, inputs_: list[Any]) -> Callable[..., Any]:
        self.made += 1
        return model_.forward

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Traced)

    def __hash__(self) -> int:
        return hash(Traced)

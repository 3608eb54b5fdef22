"""Who is told of each call of a model ahead of it: what records routings, and what replays them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn

TOLD = "_moe_ops_told"  # of a model: who is told of its calls
MOST_PADDED = 4096  # tokens of calls that are padded, to be captured


class Looks(Protocol):
    """Who looks at the runs of a model's layers, and raises ValueError if one runs twice in one."""

    def start(self) -> None:
        """A run of the model begins."""

    def tried(self) -> None:
        """A run is through the layers, and parts of the model run again, to be captured."""


class Told(Protocol):
    """Who is told of the calls of a model.

    A call has sequences and tokens of each. Its rows are those of its tokens, sequence by sequence,
    in a batch of as many `rows` of `width` tokens: more where it is padded at its ends.

    begun: the number of calls so far. looks: who looks at the runs of the model's layers.
    """

    begun: int
    looks: Looks | None

    def begin(
        self, batch: int, tokens: int, rows: int, width: int, *, may_grow: bool = False
    ) -> None:
        """A call comes. If it `may_grow` it may turn out to be padded, by an eighth of its tokens
        and one for each sequence, and to be tried so before."""

    def pad(self, rows: int, width: int) -> None:
        """The call that comes is padded to these."""

    def try_out(self, rows: int, width: int) -> None:
        """What runs until the next call is this one again, as it would be padded."""

    def forget(self, tokens: int) -> None:
        """So many tokens of each sequence, the last ones, are taken back."""

    def end(self, done: bool) -> None:
        """The model ran for the call that was told of last, or failed: then that is no call. It may
        run once more, as with the memory that others gave back."""


def told_of(model: nn.Module) -> Told | None:
    """Who is told of a model's calls."""
    return model.__dict__.get(TOLD)


def begin(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Tell of a call of a compiled model that runs now, unless nobody is to be told. Raises
    ValueError for a call without tokens."""
    told = told_of(model)
    if told is not None:
        tell(told, args, kwargs, is_compiled=True)


@torch.compiler.disable
def tell(
    told: Told, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_compiled: bool = False
) -> None:
    """Tell of a call with these arguments, unless it was told ahead. Raises ValueError for one
    without tokens."""
    if is_told_ahead():
        return
    sizes = _sizes(args, kwargs)
    is_small = sizes[0] * sizes[1] <= MOST_PADDED
    told.begin(*sizes, *sizes, may_grow=is_compiled and is_small)


@contextmanager
def padded(told: Told | None, args: Sequence[Any], rows: int) -> Iterator[None]:
    """A call of a model whose tensors count so many rows, padded, where the call has fewer: it is
    told of once, however often the model runs inside. Raises ValueError for one without tokens."""
    if told is None:
        yield
        return
    batch, tokens = _sizes(args, {})
    x = _tokens_of(args, {})
    assert x is not None
    if x.is_floating_point():
        sizes = (1, rows) if x.dim() == 2 else (rows * math.prod(x.shape[1:-2]), tokens)
    else:
        sizes = rows, tokens
    told.begin(batch, tokens, *sizes)
    token = _ahead.set(True)
    try:
        yield
    finally:
        _ahead.reset(token)


# Whether calls in here were told ahead.
_ahead: ContextVar[bool] = ContextVar("moe_ops_told_ahead", default=False)


def is_told_ahead() -> bool:
    """Whether a call that runs here was told ahead."""
    return _ahead.get()


def _sizes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    sizes = sizes_of(args, kwargs)
    if sizes is None:
        raise ValueError(
            "routings are recorded and replayed by tokens, and this call has none: give input_ids "
            "[sequences, tokens], or inputs_embeds or x [..., tokens, width]"
        )
    return sizes


def sizes_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, int] | None:
    """The sequences and tokens of a call, or None: of ids [B, S], of floats [..., S, D], where all
    that comes before S counts sequences, or [T, D]."""
    x = _tokens_of(args, kwargs)
    if x is None:
        return None
    if x.is_floating_point():
        return math.prod(x.shape[:-2]), x.shape[-2]
    return x.shape[0], x.shape[1]


def _tokens_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The argument of a call that has its tokens."""
    named = (kwargs.get(name) for name in ("input_ids", "inputs_embeds"))
    given = (*named, *args, *kwargs.values())
    return next((x for x in given if isinstance(x, Tensor) and x.dim() >= 2), None)


# Models of whose calls somebody is told now.
_watched: list[nn.Module] = []


@contextmanager
def watching(model: nn.Module) -> Iterator[None]:
    """A context in which somebody is told of a model's calls."""
    _watched.append(model)
    try:
        yield
    finally:
        del _watched[next(i for i, other in enumerate(_watched) if other is model)]


def are_watched(tensors: Iterable[Tensor]) -> bool:
    """Whether a model of whose calls somebody is told has one of these tensors: it, or a model that
    follows it or that it follows, as what is compiled shares its weights."""
    wanted = {id(t) for t in tensors}
    held = (t for model in [*_watched] for t in (*model.parameters(), *model.buffers()))
    return any(id(t) in wanted for t in held)

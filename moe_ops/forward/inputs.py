"""What layers get beside states: a graph is only as good as the masks and positions in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from moe_ops.forward.layer_cache import CACHE

Inputs = list[dict[str, Any]]  # of each layer that ran, by name

_watching: ContextVar[Inputs | None] = ContextVar("watching", default=None)


@contextmanager
def watched() -> Iterator[Inputs]:
    """A context around a forward, and what its layers get beside states and a cache."""
    inputs: Inputs = []
    token = _watching.set(inputs)
    try:
        yield inputs
    finally:
        _watching.reset(token)


def note(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note what a layer gets, if someone watches. The first argument are its states."""
    inputs = _watching.get()
    if inputs is not None:
        given = {**{str(i): x for i, x in enumerate(args[1:], 1)}, **kwargs}
        given.pop(CACHE, None)
        inputs.append(dict(_flat(given)))


def _flat(given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        if isinstance(value, dict):
            yield from _flat({f"{name}.{key}": x for key, x in value.items()})
        elif isinstance(value, (tuple, list)):
            yield from _flat({f"{name}.{i}": x for i, x in enumerate(value)})
        elif value is None or isinstance(value, Tensor):
            yield name, value


def unlike(padded: Inputs, plain: Inputs) -> str | None:
    """What layers got otherwise in a forward of sequences padded at their ends, or None."""
    if len(padded) != len(plain):
        return f"{len(padded)} layers in place of {len(plain)}"
    alike: set[tuple[int, int]] = set()  # pairs by identity, as most layers get the same
    for got, want in zip(padded, plain, strict=True):
        for name in got.keys() | want.keys():
            a, b = got.get(name), want.get(name)
            if (id(a), id(b)) in alike:
                continue
            if not _begins_with(a, b):
                return name
            alike.add((id(a), id(b)))
    return None


def _begins_with(padded: Tensor | None, plain: Tensor | None) -> bool:
    """Whether what a layer got is the same but for padding behind. No mask is a causal one."""
    if plain is None or padded is None:
        mask = padded if plain is None else plain
        return mask is None or _is_causal(mask)
    if padded.dim() != plain.dim() or padded.dtype != plain.dtype:
        return False
    for dim, size in enumerate(plain.shape):
        if padded.shape[dim] < size:
            return False
        padded = padded.narrow(dim, 0, size)
    # As far as a kernel that makes positions of other sizes may round otherwise.
    return (
        torch.allclose(padded, plain, 1e-4, 1e-4)
        if plain.is_floating_point()
        else bool(torch.equal(padded, plain))
    )


def _is_causal(mask: Tensor) -> bool:
    if mask.dim() != 4 or mask.dtype != torch.bool:
        return False
    return torch.equal(mask, torch.ones_like(mask).tril())

"""Arguments of a block in halves of sequences, and results of both put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ops.halves.caches import CacheHalves, is_cache

Given = dict[str, Any]


def split(
    given: Mapping[str, Any], by_sequence: Sequence[str], sequences: int, first: int
) -> tuple[tuple[Given, Given], list[CacheHalves]]:
    """The arguments of both halves, and the caches that were split.

    What is named in by_sequence has an entry for each sequence, or one for all, on the first axis;
    the rest goes to both. Raises ValueError, naming the argument, for what cannot be split.
    """
    halves: tuple[Given, Given] = {}, {}
    caches: list[CacheHalves] = []
    for name, value in given.items():
        if is_cache(value):
            caches.append(CacheHalves(name, value, first))
            pair = caches[-1].views
        elif name in by_sequence:
            pair = _split(name, value, sequences, first)
        else:
            pair = value, value
        halves[0][name], halves[1][name] = pair
    return halves, caches


def _split(name: str, value: Any, sequences: int, first: int) -> tuple[Any, Any]:
    if value is None:
        return None, None
    if isinstance(value, (tuple, list)):
        pairs = [_split(name, item, sequences, first) for item in value]
        return tuple(a for a, _ in pairs), tuple(b for _, b in pairs)
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{name} is a {type(value).__name__}, which cannot be split by sequences; give a "
            "tensor, or leave its name out of by_sequence"
        )
    if value.dim() and value.shape[0] == 1:
        return value, value
    if not value.dim() or value.shape[0] != sequences:
        raise ValueError(
            f"{name} has the shape {list(value.shape)}, and x {sequences} sequences; give it with "
            "an entry for each on its first axis, or one for all, or leave its name out of "
            "by_sequence"
        )
    return value[:first], value[first:]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


def joined(first: Any, second: Any) -> Any:
    """The result of a block, of those of both halves. Raises ValueError for what is no tensor and
    not the same of both."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.cat((first, second))
    if isinstance(first, (tuple, list)) and len(first) == len(second):
        return type(first)(joined(a, b) for a, b in zip(first, second, strict=True))
    if first is None and second is None:
        return None
    raise ValueError(
        f"block returned {type(first).__name__} and {type(second).__name__} for its halves; give "
        "one that returns tensors with an entry for each sequence on the first axis"
    )

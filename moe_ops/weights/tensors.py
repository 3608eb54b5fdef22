"""Tensors by name as the source of a load, instead of files: of a state dict, or one at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from moe_ops.checks.options import check_text, check_type
from moe_ops.weights import bitsandbytes
from moe_ops.weights.layouts import Stored

Pairs = Iterable[tuple[str, Tensor]]
GIVEN = "the tensors given"  # what errors name instead of a file
STREAM = "the tensors given, of which those before it are written"


def kept_tensors(source: Any) -> dict[str, Tensor] | None:
    """The tensors of a mapping, or of a list or tuple of (name, tensor); None if it is none.

    Raises ValueError or TypeError for what is no tensor with memory, or a name that comes twice.
    """
    pairs = source.items() if isinstance(source, Mapping) else source
    listed = isinstance(source, (list, tuple)) and bool(source) and _is_pair(source[0])
    if not (isinstance(source, Mapping) or listed):
        return None
    found: dict[str, Tensor] = {}
    for pair in pairs:
        name, tensor = checked(pair)
        if name in found:
            raise ValueError(f"{name}: comes twice in {GIVEN}; give each name one tensor")
        found[name] = tensor
    return found


def streamed(source: Any) -> tuple[Any, Pairs | None]:
    """(the source, None) of paths, or (the source, its pairs) if what an iterator gives first is a
    (name, tensor). Of an iterator of paths the source comes back as a list.
    """
    if isinstance(source, (str, os.PathLike, list, tuple)) or not isinstance(source, Iterable):
        return source, None
    every = iter(source)
    first = next(every, None)
    if first is None:
        return [], None
    whole = chain((first,), every)
    return (source, whole) if _is_pair(first) else (list(whole), None)


def entries_of(tensors: Mapping[str, Tensor], ending: str = "") -> Iterator[Stored]:
    """Tensors as entries, all or those whose names end so; of bitsandbytes, made of parts."""
    names = [name for name in tensors if name.endswith(ending)]
    decoded, parts = bitsandbytes.decoders(set(names), tensors.__getitem__)
    for name in names:
        if name in decoded:
            yield decoded[name].stored()
        elif name not in parts:
            yield entry_of(name, tensors[name])


def entry_of(name: str, tensor: Tensor) -> Stored:
    return Stored(name=name, read=partial(Tensor.detach, tensor))


def checked(pair: Any) -> tuple[str, Tensor]:
    """A name and a tensor with memory. Raises TypeError or ValueError for anything else."""
    if not _is_pair(pair):
        raise TypeError(f"source must give (name, tensor), got {pair!r:.80}")
    name, tensor = pair
    check_text("each name of source", name)
    check_type(f"{name} of source", tensor, Tensor, "a Tensor")
    if tensor.is_meta or tensor.layout != torch.strided:
        what = "on the meta device" if tensor.is_meta else str(tensor.layout)
        raise ValueError(f"{name}: is {what}; give a dense tensor that has memory")
    return name, tensor


def _is_pair(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 2

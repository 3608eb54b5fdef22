"""A compiled layer whose graph serves every number of sequences and tokens."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch._dynamo import mark_static, maybe_mark_dynamic

from moe_ops.interop.interrupts import call_compiled
from moe_ops.passes.inductor.sizes import call_oblivious

MARKED = "_dynamo_weak_dynamic_indices"  # a tensor whose dims were marked


class LayerRegion:
    """Calls compiled code such that one graph serves every number of sequences and tokens.

    The first tensor of the call, [B, S, D] or [B, S], tells these. Sequences of one token have
    a graph of their own, as attention functions branch on it. A first call of one sequence is
    compiled by one of two, as torch 2.11 takes a size of 1 that it sees first to be always 1.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.is_compiled = False

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tensors = list(tensors_in((*args, *kwargs.values())))
        if not tensors or tensors[0].dim() < 2:
            return self._run(module, *args, **kwargs)
        B, S = tensors[0].shape[:2]
        if B == 1 and not self.is_compiled:
            twice_args, twice_kwargs = twice((args, kwargs), S)
            self(module, *twice_args, **twice_kwargs)
        for x in tensors:
            if not hasattr(x, MARKED):  # of what all layers get
                mark(x, B, S)
        for x in shared_in(kwargs.values()):
            maybe_mark_dynamic(x, 0)
            maybe_mark_dynamic(x, 2)
        return self._run(module, *args, **kwargs)

    def _run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = call_oblivious(call_compiled, self.call, module, *args, **kwargs)
        self.is_compiled = True
        return out


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, and in tuples, lists and dicts of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def shared_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The keys and values [B, heads, tokens seen, head size] of layers before, which transformers
    hands on in a `UserDict` that layers fill."""
    for value in values:
        if isinstance(value, UserDict):
            yield from (x for x in tensors_in(value.values()) if x.dim() == 4)


def twice(value: Any, S: int) -> Any:
    """Arguments for one sequence of S tokens, as they are for two like it."""
    if isinstance(value, Tensor):
        dims = counting_dims(value, S)
        if dims is None or value.shape[dims[0]] != 1 or value.shape[dims[1]] != S:
            return value
        if value.stride(dims[0]) == 0:  # of what all sequences share
            return value.expand(*(2 if i == dims[0] else -1 for i in range(value.dim())))
        return value.repeat_interleave(2, dims[0])
    if isinstance(value, dict):
        return {name: twice(x, S) for name, x in value.items()}
    if isinstance(value, UserDict):
        of_two = {
            k: tuple(x.repeat_interleave(2, 0) for x in shared) for k, shared in value.items()
        }
        return type(value)(of_two)
    if type(value) in (tuple, list):
        return type(value)(twice(x, S) for x in value)
    return value.twice() if hasattr(value, "twice") else value  # a view of a cache


def counting_dims(x: Tensor, S: int) -> tuple[int, int] | None:
    """Which dims of an argument of layers count sequences and the S tokens: of [B, S], [B, S, D],
    states of several streams [B, S, N, D], positions of several kinds [N, B, S], and masks
    [B, 1, S, tokens seen]."""
    if x.dim() < 2:
        return None
    if is_mask(x, S):
        return 0, 2
    floats = x.is_floating_point() or x.is_complex()  # complex are the angles of some layers
    return (1, 2) if x.dim() == 3 and not floats else (0, 1)


def is_mask(x: Tensor, S: int) -> bool:
    """Whether an argument may be a mask [B, 1, S, tokens seen], or one for each head."""
    return x.dim() == 4 and x.shape[2] == S and (S == 1 or x.shape[1] != S)


def mark(x: Tensor, B: int, S: int) -> None:
    """Mark the dims that count sequences and tokens."""
    dims = counting_dims(x, S)
    if dims is None:
        return
    if x.shape[dims[0]] == B:
        maybe_mark_dynamic(x, dims[0])
    if x.shape[dims[1]] == S:
        (maybe_mark_dynamic if S > 1 else mark_static)(x, dims[1])
    if is_mask(x, S) and x.shape[3] >= max(2, S):  # 1 is a factor of each token
        maybe_mark_dynamic(x, 3)

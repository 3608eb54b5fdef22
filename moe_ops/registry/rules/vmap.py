"""torch.vmap: one call for the rows of all elements where rows stand alone, else one for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten


@dataclass(frozen=True, slots=True)
class Batched:
    """How vmap runs an op.

    `rows` names the arguments that have a row for each of the result, which depends on no other
    row; then a batch of them is one call of more rows, unless `apart` says of the call that its
    rows depend on each other. Where anything else is batched, each element is a call.
    """

    rows: tuple[str, ...] = ()
    apart: Callable[[Any], bool] = lambda call: False

    def __str__(self) -> str:
        if not self.rows:
            return "runs one call for each element"
        rows = ", ".join(f"`{name}`" for name in self.rows)
        return f"runs one call for a batch of {rows}, else one for each element"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vmapped:
    """An op under vmap: its rule, and what it is called by."""

    name: str
    arguments: tuple[str, ...]
    mutated: tuple[str, ...]
    call: Callable[..., Any]  # to a record
    overload: Callable[..., Any]
    rule: Batched

    def register(self, library: Library) -> None:
        register_vmap(f"moe_ops::{self.name}", self.run, lib=library)

    def run(self, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, int]:
        """A batch of calls, of tensors with an axis more. The results have it in front."""
        leading = [_moved(a, d) for a, d in zip(args, in_dims, strict=True)]
        batched = [any(d is not None for d in tree_flatten(dims)[0]) for dims in in_dims]
        names = {n for n, is_batched in zip(self.arguments, batched, strict=False) if is_batched}
        alone = [n for n in self.mutated if n not in names]
        if alone:
            raise ValueError(
                f"moe_ops.{self.name} under vmap writes to {', '.join(alone)}, of which there is "
                "one for the whole batch; give one for each element, by in_dims"
            )
        if names <= {*self.rule.rows} and not self.rule.apart(self.call(*args)):
            return self._together(info.batch_size, leading, batched), 0
        return self._one_by_one(info.batch_size, leading, in_dims), 0

    def _together(self, size: int, args: Sequence[Any], batched: Sequence[bool]) -> Any:
        rows, folded = 0, list(args)
        for i, name in enumerate(self.arguments[: len(args)]):
            if name in self.rule.rows:
                t = args[i] if batched[i] else args[i].expand(size, *args[i].shape)
                rows, folded[i] = t.shape[1], t.flatten(0, 1)
        return tree_map(lambda t: t.unflatten(0, (size, rows)), self.overload(*folded))

    def _one_by_one(self, size: int, args: Sequence[Any], in_dims: tuple[Any, ...]) -> Any:
        if size == 0:
            raise ValueError(
                f"moe_ops.{self.name} under vmap got no element, and runs each by itself; give one"
            )
        made = [self.overload(*_element(args, in_dims, i)) for i in range(size)]
        spec = tree_flatten(made[0])[1]
        results = zip(*(tree_flatten(m)[0] for m in made), strict=True)
        return tree_unflatten([torch.stack(r) for r in results], spec)


def _moved(value: Any, dim: Any) -> Any:
    """A tensor, or a list of them, with the axis of the batch in front."""
    if isinstance(value, (list, tuple)):
        return [_moved(v, d) for v, d in zip(value, dim, strict=True)]
    return value.movedim(dim, 0) if isinstance(value, Tensor) and dim is not None else value


def _element(value: Any, dim: Any, i: int) -> Any:
    """An element of a batch of arguments."""
    if isinstance(value, (list, tuple)):
        return [_element(v, d, i) for v, d in zip(value, dim, strict=True)]
    return value if dim is None else value[i]

"""Floating-point operations, which `torch.utils.flop_counter` counts by formulas of its ops.

torch counts products of matrices, convolutions and attention, and so do the formulas here. A call
that wants a gradient runs eagerly under a counter, which then sees the products of ATen that it and
its backward consist of.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from moe_ops.interop.import_hook import Later

NO_PRODUCT = "has no product of matrices, and torch counts no other operations"

_counter = Later("torch.utils.flop_counter")


def register(name: str, call: Callable[..., Any], formula: Callable[[Any], int]) -> None:
    """Count the calls of an op by a formula of its record."""

    def counted(*args: Any, out_val: Any = None, plan: str = "", **kwargs: Any) -> int:
        return formula(call(*args, **kwargs))

    _counter.do(lambda: _add(getattr(torch.ops.moe_ops, name), counted))


def product(*sizes: int) -> int:
    """The operations of a product of matrices with these sizes: a multiplication and a sum each."""
    return 2 * prod(sizes)


def _add(packet: Any, counted: Callable[..., int]) -> None:
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    if packet not in flop_registry:
        register_flop_formula(packet, get_raw=True)(counted)


def _grouped(a: Tensor, b: Tensor, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Rows by the weight of their group, or, of two matrices, columns by the rows of a group."""
    batch = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return product(batch, a.shape[-2], a.shape[-1], b.shape[-1])


def _count_grouped() -> None:
    """Count PyTorch's grouped product, on which our products train, where torch has no formula."""
    _add(torch.ops.aten._grouped_mm, _grouped)


_counter.do(_count_grouped)

"""Calls that an op has to refuse, with a sentence that says why."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from moe_ops import Op


class Bad(NamedTuple):
    """A change that makes a valid call bad, and the error that must say so."""

    change: dict[str, Any]
    message: str
    error: type[Exception] = ValueError


FLOAT_NAMES = "float32, bfloat16, float16"
FIRST_FLOAT_NAMES = f"{FLOAT_NAMES}, float64"  # which others then have to be, too


def wrong_rank(name: str, shape: tuple[int, ...], want: int) -> Bad:
    """A tensor with too many or too few axes."""
    return Bad({name: torch.ones(shape)}, f"{name} must have {want} axes, got shape {shape}")


def wrong_dtype(name: str, shape: tuple[int, ...], dtype: str, want: str = FLOAT_NAMES,
                do: str = "convert it first") -> Bad:  # fmt: skip
    """A tensor of a dtype that the op does not take, and what the error says to do."""
    bad = {name: torch.ones(shape, dtype=getattr(torch, dtype))}
    want = f"one of {want}" if "," in want else want
    return Bad(bad, f"{name} must be {want}; got {dtype}; {do}", TypeError)


def wrong_size(
    name: str, shape: tuple[int, ...], axis: int, want: str, dtype: torch.dtype = torch.float32
) -> Bad:
    """A tensor with a wrong size on one axis; `want` is the size and its reason."""
    message = f"{name} must have {want} on axis {axis}, got shape {shape}"
    return Bad({name: torch.ones(shape, dtype=dtype)}, message)


def wrong_device(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Bad:
    """A tensor that is not where the first argument is."""
    message = f"{name} is on meta, but the first argument is on cpu; move one"
    return Bad({name: torch.ones(shape, dtype=dtype, device="meta")}, message)


def assert_refused(op: Op, call: dict[str, Any], bad: Bad) -> None:
    """Assert that the changed call raises the error, and leaves its arguments alone."""
    kwargs = {**call, **bad.change}
    tensors = [t for t in kwargs.values() if isinstance(t, Tensor) and not t.is_meta]
    before = [t.clone() for t in tensors]
    with pytest.raises(bad.error, match=re.escape(bad.message)):
        op(**kwargs)
    for t, copy in zip(tensors, before, strict=True):
        torch.testing.assert_close(t, copy, rtol=0, atol=0)

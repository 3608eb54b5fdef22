"""Schemas of ops in torch's dispatcher, which libmoe_ops may have defined before Python."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library

from moe_ops.registry.registration import NAMESPACE


def define(name: str, schema: str, run: Callable[..., Any], library: Library) -> None:
    """Define an overload of an op, run by a function, unless libmoe_ops has defined it.

    Raises ImportError if its schema is another one.
    """
    is_librarys = _define(name, schema, library)
    library.impl(name, run, "CompositeExplicitAutograd")
    if is_librarys:
        _take_over(name, run, library)


def _define(name: str, schema: str, library: Library) -> bool:
    """Define an overload, and say whether libmoe_ops has done so already."""
    wanted = torch._C.parse_schema(f"{NAMESPACE}::{name}{schema}")
    overloads = torch._C._jit_get_schemas_for_operator(f"{NAMESPACE}::{name.partition('.')[0]}")
    found = [s for s in overloads if s.overload_name == wanted.overload_name]
    if not found:
        # The strides that eager mode sees are the strides a backend sees: weights that are
        # transposed views are never copied into another layout behind the caller's back.
        library.define(f"{name}{schema}", tags=(torch.Tag.needs_exact_strides,))
        return False
    if found[0] != wanted:
        raise ImportError(
            f"a library that is loaded defines {found[0]}, but this moe_ops {wanted}; build it "
            "again: python -m moe_ops build-library DIR"
        )
    return True


def _take_over(name: str, run: Callable[..., Any], library: Library) -> None:
    """Run an overload of libmoe_ops on CPUs by Python, which has backends for every call; those of
    the library are among them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # that this does
        library.impl(name, run, "CPU")

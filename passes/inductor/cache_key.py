"""What a compiled graph depends on, in bytes: the parts of the pipeline's `uuid`.

Inductor hashes nothing of a custom pass but its uuid, so whatever can change a rewrite belongs
here: our own sources, backends that others registered, libraries, the device and tuned tables.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from moe_ops.backends.flashinfer.options import current as flashinfer_options
from moe_ops.installed import version
from moe_ops.interop.interrupts import let_through
from moe_ops.kernels import gpus
from moe_ops.planning import tuned
from moe_ops.planning.cost import device_of
from moe_ops.ranks.groups import known_sizes
from moe_ops.ranks.peers import connected
from moe_ops.registry.backend import Backend
from moe_ops.registry.spec import DECODE_OPS, OPS

log = logging.getLogger("moe_ops")

PACKAGES = ("moe_ops", "moe_ops.passes", "moe_ops.fake_impls")  # those that lie apart in a checkout
SUFFIXES = (".py", ".cpp", ".cu", ".cuh", ".h")
LIBRARIES = ("torch", "triton", "flashinfer", "cutlass")


def digest(*parts: object) -> str:
    """A hash of strings, and of whatever else has a `repr` that tells unequal values apart."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def source_files() -> set[Path]:
    """The source files of moe_ops, wherever its linked folders lie."""
    found: set[Path] = set()
    for package in PACKAGES:
        for folder, _, names in os.walk(Path(str(sys.modules[package].__file__)).resolve().parent):
            found.update(Path(folder, name) for name in names if name.endswith(SUFFIXES))
    return found


@functools.cache
def sources_key() -> str:
    """A hash of the source files of moe_ops as they are when it is first asked for."""
    return digest(*sorted((path.name, path.read_bytes()) for path in source_files()))


@functools.cache
def _file_key(path: str) -> str:
    return digest(Path(path).read_bytes())


def function_key(fn: Callable[..., Any]) -> str | None:
    """A hash of a function's source, its whole file and what it closes over; None if unknown.

    Unknown is what is not a plain function, or has no source (typed into an interpreter, built by
    exec). Functions of moe_ops are told apart by name, as `sources_key` has their files. A value in
    a closure counts by its repr: one that shows an address costs warm starts, never staleness.
    """
    return _plain_function_key(fn) if inspect.isfunction(fn) else None


@functools.cache
def _plain_function_key(fn: FunctionType) -> str | None:
    name = f"{fn.__module__}.{fn.__qualname__}"
    if name.startswith("moe_ops."):
        return name
    try:
        source, path = inspect.getsource(fn), inspect.getsourcefile(fn)
        file = _file_key(path) if path and os.path.exists(path) else ""
        closure = [cell.cell_contents for cell in fn.__closure__ or ()]
    except (OSError, ValueError) as error:  # ValueError: a cell that is still empty
        let_through(error)
        return None
    return digest(name, source, file, closure)


def _backend_key(backend: Backend) -> tuple[object, ...] | None:
    values = list(_values(backend))
    keys = [function_key(value) if callable(value) else value for value in values]
    if any(key is None and value is not None for key, value in zip(keys, values, strict=True)):
        return None
    return tuple(sorted(key) if isinstance(key, frozenset) else key for key in keys)


def _values(part: Any) -> Iterator[Any]:
    """What tells a dataclass from its like, and the dataclasses in it."""
    for field in dataclasses.fields(part):
        value = getattr(part, field.name) if field.compare else None
        if dataclasses.is_dataclass(value):
            yield from _values(value)
        else:
            yield value


def registry_key() -> str | None:
    """A hash of every registered op and its backends in the order in which they are asked.

    None, with the name logged, if a backend's source cannot be found.
    """
    parts: list[object] = []
    for name, op in sorted(OPS.items()):
        reference = function_key(op.body)
        backends = {b.name: _backend_key(b) for b in (*op.backends.values(), *op.paths.values())}
        unknown = [b for b, key in backends.items() if key is None]
        if reference is None or unknown:
            which = f"backend {unknown[0]!r} of {name}" if unknown else f"reference of {name}"
            log.info("compiled graphs are not cached: the %s has no source file to hash", which)
            return None
        parts.append((name, op.schema, reference, list(backends.values())))
    # Of other ops graphs hold the names of backends, at most.
    parts += [(name, *op.backends, *op.paths) for name, op in sorted(DECODE_OPS.items())]
    return digest(*parts)


@functools.cache
def _versions() -> tuple[tuple[str, str | None], ...]:
    return tuple((library, version(library)) for library in LIBRARIES)


def environment_key() -> str:
    """A hash of Python, the libraries that kernels come from and their options, the device and
    process groups."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        device = f"{device_of(torch.device('cuda')).name} {gpus.described()}"
    else:
        device = device_of(torch.device("cpu")).name
    parts = _versions(), flashinfer_options(), device, known_sizes(), connected()
    return digest(platform.python_version(), *parts)


def tables_key(users: str | None) -> str:
    """A hash of the tuned tables that are read: the shipped ones and the user's."""
    return digest(*((path.name, path.read_bytes()) for path in tuned.tables(users)))

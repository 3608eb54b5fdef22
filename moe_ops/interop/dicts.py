"""Whether dicts were written to, as Dynamo's guards ask, without a look at each value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

try:
    from torch._C._dynamo.guards import dict_version
except ImportError:  # it is no public name of torch
    _version: Callable[[dict[Any, Any]], int] | None = None
else:
    _version = dict_version


def versions(dicts: Sequence[dict[Any, Any]]) -> list[int] | None:
    """Numbers that are others after each write of another value into one of these dicts, so the
    same ones say that there was none. None if this torch has none, so that values have to be
    looked at."""
    return None if _version is None else list(map(_version, dicts))

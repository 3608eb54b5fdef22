"""Functions that take what those of the installed version take, as a file beside its metadata says,
and not what their bodies here read of it."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from typing import Any

_INSTALLED = importlib.metadata.distribution("flashinfer-python")
VERSION, _RECORD = _INSTALLED.version, json.loads(_INSTALLED.read_text("signatures.json") or "")


def signed(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Give the decorated body all arguments of the named function or method, by name; None in its
    place if the version has none of this name."""
    taken: str | None = _RECORD["functions"].get(name)
    owner, _, function = name.rpartition(".")
    first = "self, " if owner.endswith("Wrapper") else ""

    def sign(body: Callable[..., Any]) -> Callable[..., Any] | None:
        if taken is None:
            return None
        space: dict[str, Any] = {"body": body}
        exec(f"def {function}({first}{taken}):\n return body(**locals())", space)
        made: Callable[..., Any] = space[function]
        made.__qualname__ = name
        return made

    return sign

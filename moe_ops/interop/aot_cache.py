"""Graphs that AOTAutograd cached are used again only by the ops that they were traced with."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from types import ModuleType

import torch.compiler.config as config


def tag(*modules: ModuleType) -> None:
    """Append a hash of these modules' source files to torch's `cache_key_tag`; what the user put
    there stays, and nothing is appended twice.

    torch hashes an op by its name alone (pytorch issue 144344). A cached graph holds what fakes and
    definitions said when it was traced, gradients among it: after a change of them it is stale.
    """
    _append(f"moe_ops:{_digest(_files(modules))}")


def tag_definition(text: str) -> None:
    """Append a hash of a text that tells what others defined for our ops, in the same way."""
    _append(f"moe_ops+{hashlib.sha256(text.encode()).hexdigest()[:16]}")


def _append(ours: str) -> None:
    if ours not in config.cache_key_tag:
        config.cache_key_tag = f"{config.cache_key_tag} {ours}".strip()


def _files(modules: Iterable[ModuleType]) -> list[str]:
    """The files of modules; of a package all of its folder and those in it."""
    # Strings: every import of ours asks, and objects for paths take three times as many calls.
    found: set[str] = set()
    for module in modules:
        path = os.path.realpath(str(module.__file__))
        folder, name = os.path.split(path)
        if name != "__init__.py":
            found.add(path)
            continue
        for parent, _, names in os.walk(folder):
            found.update(os.path.join(parent, n) for n in names if n.endswith(".py"))
    return sorted(found)


def _digest(files: Iterable[str]) -> str:
    contents = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            contents.update(os.path.basename(path).encode() + b"\0" + file.read() + b"\0")
    return contents.hexdigest()[:16]

"""Names that callers of earlier versions may still use: each works and warns, until it goes."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from typing import Any

from moe_ops.checks.signature import RENAMED


@dataclass(frozen=True, slots=True)
class Old:
    """What stands for an old name now, and the versions that warn of it first and have it no
    more."""

    now: str
    since: str = "0.2"
    gone: str = "0.3"


# Keywords of ops.
KEYWORDS = {old: Old(now) for old, now in RENAMED.items()}
# What modules had.
NAMES = {
    "moe_ops.QuantFormats": Old("moe_ops.QuantConfig"),
    "moe_ops.layer.QuantFormats": Old("moe_ops.QuantConfig"),
    "moe_ops.hf.generation_report": Old("moe_ops.generation_report"),
}


def warn(name: str, old: Old, stacklevel: int, of: str = "") -> None:
    """Tell the frame at this level, as of the caller, that a name is an old one."""
    said = f"{of}{name} is {old.now} now; use that, for the old name goes in {old.gone}"
    warnings.warn(said, DeprecationWarning, stacklevel=stacklevel + 1)


def what_was(module: str, name: str) -> Any:
    """What an old name of a module stands for, of which whoever asks the module is warned; None
    where it never had the name. For the module's `__getattr__`."""
    old = NAMES.get(f"{module}.{name}")
    if old is None:
        return None
    warn(f"{module}.{name}", old, stacklevel=3)
    home, _, attribute = old.now.rpartition(".")
    return getattr(importlib.import_module(home), attribute)

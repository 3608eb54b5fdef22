"""Names that callers of earlier versions may still use: each works and warns, until it goes."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from typing import Any

from moe_ops.checks.signature import RENAMED, RENAMED_GONE


@dataclass(frozen=True, slots=True)
class Old:
    """What stands for an old name now, and the versions that warn of it first and have it no
    more."""

    now: str
    since: str = "0.2"
    gone: str = "0.3"


# Keywords of ops.
KEYWORDS = {old: Old(now, gone=RENAMED_GONE) for old, now in RENAMED.items()}
# What modules had.
NAMES = {
    "moe_ops.QuantFormats": Old("moe_ops.QuantConfig"),
    "moe_ops.layer.QuantFormats": Old("moe_ops.QuantConfig"),
    "moe_ops.hf.generation_report": Old("moe_ops.generation_report"),
}


def what_was(module: str, name: str) -> Any:
    """What an old name of a module stands for, of which whoever asks the module is warned; None
    where it never had the name. For the module's `__getattr__`."""
    old = NAMES.get(f"{module}.{name}")
    if old is None:
        return None
    said = f"{module}.{name} is {old.now} now; use that, for the old name goes in {old.gone}"
    warnings.warn(said, DeprecationWarning, stacklevel=3)
    home, _, attribute = old.now.rpartition(".")
    return getattr(importlib.import_module(home), attribute)

"""Examples as modules."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from tests.sources import ROOT


def load(monkeypatch: pytest.MonkeyPatch, file: str, name: str) -> ModuleType:
    """The file of an example as a module of this name, as long as the test runs."""
    example = ROOT / "examples" / file
    spec = importlib.util.spec_from_file_location(name, example)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.syspath_prepend(example.parent)  # as `python FILE` has it
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module

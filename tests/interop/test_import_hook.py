"""What waits for an import: called once, at its end, and never without one."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from moe_ops.interop.import_hook import Later, when_imported


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "waited_for.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "waited_for", raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return "waited_for"


def test_it_is_called_once_when_the_module_is_there(name: str) -> None:
    calls: list[int] = []
    finders = list(sys.meta_path)
    when_imported(name, lambda: calls.append(sys.modules[name].value))
    assert not calls and name not in sys.modules
    module = importlib.import_module(name)
    assert calls == [1] and module.__spec__.loader.get_source(name) == "value = 1\n"
    assert sys.meta_path == finders
    when_imported(name, lambda: calls.append(2))
    assert calls == [1, 2]


def test_a_module_that_is_not_there_is_waited_for(name: str, tmp_path: Path) -> None:
    calls: list[int] = []
    when_imported("comes_later", lambda: calls.append(1))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("comes_later")
    assert not calls
    (tmp_path / "comes_later.py").touch()
    importlib.invalidate_caches()
    importlib.import_module("comes_later")
    assert calls == [1]
    del sys.modules["comes_later"]


def test_what_waits_for_an_import_is_done_in_order(name: str) -> None:
    calls: list[int] = []
    later = Later(name)
    for i in (1, 2):
        later.do(lambda i=i: calls.append(i))
    assert not calls
    importlib.import_module(name)
    assert calls == [1, 2]
    later.do(lambda: calls.append(3))
    assert calls == [1, 2, 3]

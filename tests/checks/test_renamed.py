"""Names kept for callers of earlier versions: they work, warn, and are gone in time."""

from __future__ import annotations

import importlib
import re

import pytest

import moe_ops
from moe_ops.checks.renamed import KEYWORDS, NAMES
from moe_ops.registry.spec import DECODE_OPS, OPS
from tests.sources import ROOT, files

KNOWN = KEYWORDS | NAMES
PAGE = ROOT / "docs" / "RELEASES.md"


def numbers(version: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def overdue(version: str) -> set[str]:
    """The names that a version has no more."""
    return {name for name, old in KNOWN.items() if numbers(version) >= numbers(old.gone)}


def test_what_is_due_is_gone() -> None:
    """Whoever raises the version to that in which a name goes takes it out of its table."""
    assert not overdue(moe_ops.__version__)
    assert not overdue("0.2.9") and overdue("0.3.0") == KNOWN.keys()


def test_a_name_warns_for_a_version_before_it_goes() -> None:
    for name, old in KNOWN.items():
        (since, minor), gone = numbers(old.since), numbers(old.gone)
        assert gone >= (since, minor + 1), name


@pytest.mark.parametrize("name", NAMES)
def test_an_old_name_is_the_new_one_and_warns(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    home, _, now = NAMES[name].now.rpartition(".")
    with pytest.warns(DeprecationWarning) as warned:
        found = getattr(importlib.import_module(module), attribute)
    assert found is getattr(importlib.import_module(home), now)
    (warning,) = warned
    assert warning.filename == __file__
    said = f"{name} is {NAMES[name].now} now; use that, for the old name goes in 0.3"
    assert str(warning.message) == said
    with pytest.raises(AttributeError, match=f"has no attribute '{attribute[:-1]}'"):
        getattr(importlib.import_module(module), attribute[:-1])


@pytest.mark.parametrize("name", KEYWORDS)
def test_an_old_keyword_is_of_an_op_and_warns(name: str) -> None:
    """tests/checks/test_signature.py calls an op by one."""
    ops = [op for op in (OPS | DECODE_OPS).values() if name in op.signature.renamed]
    assert ops
    for op in ops:
        with pytest.warns(DeprecationWarning, match=f": {name} is .*the old name goes in 0.3"):
            assert op.signature.by_new_names({name: 5}) == {KEYWORDS[name].now: 5}


def test_nothing_else_is_kept_for_old_callers() -> None:
    """What warns stands in the tables, or nobody would take it out."""
    sources = [f for f in files() if f.startswith(("moe_ops/", "passes/", "fake_impls/"))]
    warns = re.compile(r"warn\([^)]*(?:Deprecation|Future|PendingDeprecation)Warning", re.S)
    found = [f for f in sources if f.endswith(".py") and warns.search((ROOT / f).read_text())]
    assert found == ["moe_ops/checks/renamed.py", "moe_ops/checks/signature.py"]


def test_the_page_lists_each() -> None:
    rows = re.findall(r"^\| `(\S+)` \| `(\S+)` \| (\S+) \| (\S+) \|$", PAGE.read_text(), re.M)
    assert rows == [(name, old.now, old.since, old.gone) for name, old in KNOWN.items()]

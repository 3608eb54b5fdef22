"""Modules of the registry under the names that other code imports them by."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys

import pytest

import moe_ops
from moe_ops.registry.backend import Rows
from moe_ops.registry.using import using

NAMES = ("backend", "spec", "using")


@pytest.mark.parametrize("name", NAMES)
def test_an_old_name_is_the_module(name: str) -> None:
    new = importlib.import_module(f"moe_ops.registry.{name}")
    assert importlib.import_module(f"moe_ops.{name}") is new
    assert sys.modules[f"moe_ops.{name}"] is new


def test_modules_are_names_of_the_package_and_using_is_the_function() -> None:
    from moe_ops.backend import Backend
    from moe_ops.spec import OPS, Op

    from moe_ops import backend, spec

    assert backend is moe_ops.registry.backend and spec is moe_ops.registry.spec
    assert Backend is backend.Backend and Op is moe_ops.Op and OPS is moe_ops.OPS
    assert importlib.import_module("moe_ops.using").using is moe_ops.using is using


@pytest.mark.parametrize(
    "source",
    [
        "import moe_ops.{0}; found = sys.modules['moe_ops.{0}']",
        pytest.param("found = importlib.import_module('moe_ops.{0}')", marks=pytest.mark.every),
        pytest.param(
            "__import__('moe_ops.{0}'); found = sys.modules['moe_ops.{0}']",
            marks=pytest.mark.every,
        ),
    ],
    ids=["import", "importlib", "__import__"],
)
def test_an_old_name_may_come_first(source: str) -> None:
    lines = ["import importlib, sys"]
    for name in NAMES:
        lines.append(source.format(name))
        lines.append(f"assert found is importlib.import_module('moe_ops.registry.{name}')")
        lines.append("first = found")
    code = "\n".join(lines)
    subprocess.run([sys.executable, "-c", code], check=True)


def test_state_is_not_doubled() -> None:
    old = importlib.import_module("moe_ops.spec")
    with moe_ops.using("reference"):
        assert old.FORCED.get() == moe_ops.registry.spec.FORCED.get() == {"*": "reference"}


def test_what_was_pickled_by_an_old_name_loads() -> None:
    made = pickle.dumps(Rows, protocol=0)
    assert b"moe_ops.registry.backend" in made
    assert pickle.loads(made.replace(b"moe_ops.registry.backend", b"moe_ops.backend")) is Rows

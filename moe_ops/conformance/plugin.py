"""A pytest plugin: one test for each op, size and dtype of a backend.

In conftest.py: `pytest_plugins = ["moe_ops.conformance.plugin"]`, and in a test file

    @pytest.mark.moe_ops_backend("mine")
    def test_conformance(conformance):
        conformance()

`moe_ops_backend("mine", every=True, device="cuda")` runs all sizes and dtypes, on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from moe_ops.conformance.kit import Only, examine
from moe_ops.conformance.report import said
from moe_ops.registry.spec import DECODE_OPS, OPS

FIXTURE, MARK = "conformance", "moe_ops_backend"


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark."""
    config.addinivalue_line(
        "markers", f"{MARK}(name, every=False, device='cpu'): run a backend's conformance tests"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each op that has the backend, at each size in each dtype.

    Raises pytest.UsageError without the mark, and for a name that no backend has.
    """
    if FIXTURE not in metafunc.fixturenames:
        return
    mark = metafunc.definition.get_closest_marker(MARK)
    if mark is None or len(mark.args) != 1:
        raise pytest.UsageError(
            f"{metafunc.function.__name__} takes `{FIXTURE}` without saying of which backend: mark "
            f'it with pytest.mark.{MARK}("NAME")'
        )
    metafunc.parametrize(FIXTURE, list(_params(mark.args[0], **mark.kwargs)))


def _params(name: str, every: bool = False, device: str = "cpu") -> Iterator[Any]:
    ops = [op for op in (OPS | DECODE_OPS).values() if op.named(name) is not None]
    if not ops:
        known = sorted({b for op in (OPS | DECODE_OPS).values() for b in op.backends})
        raise pytest.UsageError(f"no backend {name!r}; there are {', '.join(known)}")
    for op in ops:
        for case, dtype in Only(every=every).sizes():
            sample = f"{case.name}/{str(dtype).removeprefix('torch.')}"
            check = partial(_check, op.name, name, sample, device)
            yield pytest.param(check, id=f"{op.name}/{sample}")


def _check(op: str, name: str, sample: str, device: str) -> None:
    """Raise AssertionError with what fails at a size; skip one at which all calls are refused."""
    only = Only(sample=sample)
    report = examine(op, name, only=only, device=device)
    if not report.ran and not report.failures:
        pytest.skip(f"{name} refuses: {said(report.refused)}")
    if not report.sound:
        raise AssertionError(f"backend {name!r}:\n{report}")

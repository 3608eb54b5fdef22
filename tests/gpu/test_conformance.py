"""Our own backends that run on a GPU pass what backends of others have to pass."""

from __future__ import annotations

import pytest

from moe_ops.conformance import examine
from moe_ops.registry.spec import DECODE_OPS, OPS

pytestmark = pytest.mark.gpu
RUNS = [
    (op, b.name)
    for op, o in (OPS | DECODE_OPS).items()
    for b in o.candidates("cuda")
    if b.name.startswith("triton")
]


@pytest.mark.parametrize(("op", "name"), RUNS)
def test_backend_passes(op: str, name: str) -> None:
    report = examine(op, name, device="cuda")
    assert not report.failures, str(report)  # a sample's sizes may all be refused

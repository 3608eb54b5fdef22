"""300 bad calls of each function that compiles, measures or changes a model: refused before."""

from __future__ import annotations

import importlib

import pytest

from tests.fuzz import compiling
from tests.fuzz.attempts import CALLS, outcome

# Where compiling, tracing, capturing, measuring and changing begin.
BEGINNINGS = {
    "moe_ops.passes.inductor.net": ("compile_fx",),
    "moe_ops.graphs.capture": ("capture_call",),
    "moe_ops.passes.explain.api": ("trace", "run_compiled"),
    "moe_ops.planning.tune": ("measure", "write", "calls_of"),
    "moe_ops.hf.optimize": ("_configs", "_swap"),
    "moe_ops.hf.quantize": ("optimize", "_quantize"),
    "torch": ("compile",),
    "torch._inductor.compile_fx": ("compile_fx",),
    "torch._dynamo": ("optimize", "export"),
}


@pytest.fixture
def nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, functions in BEGINNINGS.items():
        module = importlib.import_module(name)
        for function in functions:
            monkeypatch.setattr(module, function, compiling.never)


@pytest.mark.usefixtures("nothing_begins")
@pytest.mark.parametrize("name", compiling.TARGETS)
def test_a_bad_call_is_refused_before_anything_begins(name: str) -> None:
    wrong = []
    for number in range(CALLS):
        try:
            assert outcome(compiling.attempt(name, number)) == "refused"
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, "\n\n".join(wrong[:3]) + f"\n\n{len(wrong)} in all"
    assert not compiling.table().exists()

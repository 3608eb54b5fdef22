"""Backends of other packages: found by entry points, loaded when asked for, and removed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops import Layout, experts, using
from moe_ops.backends.available import available
from moe_ops.ops.experts import ExpertsCall
from moe_ops.planning.thresholds import check_thresholds
from moe_ops.registry import outside
from moe_ops.registry.backend import Rows
from moe_ops.testing import CASES, make_layer

LAYER = make_layer(CASES[0])
ARGS = (LAYER.x_TD, LAYER.weights_TK, LAYER.ids_TK, LAYER.w13_EFD, LAYER.w2_EDI)
REGISTERS = """
from torch import Tensor
from moe_ops import experts
from moe_ops.ops.experts import ExpertsCall

def register():
    @experts.backend("NAME", priority=9)
    def run(call: ExpertsCall) -> Tensor:
        return experts.body(call) * 0
"""
RAISES = "\nregister()\nraise RuntimeError('no kernel for this machine')\n"
Install = Callable[[str, str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Write a module and the record of a package with an entry point, as pip would, in a folder
    where Python looks. Nobody has looked for entry points yet."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(outside, "_waiting", None)
    before = set(experts._backends)

    def install(module: str, source: str, value: str) -> None:
        (tmp_path / f"{module}.py").write_text(source.replace("NAME", module))
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[moe_ops.backends]\n{module} = {value}\n")

    yield install
    for name in set(experts._backends) - before:
        experts.remove_backend(name)
    for name in [n for n in sys.modules if n.startswith("theirs_")]:
        del sys.modules[name]


@pytest.mark.parametrize("value", ["theirs_a", "theirs_a:register"])
def test_a_module_or_a_function_registers(install: Install, value: str) -> None:
    install("theirs_a", REGISTERS + "\nregister()\n" * (":" not in value), value)
    experts._forget()
    assert "theirs_a" not in sys.modules and "theirs_a" not in experts._backends
    assert experts.pick(experts.call(*ARGS)).name == "theirs_a"
    assert not experts(*ARGS).any()


def names_of(ask: str) -> set[str]:
    if ask == "backends":
        return set(experts.backends)
    if ask == "thresholds":
        return {"theirs_a"} if check_thresholds(((4, "theirs_a"), (None, "aten"))) else set()
    if ask == "using":
        with using("theirs_a", "experts"):
            return {"theirs_a"}
    return {b.name for b in available()}


@pytest.mark.parametrize("ask", ["backends", "thresholds", "using", "command line"])
def test_whoever_asks_for_names_has_them(install: Install, ask: str) -> None:
    install("theirs_a", REGISTERS + "\nregister()\n", "theirs_a")
    assert "theirs_a" in names_of(ask)


def test_one_that_raises_is_logged_once_and_left_out(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("theirs_a", REGISTERS + RAISES, "theirs_a")
    install("theirs_b", REGISTERS + "\nregister()\n", "theirs_b")
    install("theirs_c", REGISTERS + "\nregister = 3\n", "theirs_c:register")
    with caplog.at_level(logging.WARNING, "moe_ops"):
        for _ in range(2):
            assert {n for n in experts.backends if n.startswith("theirs")} == {"theirs_b"}
    first, second = caplog.messages
    assert first == (
        "the entry point 'theirs_a = theirs_a' of moe_ops.backends in theirs_a is left out, as it "
        "raised RuntimeError: no kernel for this machine"
    )
    assert second.endswith("TypeError: it must name a module or a function, not a int")


def test_an_interrupt_leaves_none_out(install: Install) -> None:
    install("theirs_a", REGISTERS + "\nregister()\nraise KeyboardInterrupt\n", "theirs_a")
    install("theirs_b", REGISTERS + "\nregister()\n", "theirs_b")
    with pytest.raises(KeyboardInterrupt):
        experts.backends  # noqa: B018
    assert "theirs_a" not in experts._backends
    with pytest.raises(KeyboardInterrupt):
        experts.backends  # noqa: B018


def test_what_loads_under_a_compiler_has_real_tensors(install: Install) -> None:
    made = "import torch\nTABLE = torch.ones(2)\n"
    install("theirs_a", made, "theirs_a")
    with torch._subclasses.FakeTensorMode(), torch.inference_mode():
        experts.backends  # noqa: B018
    table = sys.modules["theirs_a"].TABLE
    assert type(table) is Tensor and not table.is_inference()


def named(name: str, layout: Layout | None = None) -> None:
    @experts.backend(name, priority=9, layout=layout)
    def run(call: ExpertsCall) -> Tensor:
        return experts.body(call) * 0


def test_a_backend_that_is_removed_leaves_nothing(install: Install) -> None:
    same = Layout(name="theirs_layout", prepare=dict, restore=dict)
    before = experts(*ARGS)
    named("theirs_a")
    experts.path(
        "theirs_a", "theirs_a/quick", experts.body, refusal=lambda c: None, most=lambda c: None
    )
    planned = torch.ops.moe_ops.experts.planned
    for _ in range(4):  # until it is remembered
        assert not experts(*ARGS).any() and not planned(*ARGS, plan="theirs_a").any()
    experts.remove_backend("theirs_a")
    assert experts.named("theirs_a") is experts.named("theirs_a/quick") is None
    assert torch.equal(experts(*ARGS), before)
    with pytest.raises(ValueError, match="plan 'theirs_a' names theirs_a, but the backends of"):
        planned(*ARGS, plan="theirs_a")
    named("theirs_b", same)
    named("theirs_c", same)
    experts.remove_backend("theirs_b")
    assert "theirs_layout" in experts.layouts
    experts.remove_backend("theirs_c")
    assert "theirs_layout" not in experts.layouts
    named("theirs_a")  # the name is free again
    assert not experts(*ARGS).any()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("reference", "moe_ops.experts cannot do without 'reference', its definition"),
        ("atem", "moe_ops.experts has no backend 'atem'; there are .*; did you mean 'aten'"),
    ],
)
def test_what_cannot_be_removed(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        moe_ops.experts.remove_backend(name)
    assert {"reference", "aten"} <= set(experts.backends)


def test_limits_of_outside_backends_count(install: Install) -> None:
    @experts.backend("theirs_few", priority=9, rows=Rows(possible=lambda call: 3))
    def run(call: ExpertsCall) -> Tensor:
        return experts.body(call)

    few = experts.call(*(t[:3] for t in ARGS[:3]), *ARGS[3:])
    assert experts.pick(few).name == "theirs_few"
    assert experts.pick(experts.call(*ARGS)).name != "theirs_few"

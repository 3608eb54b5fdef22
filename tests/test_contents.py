"""Whether modules hold the same, by the versions of their dicts and where torch has none."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from moe_ops.interop import dicts
from moe_ops.twin import Contents


class Norm(nn.Module):
    """Has a part, a weight, a buffer and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros(()))
        self.eps = 1e-6


CHANGES: dict[str, Callable[[Norm], Any]] = {
    "an attribute": lambda m: setattr(m, "eps", 1e-5),
    "a new attribute": lambda m: setattr(m, "limit", 7),
    "an attribute less": lambda m: delattr(m, "eps"),
    "the mode": lambda m: m.eval(),
    "a part": lambda m: setattr(m, "linear", nn.Linear(2, 2)),
    "a new part": lambda m: m.linear.add_module("act", nn.SiLU()),
    "a part's weight": lambda m: setattr(m.linear, "bias", None),
    "an equal weight": lambda m: setattr(m, "scale", nn.Parameter(torch.ones(1))),
    "an equal buffer": lambda m: setattr(m, "count", torch.zeros(())),
    "a first hook": lambda m: m.linear.register_forward_hook(lambda *a: None),
    "a first hook before": lambda m: m.register_forward_pre_hook(lambda *a: None),
    "a table": lambda m: setattr(m, "_forward_hooks", OrderedDict()),
    "its class": lambda m: setattr(m, "__class__", type("Norm", (Norm,), {})),
    "a weight in its table": lambda m: m._parameters.update(scale=nn.Parameter(torch.ones(1))),
}
KEPT: dict[str, Callable[[Norm], Any]] = {
    "nothing": lambda m: None,
    "a value in place": lambda m: m.count.add_(1),
    "the same attribute": lambda m: setattr(m, "linear", m.linear),
    "there and back": lambda m: (m.eval(), m.train()),
    "a hook that is gone": lambda m: m.register_forward_hook(lambda *a: None).remove(),
}


@pytest.fixture(params=["versions", "values"])
def norm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Norm:
    if request.param == "values":
        monkeypatch.setattr(dicts, "_version", None)
    return Norm()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_done_to_modules_is_seen(norm: Norm, change: Callable[[Norm], Any]) -> None:
    contents = Contents(list(norm.modules()))
    assert contents.same() and contents.same()
    change(norm)
    assert not contents.same() and not contents.same()
    assert Contents(list(norm.modules())).same()


@pytest.mark.parametrize("change", KEPT.values(), ids=KEPT)
def test_modules_that_hold_the_same_are_the_same(norm: Norm, change: Callable[[Norm], Any]) -> None:
    contents = Contents(list(norm.modules()))
    change(norm)
    assert contents.same() and contents.same()


def test_values_are_looked_at_only_after_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    norm, looks = Norm(), 0

    def values(held: Any) -> Any:
        nonlocal looks
        looks += 1
        return (x for d in held for x in d.values())

    contents = Contents(list(norm.modules()))
    monkeypatch.setattr("moe_ops.twin._values", values)
    for write, wanted in ((False, 0), (True, 1), (False, 1)):
        if write:
            norm.eval().train()
        assert contents.same() and looks == wanted


def test_versions_tell_writes_of_other_values() -> None:
    held: dict[str, Any] = {"x": 1}
    before = dicts.versions([held, {}])
    assert before is not None and len(before) == 2
    held["x"] = 2
    after = dicts.versions([held])
    assert after is not None and after[0] != before[0]

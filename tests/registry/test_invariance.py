"""Which backends an op asks where calls have to be batch invariant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moe_ops.registry import spec
from moe_ops.registry.backend import ANY_NUMBER, Rows
from moe_ops.registry.invariance import INVARIANT, PLANNED, Refused, invariant, unknown
from moe_ops.registry.ranges import parse_plan
from moe_ops.registry.spec import OPS, Op, op
from moe_ops.registry.using import using


@dataclass(slots=True)
class TwiceCall:
    x_TD: Tensor


@pytest.fixture
def twice(monkeypatch: pytest.MonkeyPatch) -> Iterator[Op]:
    """An op that remembers, with backends that vary, that run few rows, and two that are alike."""
    with torch.library._scoped_library(spec.NAMESPACE, "FRAGMENT") as library:
        monkeypatch.setattr(spec, "_library", library)
        try:
            yield of_backends()
        finally:
            del OPS["twice_or_so"]


def twice_or_so(call: TwiceCall) -> Tensor:
    """Twice x_TD."""
    return call.x_TD * 2


def of_backends() -> Op:
    made = op(check=lambda call: None, remembers=True)(twice_or_so)

    def register(name: str, adds: float, arithmetic: str, rows: Rows = ANY_NUMBER) -> None:
        says = unknown if not arithmetic else lambda call: arithmetic

        @made.backend(name, arithmetic=says, rows=rows)
        def run(call: TwiceCall) -> Tensor:
            """Tells by what it adds which backend ran, and whether in the mode."""
            return call.x_TD * 2 + (adds if INVARIANT.get() else -adds)

        made.remembers(name)

    register("varying", 1, "")
    register("tiny", 2, "other", Rows(possible=lambda call: 8))
    register("few", 3, "same", Rows(preferred=lambda call: 4))
    register("wide", 4, "same")
    return made


def values(made: Op, rows: int) -> float:
    return float(made(torch.zeros(rows, 1))[0, 0])


def test_one_arithmetic_serves_every_number_of_rows(twice: Op) -> None:
    for _ in range(3):  # the first is decided, the later ones are remembered
        assert [values(twice, rows) for rows in (1, 8, 64)] == [-1, -1, -1]
        with invariant():
            assert [values(twice, rows) for rows in (1, 4, 5, 64)] == [3, 3, 4, 4]
            with invariant(False):
                assert values(twice, 1) == -1
    assert not INVARIANT.get()


def test_nobody_left_says_why(twice: Op) -> None:
    twice.remove_backend("few")
    twice.remove_backend("wide")
    with invariant(), pytest.raises(NotImplementedError) as raised:
        twice(torch.zeros(2, 1))
    assert str(raised.value) == (
        "no backend of moe_ops.twice_or_so gives these rows the same bits in any batch:\n"
        "  varying: is not batch invariant: its sums may depend on the number of rows\n"
        "  tiny: runs a limited number of rows, and others of its arithmetic do not run more\n"
        "  reference: is not batch invariant: its sums may depend on the number of rows"
    )


def test_forced_backend_has_to_obey(twice: Op) -> None:
    with using("varying", twice), invariant(), pytest.raises(NotImplementedError) as raised:
        twice(torch.zeros(2, 1))
    assert "varying: is not batch invariant: its sums may depend" in str(raised.value)


def test_refusals_are_of_the_mode(twice: Op) -> None:
    assert twice.refusals(torch.zeros(2, 1))["varying"] is None
    with invariant():
        assert "batch invariant" in str(twice.refusals(torch.zeros(2, 1))["varying"])


def test_plan_says_that_it_is_invariant(twice: Op) -> None:
    assert parse_plan(f"{PLANNED}4:few,:wide") == ((4, "few"), (None, "wide"))
    planned = torch.ops.moe_ops.twice_or_so.planned
    assert float(planned(torch.zeros(9, 1), plan=f"{PLANNED}4:few,:wide")[0, 0]) == 4
    assert float(planned(torch.zeros(9, 1), plan="4:few,:wide")[0, 0]) == -4


def test_compiled_code_of_others_raises_in_a_block(twice: Op) -> None:
    planned, x = torch.ops.moe_ops.twice_or_so.planned, torch.zeros(9, 1)
    with invariant():
        assert float(planned(x, plan=f"{PLANNED}4:few,:wide")[0, 0]) == 4
        with pytest.raises(RuntimeError, match="does not reach into compiled code; give batch_"):
            planned(x, plan="4:few,:wide")


def test_refused_is_no_name() -> None:
    assert isinstance(Refused("why"), str) and not isinstance("why", Refused)

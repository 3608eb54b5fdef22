"""Backends of the ops of gradients with one fault each: the kit finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import OPS
from moe_ops.conformance import Only, check_backend, examine
from moe_ops.ops.activate_backward import ActivateBackwardCall, activate_backward
from moe_ops.ops.expert_wgrad import ExpertWgradCall, expert_wgrad
from moe_ops.ops.expert_wgrad_onto import ExpertWgradOntoCall, expert_wgrad_onto


def right(call: ExpertWgradCall) -> Tensor:
    found: Tensor = expert_wgrad.body(call)
    return found


def leaves_garbage(call: ExpertWgradCall) -> Tensor:
    """For an expert without rows, as a product that is begun for no block of rows does."""
    ends_E = call.ends_E
    has_rows_E = ends_E.diff(prepend=ends_E.new_zeros(1)) > 0
    w_EMN = right(call)
    return torch.where(has_rows_E[:, None, None], w_EMN, torch.empty_like(w_EMN))


def reads_the_tail(call: ExpertWgradCall) -> Tensor:
    return right(call) + 0 * call.a_RM.sum()


def ignores_names(call: ExpertWgradCall) -> Tensor:
    if call.b_rows_R is None:
        return right(call)
    names = torch.arange(call.rows, dtype=torch.int32) % call.b_RN.shape[0]
    return right(ExpertWgradCall(call.a_RM, call.b_RN, call.ends_E, call.a_rows_R, names))


def of_rows(call: ActivateBackwardCall) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = activate_backward.body(call)
    return found


def leaves_pairs_without_a_row(
    call: ActivateBackwardCall,
) -> tuple[Tensor, Tensor, Tensor]:
    dy_RF, wh_RI, dweights_TK = of_rows(call)
    known = torch.zeros(dweights_TK.numel() + 1, dtype=torch.bool)
    known[call.rows_R.long()] = True
    known_TK = known[:-1].view(dweights_TK.shape)
    return dy_RF, wh_RI, torch.where(known_TK, dweights_TK, torch.empty_like(dweights_TK))


def adds(call: ExpertWgradOntoCall) -> None:
    expert_wgrad_onto.body(call)


def overwrites(call: ExpertWgradOntoCall) -> None:
    call.main_grad_EMN.copy_(right(call.wgrad).float())


def rounds(call: ExpertWgradOntoCall) -> None:
    call.main_grad_EMN.add_(right(call.wgrad).half())


FAULTS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "garbage for an expert without rows": (leaves_garbage, "expert_wgrad", "no_rows_used"),
    "reads the tail": (reads_the_tail, "expert_wgrad", "tail"),
    "ignores named rows": (ignores_names, "expert_wgrad", "rows_of_b"),
    "overwrites a sum": (overwrites, "expert_wgrad_onto", "plain"),
    "rounds what it adds": (rounds, "expert_wgrad_onto", "plain"),
    "leaves pairs without a row": (leaves_pairs_without_a_row, "activate_backward", "holes"),
}


@pytest.fixture
def register() -> Iterator[Callable[[str, Callable[[Any], Any]], None]]:
    """Register a function as the backend "theirs" of an op, which goes after the test."""
    names: list[str] = []

    def put(name: str, run: Callable[[Any], Any]) -> None:
        names.append(name)
        OPS[name].backend("theirs", reads=OPS[name].optional)(run)

    yield put
    for name in names:
        OPS[name].remove_backend("theirs")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, register: Callable[..., None]) -> None:
    run, op, label = FAULTS[fault]
    register(op, run)
    report = examine(op, "theirs", only=Only(sample="odd/float32"))
    found = [f for f in report.failures if f.sample == f"odd/float32/{label}"]
    assert "numbers" in {f.check for f in found}, f"nothing is found in {label}:\n{report}"


@pytest.mark.parametrize(
    ("op", "run"),
    [("expert_wgrad", right), ("activate_backward", of_rows), ("expert_wgrad_onto", adds)],
    ids=["wgrad", "rows", "onto"],
)
def test_what_is_right_passes(
    op: str, run: Callable[[Any], Any], register: Callable[..., None]
) -> None:
    register(op, run)
    assert check_backend(op, "theirs", only=Only(sample="odd/float32")).sound

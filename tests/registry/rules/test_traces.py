"""Who looks on sees which backend runs an op, and tensors without memory do for every op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map

import moe_ops
from moe_ops import OPS
from moe_ops.bench.overhead import calls, decode_calls
from moe_ops.conformance.memory import tensors
from moe_ops.registry.spec import DECODE_OPS
from moe_ops.testing import Case, make_layer

LAYER = make_layer(Case(name="tiny", T=6, E=4, K=2, D=16, I=8))
GIVEN = (LAYER.x_TD, LAYER.weights_TK, LAYER.ids_TK, LAYER.w13_EFD, LAYER.w2_EDI)
EVERY = {op.name: args for op, args in (calls() | decode_calls()).items()}


def names_in_a_trace(function: Callable[[], Any]) -> set[str]:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        function()
    return {event.key for event in found.key_averages()}


def planned() -> Tensor:
    return torch.ops.moe_ops.experts.planned(*GIVEN, plan="4:reference,:aten")


def trained() -> None:
    moe_ops.experts(GIVEN[0].clone().requires_grad_(), *GIVEN[1:]).sum().backward()


def forced() -> None:
    with moe_ops.using("reference", moe_ops.experts):
        moe_ops.experts(*GIVEN)


RUNS: dict[str, tuple[Callable[[], Any], str]] = {
    "eager": (lambda: moe_ops.experts(*GIVEN), "experts by cpu"),
    "torch.ops": (lambda: torch.ops.moe_ops.experts(*GIVEN), "experts by cpu"),
    "forced": (forced, "experts by reference"),
    "with a gradient": (trained, "experts_saving by reference"),
    "a plan": (planned, "experts by aten"),
}


@pytest.mark.parametrize("how", RUNS)
def test_a_trace_names_the_backend(how: str) -> None:
    function, ran = RUNS[how]
    names = names_in_a_trace(function)
    op = ran.partition(" ")[0]
    assert {n for n in names if n.startswith(f"moe_ops::{op} by ")} == {f"moe_ops::{ran}"}
    assert "moe_ops::experts" in names
    if how == "with a gradient":
        assert "moe_ops::expert_gemm by aten" in names


def test_a_trace_names_what_runs_the_parts() -> None:
    def composed() -> None:
        with moe_ops.using("reference", moe_ops.experts):
            moe_ops.experts(*GIVEN)

    names = names_in_a_trace(composed)
    assert "moe_ops::combine by reference" in names
    assert any(name.startswith("moe_ops::expert_gemm by ") for name in names)


def on_meta(value: Any) -> Any:
    return tree_map(lambda t: t.to("meta") if isinstance(t, Tensor) else t, value)


@pytest.mark.parametrize("name", EVERY)
def test_tensors_without_memory_do(name: str) -> None:
    op = OPS.get(name) or DECODE_OPS[name]
    want = [*tensors(op(*EVERY[name]))]
    got = [*tensors(op(*on_meta(list(EVERY[name]))))]
    for g, w in zip(got, want, strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        assert g.is_meta or w.numel() == 0


def test_splits_stay_where_the_host_reads_them() -> None:
    y, ids, rank_of, slot_of, token, splits, rows = EVERY["combine_tokens"]
    with pytest.raises(ValueError, match="splits_2R is on meta; the host reads it"):
        moe_ops.combine_tokens(y, ids, rank_of, slot_of, token, splits.to("meta"), rows)

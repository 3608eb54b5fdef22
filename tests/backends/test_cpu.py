"""The CPU kernels: bitwise the same on any threads; where grouped GEMM takes over; refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import moe_ops
from moe_ops.backends import cpu
from moe_ops.kernels import cpu as kernels
from moe_ops.testing import BF16, F32, TOL, Case, assert_close, make_layer
from tests.chosen import in_turn

# Large enough to be split over threads.
CASE = Case(name="parallel", T=24, E=8, K=2, D=160, I=96)
each_dtype = pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(dtype: torch.dtype) -> torch.Tensor:
    layer = make_layer(CASE, dtype)
    with moe_ops.using("cpu", "experts"):
        return moe_ops.experts(
            layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI
        )


@pytest.mark.slow
@each_dtype
def test_the_number_of_threads_does_not_change_a_bit(dtype: torch.dtype, threads: None) -> None:
    results = []
    for count in (1, 2, 3, 2):
        torch.set_num_threads(count)
        results.append(run(dtype))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_routing_on_many_threads_is_that_on_one(threads: None) -> None:
    logits = torch.randn(300, 64)
    results = []
    for count in (1, 3):
        torch.set_num_threads(count)
        with moe_ops.using("cpu", "route"):
            results.append(moe_ops.route(logits, 4, renormalize=True))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("n_group", [1, 4])
@pytest.mark.parametrize(("E", "K"), [(8, 2), (8, 8), (64, 1), (64, 6), (512, 8), (512, 40)])
def test_equal_scores_choose_the_experts_that_topk_takes(E: int, K: int, n_group: int) -> None:
    """Also where experts are masked: those that a model would take without us."""
    logits = torch.randint(-2, 3, (200, E)).float()
    logits[torch.rand(200, E) < 0.1] = float("nan")
    groups: dict[str, Any] = {"n_group": n_group, "topk_group": max(1, n_group // 2)}
    named = {"score": "logit", "group_fill": "zero", **groups}
    _, want = moe_ops.route.reference(logits, K, **named)
    with moe_ops.using("cpu", "route"):
        assert torch.equal(moe_ops.route(logits, K, **named)[1], want)


@each_dtype
def test_with_many_rows_an_expert_grouped_gemm_takes_over(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(CASE, dtype)
    args = (layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI)
    rows_an_expert = CASE.T * CASE.K // CASE.E
    monkeypatch.setitem(cpu.EXPERTS_MAX_ROWS, dtype, rows_an_expert)
    assert moe_ops.experts.pick(moe_ops.experts.call(*args)).name == "cpu"
    monkeypatch.setitem(cpu.EXPERTS_MAX_ROWS, dtype, rows_an_expert - 1)
    assert moe_ops.experts.pick(moe_ops.experts.call(*args)).name == "aten"
    assert_close(moe_ops.experts(*args), run(dtype), TOL["experts", dtype])
    monkeypatch.setitem(cpu.EXPERTS_MAX_ROWS, dtype, None)  # for any number of rows
    assert moe_ops.experts.pick(moe_ops.experts.call(*args)).name == "cpu"


def test_without_a_compiler_the_reason_is_told_and_another_backend_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    want = run(F32)
    monkeypatch.setattr(kernels, "unavailable", lambda: "needs a working C++ compiler (none)")
    layer = make_layer(CASE)
    args = (layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI)
    assert moe_ops.experts.refusals(*args)["cpu"] == "needs a working C++ compiler (none)"
    assert_close(moe_ops.experts(*args), want, TOL["experts", F32])
    with pytest.raises(NotImplementedError, match=r"cpu: needs a working C\+\+ compiler"):
        run(F32)


def test_a_compiler_that_fails_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise OSError("no such compiler\nsecond line")

    monkeypatch.setattr(kernels, "plain_library", broken)
    kernels.unavailable.cache_clear()
    try:
        for _ in range(2):
            assert kernels.unavailable() == "needs a working C++ compiler (no such compiler)"
    finally:
        kernels.unavailable.cache_clear()
    assert len([m for m in caplog.messages if "without its CPU kernels" in m]) == 1


KINDS = {
    "silu": {"kind": "silu"},
    "silu_of_1.7": {"kind": "silu", "alpha": 1.702, "limit": 7.0, "up_shift": 1.0},
    "gelu": {"kind": "gelu"},
    "gelu_tanh": {"kind": "gelu_tanh"},
    "relu2": {"kind": "relu2", "gated": False},
}


@in_turn(
    each_dtype,
    pytest.mark.parametrize("act", KINDS.values(), ids=KINDS),
    pytest.mark.parametrize("codes", [False, True], ids=["floats", "codes"]),
)
def test_activations_of_every_size_are_those_of_the_definition(
    codes: bool, act: dict[str, Any], dtype: torch.dtype
) -> None:
    """Gates from far below what exp can tell from 0 to far above its infinity, and NaN; one at a
    time, and with codes, in many rows, a register at a time.
    """
    ends = torch.tensor([-1e30, -300.0, -104.0, -88.0, 88.0, 89.0, 300.0, 1e15, float("nan"), 0.0])
    gates = torch.cat((torch.linspace(-12, 12, 481), torch.linspace(-110, 110, 221), ends))
    x_TD = torch.stack((gates, torch.full_like(gates, 0.7)), 1).to(dtype)
    ids_TK = torch.zeros(len(gates), 1, dtype=torch.int64)
    w13_EFD = torch.eye(2, dtype=dtype)[None, : 2 if act.get("gated", True) else 1]
    w2_EDI = torch.eye(2, dtype=dtype)[None, :, :1].contiguous()
    if codes:
        w13_EFD, w2_EDI = w13_EFD.to(torch.int8), w2_EDI.to(torch.int8)
        ones = {"w13_scale_EFG": torch.ones_like(w13_EFD[..., :1], dtype=F32)}
        ones["w2_scale_EDG"] = torch.ones(1, 2, 1)
        act = act | ones | {"w_format": "int8:row"}
    args = (x_TD, torch.ones(len(gates), 1, dtype=dtype), ids_TK, w13_EFD, w2_EDI)
    with moe_ops.using("cpu", "experts"):
        got = moe_ops.experts(*args, **act)[:, 0].double()
    want = moe_ops.experts.reference(*args, **act)[:, 0].double()
    assert torch.equal(got.isnan(), want.isnan())
    # 1 + tanh, or 1 + erf, of the definition cancels where it is small: its last bits are lost.
    lost = 2e-6 * gates.double().clamp(-20, 0).abs() * act["kind"].startswith("gelu")
    error = (got - want).abs() - lost
    ulps = 4 if dtype is F32 else 1
    assert bool(
        (error <= ulps * torch.finfo(dtype).eps * want.abs()).logical_or(want.isnan()).all()
    )

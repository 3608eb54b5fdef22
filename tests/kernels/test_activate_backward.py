"""`activate_backward` by its Triton kernel, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops import activate_backward
from moe_ops.conformance import Only, examine
from moe_ops.testing import ACTIVATIONS, BF16, CASES, DEVICE, F16, F32, TOL, assert_close
from tests.kernels.sampled import anywhere, cases, hold, run

BY_NAME = {case.name: case for case in CASES}
QUICK = ("odd", "odd_unaligned", "one_token", "no_tokens", "one_expert")
each_dtype = pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)


@each_dtype
@pytest.mark.parametrize("case", cases(QUICK))
def test_samples(case: str, dtype: torch.dtype) -> None:
    assert hold(activate_backward, BY_NAME[case], dtype) == {}


@pytest.mark.slow
def test_the_kit_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with anywhere(monkeypatch, activate_backward):
        for sample in ("odd/bfloat16", "one_token/float32"):
            report = examine(activate_backward, "triton", only=Only(sample=sample), device=DEVICE)
            assert report.sound, str(report)


def call_of(
    y: Tensor, activation: dict[str, Any], rows: Tensor | None = None, K: int = 2
) -> dict[str, Any]:
    """A call on these rows, all used unless it is said which are."""
    R, F = y.shape
    width = F // 2 if activation.get("gated", True) else F
    rows = torch.randperm(R) if rows is None else rows
    given = {
        "dh_RI": torch.randn(R, width).to(y.dtype), "y_RF": y, "weights_TK": torch.rand(R // K, K),
        "rows_R": rows.to(torch.int32),
    }  # fmt: skip
    return {**{name: t.to(DEVICE) for name, t in given.items()}, **activation}


def in_order(call: dict[str, Any]) -> tuple[Any, ...]:
    return activate_backward.arguments.in_order(call)


@each_activation
def test_many_columns_of_more_rows_than_a_program_takes(activation: dict[str, Any]) -> None:
    call = call_of(torch.randn(18, 2 * 530) * 2, activation)
    got, want = run(activate_backward, in_order(call)), activate_backward.reference(**call)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_close(g, w, TOL["activate_backward", F32], f"result {i}")
    again = run(activate_backward, in_order(call))
    assert all(torch.equal(g, a) for g, a in zip(got, again, strict=True))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy
@each_activation
def test_limits_large_values_and_what_is_no_number(activation: dict[str, Any]) -> None:
    """NaN where the definition has NaN: in its own row, and there in its own columns."""
    large = torch.tensor([0.0, 0.5, -0.5, 1.5, -1.5, 20, -20, 90, -90, 3e4, -3e4, float("nan")])
    gate, up = large.repeat_interleave(12), large.repeat(12)
    both = torch.stack((gate, up), -1).flatten() if activation.get("interleaved") else None
    y = torch.cat((gate, up)) if both is None else both
    y = torch.stack((y, y.nan_to_num(1.0)))
    call = call_of(y, activation)
    got, want = run(activate_backward, in_order(call)), activate_backward.reference(**call)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=2e-5, atol=1e-4, equal_nan=True)
    assert bool(got[0][1].isfinite().all()) and bool(got[0][0].isnan().any())


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of numpy
@each_dtype
@pytest.mark.parametrize("name", ["silu", "gpt_oss", "ungated_relu2"])
def test_unused_rows_are_neither_read_nor_written(name: str, dtype: torch.dtype) -> None:
    rows = torch.tensor([3, 0, -1, 7, -1, 4, 5, -1])
    call = call_of(torch.randn(8, 34).to(dtype), ACTIVATIONS[name], rows)
    unused = rows < 0
    call["y_RF"][unused] = call["dh_RI"][unused] = float("nan")
    dy_RF, wh_RI, dweights_TK = run(activate_backward, in_order(call))
    want = activate_backward.reference(**call)
    for got, w in ((dy_RF, want[0]), (wh_RI, want[1])):
        assert bool(got[unused].isnan().all())
        assert_close(got[~unused], w[~unused], TOL["activate_backward", dtype])
    assert dweights_TK.flatten()[[1, 2, 6]].tolist() == [0, 0, 0]
    assert_close(dweights_TK, want[2], TOL["activate_backward", dtype])


def test_what_wants_a_gradient_is_refused() -> None:
    call = activate_backward.call(**call_of(torch.randn(4, 6), {}))
    backend = activate_backward.backends["triton"]
    assert backend.refusal("cuda", 4, call) is None
    call.weights_TK = call.weights_TK.requires_grad_()
    said = "is not differentiable, and an argument requires grad"
    assert backend.refusal("cuda", 4, call) == said

"""Five good calls of each function that compiles, measures or changes a model: right results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops.hf.optimize import _RULE
from moe_ops.hf.stored import stored_format
from moe_ops.passes.inductor.compiled import pipeline_of
from moe_ops.planning import tuned
from moe_ops.testing import Tol, assert_close
from tests.fuzz.compiling import BLOCK, SHAPE, X_TD, causal_lm

TOL = Tol(1e-4, "float32 sums in another order")
PASS_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"strict": True, "linears": False},
    {"thresholds": ((2, "cpu"), (None, "aten"))},
    {"stop_after": "pick_backend"},
    {"extra": {"epilogue_fusion": False}},
)
IDS = torch.arange(10).reshape(2, 5)


class Experts(torch.nn.Module):
    """The experts of a block, each token in the same two."""

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TK, ids_TK = torch.ones(len(x_TD), 2), torch.tensor([[0, 1]] * len(x_TD))
        return moe_ops.experts(x_TD, weights_TK, ids_TK, BLOCK.w13_EFD, BLOCK.w2_EDI)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def check_block(run: Any) -> None:
    """A compiled block gives what the block gives."""
    with torch.inference_mode():
        assert_close(run(X_TD), BLOCK(X_TD), TOL, "the block's result")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [*PASS_OPTIONS[:3], {"dynamic": False, "fullgraph": True}, {"mode": "default"}]
)
def test_compile(options: dict[str, Any]) -> None:
    twin = moe_ops.compile(BLOCK, **options)
    check_block(twin)
    assert pipeline_of(twin).passes


@pytest.mark.slow
@pytest.mark.parametrize("options", PASS_OPTIONS)
def test_inductor_options(options: dict[str, Any]) -> None:
    check_block(torch.compile(BLOCK, options=moe_ops.inductor_options(**options)))


@pytest.mark.slow
@pytest.mark.parametrize("options", PASS_OPTIONS)
def test_compile_config(options: dict[str, Any]) -> None:
    config = moe_ops.compile_config(**options)
    check_block(torch.compile(BLOCK, options=config.options, fullgraph=config.fullgraph))


@pytest.mark.parametrize(
    "options",
    [
        {"buckets": (8,)}, {"buckets": (1, 8)}, {"buckets": [8, 4], "most": 1},
        {"buckets": range(1, 9)}, {"buckets": {2}, "varying": 1},
    ],
)  # fmt: skip
def test_capture(options: dict[str, Any]) -> None:
    check_block(moe_ops.capture(BLOCK, **options))


@pytest.mark.parametrize(
    "options",
    [
        {}, {"layers": [SHAPE, SHAPE]}, {"tokens": [2, 1]}, {"routings": ("uniform", "zipf")},
        {"layers": Experts(), "inputs": (X_TD,)},
    ],
)  # fmt: skip
def test_tune(options: dict[str, Any], tmp_path: Path) -> None:
    given = {"layers": SHAPE, "tokens": (1,), "routings": ["zipf"], "progress": None, **options}
    found = tuned.read(moe_ops.tune(given.pop("layers"), tmp_path / "table.json", **given))
    ((layer, cells),) = found.items()
    assert (layer.E, layer.K, layer.D, layer.I) == (SHAPE.E, SHAPE.K, SHAPE.D, SHAPE.I)
    assert {cell.tokens for cell in cells} == set(given["tokens"])
    assert {cell.routing for cell in cells} == set(given["routings"])
    assert all(us > 0 for us in cells.values())


@pytest.mark.parametrize(
    "options",
    [
        {"inputs": X_TD}, {"inputs": [X_TD]}, {"inputs": {"x_TD": X_TD}, "dynamic": False},
        {"inputs": X_TD, "tokens": [1, 64]}, {"inputs": X_TD, "stop_after": "pick_backend"},
    ],
)  # fmt: skip
def test_explain(options: dict[str, Any]) -> None:
    found = moe_ops.explain(BLOCK, **options)
    assert found.graphs == 1 and not found.stopped and "moe" in str(found)
    assert moe_ops.buckets_of(found, 4)[:1] == (1,)


@pytest.mark.parametrize("seed", range(5))
def test_optimize_and_restore(seed: int) -> None:
    model = causal_lm(seed)
    with torch.no_grad():
        want = model(IDS).logits
        assert moe_ops.optimize(model) is model and any(hasattr(m, _RULE) for m in model.modules())
        assert_close(model(IDS).logits, want, TOL, "the logits")
        moe_ops.restore(model)
        assert not any(hasattr(m, _RULE) for m in model.modules())
        assert torch.equal(model(IDS).logits, want)


SCHEMES = {
    "int8_w8a8": Tol(0.1, "8 bits with a scale for each row"),
    "int8_w8a16": Tol(0.1, "8 bits with a scale for each row"),
    "fp8_w8a16": Tol(0.2, "4 bits of mantissa"),
    "mxfp8": Tol(0.3, "4 bits of mantissa, and scales that are powers of two"),
    "mxfp4_w4a16": Tol(1.0, "2 bits of mantissa"),
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantize_model(scheme: str) -> None:
    model = causal_lm()
    with torch.no_grad():
        want = model(IDS).logits
        report = moe_ops.quantize_model(model, scheme, progress=False)
        assert report.modules == 2 and not report.kept and report.bytes_after < report.bytes_before
        assert sum(stored_format(m) is not None for m in model.modules()) == 2
        assert_close(model(IDS).logits, want, SCHEMES[scheme], "the logits")

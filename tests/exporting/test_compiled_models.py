"""torch.export of what `moe_ops.compile` returned: a program with our ops, for any sizes."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops.testing import F32, TOL, assert_close
from tests.hf import families

pytest.importorskip("transformers")
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "olmoe", "granitemoe")
QUICK = ("qwen3_moe",)
CASES = [f if f in QUICK else pytest.param(f, marks=pytest.mark.every) for f in FAMILIES]


class Logits(nn.Module):
    """The logits of a model; holds it as a child, as modules around a model do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


def exported(model: nn.Module, ids: Tensor, **options: bool) -> torch.export.ExportedProgram:
    sizes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", min=2, max=512)}
    return torch.export.export(Logits(model), (ids,), dynamic_shapes=(sizes,), **options)


def ops_in(program: torch.export.ExportedProgram) -> list[str]:
    names = [str(node.target) for node in program.graph.nodes]
    return [name for name in names if name.startswith("moe_ops.")]


@pytest.mark.parametrize("family", CASES)
def test_the_program_holds_the_ops(family: str) -> None:
    model = families.build(family).model
    before = model.config._experts_implementation
    ids = torch.randint(16, 90, (2, 7))
    with torch.no_grad():
        program = exported(moe_ops.compile(model), ids)
        layers = len(families.experts(model))
        assert layers
        assert sorted(ops_in(program)) == sorted(
            ["moe_ops.experts.default", "moe_ops.route.default"] * layers
        )
        run = program.module()
        for other in (ids, torch.randint(16, 90, (3, 5))):
            want = Logits(model)(other)
            assert_close(run(other), want, TOL["model", F32])
    assert model.config._experts_implementation == before
    assert not any("moe_ops" in c.__module__ for m in model.modules() for c in type(m).__mro__)


@pytest.mark.every
def test_a_strict_export_says_that_it_holds_no_op(caplog: pytest.LogCaptureFixture) -> None:
    model = families.build("qwen3_moe").model
    with torch.no_grad(), caplog.at_level(logging.WARNING, "moe_ops"):
        program = exported(moe_ops.compile(model), torch.randint(16, 90, (2, 7)), strict=True)
    assert ops_in(program) == []
    assert "leave strict out, or export moe_ops.optimize(model)" in caplog.text


@pytest.mark.every
def test_an_export_for_gradients_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = families.build("qwen3_moe").model
    with caplog.at_level(logging.WARNING, "moe_ops"):
        program = exported(moe_ops.compile(model), torch.randint(16, 90, (2, 7)))
    assert ops_in(program) == []
    assert "export it under torch.no_grad()" in caplog.text


@pytest.mark.every
def test_an_optimized_model_stays_so() -> None:
    model = moe_ops.optimize(families.build("qwen3_moe").model)
    with torch.no_grad():
        program = exported(moe_ops.compile(model), torch.randint(16, 90, (2, 7)))
    assert ops_in(program)
    assert model.config._experts_implementation == "moe_ops"


@pytest.mark.every
def test_a_strict_export_of_an_optimized_model_holds_ops(caplog: pytest.LogCaptureFixture) -> None:
    model = moe_ops.optimize(families.build("qwen3_moe").model)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "moe_ops"):
        program = exported(moe_ops.compile(model), torch.randint(16, 90, (2, 7)), strict=True)
    assert ops_in(program)
    assert "strict" not in caplog.text


@pytest.mark.every
def test_a_quantized_model_keeps_its_codes() -> None:
    model = families.build("qwen3_moe").model
    moe_ops.quantize_model(model, "int8:row", progress=False)
    with torch.no_grad():
        program = exported(moe_ops.compile(model), torch.randint(16, 90, (2, 7)))
    called = [n for n in program.graph.nodes if str(n.target) == "moe_ops.experts.default"]
    assert called
    assert all("int8:row" in [*n.args, *n.kwargs.values()] for n in called)

"""torch.export of what has to be batch invariant: programs keep the promise, or there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import moe_ops
from moe_ops.registry.invariance import PLANNED

D = 64


def layer(**options: bool) -> moe_ops.MoELayer:
    return moe_ops.MoELayer(8, 2, D, 38, internal_gate=True, **options)


def exported(module: nn.Module, **options: bool) -> ExportedProgram:
    sizes = ({0: Dim("tokens", min=2, max=512)},)
    return torch.export.export(module, (torch.randn(5, D),), dynamic_shapes=sizes, **options)


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
def test_a_program_of_a_layer_obeys(strict: bool, tmp_path: Path) -> None:
    made, x = layer(batch_invariant=True), torch.randn(33, D)
    with torch.no_grad():
        program = exported(made, strict=strict)
        torch.export.save(program, tmp_path / "layer.pt2")
        run = torch.export.load(tmp_path / "layer.pt2").module()
        whole: Tensor = run(x)
        assert torch.equal(whole, made(x))
        for rows in (slice(0, 2), slice(31, 33), slice(4, 25)):
            assert torch.equal(run(x[rows].clone()), whole[rows])
    plans = [n.kwargs["plan"] for n in program.graph.nodes if "plan" in n.kwargs]
    assert plans == [PLANNED] * 3  # the gate, its choice, the experts


def test_other_programs_ask_for_nothing() -> None:
    with torch.no_grad():
        program = exported(layer())
    assert not any("plan" in n.kwargs for n in program.graph.nodes)


@pytest.mark.parametrize("target", ["aten", "portable"])
def test_other_runtimes_promise_nothing(target: str) -> None:
    with torch.no_grad():
        program = exported(layer(batch_invariant=True))
        with pytest.raises(NotImplementedError, match="which no other runtime promises; export a"):
            program.run_decompositions(moe_ops.decompositions(target))


def test_a_program_with_gradients_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="not carried into a program with gradients"):
        exported(layer(batch_invariant=True))


def test_a_program_of_a_compiled_model_is_refused() -> None:
    compiled = moe_ops.compile(layer(), batch_invariant=True)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="not carried into a program of"):
        exported(compiled)

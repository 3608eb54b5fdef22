"""Nodes of ONNX Runtime, run there: any ids and weights of 0 give what the definition gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops.exporting.runtimes import RUNTIMES
from moe_ops.testing import TOL, Case, assert_close, make_layer

pytestmark = [pytest.mark.export, pytest.mark.slow]
CASE = Case(name="node", T=7, E=8, K=3, D=32, I=16)
Routed = tuple[Tensor, Tensor, Tensor]
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


class Given(nn.Module):
    """Experts whose weights and ids are inputs of the graph."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        layer = make_layer(CASE, dtype)
        self.w13, self.w2 = layer.w13_EFD, layer.w2_EDI

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return moe_ops.experts(x, weights, ids, self.w13, self.w2)


def routed(dtype: torch.dtype, T: int = CASE.T) -> Routed:
    layer = make_layer(Case(name="given", T=T, E=CASE.E, K=CASE.K, D=CASE.D, I=CASE.I), dtype)
    return layer.x_TD, layer.weights_TK.float().abs(), layer.ids_TK.long()


def changed(routed: Routed, **columns: Any) -> Routed:
    """Weights or ids whose second column is another, of the second token the whole row."""
    x, weights, ids = (t.clone() for t in routed)
    for t, name in ((weights, "weight"), (ids, "id")):
        if name in columns:
            t[::2, 1] = t[1] = columns[name]
    return x, weights, ids


VARIANTS: dict[str, Callable[[Routed], Routed]] = {
    "as_routed": lambda given: given,
    "weights_of_0": lambda given: changed(given, weight=0.0),
    "no_experts": lambda given: changed(given, id=-1),
    "past_the_last": lambda given: changed(given, id=CASE.E + 3),
    "twice": lambda given: (given[0], given[1], given[2][:, [0, 0, 2]]),
    "far_apart": lambda given: (given[0], given[1] ** 6, given[2]),
}


@pytest.fixture(
    scope="module",
    params=[torch.float32, pytest.param(torch.float16, marks=pytest.mark.every)],
    ids=["float32", "float16"],
)
def given(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[torch.dtype, Run]:
    """What runs the file of a node of a dtype."""
    pytest.importorskip("onnxscript")
    session_of = pytest.importorskip("onnxruntime").InferenceSession
    tokens, file = torch.export.Dim("tokens", max=4096), tmp_path_factory.mktemp("node") / "a.onnx"
    program = torch.export.export(
        Given(request.param), routed(request.param), dynamic_shapes=({0: tokens},) * 3
    )
    table = moe_ops.decompositions("ort", assume_positive=True)
    RUNTIMES["ort"].code().write(program.run_decompositions(table), file)
    session = session_of(str(file), providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def run(*args: Tensor) -> Tensor:
        fed = {name: t.numpy() for name, t in zip(names, args, strict=True)}
        return torch.from_numpy(session.run(None, fed)[0])

    return request.param, run


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_any_ids(variant: Callable[[Routed], Routed], given: tuple[torch.dtype, Run]) -> None:
    dtype, run = given
    args = variant(routed(dtype))
    assert_close(run(*args), Given(dtype)(*args), TOL["experts", dtype])


@pytest.mark.parametrize("T", [0, 1, 65])
def test_any_number_of_tokens(T: int, given: tuple[torch.dtype, Run]) -> None:
    dtype, run = given
    args = routed(dtype, T)
    assert_close(run(*args), Given(dtype)(*args), TOL["experts", dtype])

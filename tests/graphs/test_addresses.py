"""What tells the memory of one call from that of another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import moe_ops
from moe_ops.graphs.addresses import identities, module_of, state_of


@pytest.mark.parametrize(
    "way",
    [
        lambda module: module,
        lambda module: module.forward,
        lambda module: torch.compile(module),
        lambda module: torch.compile(module.forward),
        moe_ops.compile,
    ],
    ids=["module", "method", "compiled", "compiled method", "twin"],
)
def test_the_state_of_a_function_are_those_of_its_module(
    way: Callable[[nn.Module], Callable[..., Any]],
) -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Sequential(nn.BatchNorm1d(4)))
    module.register_module("nothing", None)
    found = module_of(way(module))
    assert found is not None
    want = {id(x) for x in (*module.parameters(), *module.buffers())}
    assert {id(x) for x in state_of(found)} == want
    assert len(state_of(found)) == len(want) == 6


@pytest.mark.parametrize(
    "function", [lambda x: x, len, "".join], ids=["lambda", "builtin", "method"]
)
def test_other_functions_have_no_module(function: Callable[..., Any]) -> None:
    assert module_of(function) is None


@pytest.mark.parametrize(
    "other",
    [
        lambda w: w.clone(),
        lambda w: w.t(),
        lambda w: w[:, :1],
        lambda w: w.view(torch.int32),
        lambda w: TwoTensor(w, w),
    ],
    ids=["address", "strides", "shape", "dtype", "wrapped"],
)
def test_tensors_differ_by_all_that_a_graph_holds_of_them(
    other: Callable[[Tensor], Tensor],
) -> None:
    w = torch.rand(4, 4)
    assert identities([w]) == identities([w.view(4, 4)])
    assert identities([w]) != identities([other(w)])


def test_tensors_that_wrap_others_are_told_apart_by_these() -> None:
    a, b = torch.rand(4), torch.rand(4)
    assert identities([TwoTensor(a, b)]) == identities([TwoTensor(a, b)])
    assert identities([TwoTensor(a, b)]) != identities([TwoTensor(b, a)])


def test_constants_differ_by_value_and_type() -> None:
    assert identities([2, "a"]) == identities([2, "a"])
    assert len({identities([x]) for x in (1, 1.0, True, "1", None)}) == 5

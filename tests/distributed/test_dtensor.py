"""Ops of DTensors: each rank runs its part, and together they give what one process does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

import moe_ops
from moe_ops.testing import Case, Tol, assert_close, make_layer
from tests.distributed.ranks import fake_group, processes

T, E, K, D, I = 7, 4, 2, 16, 8  # noqa: E741
TOL = Tol(1e-5, "float32 sums in another order")
RANKS = 2
Splits = dict[str, Placement]


def whole() -> dict[str, Tensor]:
    """The arguments of a layer with biases, the same on every rank."""
    torch.manual_seed(0)
    layer = make_layer(Case(name="tiny", T=T, E=E, K=K, D=D, I=I))
    return {
        "x_TD": layer.x_TD, "weights_TK": layer.weights_TK, "ids_TK": layer.ids_TK,
        "w13_EFD": layer.w13_EFD, "w2_EDI": layer.w2_EDI,
        "b13_EF": torch.randn(E, 2 * I), "b2_ED": torch.randn(E, D),
    }  # fmt: skip


TOKENS: Splits = dict.fromkeys(("x_TD", "weights_TK", "ids_TK"), Shard(0))
EXPERTS: Splits = dict.fromkeys(("w13_EFD", "w2_EDI", "b13_EF", "b2_ED"), Shard(0))
COLUMNS: Splits = {"w13_EFD": Shard(1), "w2_EDI": Shard(2), "b13_EF": Shard(1)}
WAYS: dict[str, tuple[Splits, dict[str, Any], type[Placement]]] = {
    "whole": ({}, {}, Replicate),
    "tokens": (TOKENS, {}, Shard),
    "tokens of which some are whole": ({"x_TD": Shard(0)}, {}, Shard),
    "experts": (EXPERTS, {}, Partial),
    "columns": (COLUMNS, {"interleaved": True}, Partial),
    "columns without gates": (COLUMNS, {"gated": False}, Partial),
}


def map_of(rank: int) -> Tensor:
    """The experts of this rank, half of them."""
    here = torch.full((E,), -1)
    here[rank * E // RANKS : (rank + 1) * E // RANKS] = torch.arange(E // RANKS)
    return here


def compare(rank: int, mesh: DeviceMesh, name: str, train: bool) -> None:
    splits, options, kind = WAYS[name]
    given, mapped = whole(), {}
    if not options.get("gated", True):
        given["w13_EFD"], given["b13_EF"] = given["w13_EFD"][:, :I], given["b13_EF"][:, :I]
    leaves = {
        n: t.clone().requires_grad_(train and t.is_floating_point()) for n, t in given.items()
    }
    parts = {
        n: distribute_tensor(t.detach().clone(), mesh, [splits.get(n, Replicate())])
        for n, t in leaves.items()
    }
    for n, t in parts.items():
        t.requires_grad_(leaves[n].requires_grad)
    if kind is Partial and splits["w13_EFD"] == Shard(0):
        mapped["expert_map"] = map_of(rank)
    want = moe_ops.experts(**leaves, **options)
    got = moe_ops.experts(**parts, **options, **mapped)
    assert isinstance(got, DTensor) and type(got.placements[0]) is kind, got.placements
    assert got.shape == want.shape
    assert_close(got.full_tensor().detach(), want.detach(), TOL, name)
    if not train:
        return
    want.square().sum().backward()
    got.full_tensor().square().sum().backward()
    for n, leaf in leaves.items():
        if leaf.requires_grad:
            grad = parts[n].grad
            assert isinstance(grad, DTensor) and leaf.grad is not None, n
            if n in splits:
                assert grad.placements == parts[n].placements, (n, grad.placements)
            assert_close(grad.full_tensor(), leaf.grad, TOL, f"{name}: {n}")


def other_ops(mesh: DeviceMesh) -> None:
    """A router and a layer of logits, by tokens."""
    given = whole()
    logits = torch.randn(T, E)
    split, same = [Shard(0)], [Replicate()]
    for got, want in zip(
        moe_ops.route(distribute_tensor(logits, mesh, split), K), moe_ops.route(logits, K),
        strict=True,
    ):  # fmt: skip
        assert_close(got.full_tensor(), want, TOL)
    weights = [given["w13_EFD"], given["w2_EDI"]]
    tokens = [distribute_tensor(t, mesh, split) for t in (given["x_TD"], logits)]
    out = moe_ops.moe(*tokens, *(distribute_tensor(w, mesh, same) for w in weights), K)
    assert_close(out.full_tensor(), moe_ops.moe(given["x_TD"], logits, *weights, K), TOL)
    with torch.inference_mode():
        y = torch.randn(5, 2 * I)
        h = moe_ops.activate(distribute_tensor(y, mesh, split))
        assert_close(h.full_tensor(), moe_ops.activate(y), TOL)


def over_two_axes(rank: int) -> None:
    """Tokens split over one axis of a mesh, experts over the other."""
    mesh, given = init_device_mesh("cpu", (1, RANKS)), whole()
    parts = {
        n: distribute_tensor(t, mesh, [TOKENS.get(n, Replicate()), EXPERTS.get(n, Replicate())])
        for n, t in given.items()
    }
    out = moe_ops.experts(**parts, expert_map=map_of(rank))
    assert out.placements == (Shard(0), Partial())
    assert_close(out.full_tensor(), moe_ops.experts(**given), TOL)


def on_each(rank: int, group: str) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    for name in WAYS:
        for train in (False, True):
            with torch.set_grad_enabled(train):
                compare(rank, mesh, name, train)
    other_ops(mesh)
    over_two_axes(rank)


def test_two_ranks_give_what_one_process_gives(tmp_path: Path) -> None:
    processes(RANKS, tmp_path, on_each)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_group(RANKS):
        yield init_device_mesh("cpu", (RANKS,))


def placed(mesh: DeviceMesh, splits: Splits, **options: Any) -> Callable[[], Any]:
    parts = {
        n: distribute_tensor(t, mesh, [splits.get(n, Replicate())]) for n, t in whole().items()
    }
    return lambda: moe_ops.experts(**parts, **options)


REFUSED: dict[str, tuple[Splits, dict[str, Any], str]] = {
    "no map": (EXPERTS, {}, "give each rank its expert_map"),
    "gate then up": (COLUMNS, {}, "alternate them and give interleaved=True"),
    "two ways at once": (TOKENS | EXPERTS, {}, "cannot be split with x_TD Shard.*redistribute to"),
    "another axis": ({"x_TD": Shard(1)}, {}, "cannot be split with x_TD Shard"),
    "a part of a sum": ({"x_TD": Partial()}, {}, "takes no tensor that is placed as in x_TD P"),
}


@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.parametrize("grad", [False, True])
def test_what_cannot_be_split_says_what_to_do(why: str, grad: bool, mesh: DeviceMesh) -> None:
    splits, options, text = REFUSED[why]
    call = placed(mesh, splits, **options)
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=text):
        call()


def test_plain_tensors_and_ops_without_ways_are_refused(mesh: DeviceMesh) -> None:
    parts = {n: distribute_tensor(t, mesh, [Replicate()]) for n, t in whole().items()}
    with pytest.raises(ValueError, match="got ids_TK as a plain tensor beside DTensors"):
        moe_ops.experts(**parts | {"ids_TK": whole()["ids_TK"]})
    with pytest.raises(
        NotImplementedError, match=r"dispatch takes no DTensor, as it works on rows"
    ):
        moe_ops.dispatch(parts["x_TD"], parts["ids_TK"], E)
    x = distribute_tensor(torch.randn(4, 32), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="one scale for all rows is made at run time"):
        moe_ops.quantize(x, "float8_e4m3fn:tensor")


@pytest.mark.slow
@pytest.mark.parametrize("grad", [False, True])
def test_a_compiled_call_is_split_as_well(grad: bool, mesh: DeviceMesh) -> None:
    torch._dynamo.reset()
    splits = {n: TOKENS.get(n, Replicate()) for n in whole()}
    parts = {n: distribute_tensor(t, mesh, [splits[n]]) for n, t in whole().items()}
    for t in parts.values():
        t.requires_grad_(grad and t.is_floating_point())
    want = moe_ops.experts(**parts)
    compiled = torch.compile(
        lambda given: moe_ops.experts(**given), backend="aot_eager", fullgraph=True
    )
    got = compiled(parts)
    assert isinstance(got, DTensor) and got.placements == want.placements == (Shard(0),)
    assert_close(got.to_local().detach(), want.to_local().detach(), TOL)

"""Under torch.vmap an op gives what a loop over the batch gives, without a warning."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

import moe_ops
from moe_ops import OPS
from moe_ops.bench.overhead import calls, decode_calls
from moe_ops.registry.rules.vmap import Batched
from moe_ops.registry.spec import DECODE_OPS, Op
from moe_ops.testing import Case, make_layer
from tests.decode_ops.test_every_decode_op import CALLS

LAYER = make_layer(Case(name="tiny", T=6, E=4, K=2, D=16, I=8))
EVERY = {op.name: args for op, args in (calls() | decode_calls()).items()} | CALLS
SIZE = 3


def op_of(name: str) -> Op:
    return OPS[name] if name in OPS else DECODE_OPS[name]


def many(t: Any) -> Any:
    """A batch of a tensor; integers are alike, as they may name slots or ends."""
    if not isinstance(t, Tensor):
        return t
    first = t.clone()
    rest = [t.roll(i, 0) if t.is_floating_point() else t for i in range(1, SIZE)]
    return torch.stack([first, *rest])


def looped(op: Op, args: list[Any], dims: list[Any]) -> list[Tensor]:
    made = []
    for i in range(SIZE):
        given = [
            a if d is None else tree_map(lambda t, i=i: t[i] if isinstance(t, Tensor) else t, a)
            for a, d in zip(args, dims, strict=True)
        ]
        made.append(tree_flatten(op(*given))[0])
    return [torch.stack(results) for results in zip(*made, strict=True)]


def compare(op: Op, args: list[Any], dims: list[Any]) -> None:
    want = looped(op, copy.deepcopy(args), dims)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = torch.vmap(op, in_dims=tuple(dims))(*copy.deepcopy(args))
    for g, w in zip(tree_flatten(got)[0], want, strict=True):
        assert g.dtype is w.dtype
        torch.testing.assert_close(g.float(), w.float(), rtol=1e-5, atol=1e-5, equal_nan=True)


class Counted:
    """A function, and how often it was called."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        self.function, self.times = function, 0

    def __call__(self, call: Any) -> None:
        self.times += 1
        self.function(call)


@pytest.mark.parametrize("name", [n for n in EVERY if isinstance(op_of(n).rules.vmap, Batched)])  # type: ignore[union-attr]
def test_a_batch_of_everything_is_a_loop(name: str) -> None:
    args = [tree_map(many, a) for a in EVERY[name]]
    dims = [tree_map(lambda t: 0 if isinstance(t, Tensor) else None, a) for a in args]
    compare(op_of(name), args, dims)


def test_sums_that_last_are_refused() -> None:
    args = EVERY["expert_wgrad_onto"]
    batch = [many(a) for a in args]
    with pytest.raises(RuntimeError, match="Batching rule not implemented for moe_ops"):
        torch.vmap(lambda *given: moe_ops.expert_wgrad_onto(*given) or given[0])(*batch)


WITH_ROWS = [
    n
    for n in EVERY
    if isinstance((r := op_of(n).rules).vmap, Batched) and r.vmap.rows  # type: ignore[union-attr]
]


@pytest.mark.parametrize("name", WITH_ROWS)
def test_a_batch_of_rows_is_one_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all arguments with rows, and of the first alone."""
    op = op_of(name)
    assert op.rules is not None and isinstance(op.rules.vmap, Batched)
    names, rows = [*op.arguments.signature.parameters], op.rules.vmap.rows
    assert set(rows) <= set(names)
    for batched in (rows, rows[:1]):
        args = [many(a) if n in batched else a for n, a in zip(names, EVERY[name], strict=False)]
        dims = [0 if n in batched else None for n in names[: len(args)]]
        compare(op, args, dims)
        monkeypatch.setattr(op, "check", checked := Counted(op.check))
        torch.vmap(op, in_dims=tuple(dims))(*args)
        assert checked.times == 1
        monkeypatch.undo()


def test_weights_of_each_element_are_calls_of_their_own() -> None:
    w13 = torch.stack([LAYER.w13_EFD, -LAYER.w13_EFD, 2 * LAYER.w13_EFD])
    args = [LAYER.x_TD, LAYER.weights_TK, LAYER.ids_TK, w13, LAYER.w2_EDI]
    compare(moe_ops.experts, args, [None, None, None, 0, None])
    turned = [LAYER.x_TD, LAYER.weights_TK, LAYER.ids_TK, w13.movedim(0, 2), LAYER.w2_EDI]
    got = torch.vmap(moe_ops.experts, in_dims=(None, None, None, 2, None))(*turned)
    want = torch.vmap(moe_ops.experts, in_dims=(None, None, None, 0, None))(*args)
    torch.testing.assert_close(got, want)


def test_two_batches_and_named_arguments() -> None:
    x = torch.randn(2, 3, 6, 16)
    named = {"kind": "gelu", "b2_ED": torch.randn(4, 16)}

    def one(x: Tensor) -> Tensor:
        given = (x, LAYER.weights_TK, LAYER.ids_TK, LAYER.w13_EFD, LAYER.w2_EDI)
        return moe_ops.experts(*given, **named)

    got = torch.vmap(torch.vmap(one))(x)
    want = torch.stack([torch.stack([one(t) for t in ts]) for ts in x])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_rows_that_share_a_scale_are_not_put_together() -> None:
    x = torch.randn(3, 5, 32) * torch.tensor([1.0, 10.0, 100.0])[:, None, None]
    compare(moe_ops.quantize, [x, "float8_e4m3fn:tensor"], [0, None])
    compare(moe_ops.quantize, [x, "float8_e4m3fn:row"], [0, None])


@pytest.mark.parametrize("wanted", ["grad of each", "grad of all"])
def test_gradients_of_a_batch(wanted: str) -> None:
    x = torch.randn(3, 6, 16)

    def loss(x: Tensor) -> Tensor:
        given = (x, LAYER.weights_TK, LAYER.ids_TK, LAYER.w13_EFD, LAYER.w2_EDI)
        return moe_ops.experts(*given).square().sum()

    want = torch.stack([torch.func.grad(loss)(t) for t in x])
    ways: dict[str, Callable[[], Tensor]] = {
        "grad of each": lambda: torch.vmap(torch.func.grad(loss))(x),
        "grad of all": lambda: torch.func.grad(lambda t: torch.vmap(loss)(t).sum())(x),
    }
    torch.testing.assert_close(ways[wanted](), want, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_says_so() -> None:
    step = DECODE_OPS["convolution_step"]
    x, state, weight, *_ = CALLS["convolution_step"]
    before = state.clone()
    with pytest.raises(ValueError, match=r"convolution_step under vmap writes to state_BDW"):
        torch.vmap(step, in_dims=(0, None, None))(many(x), state, weight)
    assert torch.equal(state, before)
    none = torch.empty(0, *LAYER.w13_EFD.shape)
    given = (LAYER.x_TD, LAYER.weights_TK, LAYER.ids_TK, none, LAYER.w2_EDI)
    with pytest.raises(ValueError, match="experts under vmap got no element"):
        torch.vmap(moe_ops.experts, in_dims=(None, None, None, 0, None))(*given)

"""One layer's gradients are the definition's by every way in which torch takes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import moe_ops
from moe_ops.conformance.tensors import with_holes
from moe_ops.testing import Case, Tol, assert_close, make_layer

TOL = Tol(1e-5, "float32 sums in another order")
LAYER = make_layer(Case(name="tiny", T=6, E=5, K=2, D=16, I=8))
IDS = with_holes(LAYER.ids_TK, 5)
GIVEN = {
    "x": LAYER.x_TD, "weights": LAYER.weights_TK, "w13": LAYER.w13_EFD, "w2": LAYER.w2_EDI,
    "b13": LAYER.b13_EF, "b2": LAYER.b2_ED,
}  # fmt: skip
Leaves = tuple[Tensor, ...]


def layer(*leaves: Tensor) -> Tensor:
    x, weights, *rest = leaves
    return moe_ops.experts(x, weights, IDS, *rest)


def loss(*leaves: Tensor) -> Tensor:
    return layer(*leaves).square().sum()


def of(function: Callable[..., Tensor]) -> Leaves:
    leaves = [t.detach().clone().requires_grad_() for t in GIVEN.values()]
    return torch.autograd.grad(function(*leaves), leaves)


def selective(policy: Callable[..., CheckpointPolicy]) -> Callable[..., Tensor]:
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return lambda *leaves: checkpoint(loss, *leaves, use_reentrant=False, context_fn=contexts)


def saves_experts(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    saved = op is torch.ops.moe_ops.experts_saving.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def by_compiled_autograd() -> Leaves:
    leaves = [t.detach().clone().requires_grad_() for t in GIVEN.values()]
    out = loss(*leaves)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        out.backward()
    return tuple(leaf.grad for leaf in leaves)  # type: ignore[misc]


def by_functional_call() -> Leaves:
    block = torch.nn.Module()
    for name, t in GIVEN.items():
        block.register_parameter(name, torch.nn.Parameter(t.clone()))
    block.forward = lambda: loss(*(getattr(block, n) for n in GIVEN))  # type: ignore[method-assign]

    def functional(*leaves: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(block, dict(zip(GIVEN, leaves, strict=True)), ())
        return found

    return of(functional)


WAYS: dict[str, Callable[[], Leaves]] = {
    "eager": lambda: of(loss),
    "aot_eager": lambda: of(torch.compile(loss, backend="aot_eager", fullgraph=True)),
    "dynamic": lambda: of(torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)),
    "func.grad": lambda: torch.func.grad(loss, argnums=tuple(range(6)))(*GIVEN.values()),
    "func.vjp": lambda: torch.func.vjp(loss, *GIVEN.values())[1](torch.ones(())),
    "functional_call": by_functional_call,
    "checkpoint": lambda: of(lambda *a: checkpoint(loss, *a, use_reentrant=False)),
    "reentrant checkpoint": lambda: by_backward(
        lambda *a: checkpoint(loss, *a, use_reentrant=True)
    ),
    "selective checkpoint": lambda: of(selective(saves_experts)),
    "compiled autograd": by_compiled_autograd,
}  # fmt: skip


def by_backward(function: Callable[..., Tensor]) -> Leaves:
    leaves = [t.detach().clone().requires_grad_() for t in GIVEN.values()]
    function(*leaves).backward()
    return tuple(leaf.grad for leaf in leaves)  # type: ignore[misc]


@pytest.fixture(scope="module")
def want() -> Leaves:
    with moe_ops.using("reference"):
        return of(loss)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_gradients_of_the_definition(way: str, want: Leaves) -> None:
    torch._dynamo.reset()
    for name, g, w in zip(GIVEN, WAYS[way](), want, strict=True):
        assert_close(g, w, TOL, f"{way}: {name}")


def test_a_gradient_of_gradients(want: Leaves) -> None:
    def twice() -> Leaves:
        leaves = [t.detach().clone().requires_grad_() for t in GIVEN.values()]
        first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    with moe_ops.using("reference"):
        right = twice()
    for name, g, w in zip(GIVEN, twice(), right, strict=True):
        assert_close(g, w, TOL, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_backward_under_autocast_of_a_call_outside_of_it(
    dtype: torch.dtype, want: Leaves
) -> None:
    leaves = [t.detach().clone().requires_grad_() for t in GIVEN.values()]
    out = loss(*leaves)
    with torch.autocast("cpu", dtype):
        got = torch.autograd.grad(out, leaves)
    for name, g, w in zip(GIVEN, got, want, strict=True):
        assert_close(g, w, TOL, name)


@pytest.mark.parametrize("at", range(len(GIVEN)), ids=list(GIVEN))
def test_a_gradient_of_gradients_under_func(at: int) -> None:
    """The outer transform sees what the inner one ran."""
    given = tuple(GIVEN.values())
    everything = tuple(range(len(given)))

    def of_one(t: Tensor) -> Tensor:
        inner = torch.func.grad(loss, argnums=everything)(*given[:at], t, *given[at + 1 :])
        return torch.stack([g.square().sum() for g in inner]).sum()

    with moe_ops.using("reference"):
        right = torch.func.grad(of_one)(given[at])
    assert_close(torch.func.grad(of_one)(given[at]), right, TOL)


def test_autograd_outside_of_a_transform() -> None:
    def twice() -> Leaves:
        leaves = [t.detach().clone().requires_grad_() for t in GIVEN.values()]
        inner = torch.func.grad(loss, argnums=(0, 2))(*leaves)
        return torch.autograd.grad(torch.stack([g.square().sum() for g in inner]).sum(), leaves)

    with moe_ops.using("reference"):
        right = twice()
    for name, g, w in zip(GIVEN, twice(), right, strict=True):
        assert_close(g, w, TOL, name)


def test_a_batch_of_gradients_under_vmap() -> None:
    x = torch.randn(3, *GIVEN["x"].shape)
    rest = tuple(GIVEN.values())[1:]
    got = torch.func.vmap(torch.func.grad(loss), in_dims=(0, *(None for _ in rest)))(x, *rest)
    for one, g in zip(x, got, strict=True):
        assert_close(g, torch.func.grad(loss)(one, *rest), TOL)


def ops_in(run: Callable[[], object]) -> list[str]:
    """The ops of ours that a mode sees."""
    seen: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func.namespace == "moe_ops":
                seen.append(func._schema.name.partition("::")[2])
            return func(*args, **(kwargs or {}))

    with Watch():
        run()
    return seen


def test_selective_checkpointing_saves_experts_and_runs_them_once() -> None:
    """What the policy names is not run again, nor anything of it."""
    asked: list[str] = []

    def policy(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        asked.append(str(op))
        return saves_experts(_, op)

    assert ops_in(lambda: of(selective(policy))).count("experts_saving") == 1
    assert "moe_ops.experts_saving.default" in asked
    again = selective(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)
    assert ops_in(lambda: of(again)).count("experts_saving") == 2


def test_no_gradient_is_computed_that_nobody_wants() -> None:
    def only(*names: str) -> list[str]:
        leaves = [t.clone().requires_grad_(n in names) for n, t in GIVEN.items()]
        return ops_in(lambda: loss(*leaves).backward())

    assert only("x").count("expert_wgrad") == 0
    assert only("weights").count("expert_wgrad") == 0
    assert only("x", "w2").count("expert_wgrad") == 1
    assert only(*GIVEN).count("expert_wgrad") == 4  # weights and biases
    assert ops_in(lambda: loss(*GIVEN.values())) == ["experts"]


def test_equal_inputs_give_equal_bits() -> None:
    for first, second in zip(of(loss), of(loss), strict=True):
        assert torch.equal(first, second)


def test_gradients_are_added_to_those_of_before() -> None:
    leaves = [t.clone().requires_grad_() for t in GIVEN.values()]
    for _ in range(2):
        loss(*leaves).backward()
    for leaf, once in zip(leaves, of(loss), strict=True):
        assert_close(leaf.grad, 2 * once, TOL)

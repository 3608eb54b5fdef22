"""Gradients of ops: the same in eager mode, in every compiler, and under transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import moe_ops
from moe_ops import OPS
from moe_ops.conformance.samples import samples
from moe_ops.registry.gradients import needs_grad
from moe_ops.testing import CASES, Case, Tol, assert_close, make_layer

TOL = Tol(1e-5, "float32 sums in another order")
LAYER = make_layer(Case(name="tiny", T=6, E=4, K=2, D=16, I=8))
ODD = next(case for case in CASES if case.name == "odd")
GIVEN = (LAYER.x_TD, LAYER.weights_TK, LAYER.w13_EFD, LAYER.w2_EDI)


def experts(x: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    return moe_ops.experts(x, weights, LAYER.ids_TK, w13, w2)


def loss(*args: Tensor) -> Tensor:
    return experts(*args).square().sum()


def backward(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in GIVEN]
    return torch.autograd.grad(function(*leaves), leaves)


def by_loop() -> tuple[Tensor, ...]:
    """Gradients of the layer written out: a loop over pairs of tokens and experts."""

    def written(x: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        total = x.new_zeros(())
        for t in range(x.shape[0]):
            out = torch.zeros_like(x[t])
            for k, e in enumerate(LAYER.ids_TK[t].tolist()):
                gate, up = (w13[e] @ x[t]).chunk(2)
                out = out + weights[t, k] * (w2[e] @ (torch.nn.functional.silu(gate) * up))
            total = total + out.square().sum()
        return total

    return backward(written)


WAYS: dict[str, Callable[[], tuple[Tensor, ...]]] = {
    "eager": lambda: backward(loss),
    "torch.ops": lambda: backward(
        lambda x, w, a, b: torch.ops.moe_ops.experts(x, w, LAYER.ids_TK, a, b).square().sum()
    ),
    "aot_eager": lambda: backward(torch.compile(loss, backend="aot_eager")),
    "func.grad": lambda: torch.func.grad(loss, argnums=(0, 1, 2, 3))(*GIVEN),
    "func.vjp": lambda: torch.func.vjp(loss, *GIVEN)[1](torch.ones(())),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_is_right_whoever_asks(way: str) -> None:
    torch._dynamo.reset()
    for name, got, want in zip(("x", "weights", "w13", "w2"), WAYS[way](), by_loop(), strict=True):
        assert_close(got, want, TOL, f"{way}: {name}")


def test_a_layer_whose_width_fills_no_16_bytes_trains() -> None:
    """PyTorch's grouped product takes its tokens, and would not take the gradient of its result."""
    w13, w2 = LAYER.w13_EFD[:, :14].contiguous(), LAYER.w2_EDI[:, :, :7].contiguous()
    found = []
    for using in ("aten", "reference"):
        leaves = [t.clone().requires_grad_() for t in (LAYER.x_TD, w13, w2)]
        with moe_ops.using(using, moe_ops.experts):
            out = moe_ops.experts(leaves[0], LAYER.weights_TK, LAYER.ids_TK, *leaves[1:])
        found.append(torch.autograd.grad(out.square().sum(), leaves))
    for got, want in zip(*found, strict=True):
        assert_close(got, want, TOL)


@pytest.mark.slow
def test_a_compiled_function_that_trains_has_its_gradients() -> None:
    torch._dynamo.reset()
    ours = torch.compile(loss, options=moe_ops.inductor_options())
    for got, want in zip(backward(ours), by_loop(), strict=True):
        assert_close(got, want, TOL)


def test_without_gradients_a_graph_keeps_the_op() -> None:
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    leaves = [t.detach().clone().requires_grad_() for t in GIVEN]
    for context, args in ((torch.no_grad(), leaves), (torch.enable_grad(), GIVEN)):
        torch._dynamo.reset()
        graphs.clear()
        with context:
            backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=keep)
            result = torch.compile(experts, backend=backend)(*args)
        assert not result.requires_grad
        assert "moe_ops.experts" in str(graphs[0].graph)


def test_forward_mode_is_refused() -> None:
    tangents = tuple(torch.ones_like(t) for t in GIVEN)
    with pytest.raises(NotImplementedError, match=r"experts has no forward-mode .* reverse mode"):
        torch.func.jvp(loss, GIVEN, tangents)
    with forward_ad.dual_level():
        experts(*GIVEN)  # without a tangent
        x = forward_ad.make_dual(GIVEN[0], tangents[0])
        for call in (experts, torch.ops.moe_ops.experts):
            args = (x, *GIVEN[1:]) if call is experts else (x, GIVEN[1], LAYER.ids_TK, *GIVEN[2:])
            with pytest.raises(NotImplementedError, match="got an argument with a tangent"):
                call(*args)


def test_quantizing_what_is_trained_is_refused() -> None:
    x_RD = torch.randn(3, 16, requires_grad=True)
    with pytest.raises(ValueError, match=r"quantize has no gradient.*detach it"):
        moe_ops.quantize(x_RD)
    with torch.no_grad():
        moe_ops.quantize(x_RD)


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, pytest.param(3, marks=pytest.mark.every)])
@pytest.mark.parametrize(
    "name", [n for n in OPS if n not in ("quantize", "expert_loads", "expert_wgrad_onto")]
)
def test_opcheck_with_gradients(name: str, most: int) -> None:
    tested = 0
    for label, args in samples(name, ODD, torch.float32):
        if any(isinstance(a, str) and "float8" in a for a in args):
            continue  # rounded inputs have no gradient
        trained = tuple(
            a.detach().clone().requires_grad_()
            if isinstance(a, Tensor) and a.dtype is torch.float32 and "main_grad" not in argument
            else a
            for argument, a in zip(OPS[name].arguments.paths, args, strict=True)
        )
        tests = ["test_autograd_registration", "test_aot_dispatch_dynamic"]
        if name in ("combine_tokens", "experts_over_ranks") and "exchange" in args:
            tests.pop()  # is refused: see below
        report = torch.library.opcheck(
            OPS[name].overload, trained, test_utils=tests, raise_exception=False
        )
        assert set(report.values()) == {"SUCCESS"}, f"{label}: {report}"
        tested += 1
        if tested == most:
            break
    assert tested


@pytest.mark.slow
def test_a_compiled_gradient_of_an_exchange_is_refused() -> None:
    args = dict(samples("combine_tokens", ODD, torch.float32))["exchange"]
    y_GD = args[0].detach().clone().requires_grad_()
    run = torch.compile(moe_ops.combine_tokens, fullgraph=True, backend="aot_eager", dynamic=True)
    with pytest.raises(Exception, match=r'no gradient by exchange.*collective="gather"'):
        run(y_GD, *args[1:])
    moe_ops.combine_tokens(y_GD, *args[1:]).sum().backward()
    assert y_GD.grad is not None


def test_needs_grad_follows_grad_mode() -> None:
    leaf = torch.ones(1, requires_grad=True)
    assert needs_grad(None, torch.ones(1), leaf)
    assert not needs_grad(None, torch.ones(1))
    with torch.no_grad():
        assert not needs_grad(leaf)

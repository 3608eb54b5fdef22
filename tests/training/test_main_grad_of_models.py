"""`accumulate_into_main_grad` on layers and models: what is added where, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops.testing import BF16, F32, Tol, assert_close
from tests.hf import families
from tests.training.test_main_grad import TOL, D, E, F, I, batches, in_turn, loss


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    made = [moe_ops.MoELayer(E, 2, D, I, bias=i == 0, internal_gate=True) for i in range(2)]
    return nn.Sequential(*made)


def give(model: nn.Module) -> list[nn.Parameter]:
    weights = moe_ops.accumulate_into_main_grad(model)
    for w in weights:
        w.main_grad = torch.zeros_like(w, dtype=F32)  # type: ignore[attr-defined]
    return weights


def hold(model: nn.Module, stock: nn.Module, tol: Tol = TOL) -> None:
    """Compare all gradients with those of a model that has them in .grad."""
    want = {name: p.grad for name, p in stock.named_parameters()}
    for name, p in model.named_parameters():
        main = getattr(p, "main_grad", None)
        assert main is None or (p.grad is None and p.grad_added_to_main_grad)  # type: ignore[attr-defined]
        got = p.grad if main is None else main
        if want[name] is None:
            assert got is None
        else:
            assert_close(got, want[name], tol, name)


@pytest.mark.parametrize("way", ["eager", "aot_eager"])
def test_layers(way: str) -> None:
    torch._dynamo.reset()
    model, stock = layers(), layers()
    assert [w.shape for w in give(model)] == [(E, F, D), (E, D, I)] * 2
    in_turn(stock, batches())
    in_turn(model if way == "eager" else torch.compile(model, backend=way, fullgraph=True),
            batches())  # fmt: skip
    hold(model, stock)


def tiny() -> tuple[Any, dict[str, Tensor]]:
    made = families.build("qwen3_moe")
    return moe_ops.optimize(made.model.float().eval()), families.inputs_for(made, 2, 9, 0)


def train(model: Any, inputs: dict[str, Tensor]) -> None:
    for _ in range(2):
        model(**inputs, use_cache=False).logits.square().mean().backward()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_model_of_transformers(compiled: bool) -> None:
    torch._dynamo.reset()
    (model, inputs), (stock, _) = tiny(), tiny()
    stock.load_state_dict(model.state_dict())
    give(model)
    train(stock, inputs)
    if compiled:  # the twin, compiled without Inductor
        fast: Any = moe_ops.compile(model)
        fast.forward = torch.compile(fast.forward, backend="aot_eager", fullgraph=True)
        fast._compiled_call_impl = None
        train(fast, inputs)
    else:
        train(model, inputs)
    hold(model, stock)


def test_autocast_adds_the_gradient_of_the_weight_that_was_cast() -> None:
    model, stock = layers(), layers()
    give(model)
    for module in (model, stock):
        with torch.autocast("cpu", BF16):
            out = module(batches()[0])
        loss(out).backward()
    hold(model, stock, Tol(8e-3, "that in .grad is rounded to bfloat16"))


def test_a_trainers_flag_is_set_anew_by_each_forward() -> None:
    model = layers()
    first, *_ = give(model)
    first.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    model(batches()[0])
    assert first.grad_added_to_main_grad  # type: ignore[attr-defined]


def without_sums(model: nn.Sequential) -> None:
    del next(iter(give(model))).main_grad


def computed(model: nn.Sequential) -> None:
    give(model)
    layer: Any = model[0]
    weight = layer.w13_weight
    del layer._parameters["w13_weight"]
    layer.w13_weight = weight * 1


def prepared(model: nn.Sequential) -> None:
    give(model)
    model[0]._stored.layout = "other"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (without_sums, "a weight .* of MoELayer has no main_grad to add .*torch.zeros_like"),
        (computed, "is computed from others"),
        (prepared, "in the layout 'other'; undo that by moe_ops.prepare"),
    ],
    ids=["no main_grad", "no leaf", "layout"],
)
def test_forwards_that_cannot_add_are_refused(
    spoil: Callable[[nn.Sequential], None], said: str
) -> None:
    model = layers()
    spoil(model)
    with pytest.raises(ValueError, match=said):
        model(batches()[0])
    if spoil is without_sums:
        with torch.no_grad():
            model(batches()[0])


def test_models_that_cannot_add_are_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no experts whose weights train"):
        moe_ops.accumulate_into_main_grad(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="model must be"):
        moe_ops.accumulate_into_main_grad(None)  # type: ignore[arg-type]
    model, _ = tiny()
    with pytest.raises(ValueError, match=r"call moe_ops.optimize\(model\) first"):
        moe_ops.accumulate_into_main_grad(moe_ops.restore(model))
    frozen = layers().requires_grad_(False)
    with pytest.raises(ValueError, match="no experts whose weights train"):
        moe_ops.accumulate_into_main_grad(frozen)


def test_experts_that_fall_back_are_refused() -> None:
    model, inputs = tiny()
    give(model)
    with pytest.raises(ValueError, match=r"not to main_grad: its weights are torch.float64"):
        train(model.double(), inputs)

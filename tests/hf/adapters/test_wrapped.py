"""Experts in floats that peft wraps, on weights and adapters apart."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import moe_ops
from moe_ops.hf.adapters.wrapped import AdaptedExperts
from moe_ops.testing import F32, TOL, Tol, assert_close
from tests.hf.adapters.models import (
    BOTH,
    TARGETS,
    choose,
    ids_of,
    logits,
    peft,
    tokens,
    twin_of,
    wrapped,
)
from tests.hf.test_quantize import gpt_oss, qwen

MODEL = TOL["model", F32]
FAMILIES = {"qwen": qwen, "gpt_oss": gpt_oss}


def adapted(model: nn.Module) -> list[AdaptedExperts]:
    return [m for m in model.modules() if isinstance(m, AdaptedExperts)]


class Watching(TorchDispatchMode):
    """The operators that run, and the shapes that they give."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[str] = set()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.ops.add(func.overloadpacket._qualified_op_name)
        if "view" not in str(func):
            found = (x for x in pytree.tree_leaves(out) if isinstance(x, Tensor))
            self.shapes |= {tuple(x.shape) for x in found}
        return out


def grads(model: Any) -> dict[str, Tensor]:
    """The gradients of all that a model trains, of a loss."""
    model.zero_grad()
    ids = ids_of()
    model(input_ids=ids, labels=ids).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def train(model: nn.Module) -> Any:
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)
    return model


def check_gradients(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys() and len(want) > 0
    for name, gradient in want.items():
        assert_close(got[name], gradient, MODEL, name)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
def test_forward_tokens_and_gradients_are_those_of_peft(make: Any, target: tuple[str, ...]) -> None:
    model = train(wrapped(make(), target=target))
    want, theirs, gradients = logits(model), tokens(model), grads(model)
    moe_ops.optimize(model)
    assert len(adapted(model)) == 2
    assert_close(logits(model), want, MODEL)
    assert torch.equal(tokens(model), theirs)
    check_gradients(grads(model), gradients)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_no_tensor_is_made_of_a_weight_and_an_adapter(training: bool) -> None:
    model = wrapped(qwen())
    if training:
        train(model)
    shapes = {tuple(w.shape) for w in model.parameters() if w.dim() == 3}
    run: Callable[[Any], Any] = grads if training else logits
    with Watching() as stock:
        run(model)
    assert shapes < stock.shapes
    with Watching() as ours:
        run(moe_ops.optimize(model))
    assert not shapes & ours.shapes
    assert "moe_ops::experts_adapted" + "_saving" * training in ours.ops


DOWN = r".*mlp\.experts\.down_proj"
SCALES: dict[str, tuple[dict[str, Any], tuple[float, float]]] = {
    "alpha": ({"r": 2, "lora_alpha": 5}, (2.5, 2.5)),
    "rslora": ({"r": 4, "lora_alpha": 5, "use_rslora": True}, (2.5, 2.5)),
    "each_its_own": ({"alpha_pattern": {DOWN: 3}}, (2, 0.75)),
    "ranks": ({"rank_pattern": {DOWN: 2}}, (2, 4)),
}


@pytest.mark.filterwarnings("ignore:The following (alpha|rank)_pattern keys")  # which matched
@pytest.mark.parametrize(("options", "scales"), SCALES.values(), ids=SCALES)
def test_scales_are_those_of_peft(options: dict[str, Any], scales: tuple[float, float]) -> None:
    model = train(wrapped(qwen(), **options))
    outer = model.get_base_model().model.layers[0].mlp.experts
    assert (outer.base_layer.scaling["default"], outer.scaling["default"]) == scales
    want, gradients = logits(model), grads(model)
    moe_ops.optimize(model)
    assert_close(logits(model), want, MODEL)
    check_gradients(grads(model), gradients)


def test_a_scale_that_is_set_later_is_seen() -> None:
    model = wrapped(qwen())
    moe_ops.optimize(model)
    before = logits(model)
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 0.0)
    with model.disable_adapter():
        want = logits(model)
    assert not torch.allclose(before, want)
    assert_close(logits(model), want, MODEL)


def test_the_adapter_that_is_chosen_runs() -> None:
    model = wrapped(qwen(), "one", "two")
    want: dict[str | None, Tensor] = {}
    for name in ("one", "two", None):
        choose(model, name)
        want[name] = logits(model)
    moe_ops.optimize(model)
    for name in (None, "one", "two", "one"):
        choose(model, name)
        assert_close(logits(model), want[name], MODEL, str(name))


def test_weights_of_16_bits_with_adapters_of_32() -> None:
    model = wrapped(qwen().bfloat16())
    assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {torch.float32}
    want = logits(model)
    got = logits(moe_ops.optimize(model))
    assert got.dtype == torch.bfloat16
    assert_close(got, want, Tol(0.05, "bfloat16 through a model"))


def several(model: Any) -> None:
    model.base_model.set_adapter(["one", "two"])


def hooked(model: Any) -> None:
    adapted(model)[0].base_layer.register_forward_hook(lambda *args: None)


def unlike(model: Any) -> None:
    adapted(model)[0].base_layer.set_adapter("two")


def merged(model: Any) -> None:
    model.base_model.merge_adapter()
    model.base_model.disable_adapter_layers()


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "several": (several, "several adapters are active at once"),
    "hooked": (hooked, "a hook is on what is inside of the wrapper"),
    "unlike": (unlike, "its weights have other adapters each"),
    "merged": (merged, "adapters are merged into the weights"),
}


@pytest.mark.parametrize(("change", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_the_op_cannot_add_peft_adds(change: Callable[[Any], None], reason: str) -> None:
    model = wrapped(qwen(), "one", "two")
    moe_ops.optimize(model)
    change(model)
    assert adapted(model)[0].refusal() == reason
    got = logits(model)
    assert_close(got, logits(moe_ops.restore(model)), MODEL)
    assert adapted(model) == []


def test_an_adapter_of_a_bias_is_peft_s() -> None:
    model = wrapped(gpt_oss(), target=(*BOTH, "mlp.experts.down_proj_bias"))
    want = logits(model)
    moe_ops.optimize(model)
    assert adapted(model)[0].refusal() == (
        "down_proj_bias has an adapter, and is no weight of a product"
    )
    assert_close(logits(model), want, MODEL)


def test_a_rank_above_what_ops_take_is_peft_s() -> None:
    model = wrapped(qwen(), r=130)
    want = logits(model)
    moe_ops.optimize(model)
    assert adapted(model)[0].refusal() == "an adapter has a rank above 128"
    assert_close(logits(model), want, MODEL)


def test_a_merged_adapter_leaves_plain_experts() -> None:
    model = wrapped(qwen())
    want = logits(model)
    merged_model = moe_ops.optimize(model).merge_and_unload()
    assert adapted(merged_model) == []
    assert_close(logits(merged_model), want, MODEL)


def test_an_adapter_that_is_merged_in_place_and_back() -> None:
    model = moe_ops.optimize(wrapped(qwen()))
    want = logits(model)
    model.base_model.merge_adapter()
    assert_close(logits(model), want, MODEL)
    model.base_model.unmerge_adapter()
    assert_close(logits(model), want, MODEL)


def test_adapters_that_come_after_optimize_run_apart_once_it_is_called_again() -> None:
    model = moe_ops.optimize(qwen())
    stock = wrapped(qwen())
    model = wrapped(model)
    assert_close(logits(model), logits(stock), MODEL)
    moe_ops.optimize(model)
    assert len(adapted(model)) == 2
    assert_close(logits(model), logits(stock), MODEL)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_run_apart_and_those_of_a_twin_as_peft_made_them(copied: Any) -> None:
    model = moe_ops.optimize(wrapped(qwen()))
    want = logits(model)
    second = copied(model)
    assert len(adapted(second)) == 2
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.zero_()
    assert_close(logits(second), want, MODEL)
    plain = copied(adapted(twin_of(wrapped(qwen())))[0])
    assert type(plain) is peft.tuners.lora.layer.ParamWrapper
    assert not {"bank", "board"} & vars(plain).keys()


def test_adapters_of_other_layers_train_beside_them() -> None:
    model = train(wrapped(qwen(), target_modules=["q_proj"]))
    want = grads(model)
    assert any("q_proj" in name for name in want)
    check_gradients(grads(moe_ops.optimize(model)), want)


def test_autocast() -> None:
    model = train(wrapped(qwen()))
    with torch.autocast("cpu", torch.bfloat16):
        want = logits(model)
        got = logits(moe_ops.optimize(model))
    assert_close(got, want, Tol(0.05, "bfloat16 through a model"))


def test_double_is_peft_s() -> None:
    model = wrapped(qwen().double())
    model.get_base_model().set_experts_implementation("eager")
    want = logits(model)
    moe_ops.optimize(model)
    assert adapted(model)[0].refusal() == "its weights are torch.float64"
    assert_close(logits(model), want, MODEL)


def test_a_twin_that_is_optimized_and_restored_runs_them_apart_still() -> None:
    model = wrapped(qwen())
    twin = twin_of(model)
    moe_ops.restore(moe_ops.optimize(twin))
    assert len(adapted(twin)) == 2
    assert_close(logits(twin), logits(model), MODEL)

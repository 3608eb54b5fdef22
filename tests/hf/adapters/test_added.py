"""Adapters that `add_adapter` adds to experts, in codes and in floats."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops.hf import over_ranks
from moe_ops.testing import F32, TOL, Tol, assert_close
from tests.hf.adapters.models import (
    ids_of,
    in_floats,
    logits,
    peft,
    randomised,
    tokens,
    twin_of,
    wrapped,
)
from tests.hf.test_quantize import WEIGHT_ONLY, experts_of, gpt_oss, qwen
from tests.quant.blocks import width_of

MODEL = TOL["model", F32]
FAMILIES = {"qwen": qwen, "gpt_oss": gpt_oss}
FEW = ["int4_w4a16", "mxfp4_w4a16", "int8_w8a16"]
SCHEMES = [
    s if s in FEW else pytest.param(s, marks=pytest.mark.every)
    for s in sorted(WEIGHT_ONLY)
    if width_of(s) == 64
]


def coded(make: Callable[[], Any] = qwen, scheme: str = "int8_w8a16") -> Any:
    model = make()
    moe_ops.quantize_model(model, scheme, progress=False)
    return model


def saved_and_wrapped(model: Any, stock: Any, folder: Any) -> Any:
    """A stock model with the adapter of a model, by peft."""
    moe_ops.save_adapter(model, folder)
    return peft.PeftModel.from_pretrained(stock, folder, is_trainable=True).eval()


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("target", [("w13",), ("w2",), ("w13", "w2")], ids="-".join)
@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
def test_codes_with_an_adapter_are_what_peft_makes_of_them_decoded(
    make: Any, target: tuple[str, ...], tmp_path: Any
) -> None:
    model = coded(make)
    before = logits(model)
    assert moe_ops.add_adapter(model, 4, alpha=8, target=target) == 2
    assert_close(logits(model), before, MODEL)  # B is zero
    randomised(model)
    stock = saved_and_wrapped(model, in_floats(model, make()), tmp_path)
    assert not torch.allclose(logits(model), before, atol=0.1)
    assert_close(logits(model), logits(stock), MODEL)
    assert torch.equal(tokens(model), tokens(stock))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_are_those_of_peft_on_the_decoded_model(scheme: str, tmp_path: Any) -> None:
    model = coded(qwen, scheme)
    moe_ops.add_adapter(model, 3, alpha=6, rslora=True)
    randomised(model)
    stock = saved_and_wrapped(model, in_floats(model, qwen()), tmp_path)
    ids = ids_of()
    found = gradients(model, model(input_ids=ids, labels=ids).loss)
    want = gradients(stock, stock(input_ids=ids, labels=ids).loss)
    assert len(found) == len(want) == 8
    for i, module in enumerate(experts_of(model)):
        E, held = 6, module.expert_adapters.by_name.default  # type: ignore[union-attr]
        for target, inside in (("w13", "base_layer."), ("w2", "")):
            path = f"base_model.model.model.layers.{i}.mlp.experts.{inside}"
            a, b = (want[f"{path}lora_{x}.default.weight"] for x in "AB")
            assert_close(getattr(held, f"a_{target}").grad.flatten(0, 1), a, MODEL)
            b = b.reshape(len(b), -1, E).permute(2, 0, 1)
            assert_close(getattr(held, f"b_{target}").grad, b, MODEL)


def test_a_few_steps_train_the_adapter_alone() -> None:
    model = coded()
    moe_ops.add_adapter(model, 4)
    held = {n: p.clone() for n, p in model.named_parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 8
    optimizer, ids, losses = torch.optim.AdamW(trained, lr=0.01), ids_of(), []
    for _ in range(8):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.1
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, held[n])}
    assert changed == {n for n, p in model.named_parameters() if p.requires_grad}


def test_inputs_in_codes_have_no_gradient_but_infer() -> None:
    model = coded(scheme="int8_w8a8")
    before = logits(model)
    moe_ops.add_adapter(model, 4)
    randomised(model)
    assert not torch.allclose(logits(model), before, atol=0.1)
    ids = ids_of()
    with pytest.raises(RuntimeError, match="quantises the inputs of its experts, through which no"):
        model(input_ids=ids, labels=ids).loss.backward()


def test_adapters_are_chosen_and_removed() -> None:
    model = coded()
    want: dict[str | None, Tensor] = {None: logits(model)}
    for name, target in (("one", "w13"), ("two", "w2")):
        moe_ops.add_adapter(model, 2, name=name, target=target)
    randomised(model)
    for name in ("one", "two"):
        moe_ops.set_adapter(model, name)
        want[name] = logits(model)
    assert not torch.allclose(want["one"], want["two"], atol=0.1)
    for name in (None, "two", "one"):
        moe_ops.set_adapter(model, name)
        assert_close(logits(model), want[name], MODEL)
    moe_ops.remove_adapter(model, "one")
    assert_close(logits(model), want[None], MODEL)
    moe_ops.set_adapter(model, "two")
    assert_close(logits(model), want["two"], MODEL)
    moe_ops.remove_adapter(model, "two")
    assert not any("expert_adapters" in name for name, _ in model.named_modules())


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
def test_experts_in_floats_take_one_too_and_merge_it(make: Any) -> None:
    model = make()
    moe_ops.add_adapter(model, 4)
    randomised(model)
    want = logits(model)
    moe_ops.merge_adapter(model, "default")
    assert not any("expert_adapters" in name for name, _ in model.named_modules())
    assert_close(logits(model), want, MODEL)


def test_merging_into_codes_names_the_way() -> None:
    model = coded()
    moe_ops.add_adapter(model, 4)
    want = logits(model)
    with pytest.raises(ValueError, match=r"holds codes of int8:row, .* dequantise, merge and quan"):
        moe_ops.merge_adapter(model, "default")
    assert torch.equal(logits(model), want)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_have_adapters_of_their_own(copied: Any) -> None:
    model = coded()
    moe_ops.add_adapter(model, 4)
    randomised(model)
    want = logits(model)
    second = copied(model)
    moe_ops.remove_adapter(model, "default")
    assert_close(logits(second), want, MODEL)


def test_a_state_dict_holds_adapters_and_loads_into_a_model_with_the_same() -> None:
    model, other = coded(), coded()
    for one in (model, other):
        moe_ops.add_adapter(one, 4)
    randomised(model)
    other.load_state_dict(model.state_dict())
    assert_close(logits(other), logits(model), MODEL)


def test_a_model_that_is_cast() -> None:
    model = coded()
    moe_ops.add_adapter(model, 4)
    randomised(model)
    experts, x_TD = experts_of(model)[0], torch.randn(5, 64).bfloat16()
    chosen_TK, weights_TK = torch.tensor([[0, 3]] * 5), torch.full((5, 2), 0.5)
    want = experts(x_TD.float(), chosen_TK, weights_TK)
    model.bfloat16()
    got = experts(x_TD, chosen_TK, weights_TK.bfloat16())
    assert got.dtype == torch.bfloat16
    assert_close(got.float(), want, Tol(0.03, "bfloat16 through a layer"))


def test_floats_that_are_cast_or_quantized_later() -> None:
    model = qwen()
    moe_ops.add_adapter(model, 4)
    randomised(model)
    want = logits(model)
    moe_ops.quantize_model(model, "int8_w8a16", progress=False)
    assert_close(logits(model), want, Tol(0.1, "weights of 8 bits"))
    assert logits(model.bfloat16()).dtype == torch.bfloat16
    other = qwen()
    moe_ops.add_adapter(other, 4)
    assert logits(other.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("copied", [lambda x: x, copy.deepcopy])
def test_no_other_way_of_running_experts_leaves_an_adapter_out(copied: Any) -> None:
    model = qwen()
    moe_ops.add_adapter(model, 4)
    randomised(model)
    want = logits(model)
    other = copied(moe_ops.restore(model))
    other.set_experts_implementation("eager")
    assert_close(logits(other), want, MODEL)
    with pytest.raises(ValueError, match="has an adapter that only the ops of moe_ops add: "):
        logits(other.double())
    moe_ops.set_adapter(other, None)  # then transformers' own runs what ours do not take
    stock = qwen().double()
    stock.set_experts_implementation("eager")
    assert_close(logits(other), logits(stock), MODEL)
    moe_ops.remove_adapter(other, "default")
    other.float()
    assert_close(logits(other), logits(qwen()), MODEL)


def test_a_model_over_ranks_has_no_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    one = SimpleNamespace(size=1, rank=0, name="one")
    monkeypatch.setattr(over_ranks.Group, "of", lambda name: one)
    model = qwen()
    moe_ops.add_adapter(model, 4)
    with pytest.raises(ValueError, match="cannot be shared: it has adapters, which each rank"):
        moe_ops.share_experts(model, "one")
    moe_ops.remove_adapter(model, "default")
    moe_ops.share_experts(model, "one")
    with pytest.raises(ValueError, match="its experts are over ranks; add adapters to a model"):
        moe_ops.add_adapter(model, 4)
    wrapper = moe_ops.optimize(wrapped(model)).get_base_model().model.layers[0].mlp.experts
    assert wrapper.refusal() == "its experts are over ranks"


def test_codes_that_were_saved_and_loaded_take_an_adapter(tmp_path: Any) -> None:
    model = coded()
    moe_ops.add_adapter(model, 4)
    randomised(model)
    want = logits(model)
    moe_ops.save_adapter(model, tmp_path / "adapter")
    moe_ops.remove_adapter(model, "default")
    model.save_pretrained(tmp_path / "model")
    loaded = type(model).from_pretrained(tmp_path / "model").eval()
    moe_ops.load_adapter(loaded, tmp_path / "adapter")
    assert_close(logits(loaded), want, MODEL)


def test_a_twin_has_the_adapters_that_the_model_gets() -> None:
    model = coded()
    twin = twin_of(model)
    before = tokens(twin)
    moe_ops.add_adapter(model, 4)
    randomised(model)
    assert torch.equal(tokens(twin), tokens(model))
    assert not torch.equal(tokens(twin), before)
    moe_ops.set_adapter(model, None)
    assert torch.equal(tokens(twin), before)


def dense() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, vocab_size=8,
                    num_attention_heads=1, num_key_value_heads=1)
    )  # fmt: skip


def with_one() -> Any:
    model = coded()
    moe_ops.add_adapter(model, 2)
    return model


BAD: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "no_model": (lambda: nn.Linear(2, 2), TypeError, "transformers PreTrainedModel, got a Linear"),
    "no_experts": (dense, ValueError, "LlamaForCausalLM has no experts in stacked weights to ada"),
    "again": (with_one, ValueError, "it has an adapter 'default'; give another name, or remove_a"),
    "wrapped": (
        lambda: wrapped(qwen()).get_base_model(), ValueError, "peft wraps it; add adapters by its",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "kind", "message"), BAD.values(), ids=BAD)
def test_what_gets_no_adapter(make: Callable[[], Any], kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        moe_ops.add_adapter(make(), 2)


OPTIONS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "rank": ({"rank": 0}, ValueError, "rank=0 must be at least 1"),
    "large": ({"rank": 129}, ValueError, "rank=129 must be at most 128"),
    "float": ({"rank": 2.5}, TypeError, "rank must be an int, got"),
    "alpha": ({"alpha": "8"}, TypeError, "alpha must be a number"),
    "infinite": ({"alpha": float("inf")}, ValueError, "alpha=inf must be a finite number"),
    "target": ({"target": "w1"}, ValueError, "target='w1' must be one of w13, w2"),
    "none": ({"target": ()}, ValueError, "target names no weight; give w13, w2 or both"),
    "attribute": ({"name": "train"}, ValueError, "name='train' is an attribute of modules of tor"),
    "dots": ({"name": "a.b"}, ValueError, "name='a.b' must be a word without dots"),
    "rslora": ({"rslora": 1}, TypeError, "rslora must be True or False"),
}


@pytest.mark.parametrize(("options", "kind", "message"), OPTIONS.values(), ids=OPTIONS)
def test_options_that_cannot_be(options: dict[str, Any], kind: Any, message: str) -> None:
    model = coded()
    with pytest.raises(kind, match=message):
        moe_ops.add_adapter(model, **options)
    assert not any("expert_adapters" in name for name, _ in model.named_modules())


@pytest.mark.parametrize("call", [moe_ops.set_adapter, moe_ops.remove_adapter])
def test_a_name_that_the_model_lacks(call: Any) -> None:
    with pytest.raises(ValueError, match="no adapter 'defaults'; there are default; did you mean"):
        call(with_one(), "defaults")
    with pytest.raises(ValueError, match="the experts have no adapter 'x'; there are none"):
        call(coded(), "x")


def test_weights_that_add_to_main_grad_have_no_adapter_beside_them() -> None:
    model = moe_ops.optimize(qwen())
    moe_ops.add_adapter(model, 4)
    weights = [w for m in experts_of(model) for w in (m.gate_up_proj, m.down_proj)]
    for weight in weights:
        weight.requires_grad_(True)
        weight.main_grad = torch.zeros_like(weight)
    moe_ops.accumulate_into_main_grad(model)
    with pytest.raises(ValueError, match="add to main_grad and have adapters, which no op does at"):
        model(input_ids=ids_of())
    for weight in weights:
        weight.requires_grad_(False)
    model(input_ids=ids_of()).logits.sum().backward()

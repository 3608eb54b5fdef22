"""Quantised models that are called plainly, with gradients enabled and parameters that want them:
forwards are those of inference, gradients pass through weights of every format, and a backward
through inputs that were rounded says that there are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops.hf import adopt_mxfp4
from moe_ops.quant.config import QuantConfig
from moe_ops.testing import Tol, assert_close
from tests.hf.published import LAYOUTS, write
from tests.hf.test_published import load
from tests.hf.test_quantize import (
    decoded,
    experts_of,
    fp8_module,
    gpt_oss,
    logits,
    qwen,
    stored_mxfp4,
)

BLOCKS = QuantConfig(weights="float8_e4m3fn:32x32", inputs="float8_e4m3fn:1x32")
IDS = torch.arange(3, 15)[None]
TOL = Tol(1e-5, "the router's own code beside `route`")
RAISED = "quantises the inputs of its experts, through which no gradients are defined"


def quantized(scheme: str | QuantConfig) -> nn.Module:
    model = qwen()
    moe_ops.quantize_model(model, scheme, progress=False)
    return model


def adopted() -> nn.Module:
    model = gpt_oss()
    adopt_mxfp4(model, stored_mxfp4(model))
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "weights": lambda: quantized("uint4:1x32"),
    "rows": lambda: quantized("int8_w8a8"),
    "blocks": lambda: quantized(BLOCKS),
    "nvfp4": lambda: quantized("nvfp4_w4a4"),
    "mxfp8": lambda: quantized("mxfp8"),
    "adopted": adopted,
}  # fmt: skip


WEIGHTS_ALONE = {"weights": qwen, "adopted": gpt_oss}  # and the model that was quantised


@torch.no_grad()
def of_floats(name: str, model: nn.Module) -> nn.Module:
    """Transformers' own model, with the weights that the codes of `model` stand for."""
    floats = WEIGHTS_ALONE[name]()
    for coded, own in zip(experts_of(model), experts_of(floats), strict=True):
        for projection in ("gate_up_proj", "down_proj"):
            w = decoded(coded, projection)
            getattr(own, projection).copy_(w.transpose(1, 2) if own.is_transposed else w)
    return floats


def plain(model: nn.Module) -> Tensor:
    found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_plain_call_is_that_of_inference(name: str) -> None:
    model = MODELS[name]()
    want = logits(model)
    for part in (model.model.norm, model.model.embed_tokens, model.model.layers[0].self_attn):
        part.requires_grad_(True)
    got = plain(model)
    assert got.requires_grad
    assert_close(got.detach(), want, TOL)
    if name in WEIGHTS_ALONE:
        got.sum().backward()
        return
    with pytest.raises(RuntimeError, match=RAISED):
        got.sum().backward()


@pytest.mark.parametrize("name", WEIGHTS_ALONE)
def test_gradients_pass_through_quantized_weights(name: str) -> None:
    """Those of the same model with weights that its codes stand for, by transformers' own code."""
    model = MODELS[name]()
    found = []
    for each in (model, of_floats(name, model)):
        each.model.embed_tokens.weight.requires_grad_(True)
        (grad,) = torch.autograd.grad(plain(each).square().mean(), each.model.embed_tokens.weight)
        found.append(grad)
    assert_close(*found, Tol(1e-4, "as a model, forward and backward"))


def test_a_checkpoint_is_called_plainly(tmp_path: Path) -> None:
    write(tmp_path, LAYOUTS["modelopt_nvfp4"])
    model = load(tmp_path)
    assert any(p.requires_grad for p in model.parameters())
    got = plain(model)
    assert_close(got.detach(), logits(model), TOL)
    with pytest.raises(RuntimeError, match=RAISED):
        got.sum().backward()
    assert model.generate(IDS, max_new_tokens=2, do_sample=False).shape == (1, 14)


def test_what_is_above_all_experts_is_trained() -> None:
    """Nothing of this backward goes through codes, so it is the one of plain weights."""
    model = quantized("int8_w8a8")
    model.lm_head.requires_grad_(True)
    plain(model).sum().backward()
    hidden = model.model(input_ids=IDS, use_cache=False).last_hidden_state
    assert_close(model.lm_head.weight.grad[0], hidden.sum((0, 1)), TOL)


def test_a_gradient_of_part_of_a_model_raises_too() -> None:
    """Not a gradient that lacks what went through experts."""
    model = quantized("int8_w8a8")
    last = model.model.layers[-1].post_attention_layernorm.requires_grad_(True)
    got = plain(model)
    with pytest.raises(RuntimeError, match=RAISED):
        torch.autograd.grad(got.sum(), last.weight)


def test_under_a_transform() -> None:
    model = quantized("int8_w8a8")
    embedded = model.model.embed_tokens(IDS)

    def summed(x: Tensor) -> Tensor:
        found: Tensor = model(inputs_embeds=x, use_cache=False).logits
        return found.sum()

    with pytest.raises(RuntimeError, match=RAISED):
        torch.func.grad(summed)(embedded)


def test_compiled_code_defers_it_to_the_backward() -> None:
    module = experts_of(quantized("int8_w8a8"))[0]
    ids, weights = torch.tensor([[0, 3], [1, 2]]), torch.rand(2, 2)
    x = torch.randn(2, 64)
    with torch.inference_mode():
        want = module(x, ids, weights)
    x.requires_grad_()
    got = torch.compile(module, backend="aot_eager", fullgraph=True)(x, ids, weights)
    assert_close(got.detach(), want, TOL)
    with pytest.raises(RuntimeError, match=RAISED):
        got.sum().backward()


def test_fp8_experts_of_transformers() -> None:
    module = fp8_module(qwen(), (32, 32))
    x = torch.randn(3, 64)
    ids, weights = torch.tensor([[0, 3], [1, 2], [5, 4]]), torch.rand(3, 2)
    want = moe_ops.hf.fp8.fp8_experts_forward(module, x, ids, weights)
    got = moe_ops.hf.fp8.fp8_experts_forward(module, x.requires_grad_(), ids, weights)
    assert torch.equal(got.detach(), want)
    with pytest.raises(RuntimeError, match=f"FP8Experts {RAISED}"):
        got.sum().backward()


def test_quantized_experts_refuse_to_train() -> None:
    """At the backward that would train them; a forward runs."""
    model = qwen()
    moe_ops.quantize_model(model, "int8_w8a8", progress=False)
    model.model.embed_tokens.weight.requires_grad_(True)
    out = model(input_ids=IDS).logits
    with pytest.raises(RuntimeError, match=f"Qwen3MoeExperts {RAISED}"):
        out.sum().backward()

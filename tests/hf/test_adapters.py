"""peft's adapters: on the experts of a quantised model they are refused, elsewhere they run."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops.hf.stored import stored_format
from moe_ops.testing import Tol, assert_close
from tests.chosen import in_turn
from tests.hf.test_quantize import decoded, experts_of, gpt_oss, logits, qwen
from tests.hf.twins import twin_of

peft = pytest.importorskip("peft")

TOL = Tol(1e-5, "float32 sums in another order")
FORMATS = ["fp8_w8a16", "int8_w8a16", "mxfp4_w4a16", "int8_w8a8"]
TARGETS = {
    "first": ["mlp.experts.gate_up_proj"],
    "second": ["mlp.experts.down_proj"],
    "both": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


def adapted(model: nn.Module, *parameters: str, modules: Any = ("q_proj",)) -> Any:
    """The model with random adapters of rank 4."""
    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=list(modules), target_parameters=list(parameters),
        init_lora_weights=False,
    )  # fmt: skip
    return peft.get_peft_model(model, config).eval().requires_grad_(False)


@in_turn(
    pytest.mark.parametrize("make", [qwen, gpt_oss]),
    pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS),
    pytest.mark.parametrize("scheme", FORMATS),
)
def test_an_adapter_on_quantized_experts_is_refused(
    scheme: str, targets: list[str], make: Any
) -> None:
    model = make()
    moe_ops.quantize_model(model, scheme, progress=False)
    name, format = type(experts_of(model)[0]).__name__, stored_format(experts_of(model)[0])
    assert format is not None
    with pytest.raises(
        ValueError,
        match=f"{name} holds codes of {format.w_format}, .* add an adapter .* quantise then$",
    ):
        adapted(model, *targets)


def test_an_optimized_and_a_compiled_quantized_model_refuse_alike() -> None:
    model = qwen()
    moe_ops.quantize_model(model, "int8_w8a16", progress=False)
    with pytest.raises(ValueError, match="holds codes of int8:row"):
        adapted(moe_ops.compile(model), *TARGETS["both"])
    with pytest.raises(ValueError, match="holds codes of int8:row"):
        adapted(moe_ops.optimize(model), *TARGETS["both"])


def test_a_parametrization_of_codes_is_refused_and_leaves_the_model_whole() -> None:
    model = qwen()
    moe_ops.quantize_model(model, "int8_w8a16", progress=False)
    want = logits(model)
    for name in ("gate_up_proj", "gate_up_proj_codes", "down_proj_scale"):
        with pytest.raises(ValueError, match=f"of which {name} is a part: nothing can be put in"):
            nn.utils.parametrize.register_parametrization(experts_of(model)[0], name, nn.Identity())
    assert torch.equal(logits(model), want)


def test_an_adapter_elsewhere_runs_with_quantized_experts() -> None:
    model, stock = qwen(), qwen()
    moe_ops.quantize_model(model, "int8_w8a16", progress=False)
    with torch.no_grad():
        for module, plain in zip(experts_of(model), experts_of(stock), strict=True):
            for name in ("gate_up_proj", "down_proj"):
                getattr(plain, name).copy_(decoded(module, name))
    before = logits(stock)
    got, want = logits(adapted(model)), logits(adapted(stock))
    assert float((want - before).norm() / before.norm()) > 0.01
    assert_close(got, want, TOL)


def test_a_merged_adapter_is_quantized_with_the_weights() -> None:
    model = adapted(qwen(), *TARGETS["both"])
    want = logits(model)
    with pytest.raises(ValueError, match=r"0\.mlp\.experts has an adapter, .* merge it first"):
        moe_ops.quantize_model(model.get_base_model(), "int8_w8a16", progress=False)
    assert_close(logits(model), want, TOL)  # nothing was changed
    assert model.get_base_model().config._experts_implementation != "moe_ops"
    merged = model.merge_and_unload()
    moe_ops.quantize_model(merged, "int8_w8a16", progress=False)
    assert_close(logits(merged), want, Tol(0.05, "weights of 8 bits"))


def test_quantize_model_of_the_wrapper_says_what_to_give() -> None:
    with pytest.raises(TypeError, match=r"got PeftModel; of a PeftModel give what merge_and_unl"):
        moe_ops.quantize_model(adapted(qwen()), "int8_w8a16")


def greedy(model: Any) -> Tensor:
    ids = torch.arange(3, 15)[None]
    with torch.inference_mode():
        return model.generate(input_ids=ids, max_new_tokens=3, do_sample=False, pad_token_id=0)


class Holder(nn.Module):
    """Holds a model, and passes calls on to it."""

    def __init__(self, inside: Any) -> None:
        super().__init__()
        self.inside = inside

    def generate(self, *args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = self.inside.generate(*args, **kwargs)
        return made


def test_compiling_what_holds_a_model_says_what_generate_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Holder(qwen())
    with caplog.at_level(logging.WARNING, "moe_ops"):
        twin = moe_ops.compile(model)
    (message,) = caplog.messages
    assert message == (
        "generate of Holder is its own, and the model that it calls inside is not compiled; "
        "give that to moe_ops.compile"
    )
    with pytest.raises(ValueError, match="generate of this Holder is not ours"):
        moe_ops.generation_report(twin)
    assert torch.equal(greedy(twin), greedy(model))


def test_compiling_a_peft_model_compiles_the_model_inside(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = adapted(qwen())
    with caplog.at_level(logging.WARNING, "moe_ops"):
        twin = moe_ops.compile(model)
    assert caplog.messages == []
    assert type(twin) is type(model)
    assert moe_ops.generation_report(twin) == []
    assert moe_ops.graph_report(twin).generation == ()


@pytest.mark.every
@pytest.mark.slow
def test_the_compiled_twins_of_a_peft_model_and_of_the_model_inside_are_right() -> None:
    model = adapted(qwen())
    want, tokens = logits(model), greedy(model)
    twin = moe_ops.compile(model)
    assert_close(logits(twin), want, TOL)
    assert torch.equal(greedy(twin), tokens)
    assert moe_ops.generation_report(twin)[0].steps == 2
    inside = moe_ops.compile(model.get_base_model())
    assert_close(logits(inside), want, TOL)
    assert torch.equal(greedy(inside), tokens)
    assert moe_ops.generation_report(inside)[0].steps == 2


@pytest.mark.parametrize("parameters", [(), ("mlp.experts.down_proj",)], ids=["modules", "both"])
def test_an_adapter_on_a_twin_stays_with_it_and_one_on_the_model_reaches_it(
    parameters: tuple[str, ...],
) -> None:
    model, stock = qwen(), qwen()
    want, tokens = logits(model), greedy(model)
    twin = twin_of(model)
    adapted(twin, *parameters)
    adapted(stock, *parameters)
    theirs, their_tokens = logits(stock), greedy(stock)
    assert not torch.allclose(theirs, want)
    assert_close(logits(twin), theirs, TOL)
    assert torch.equal(greedy(twin), their_tokens)
    assert moe_ops.generation_report(twin)
    assert not any("lora" in name for name, _ in model.named_modules())
    assert torch.equal(logits(model), want) and torch.equal(greedy(model), tokens)
    second = twin_of(model)
    greedy(second)
    adapted(model, *parameters)
    assert torch.equal(greedy(second), their_tokens)


class OwnGenerate(nn.Module):
    def generate(self) -> None:
        return None


def test_compiling_a_model_that_generates_itself_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "moe_ops"):
        moe_ops.compile(qwen())
        moe_ops.compile(nn.Linear(2, 2))
        moe_ops.compile(OwnGenerate())
    assert caplog.messages == []

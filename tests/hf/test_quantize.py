"""Quantised experts in whole models: our own formats, transformers' FP8 experts, stored MXFP4."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import moe_ops
from moe_ops.hf import adopt_mxfp4
from moe_ops.hf.fp8 import describe_fp8
from moe_ops.hf.stored import stored_format
from moe_ops.quant import packing
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.formats import Format
from moe_ops.quant.schemes import SCHEMES
from moe_ops.testing import Tol, assert_close
from tests.peak import Peak
from tests.quant.blocks import width_of
from tests.two_scales import dequantize

TOL = Tol(1e-4, "float32 sums in another order through a whole model")

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 64, "num_experts_per_tok": 2, "max_position_embeddings": 64,
}  # fmt: skip


def qwen(seed: int = 0, width: int = 64) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    sizes = SIZES | {"hidden_size": width, "moe_intermediate_size": width, "num_experts": 6}
    return randomised(Qwen3MoeForCausalLM(Qwen3MoeConfig(intermediate_size=64, **sizes)), seed)


def gpt_oss(seed: int = 0, width: int = 64) -> GptOssForCausalLM:
    torch.manual_seed(seed)
    sizes = SIZES | {"hidden_size": width, "intermediate_size": width, "num_local_experts": 6}
    return randomised(GptOssForCausalLM(GptOssConfig(**sizes)), seed)


@torch.no_grad()
def randomised(model: Any, seed: int) -> Any:
    """The model in float32 with matrices of std 1/√fan_in, so that every layer matters."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.ndim > 1:
            fan_in = p.shape[-2] if p.ndim == 3 and "gate_up_proj" in name else p.shape[-1]
            p.copy_(torch.randn(p.shape, generator=generator) * fan_in**-0.5)
    return model.float().eval().requires_grad_(False)


def logits(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.arange(3, 15)[None], use_cache=False).logits


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if hasattr(m, "has_gate")]


def decoded(module: nn.Module, name: str) -> Tensor:
    """A quantised weight of a module in float32, rows as outputs."""
    stored = stored_format(module)
    assert stored is not None
    return dequantize(
        getattr(module, f"{name}_codes"), getattr(module, f"{name}_scale"),
        Format.of(stored.w_format), getattr(module, f"{name}_zero", None),
        getattr(module, f"{name}_global_scale", None),
        interleaved=stored.activation.interleaved and name == "gate_up_proj",
    )  # fmt: skip


WEIGHT_ONLY = [n for n, info in SCHEMES.items() if info.input_formats == ("",) and n != "none"]


@pytest.mark.parametrize("make", [qwen, gpt_oss])
@pytest.mark.parametrize("scheme", WEIGHT_ONLY)
def test_quantized_weights_give_what_the_stock_model_gives_with_them_decoded(
    scheme: str, make: Any
) -> None:
    model, stock = (make(width=width_of(scheme)) for _ in range(2))
    before = [(m.gate_up_proj.clone(), m.down_proj.clone()) for m in experts_of(model)]
    report = moe_ops.quantize_model(model, scheme, progress=False)
    assert (report.modules, report.kept) == (2, ())
    assert report.bytes_after < 0.6 * report.bytes_before
    for module, plain, weights in zip(experts_of(model), experts_of(stock), before, strict=True):
        for name, weight in zip(("gate_up_proj", "down_proj"), weights, strict=True):
            new = decoded(module, name)
            new = new.transpose(1, 2) if plain.is_transposed else new
            assert 0 < float((new - weight).norm() / weight.norm()) < 0.2
            getattr(plain, name).copy_(new)
    assert_close(logits(model), logits(stock), TOL)


EVERY = [
    (info.name, w, x)
    for info in SCHEMES.values()
    if info.name != "none"
    for w in info.weight_formats
    for x in info.input_formats
    if "1x128" not in (w.partition(":")[2], x.partition(":")[2]) and "128x128" not in w
]


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "w", "x"), EVERY, ids=lambda v: v or "16bit")
def test_every_scheme_stays_near_the_model_it_came_from(scheme: str, w: str, x: str) -> None:
    model = qwen(width=width_of(scheme))
    want = logits(model)
    moe_ops.quantize_model(model, scheme, weight_format=w, input_format=x, progress=False)
    got = logits(model)
    error = float((got - want).norm() / want.norm())
    bits = min(Format.of(f).bits for f in (w, x) if f)
    bound = {4: 0.6, 5: 0.45, 6: 0.35, 8: 0.2}[int(bits)]
    assert 0 < error < bound


# Inductor compiles layers of codes in tests/layer, too, so that here tracing one is enough.
COMPILED: list[Any] = [("aot_eager", "fp8_w8a8")]
COMPILED += [
    pytest.param("inductor", scheme, marks=pytest.mark.every)
    for scheme in ("fp8_w8a8", "mxfp4_w4a16", "nvfp4_w4a4")
]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "scheme"), COMPILED)
def test_a_quantized_model_compiles_into_one_graph(backend: str, scheme: str) -> None:
    model = qwen()
    moe_ops.quantize_model(model, scheme, progress=False)
    want = logits(model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert_close(logits(compiled), want, TOL)


def test_less_than_one_layer_of_extra_memory_is_needed() -> None:
    model = qwen()
    layer = sum(p.nbytes for p in experts_of(model)[0].parameters())
    gc.collect()
    with Peak() as peak:
        moe_ops.quantize_model(model, "fp8_w8a16", progress=False)
    assert 0 < peak.most < layer


def test_progress_and_report_are_readable(capsys: pytest.CaptureFixture[str]) -> None:
    report = moe_ops.quantize_model(qwen(), "mxfp4_w4a16")
    assert capsys.readouterr().err.splitlines() == [
        "mxfp4_w4a16: 1 of 2  model.layers.0.mlp.experts",
        "mxfp4_w4a16: 2 of 2  model.layers.1.mlp.experts",
    ]
    # 2 layers of 6 experts of 3 * 64 * 64 values: 4 bytes each, then 4 bits and a byte for 32.
    values = 2 * 6 * 3 * 64 * 64
    assert (report.bytes_before, report.bytes_after) == (4 * values, values // 2 + values // 32)
    assert str(report) == "2 experts modules in mxfp4_w4a16: 0.00 GiB to 0.00 GiB"


def test_experts_that_a_format_does_not_fit_keep_their_weights() -> None:
    model = qwen()
    want = logits(model)
    report = moe_ops.quantize_model(model, "int4_w4a16", weight_format="int4:1x128", progress=False)
    assert report.modules == 0
    assert report.bytes_after == report.bytes_before
    assert report.kept[0] == (
        "model.layers.0.mlp.experts (Qwen3MoeExperts): "
        "w_format='int4:1x128' wants rows of a multiple of 128, got 64"
    )
    assert "kept: model.layers.1" in str(report)
    assert_close(logits(model), want, TOL)


def test_a_configuration_says_the_same_as_a_scheme() -> None:
    for scheme, quant in (
        ("mxfp8", QuantConfig(weights="mxfp8", inputs="mxfp8")),
        ("int4_w4a16", QuantConfig(weights="uint4:1x64")),
        ("int8_w8a16", "int8:row"),
        ("nvfp4_w4a16", "nvfp4"),
    ):
        one, other = qwen(), qwen()
        first = moe_ops.quantize_model(one, scheme, progress=False)
        assert moe_ops.quantize_model(other, quant, progress=False) == first
        assert torch.equal(logits(one), logits(other))


@pytest.mark.parametrize(
    ("quant", "more", "found"),
    [
        (QuantConfig(weights="mxfp4"), {"weight_format": "mxfp4"}, "weight_format and input_form"),
        ("int4:row", {"input_format": ""}, "but int4:row names one of each; leave them out"),
        ("int4:rows", {}, "scheme 'int4:rows': format 'int4:rows' has the group 'rows'"),
        ("none", {}, "scheme 'none' is unknown; choose one of fp8_w8a8"),
        (
            QuantConfig(weights="int8:row", inputs="int8:tensor", static_inputs=True),
            {},
            r"x static int8:tensor\) wants a layer that holds scales or an order of its inputs",
        ),
        (QuantConfig(weights="int8:row", ordered_input=True), {}, "take moe_ops.MoELayer"),
    ],
)
def test_configurations_that_no_model_can_have(
    quant: Any, more: dict[str, str], found: str
) -> None:
    model = qwen()
    with pytest.raises(ValueError, match=found):
        moe_ops.quantize_model(model, quant, progress=False, **more)
    assert all(stored_format(m) is None for m in experts_of(model))


def test_bad_schemes_and_second_calls_are_refused() -> None:
    model = qwen()
    with pytest.raises(ValueError, match=r"'int8_w8' is unknown; choose one of fp.*; did you mean"):
        moe_ops.quantize_model(model, "int8_w8")
    with pytest.raises(
        ValueError, match="weight_format='int8:row' and input_format='' are the scheme int8"
    ):
        moe_ops.quantize_model(model, "int8_w8a8", input_format="")
    with pytest.raises(TypeError, match="model must be a transformers PreTrainedModel, got Linear"):
        moe_ops.quantize_model(nn.Linear(2, 2), "int8_w8a8")  # type: ignore[arg-type]
    assert all(stored_format(m) is None for m in experts_of(model))
    moe_ops.quantize_model(model, "int8_w8a8", progress=False)
    with pytest.raises(ValueError, match="the experts are quantised already; load the model again"):
        moe_ops.quantize_model(model, "int8_w8a8")
    with pytest.raises(ValueError, match="hold quantised weights, which only moe_ops runs"):
        moe_ops.restore(model)


def test_a_model_without_experts_is_refused_and_stays_as_it_is() -> None:
    sizes = {n: v for n, v in SIZES.items() if n != "num_experts_per_tok"}
    dense = LlamaForCausalLM(LlamaConfig(intermediate_size=64, **sizes))
    for model in (dense, dense.model):
        with pytest.raises(
            ValueError,
            match=rf"^{type(model).__name__} has no experts modules of transformers, so .*; give a",
        ):
            moe_ops.quantize_model(model, "int8_w8a8", progress=False)
        assert not hasattr(model, "_moe_ops_state")
    for other in (nn.Linear(2, 2), qwen().model.layers[0].mlp.experts, None):
        with pytest.raises(
            TypeError,
            match=rf"^model must be .* got {type(other).__name__}; .* MoELayer\(qu",
        ):
            moe_ops.quantize_model(other, "int8_w8a8", progress=False)  # type: ignore[arg-type]


def test_quantized_tensors_are_part_of_the_state_dict() -> None:
    model, other = qwen(0), qwen(1)
    for m in (model, other):
        moe_ops.quantize_model(m, "nvfp4_w4a16", progress=False)
    state = model.state_dict()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert state[f"{name}_codes"].dtype == torch.uint8
    assert state[f"{name}_scale"].dtype == torch.float8_e4m3fn
    assert state[f"{name}_global_scale"].shape == (6,)
    other.load_state_dict(state)
    assert torch.equal(logits(other), logits(model))


def fp8_module(model: nn.Module, block: tuple[int, int] | None, **more: Any) -> FP8Experts:
    """transformers' FP8 experts with the weights of the model's first experts."""
    module = FP8Experts(model.config, block_size=block, **more)
    scale_format = ":e8m0" if more.get("scale_fmt") == "ue8m0" else ""
    for name in ("gate_up_proj", "down_proj"):
        w = getattr(experts_of(model)[0], name)
        if block is None:
            halves = 2 if name == "gate_up_proj" else 1
            group = f"{w.shape[1] // halves}x{w.shape[2]}"
        else:
            group = f"{block[0]}x{block[1]}{scale_format}"
        done = packing.quantize(w, Format.of(f"float8_e4m3fn:{group}"))
        getattr(module, name).data.copy_(done.values)
        scale = getattr(module, f"{name}_scale_inv").data
        scale.copy_(done.scale.view(scale.dtype) if scale_format else done.scale)
    module.has_gate, module.has_bias, module.is_transposed = True, False, False
    return module.requires_grad_(False)


def fp8_by_hand(module: FP8Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The experts' definition token by token, float8 only through torch's own conversion."""

    def product(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        down, across = w.shape[0] // scale.shape[0], w.shape[1] // scale.shape[1]
        w = w.float() * scale.float().repeat_interleave(down, 0).repeat_interleave(across, 1)
        groups = x.view(-1, across)
        s = (groups.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
        x = ((groups / s).to(torch.float8_e4m3fn).float() * s).view(-1)
        return w @ x

    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for e, weight in zip(ids[t].tolist(), weights[t], strict=True):
            y = product(x[t], module.gate_up_proj[e], module.gate_up_proj_scale_inv[e])
            h = module._apply_gate(y[None])[0]
            out[t] += weight * product(h, module.down_proj[e], module.down_proj_scale_inv[e])
    return out


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("block", [(32, 32), (64, 16), (32, 32, "ue8m0"), None], ids=str)
def test_transformers_fp8_experts_run_on_our_ops(block: Any, limit: float | None) -> None:
    model = qwen()
    model.config.swiglu_limit = limit
    forward = ALL_FP8_EXPERTS_FUNCTIONS["moe_ops"]
    scales = {"scale_fmt": "ue8m0"} if block and len(block) > 2 else {}
    module = fp8_module(model, block[:2] if block else None, **scales)
    x, weights = torch.randn(9, 64), torch.rand(9, 2)
    ids = torch.rand(9, 6).topk(2).indices
    with torch.inference_mode():
        got = forward(module, x, ids, weights)
    assert_close(got, fp8_by_hand(module, x, ids, weights), Tol(2e-2, "float8 steps at near-ties"))
    close = (got - fp8_by_hand(module, x, ids, weights)).abs() < 1e-4 * got.abs().max()
    assert float(close.float().mean()) > 0.9  # the rest: one float8 step


REFUSED = {
    "static": ({"activation_scheme": "static"}, {}, "it has static activation scales"),
    "softcap": ({}, {"gate_softcap": 5.0}, "its gate is softcapped"),
    "ragged": ({}, {"block_size": (48, 48)}, "its gate_up_proj_scale_inv is"),
}


@pytest.mark.parametrize(("made", "changed", "reason"), REFUSED.values(), ids=REFUSED)
def test_fp8_experts_that_cannot_be_expressed_say_why(
    made: dict[str, Any], changed: dict[str, Any], reason: str
) -> None:
    module = fp8_module(qwen(), (32, 32), **made)
    for name, value in changed.items():
        setattr(module, name, value)
    found = describe_fp8(module)
    assert isinstance(found, str)
    assert found.startswith(reason)


def test_fp8_experts_that_cannot_be_expressed_run_on_the_fp8_grouped_mm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("moe_ops.hf.report._said", set())
    calls = []
    registry = type(ALL_FP8_EXPERTS_FUNCTIONS)
    monkeypatch.setitem(
        registry._global_mapping, "grouped_mm", lambda m, x, i, w: calls.append(m) or x
    )
    module = fp8_module(qwen(), (32, 32), activation_scheme="static")
    x, routing = torch.randn(3, 64), (torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))
    with torch.inference_mode():
        assert ALL_FP8_EXPERTS_FUNCTIONS["moe_ops"](module, x, *routing) is x
    assert calls == [module]
    assert "FP8Experts runs on transformers' grouped_mm: it has static" in caplog.messages[0]


def stored_mxfp4(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Random MXFP4 tensors for a gpt-oss model, as its checkpoints name and shape them."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for i in range(len(experts_of(model))):
        for name, rows in (("gate_up_proj", 128), ("down_proj", 64)):
            key = f"model.layers.{i}.mlp.experts.{name}"
            shape = (6, rows, 2, 16)
            blocks = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
            scales = torch.randint(120, 124, shape[:3], generator=generator, dtype=torch.uint8)
            tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    return tensors


def test_gpt_oss_runs_on_the_mxfp4_tensors_as_they_are_stored() -> None:
    model, stock = gpt_oss(), gpt_oss()
    tensors = stored_mxfp4(model)
    for i, plain in enumerate(experts_of(stock)):
        for name in ("gate_up_proj", "down_proj"):
            key = f"model.layers.{i}.mlp.experts.{name}"
            parts = tensors[f"{key}_blocks"], tensors[f"{key}_scales"]
            getattr(plain, name).copy_(convert_moe_packed_tensors(*parts, dtype=torch.float32))
    assert adopt_mxfp4(model, tensors) == 2
    module = experts_of(model)[1]
    key = "model.layers.1.mlp.experts.down_proj"
    assert module.down_proj_codes.data_ptr() == tensors[f"{key}_blocks"].data_ptr()  # not copied
    assert_close(logits(model), logits(stock), TOL)


def test_mxfp4_tensors_that_do_not_fit_are_refused() -> None:
    tensors = stored_mxfp4(gpt_oss())
    key = "model.layers.0.mlp.experts.gate_up_proj_scales"
    with pytest.raises(ValueError, match="gate_up_proj_scales must be uint8 \\[6, 128, 2\\], got"):
        adopt_mxfp4(gpt_oss(), {**tensors, key: tensors[key][:, :64]})
    with pytest.raises(ValueError, match=f"the checkpoint lacks {key}"):
        adopt_mxfp4(gpt_oss(), {k: v for k, v in tensors.items() if k != key})
    with pytest.raises(ValueError, match="no experts module of the model has tensors here"):
        adopt_mxfp4(gpt_oss(), {})

"""Linear layers and heads of models in codes: what holds them, what they compute, and on disk."""

from __future__ import annotations

import copy
import io
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, Qwen3MoeModel

import moe_ops
from moe_ops.hf.linears import Linears
from moe_ops.hf.quantized_linear import QuantizedLinear
from moe_ops.quant.formats import Format
from moe_ops.testing import Tol, assert_close
from tests.chosen import in_turn
from tests.hf import families, published
from tests.hf.coded_linears import FORMATS, MAKERS, coded, in_floats, tied
from tests.hf.test_quantize import logits, qwen
from tests.hf.test_saved import FILE, check_same

TOL = Tol(1e-5, "float32 sums in another order")
FP8, INT4 = "float8_e4m3fn:row", "uint4:1x32"
# What quantised attention and a head of random weights may change of logits, by bits of a code.
ERRORS = {4: 0.15, 6: 0.08, 8: 0.05}


def quantized(make: Any = qwen, linears: str | None = FP8, head: str | None = INT4) -> Any:
    model = make()
    moe_ops.quantize_model(
        model, "int8_w8a16", linear_format=linears, head_format=head, progress=False
    )
    return model


@in_turn(
    pytest.mark.parametrize("format", FORMATS), pytest.mark.parametrize("family", MAKERS)
)  # fmt: skip
def test_logits_are_those_of_the_model_with_its_codes_decoded(format: str, family: str) -> None:
    model = MAKERS[family]()
    before = {n: m.weight.clone() for n, m in model.named_modules() if type(m) is nn.Linear}
    report = moe_ops.quantize_model(
        model, "int8_w8a16", linear_format=format, head_format=format, progress=False
    )
    found = coded(model)
    assert found.keys() == before.keys() and not report.linears_kept
    assert report.linears is not None and report.head is not None
    assert (report.linears.modules, report.head.modules) == (8, 1)
    assert report.linears.bytes_before == sum(w.nbytes for n, w in before.items() if n != "lm_head")
    assert report.linears.bytes_after < 0.4 * report.linears.bytes_before
    errors = {n: (m.dequantize() - before[n]).norm() / before[n].norm() for n, m in found.items()}
    assert 0 < report.linears.error < ERRORS[Format.of(format).bits]
    assert report.head.error == pytest.approx(float(errors.pop("lm_head")), rel=1e-4)
    worst = max(errors, key=lambda name: float(errors[name]))
    assert report.linears.error == pytest.approx(float(errors[worst]), rel=1e-4)
    assert report.linears.worst == worst
    assert_close(logits(model), logits(in_floats(model)), TOL)


def test_the_error_of_the_head_is_that_of_logits() -> None:
    torch.manual_seed(0)
    model, stock = quantized(linears=None), qwen()
    x = torch.randn(4096, 64)
    with torch.no_grad():
        got, want = model.lm_head(x), stock.lm_head(x)
    said = moe_ops.quantize_model(qwen(), "int8_w8a16", head_format=INT4, progress=False).head
    assert isinstance(said, Linears)
    assert said.error == pytest.approx(float((got - want).norm() / want.norm()), rel=0.05)


@pytest.mark.parametrize(
    "family",
    [
        "mixtral", "qwen2_moe", "deepseek_v3", "nemotron_h",
        *(
            pytest.param(f, marks=pytest.mark.every)
            for f in families.discover()
            if f not in ("mixtral", "qwen2_moe", "deepseek_v3", "nemotron_h")
        ),
    ],
)  # fmt: skip
def test_families(family: str, tmp_path: Path) -> None:
    """Of all that have experts; the experts stay as they are."""
    tiny = families.build(family)
    report = moe_ops.quantize_model(
        tiny.model, None, linear_format="int8:row", head_format="int8:row", progress=False
    )
    assert coded(tiny.model) or report.linears_kept
    got = families.run(tiny, tiny.inputs)
    want = families.run(replace(tiny, model=in_floats(tiny.model)), tiny.inputs)
    assert_close(got, want, TOL)
    tiny.model.save_pretrained(tmp_path)
    loaded = coded(type(tiny.model).from_pretrained(tmp_path))
    assert loaded.keys() == coded(tiny.model).keys()
    for name, module in coded(tiny.model).items():
        assert torch.equal(loaded[name].dequantize(), module.dequantize()), name


KEPT = {
    "qwen2_moe": ("mlp.shared_expert_gate", "is beside experts"),
    "hunyuan_v1_moe": ("mlp.gate.wg", "is a part of a router"),
    "deepseek_v3": ("self_attn.kv_b_proj", "steps of generate read its weight"),
    "nemotron_h": ("mixer.out_proj", "NemotronHMamba2Mixer reads its weight itself"),
    "hy_v4": ("lm_head", "HYV4ForCausalLM reads its weight itself"),
    "openai_privacy_filter": ("the head", "is none"),
    "diffusion_gemma": ("self_attn.q_proj", "shares its weight with another part"),
    "deepseek_v4": ("self_attn.o_a_proj", "is DeepseekV4GroupedLinear"),
}


@pytest.mark.parametrize("family", [f for f in KEPT if f in families.discover()])
def test_what_cannot_hold_codes_is_named(family: str, caplog: pytest.LogCaptureFixture) -> None:
    tiny, (name, reason) = families.build(family), KEPT[family]
    with caplog.at_level(logging.WARNING, "moe_ops"):
        report = moe_ops.quantize_model(
            tiny.model, None, linear_format="int8:row", head_format="int8:row", progress=False
        )
    said = {n: why for n, why in report.linears_kept.items() if n.endswith(name)}
    assert said and all(why.startswith(reason) for why in said.values())
    assert not any(n.endswith(name) for n in coded(tiny.model))
    assert f"kept: {next(iter(said))}" in str(report) and reason in caplog.text


def test_adapters_of_peft_and_what_they_adapt_stay() -> None:
    peft = pytest.importorskip("peft")
    model = qwen()
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=4))
    report = moe_ops.quantize_model(model, None, linear_format="int8:row", progress=False)
    assert not any("q_proj" in name for name in coded(model)) and len(coded(model)) == 6
    kept = {name.partition("q_proj.")[2] for name in report.linears_kept}
    assert kept == {"base_layer", "lora_A.default", "lora_B.default"}
    assert all("an adapter of peft" in why for why in report.linears_kept.values())


def test_widths_that_a_format_does_not_divide() -> None:
    model = qwen()
    report = moe_ops.quantize_model(
        model, None, linear_format="int4:1x128", head_format="int8:row", progress=False
    )
    assert report.linears is not None and report.linears.modules == 0
    assert set(report.linears_kept.values()) == {
        "int4:1x128 wants columns of a multiple of 128, got 64"
    }
    assert list(coded(model)) == ["lm_head"]


def test_a_head_that_is_tied_gets_codes_of_its_own(tmp_path: Path) -> None:
    model = tied()
    embedding = model.get_input_embeddings().weight
    assert model.lm_head.weight is embedding
    want = embedding.clone()
    report = moe_ops.quantize_model(model, "int8_w8a16", head_format="int8:row", progress=False)
    assert report.head is not None and "the embedding's, which stays" in report.head.note
    assert model.get_input_embeddings().weight is embedding and torch.equal(embedding, want)
    assert not model.config.tie_word_embeddings
    model.tie_weights()
    assert list(coded(model)) == ["lm_head"]
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    check_same(model, loaded)
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.skipif("glm4v_moe" not in families.discover(), reason="wants glm4v_moe")
def test_a_tied_head_whose_configuration_reads_that_of_the_text(tmp_path: Path) -> None:
    model = families.build("glm4v_moe").model
    for config in (model.config, model.config.text_config):
        config.tie_word_embeddings = True
    model.tie_weights()
    moe_ops.quantize_model(model, None, head_format="int8:row", progress=False)
    model.save_pretrained(tmp_path)
    check_same(model, type(model).from_pretrained(tmp_path))


@pytest.mark.parametrize("format", FORMATS)
def test_saved_and_loaded_bit_by_bit(format: str, tmp_path: Path) -> None:
    model = quantized(linears=format, head=FORMATS[0])
    model.save_pretrained(tmp_path / "one", max_shard_size="20KB")
    loaded = type(model).from_pretrained(tmp_path / "one")
    check_same(model, loaded)
    assert {n: m.w_format for n, m in coded(loaded).items()} == {
        n: m.w_format for n, m in coded(model).items()
    }
    assert not any(p.requires_grad for m in coded(loaded).values() for p in m.parameters())
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "two")
    again = type(model).from_pretrained(tmp_path / "two", dtype=torch.bfloat16)
    for name, module in coded(again).items():
        for part in module.coded():
            mine, other = getattr(module, part), getattr(coded(model)[name], part)
            assert mine is None or (mine.dtype is other.dtype and mine.shape == other.shape)


def test_a_model_without_its_head_reads_the_layers(tmp_path: Path) -> None:
    model = quantized()
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    assert len(coded(base)) == 8
    check_same(base, model.model)


def test_names_that_end_as_those_of_layers_in_codes_are_no_part_of_them(tmp_path: Path) -> None:
    class WithDraft(Qwen3MoeModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.draft = nn.ModuleDict({"layers": nn.ModuleList([nn.Module()])})
            self.draft["layers"][0].self_attn = nn.ModuleDict({"q_proj": nn.Linear(64, 64)})

    model = WithDraft(qwen().config)
    moe_ops.quantize_model(model, None, linear_format="int8:row", progress=False)
    assert "layers.0.self_attn.q_proj" in coded(model) and len(coded(model)) == 8
    model.save_pretrained(tmp_path)
    check_same(model, WithDraft.from_pretrained(tmp_path))


def test_a_model_quantized_in_part_is_not_read_with_random_experts(
    tmp_path: Path,
) -> None:
    model = qwen()
    moe_ops.quantize_model(model.model, None, linear_format="int8:row", progress=False)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lacks model\.layers\.0\.mlp\.experts\..*, not on a"):
        type(model).from_pretrained(tmp_path)


def test_experts_of_floats_stay_and_are_saved_so(tmp_path: Path) -> None:
    model = qwen()
    moe_ops.quantize_model(model, None, linear_format=FP8, progress=False)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    check_same(model, loaded)
    assert torch.equal(logits(loaded), logits(model))


def test_experts_in_codes_stay_and_are_saved_so(tmp_path: Path) -> None:
    model = qwen()
    moe_ops.quantize_model(model, "mxfp4_w4a16", progress=False)
    moe_ops.quantize_model(model, None, head_format=FP8, progress=False)
    model.save_pretrained(tmp_path)
    check_same(model, type(model).from_pretrained(tmp_path))


def test_a_model_that_was_loaded_in_codes_gets_more(tmp_path: Path) -> None:
    model = qwen()
    moe_ops.quantize_model(model, "mxfp4_w4a16", progress=False)
    model.save_pretrained(tmp_path / "one")
    loaded = type(model).from_pretrained(tmp_path / "one")
    moe_ops.quantize_model(loaded, None, linear_format=FP8, head_format=INT4, progress=False)
    loaded.save_pretrained(tmp_path / "two")
    again = type(model).from_pretrained(tmp_path / "two")
    check_same(loaded, again)
    assert torch.equal(logits(again), logits(loaded))


def test_a_checkpoint_of_others_gets_codes_outside_of_experts(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    published.write(tmp_path / "one", published.LAYOUTS["gptq_int4"])
    model = moe_ops.from_checkpoint(tmp_path / "one", progress=False)
    report = moe_ops.quantize_model(
        model, None, linear_format="int8:row", head_format="int8:row", progress=False
    )
    assert report.linears is not None and report.linears.modules == len(coded(model)) - 1
    model.save_pretrained(tmp_path / "two")
    loaded = type(model).from_pretrained(tmp_path / "two")
    check_same(model, loaded)
    assert torch.equal(logits(loaded), logits(model))


def test_experts_after_linear_layers(tmp_path: Path) -> None:
    model = qwen()
    moe_ops.quantize_model(model, None, linear_format=FP8, progress=False)
    moe_ops.quantize_model(model, "int8_w8a16", progress=False)
    moe_ops.quantize_model(model, None, head_format=INT4, progress=False)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    check_same(model, loaded)
    assert len(coded(loaded)) == 9


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = quantized()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / FILE)
    head = "lm_head.weight"
    for change, message in (
        (lambda t: t.pop(f"{head}_scale"), r"lacks lm_head.weight_scale, which config.json says"),
        (lambda t: t.update({f"{head}_scale": t[f"{head}_scale"].half()}), "linear layers of con"),
        (lambda t: t[f"{head}_scale"].zero_(), "holds 0.0, but a scale is above 0"),
        (
            lambda t: t.update({f"{head}_format": t[f"{head}_format"] + 1}),
            f"linear layers are .*, but config.json says {INT4}",
        ),
    ):
        changed = copy.deepcopy(tensors)
        change(changed)
        save_file(changed, tmp_path / FILE, {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            type(model).from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("linears", "message"),
    [
        ({"int7:row": ["lm_head"]}, "int7"),
        ({FP8: "lm_head"}, "each of linears must be a list of names"),
        ([FP8], "linears must be lists of names by formats"),
        ({"mxfp4:1x128": ["lm_head"]}, "linears"),
        ({"int4:1x128": ["lm_head"]}, "wants columns of a multiple of 128, got 64; load it"),
    ],
    ids=str,
)
def test_configurations_that_do_not_fit_are_refused(
    linears: Any, message: str, tmp_path: Path
) -> None:
    model = quantized()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["linears"] = linears
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((ValueError, TypeError), match=message):
        type(model).from_pretrained(tmp_path)


def test_wrong_arguments() -> None:
    model = qwen()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    for given, message in (
        ({"linear_format": "fp8"}, r"linear_format='fp8' is no format of weights"),
        ({"head_format": "int4:column"}, "such are float8_e4m3fn:row, float8_e4m3fn:tensor"),
        ({"head_format": "float8_e5m2:row"}, "no scheme has float8_e5m2:row weights"),
        ({}, "scheme=None leaves experts as they are; give a linear_format"),
        ({"head_format": FP8, "weight_format": FP8}, "neither weight_format nor input_format"),
    ):
        with pytest.raises(ValueError, match=message):
            moe_ops.quantize_model(model, None, **given, progress=False)
    with pytest.raises(TypeError, match="linear_format must be a str, got an int"):
        moe_ops.quantize_model(model, None, linear_format=8, progress=False)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    done = quantized()
    for format, name in (("head_format", "lm_head"), ("linear_format", "q_proj")):
        with pytest.raises(ValueError, match=f"{name} is quantised already; load the model again"):
            moe_ops.quantize_model(done, None, **{format: FP8}, progress=False)


def test_state_dicts_of_others_are_refused() -> None:
    model, other = quantized(), quantized(linears=INT4)
    with pytest.raises(RuntimeError, match="is no quantised weight in the state dict"):
        model.load_state_dict(qwen().state_dict(), strict=False)
    with pytest.raises(RuntimeError, match=f"{INT4} in the state dict, .*codes of {FP8}"):
        model.load_state_dict(other.state_dict())
    model.load_state_dict(quantized().state_dict())


def test_casts_copies_and_pickles_keep_the_codes() -> None:
    model = quantized(make=lambda: MAKERS["gpt_oss"]())
    want = {n: t.clone() for n, t in model.state_dict().items()}
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(model).bfloat16(), loaded.half()):
        for name, module in coded(other).items():
            for part in filter(lambda p: getattr(module, p) is not None, module.coded()):
                assert torch.equal(
                    getattr(module, part).view(torch.uint8),
                    want[f"{name}.{part}"].view(torch.uint8),
                )
            if module.bias is not None:
                assert module.bias.dtype in (torch.bfloat16, torch.float16)
    assert f"out_features=64, bias=True, format='{FP8}'" in str(model)


def test_inputs_have_gradients_and_autocast_casts_them() -> None:
    module = coded(quantized())["lm_head"]
    x = torch.randn(2, 3, 64, requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None
    assert_close(x.grad, module.dequantize().sum(0).expand(2, 3, 64), TOL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(x.detach()).dtype is torch.bfloat16
    assert QuantizedLinear.forward(module, x[:0]).shape == (0, 3, 64)


def test_progress_and_the_report_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    report = moe_ops.quantize_model(qwen(), None, linear_format=FP8, head_format=INT4)
    assert capsys.readouterr().err == f"{FP8}: 8 linear layers\n{INT4}: lm_head\n"
    lines = str(report).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"8 linear layers in {FP8}: 0.00 GiB to 0.00 GiB; results differ by")
    assert lines[1].startswith(f"head in {INT4}: ") and lines[1].endswith("% at most (lm_head)")

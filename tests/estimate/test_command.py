"""`python -m moe_ops estimate`, and what it measures of a machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ops.__main__ import main
from moe_ops.estimate import here
from moe_ops.estimate.fit import Call, Times
from moe_ops.estimate.formats import formats_of
from moe_ops.estimate.measured import Formats, shipped
from moe_ops.estimate.reckon import Asked, estimate
from moe_ops.estimate.sizes import sizes_of
from moe_ops.estimate.text import WIDTH
from moe_ops.planning import tune
from moe_ops.testing import DEVICE
from tests.estimate.collect import of_example

transformers = pytest.importorskip("transformers")
QWEN = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "vocab_size": 151936,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN))
    return file


@pytest.mark.parametrize("name", ["file", "folder"])
def test_a_measured_model_is_shown_beside_what_was_measured(
    name: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = str(config if name == "file" else tmp_path), tmp_path / "out.json"
    assert main(["estimate", model, "--device", "h200", "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "Qwen3MoeForCausalLM, 48 layers, on one NVIDIA H200" in text
    assert "experts of 48 of 48 MoE layers, 48 routers" in text
    assert "experts 0.85 (0.85 by bytes)" in " ".join(text.split())
    assert "guess" not in text and max(map(len, text.splitlines())) <= WIDTH
    rows = json.loads(out.read_text())["rows"]
    runs = [r for r in shipped().ours() if r.file == "generate_qwen3_30b_h200"]
    for row, run in zip(rows, runs, strict=True):
        assert row["batch"] == run.batch
        assert row["measured"] == pytest.approx(run.batch / run.step_ms * 1e3)
        assert row["step"]["floor_ms"] < row["step"]["ms"]
        assert row["low_tokens_per_s"] < row["measured"] < row["high_tokens_per_s"]
        assert row["limit"] == "experts"
        assert sum(row["step"]["parts"].values()) == pytest.approx(row["step"]["ms"])


def test_codes_of_a_checkpoint_are_noted(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(json.dumps({**QWEN, "quantization_config": {"quant_method": "fp8"}}))
    words = ["estimate", str(config), "--device", "h200", "--batch", "1"]
    assert main(words) == 0
    assert "the checkpoint is in codes (fp8)" in capsys.readouterr().out
    assert main([*words, "--format", "fp8_w8a8"]) == 0
    assert "the checkpoint" not in capsys.readouterr().out


def test_stock_is_beside_where_it_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["estimate", "qwen3_5_moe_text", "--layers", "12", "--device", "h100", "--batch", "1"]
    words += ["--prompt", "512"]
    if "qwen3_5_moe_text" not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no qwen3_5_moe_text")
    assert main(words) == 0
    assert "794    260" in capsys.readouterr().out
    assert main([*words, "--prompt", "8192"]) == 0  # of which there is no run
    assert "stock" not in capsys.readouterr().out


def test_what_does_not_fit_and_what_is_guessed_are_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--device", "h100", "--format", "q4_k", "--linears", "int8:row"]
    assert main(["estimate", "minimax", *words]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "guess: what layers of linear_attention keep, taken for nothing" in text
    assert "guess: linear layers in int8:row, of which no run was measured" in text
    assert "guess: experts in q4_k were never measured; taken as formats like it" in text
    assert main(["estimate", "mixtral", "--device", "h100"]) == 0
    assert "IT DOES NOT FIT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["qwen3_moe", "--device", "a100"], "'a100' was never measured; choose h100, h200, or run"),
        (["qwen3_mo", "--device", "h100"], "no such model type"),
        (["./nowhere.json", "--device", "h100"], "./nowhere.json: there is no such f"),
        (["qwen3_moe", "--device", "h100", "--format", "int5"], "scheme 'int5' is unknown"),
        (["qwen3_moe", "--device", "h100", "--format", "int5"], "formats such as int8:row"),
        (["qwen3_moe", "--device", "h100", "--linears", "int5:row"], "--linears='int5:row'"),
        (["qwen3_moe", "--device", "h100", "--batch", "0"], "must be an integer above 0, got '0'"),
        (["llama", "--device", "h100"], "LlamaForCausalLM has no experts; name an MoE model"),
        (
            ["gpt_oss", "--device", "h100", "--format", "int4:1x128:bfloat16"],
            "cannot be in int4:1x",
        ),
    ],
)
def test_what_is_wrong_is_said(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(["estimate", *words])
    assert error.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("float32", None, None), Formats(experts="float32", linears="float32", head="float32")),
        (("fp8_w8a8", None, "int8:row"),
         Formats(experts="float8_e4m3fn:128x128+float8_e4m3fn:1x128", head="int8:row")),
        (("mxfp4", "float8_e4m3fn:row", None),
         Formats(experts="mxfp4", linears="float8_e4m3fn:row")),
        (("int8:row+int8:row", None, None), Formats(experts="int8:row+int8:row")),
    ],
)  # fmt: skip
def test_formats_are_read(words: tuple[Any, ...], found: Formats) -> None:
    assert formats_of(*words) == found


def test_this_machine_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(here, "SLICE", 0.0)
    monkeypatch.setattr(here, "LINEAR_VALUES", 2**16)
    monkeypatch.setattr(here, "COPIES", {"cpu": 2**16, "cuda": 2**20})
    monkeypatch.setattr(here, "COPIES_BYTES", 2**16)
    monkeypatch.setattr(tune, "SECONDS", 0.0)
    file, out = tmp_path / "config.json", tmp_path / "out.json"
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "moe_intermediate_size": 32}
    file.write_text(json.dumps({**QWEN, **sizes, "num_experts": 8, "vocab_size": 256}))
    words = ["estimate", str(file), "--batch", "1,2", "--prompt", "4", "--json", str(out)]
    assert main(words) == 0
    found = json.loads(out.read_text())
    assert found["device"] == here.device_of(torch.device(DEVICE)).name
    for row in found["rows"]:
        for what in ("step", "prompt"):
            assert row[what]["parts"]["experts"] > 0 < row[what]["floor_ms"]
    assert "range" in capsys.readouterr().out


def test_experts_that_were_not_measured_are_taken_in_proportion() -> None:
    sizes = sizes_of(of_example("tiny"))
    experts = sizes.layers[0].experts
    assert experts is not None
    rates = shipped().rates[0]
    found = here.Here(
        device="x", rates=rates, is_gpu=False, experts_us={(experts, 4): 10.0, (experts, 64): 40.0},
        linear_us={4: 1e-3, 64: 2e-3}, call_us=1.0,
    )  # fmt: skip
    call = Call(sizes=sizes, formats=Formats(), batch=4, prompt=64, length=32, rates=rates)
    step = found.step(call, Times(parts={}))
    assert step.parts["experts"] == pytest.approx(2 * 10.0 / 1e3)
    least = [here.floor(experts, Formats(), t, rates).us for t in (256, 64)]
    prompt = found.prompt(call, Times(parts={}))
    assert prompt.parts["experts"] == pytest.approx(2 * 40.0 * least[0] / least[1] / 1e3)


def test_no_part_takes_less_than_its_least_time() -> None:
    """Which goes by copies, and experts that were measured may read faster."""
    sizes, rates = sizes_of(of_example("tiny")), shipped().rates[0]
    experts = sizes.layers[0].experts
    assert experts is not None
    fast = here.Here(
        device="x", rates=rates, is_gpu=True, experts_us={(experts, 1): 1e-6, (experts, 4): 1e-6}
    )
    asked = Asked(sizes=sizes, formats=Formats(), batches=(1,), prompt=4, tokens=8)
    (row,) = estimate(asked, shipped(), "x", fast).rows
    for of in (row.step, row.prompt):
        assert all(0 < work.floor_ms <= of.parts[work.part] for work in of.work)
        assert of.floor_ms == sum(work.floor_ms for work in of.work)

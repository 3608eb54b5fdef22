"""Sizes of configs: those of `--tiny`, also where a config's class leaves them open."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_ops.__main__ import loaded, main, parser
from moe_ops.checks.config_sizes import TINY, require_experts_per_token, shrink

transformers = pytest.importorskip("transformers")
# Their classes have no number of experts, or of those of a token, or no head_dim.
OPEN = ("deepseek_v2", "dots1", "hunyuan_v1_moe")


@pytest.mark.parametrize("family", OPEN)
def test_sizes_that_a_class_leaves_open(family: str, tmp_path: Path) -> None:
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    words = ["export", family, "--tiny", "--to", "onnx", "-o", str(tmp_path / "a.onnx")]
    model = loaded(parser().parse_args(words))
    with torch.inference_mode():
        assert model(torch.ones(1, 5, dtype=torch.int64)).logits.shape == (1, 5, 256)


def test_linear_layers_and_the_head_in_codes(tmp_path: Path) -> None:
    words = ["export", "qwen3_moe", "--tiny", "--to", "onnx", "-o", str(tmp_path / "a.onnx")]
    words += ["--layers", "1", "--linears", "int8:row", "--head", "uint4:1x32"]
    model = loaded(parser().parse_args(words))
    formats = [m.w_format for m in model.modules() if hasattr(m, "weight_codes")]
    assert formats == [*["int8:row"] * 4, "uint4:1x32"]


def test_what_none_means_elsewhere_stays() -> None:
    config = transformers.AutoConfig.for_model("deepseek_v2", q_lora_rank=None)
    shrink(config, TINY, None)
    assert config.q_lora_rank is None
    assert config.num_experts_per_tok == TINY["num_experts_per_tok"]


def test_without_tiny_what_is_open_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["explain", "deepseek_v2", "--layers", "1"])
    assert exited.value.code == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert "deepseek_v2: DeepseekV2Config has no num_experts_per_tok of its own" in told
    assert "or add --tiny" in told


def test_configs_inside_are_looked_into() -> None:
    inner = transformers.AutoConfig.for_model("deepseek_v2")
    outer = transformers.AutoConfig.for_model("qwen3_moe")
    require_experts_per_token(outer)
    outer.text_config = inner
    with pytest.raises(ValueError, match="DeepseekV2Config has no num_experts_per_tok"):
        require_experts_per_token(outer)

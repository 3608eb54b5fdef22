"""Tiny models of families as files of each runtime: written, run there, compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import moe_ops
from moe_ops.__main__ import main
from moe_ops.checks.config_sizes import TINY, shrink
from moe_ops.exporting.command import SHAPES, TOLERANCE, compared
from moe_ops.exporting.programs import Logits, exported, inputs_of
from moe_ops.exporting.runtimes import RUNTIMES
from tests.exporting.test_compiled_models import FAMILIES

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.export, pytest.mark.slow]
QUANTIZED = [("qwen3_moe", "ort", "uint4:1x32"), ("qwen3_moe", "ort", "int8:row"),
             ("qwen3_moe", "aoti", "uint4:1x32"), ("gpt_oss", "onnx", "mxfp4")]  # fmt: skip


def require(to: str) -> None:
    missing = RUNTIMES[to].missing()
    if missing:
        pytest.skip(f"{to} needs {', '.join(missing)}")


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.every)])
def test_one_program_runs_in_onnx_runtime(family: str, tmp_path: Path) -> None:
    require("onnx")
    config = transformers.AutoConfig.for_model(family)
    shrink(config, {**TINY, "num_experts": 4, "num_local_experts": 4}, 1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    inputs = inputs_of(SHAPES, config.vocab_size)
    with torch.no_grad():
        wanted = [Logits(model)(ids) for ids in inputs]
    program = exported(moe_ops.optimize(model), inputs[0])
    for to in ("onnx", "ort"):
        code, file = RUNTIMES[to].code(), tmp_path / f"{to}.onnx"
        code.write(program.run_decompositions(moe_ops.decompositions(to)), file)
        run = code.load(file)
        for ids, want in zip(inputs, wanted, strict=True):
            line, is_close = compared(run, ids, want, TOLERANCE)
            assert is_close, f"{to}: {line}"


@pytest.mark.every
@pytest.mark.parametrize(
    ("family", "to", "quant"), [*((f, to, "") for f in FAMILIES for to in RUNTIMES), *QUANTIZED]
)
def test_a_file_gives_what_the_model_does(
    family: str, to: str, quant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require(to)
    file = tmp_path / f"model{RUNTIMES[to].suffix}"
    words = ["export", family, "--tiny", "--layers", "1", "--to", to, "-o", str(file)]
    assert main([*words, *(["--quant", quant] if quant else [])]) == 0, capsys.readouterr().out
    assert file.stat().st_size > 0
    assert capsys.readouterr().out.count(", within 1e-05") == 2

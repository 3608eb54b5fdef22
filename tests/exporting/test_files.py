"""Tiny models of families as files of each runtime: written, run there, compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_ops.__main__ import main
from moe_ops.exporting.runtimes import RUNTIMES
from tests.exporting.test_compiled_models import FAMILIES

pytest.importorskip("transformers")
pytestmark = pytest.mark.export
# Families that `make test` writes, in the runtimes that its environment has.
IN_TEST = [(family, to) for family in ("qwen3_moe", "gpt_oss") for to in ("onnx", "ort")]
QUANTIZED = [("qwen3_moe", "ort", "uint4:1x32"), ("qwen3_moe", "ort", "int8:row"),
             ("qwen3_moe", "aoti", "uint4:1x32"), ("gpt_oss", "onnx", "mxfp4")]  # fmt: skip
ALL = [
    pytest.param(family, to, "", marks=[] if (family, to) in IN_TEST else [pytest.mark.every])
    for family in FAMILIES for to in RUNTIMES
] + [pytest.param(*case, marks=pytest.mark.every) for case in QUANTIZED]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("family", "to", "quant"), ALL)
def test_a_file_gives_what_the_model_does(
    family: str, to: str, quant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = RUNTIMES[to]
    if runtime.missing():
        pytest.skip(f"{to} needs {', '.join(runtime.missing())}")
    file = tmp_path / f"model{runtime.suffix}"
    words = ["export", family, "--tiny", "--layers", "1", "--to", to, "-o", str(file)]
    assert main([*words, *(["--quant", quant] if quant else [])]) == 0, capsys.readouterr().out
    assert file.stat().st_size > 0
    assert capsys.readouterr().out.count(", within 1e-05") == 2

"""The tables of docs/PERFORMANCE.md that are made from files of results are what the files say."""

from __future__ import annotations

import difflib
import json
from dataclasses import replace
from pathlib import Path

import expecttest
import pytest

from moe_ops.bench import quantised, report
from moe_ops.bench.cells import Cell
from moe_ops.bench.rates import Rates
from moe_ops.bench.results import Results, dump, write
from moe_ops.testing import Case

from . import forwards, generation

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "PERFORMANCE.md"
RESULTS = ROOT / "benchmarks" / "results"
REMEDY = "run `make golden` if it should, and read the difference"


def test_the_page_is_what_was_measured() -> None:
    page = PAGE.read_text()
    want = forwards.fill(generation.fill(report.fill(page, RESULTS), RESULTS), RESULTS)
    if expecttest.ACCEPT:
        PAGE.write_text(want)
    lines = difflib.ndiff(PAGE.read_text().splitlines(), want.splitlines())
    changed = "\n".join(line for line in lines if line.startswith(("- ", "+ ")))
    assert not changed, f"docs/PERFORMANCE.md does not say what was measured; {REMEDY}:\n{changed}"


def test_the_page_has_a_place_for_them() -> None:
    formats = (
        "bfloat16", "float8_blocks", "float8_rows", "int8_rows", "float8_weights", "int4",
        "int4_64", "mxfp4",
    )  # fmt: skip
    assert report.BLOCK.findall(PAGE.read_text()) == [f"layer_h200_{f}" for f in formats]
    models = [
        "qwen3_30b_h200", "mixtral_8x7b_h200", "gpt_oss_20b_h200", "qwen3_30b_experts_h100",
        "gpt_oss_20b_mxfp4_h100",
    ]  # fmt: skip
    assert generation.BLOCK.findall(PAGE.read_text()) == [f"generate_{m}" for m in models]
    assert forwards.BLOCK.findall(PAGE.read_text()) == ["forward_qwen3_30b_h200"]


def test_the_page_has_the_turns_of_quantised_layers() -> None:
    figures = json.loads((RESULTS / "quantised_epyc.json").read_text())
    table = quantised.table([quantised.Turns(**one) for one in figures["turns"]])
    assert table in PAGE.read_text(), f"put this into docs/PERFORMANCE.md:\n{table}"
    assert figures["command"] in PAGE.read_text()


@pytest.fixture
def measured() -> Results:
    cell = Cell(
        layer="tiny", tokens=4, routing="uniform", contender="moe_ops", copies=1, sets=8,
        cold=True, bytes=4e6, flops=1e6, floor_us=1.0, us=1.25, low_us=1.2, high_us=1.3,
    )  # fmt: skip
    return Results(
        command="python -m moe_ops.bench layer --layer tiny",
        device="Made-up Device",
        dtype="bfloat16",
        versions={"torch": "2.11.0"},
        rates=Rates(copy_tbs=4.0, matmul_tflops=800.0),
        layers={"tiny": Case(name="tiny", T=1, E=8, K=2, D=64, I=32)},
        cells=[cell],
        peers={"tiny": {4: {"one": 1.5}}},
    )


def test_a_block_holds_the_tables_of_its_file(tmp_path: Path, measured: Results) -> None:
    page = "a\n<!-- results one -->\nold\n<!-- end -->\nb\n<!-- results two -->\n<!-- end -->\nc\n"
    write(tmp_path / "one.json", dump(measured))
    filled = report.fill(page, tmp_path)
    assert "| 4 | 1.2 (80 %, 1.20) |" in filled
    assert "    python -m moe_ops.bench layer --layer tiny\n" in filled
    assert "old" not in filled
    # A file that is not there leaves its block empty, and filling again changes nothing.
    assert filled.endswith("b\n<!-- results two -->\n<!-- end -->\nc\n")
    assert report.fill(filled, tmp_path) == filled


def test_a_block_names_the_format_of_its_file(tmp_path: Path, measured: Results) -> None:
    quantised = replace(measured, format="int4:1x64:bfloat16", command="one\nother")
    write(tmp_path / "one.json", dump(quantised))
    filled = report.fill("<!-- results one -->\n<!-- end -->\n", tmp_path)
    assert "One Made-up Device, bfloat16, weights in int4:1x64:bfloat16, torch 2.11.0;" in filled
    assert "\n    one\n    other\n" in filled


def test_another_measurement_is_another_page(tmp_path: Path, measured: Results) -> None:
    page = "<!-- results one -->\n<!-- end -->\n"
    write(tmp_path / "one.json", dump(measured))
    before = report.fill(page, tmp_path)
    faster = replace(measured, cells=[replace(measured.cells[0], us=1.0)])
    write(tmp_path / "one.json", dump(faster))
    assert report.fill(before, tmp_path) != before

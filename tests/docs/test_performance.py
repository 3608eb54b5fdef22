"""The tables of pages that are made from files of results are what the files say."""

from __future__ import annotations

import difflib
import json
from dataclasses import replace
from pathlib import Path

import expecttest
import pytest

from moe_ops.bench import quantized, report
from moe_ops.bench.cells import Cell
from moe_ops.bench.rates import Rates
from moe_ops.bench.results import Results, dump, write
from moe_ops.bench.task import TaskResults
from moe_ops.bench.task_model import About, Recipe
from moe_ops.bench.task_scores import TaskCell
from moe_ops.testing import Case
from tests.docs import figures, forwards, generation, layers, task, training
from tests.docs.figures import PAGES, RESULTS
from tests.sources import ROOT

FOLDER = ROOT / "docs" / "performance"
REMEDY = "run `make golden` if it should, and read the difference"


@pytest.mark.parametrize("page", PAGES, ids=figures.label)
def test_a_page_is_what_was_measured(page: Path) -> None:
    want = figures.filled(page.read_text())
    if expecttest.ACCEPT and page.read_text() != want:
        page.write_text(want)
    lines = difflib.ndiff(page.read_text().splitlines(), want.splitlines())
    changed = "\n".join(line for line in lines if line.startswith(("- ", "+ ")))
    assert not changed, (
        f"{figures.label(page)} does not say what was measured; {REMEDY}:\n{changed}"
    )


def test_pages_have_a_place_for_them() -> None:
    names = ("bfloat16", "float8_blocks", "int4", "mxfp4")
    layer_pages = [(FOLDER / f"{page}.md").read_text() for page in ("GPU", "QUANTISED", "SCHEMES")]
    found = [name for page in layer_pages for name in report.BLOCK.findall(page)]
    assert found == [f"layer_h200_{name}" for name in names]
    assert layers.FORMATS.findall(layer_pages[-1]) == ["layer_h100_schemes"]
    one_format = ["layer_h100_int4_64", "layer_h100_float8_weights"]
    assert layers.CELLS.findall(layer_pages[-1]) == one_format
    models = [
        "qwen3_30b_h200", "mixtral_8x7b_h200", "gpt_oss_20b_h200", "qwen3_30b_experts_h100",
        "qwen3_30b_adapters_h100", "qwen3_30b_codes_h200", "qwen3_30b_codes_64_h200",
        "gpt_oss_20b_mxfp4_h100",
    ]  # fmt: skip
    page = (FOLDER / "MODELS.md").read_text()
    assert generation.BLOCK.findall(page) == [f"generate_{m}" for m in models]
    states = [
        "qwen3_6_35b_h100", "qwen3_6_35b_12_layers_h100", "qwen3_next_12_layers_h100",
        "glm_4_7_flash_8_layers_h100", "deepseek_v3_64_4_layers_h100",
        "deepseek_v3_64_4_layers_8192_h100",
    ]  # fmt: skip
    others = (FOLDER / "STATES.md").read_text()
    assert generation.BLOCK.findall(others) == [f"generate_{m}" for m in states]
    sizes = (
        "qwen3_30b_h200", "qwen3_30b_h100", "qwen3_30b_12_layers_h200", "random_12_layers_h200",
    )  # fmt: skip
    assert forwards.BLOCK.findall(page) == [f"forward_{m}" for m in sizes]
    assert training.BLOCK.findall((FOLDER / "TRAINING.md").read_text()) == [
        "train_h100", "train_wide_h100", "train_wide_h200", "train_frozen_h100",
        "train_frozen_h200",
    ]  # fmt: skip
    assert task.BLOCK.findall((FOLDER / "ACCURACY.md").read_text())[0].split()[0] == "task_cpu"
    assert len(layers.MEANS.findall((ROOT / "docs" / "PERFORMANCE.md").read_text())) == 1


@pytest.mark.parametrize("name", ["quantised_epyc", "quantised_blocks_epyc"])
def test_the_page_has_the_turns_of_quantized_layers(name: str) -> None:
    page = FOLDER / "CPU.md"
    turns = json.loads((RESULTS / f"{name}.json").read_text())
    table = quantized.table([quantized.Turns(**one) for one in turns["turns"]])
    assert table in page.read_text(), f"put this into docs/performance/CPU.md:\n{table}"
    assert turns["command"] in page.read_text()


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
    page = "a\n<!-- results one -->\nold\n<!-- end -->\nb\n"
    write(tmp_path / "one.json", dump(measured))
    filled = report.fill(page, tmp_path)
    assert "| 4 | 1.2 (80 %, 1.20) |" in filled
    assert "    python -m moe_ops.bench layer --layer tiny\n" in filled
    assert "old" not in filled
    assert filled.endswith("<!-- end -->\nb\n")
    assert report.fill(filled, tmp_path) == filled
    with pytest.raises(FileNotFoundError):  # a block without its file is no empty table
        report.fill("<!-- results two -->\n<!-- end -->\n", tmp_path)


def test_a_block_names_the_format_of_its_file(tmp_path: Path, measured: Results) -> None:
    quantized = replace(measured, format="int4:1x64:bfloat16", command="one\nother")
    write(tmp_path / "one.json", dump(quantized))
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


def scored(scheme: str, weights: str, ranks: int, lost: float) -> TaskCell:
    return TaskCell(
        scheme=scheme, weight_format=weights, input_format="", ranks=ranks, bits_per_weight=4.25,
        backend="cpu", nats=1.3 + lost, accuracy=0.62, lost_nats=lost, lost_error=0.0004,
    )  # fmt: skip


def test_schemes_of_a_task_are_ordered_by_what_they_lose() -> None:
    about = About(
        recipe=Recipe(), text="", parameters=1, loss=1.0, seconds=1.0, device="cpu", threads=1,
        torch="2.13.0",
    )  # fmt: skip
    cpu = TaskResults(
        command="one", device="Made-up Chip", versions={"torch": "2.13.0"}, about=about, rows=64,
        float32=(1.2999, 0.6201),
        cells=[
            scored("mxfp4_w4a16", "mxfp4", 1, 0.02), scored("none", "", 1, 0.0),
            scored("mxfp4_w4a16", "mxfp4", 2, 0.021),
        ],
    )  # fmt: skip
    gpu = replace(cpu, device="NVIDIA H7", cells=[scored("mxfp4_w4a16", "mxfp4", 1, 0.022)])
    text = task.text([cpu, gpu])
    assert (
        "- CPU: Made-up Chip, torch 2.13.0. In float32 arithmetic the perplexity is 3.669" in text
    )
    head, _, none, mxfp4 = text.splitlines()[-4:]
    assert head.endswith("| lost, CPU, % | lost, CPU, 2 ranks, % | lost, H7, % |")
    assert none == "| `none` | 16-bit | 16-bit | 4.25 | 3.669 | 62.00 | +0.00 ± 0.04 |  |  |"
    assert mxfp4.endswith("| 3.743 | 62.00 | +2.02 ± 0.04 | +2.12 | +2.22 |")


def made(cells: list[dict[str, object]]) -> dict[str, object]:
    return {"rates": {"copy_tbs": 3.0, "matmul_tflops": 790.0}, "cells": cells}


def at(tokens: int, us: float, layer: str = "tiny") -> dict[str, object]:
    return {"layer": layer, "tokens": tokens, "us": us, "floor_us": 1.0}


def test_cells_of_one_format_are_a_table() -> None:
    about = {"device": "Made-up Device", "versions": {"torch": "2.11.0"}, "command": "one"}
    text = layers.cells(about | made([at(16, 4.0), at(1, 2.0), at(1, 1.25, "small")]))
    assert "One Made-up Device, torch 2.11.0; copy 3 TB/s, matrix product 790 TFLOP/s:" in text
    assert "| tokens | tiny | small |" in text
    assert "| 1 | 2.0 (50 %) | 1.2 (80 %) |\n| 16 | 4.0 (25 %) |  |" in text


def test_formats_are_compared_with_bfloat16() -> None:
    about = {"device": "Made-up Device", "versions": {"torch": "2.11.0"}, "command": "one"}
    beside, other = made([at(1, 4.0), at(16, 8.0)]), made([at(4, 1.0), at(1, 2.0)])
    text = layers.formats(about | {"formats": {"bfloat16": beside, "mxfp4": other}})
    assert "| tiny, tokens | 1 | 16 |" in text
    assert "| `bfloat16` | 4.0 (25 %, 1.00) | 8.0 (12 %, 1.00) |" in text
    assert "| `mxfp4` | 2.0 (50 %, 2.00) |  |" in text

"""A small model is trained on text, kept in a file, and scored in every scheme."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

from moe_ops.bench import __main__ as cli
from moe_ops.bench import task, task_model, task_plot, task_scores, task_text
from moe_ops.bench.contenders import backends_of
from moe_ops.bench.task import TaskResults
from moe_ops.bench.task_model import Recipe, Trained
from moe_ops.bench.task_scores import TaskCell
from moe_ops.bench.task_text import Text
from moe_ops.quant.schemes import SCHEMES
from tests.bench.runs import bench

TINY = Recipe(layers=1, D=64, I=64, E=4, K=2, batch=4, length=16, steps=3)
CPU = torch.device("cpu")
SOME = "fp8_w8a16,mxfp4_w4a16"


def lines(count: int) -> Text:
    """A text that is easy to foresee, in many paragraphs."""
    return task_text.split("\n\n".join(f"line {i} of the text" for i in range(count)).splitlines())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    pytest.importorskip("transformers")
    return task_model.trained(tmp_path_factory.mktemp("task") / "weights", TINY, lines(400), CPU)


def paragraphs(part: torch.Tensor) -> list[str]:
    return [p for p in re.split(r"\n\s*\n", bytes(part.tolist()).decode()) if p]


def test_what_is_held_out_is_not_trained_on() -> None:
    text = task_text.python_help()
    train, held_out = paragraphs(text.train), paragraphs(text.held_out)
    assert len(train) > 1000 and len(held_out) > 100
    assert not {task_text.words(p) for p in train} & {task_text.words(p) for p in held_out}


def test_every_tenth_run_of_paragraphs_is_held_out() -> None:
    text = task_text.split(["\n\n".join(f"p{i}" for i in range(320)), "  p7\n\nq"])
    held_out = [f"p{i}" for run in (9, 19) for i in range(16 * run, 16 * run + 16)]
    assert paragraphs(text.held_out) == held_out
    assert len(paragraphs(text.train)) == 322 - len(held_out)
    again = task_text.split(["\n\n".join(f"p{i}" for i in range(320)), "  p150"])
    assert paragraphs(again.held_out) == [p for p in held_out if p != "p150"]
    assert text.digest != task_text.split(["\n\n".join(f"p{i}" for i in range(320))]).digest


def test_a_model_learns_on_the_ops_and_the_same_bits_again() -> None:
    recipe, text = replace(TINY, steps=25, lr=1e-2), lines(200)
    found: list[Any] = []
    ran = backends_of(lambda: found.append(task_model.train(recipe, text, CPU)))
    assert "experts_backward" in ran or "expert_wgrad" in ran
    (model, about), (again, _) = found[0], task_model.train(recipe, text, CPU)
    assert about.loss < 0.7 * math.log(task_model.VOCABULARY)
    assert about.text == text.digest
    for name, p in model.named_parameters():
        assert p.dtype == torch.bfloat16
        assert torch.equal(p, again.get_parameter(name)), name
    other, _ = task_model.train(replace(recipe, seed=1), text, CPU)
    assert not torch.equal(other.lm_head.weight, model.lm_head.weight)


def test_the_learning_rate_rises_and_falls() -> None:
    found = [task_model.share(step, 100) for step in range(100)]
    assert found[0] == pytest.approx(0.2) and max(found) == 1.0 == found[5]
    assert found[5:] == sorted(found[5:], reverse=True)
    assert found[-1] == pytest.approx(task_model.LAST_LR, abs=0.01)


def test_weights_are_trained_once(
    model: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights"
    task_model.save(path, model.model, model.rows_NS.to(torch.uint8), model.about)
    monkeypatch.setattr(task_model, "train", None)
    again = task_model.trained(path, TINY, lines(1), CPU)
    assert again.about == model.about
    assert torch.equal(again.rows_NS, model.rows_NS)
    for name, p in model.model.named_parameters():
        assert torch.equal(p, again.model.get_parameter(name)), name
    with pytest.raises(ValueError, match=r"steps=3.*, this run is of Recipe\(.*steps=4.*--weights"):
        task_model.trained(path, replace(TINY, steps=4), lines(1), CPU)
    path.write_text("something else")
    with pytest.raises(ValueError, match=r"holds no model of this command: .*another file for"):
        task_model.trained(path, TINY, lines(1), CPU)


def test_too_little_text_is_refused() -> None:
    short = task_text.split(["a\n\nb"])
    with pytest.raises(ValueError, match="4 bytes, fewer than a row of 16"):
        next(task_model.batches(TINY, short))
    with pytest.raises(ValueError, match="0 bytes are held out, and a row has 16; take shorter"):
        task_model.held_out_rows(short, 16)


def test_a_score_is_the_mean_loss_of_the_next_byte(model: Trained) -> None:
    rows_NS = model.rows_NS[:20]  # more than one batch
    found = task_scores.score(model.model, rows_NS)
    with torch.no_grad():
        logits = model.model(input_ids=rows_NS).logits.float()
    want = F.cross_entropy(logits[:, :-1].flatten(0, 1), rows_NS[:, 1:].flatten())
    assert found.nats == pytest.approx(float(want), rel=1e-3)
    right = (logits[:, :-1].argmax(-1) == rows_NS[:, 1:]).float().mean()
    assert found.accuracy == pytest.approx(float(right), abs=0.01)
    assert found.beyond(found) == (0.0, 0.0)
    off = replace(found, nats_N=found.nats_N + torch.arange(20) % 2)
    assert off.beyond(found) == pytest.approx((0.5, 0.5 * (20 / 19 / 20) ** 0.5))


def test_schemes_are_scored_beside_bfloat16(model: Trained) -> None:
    wanted = task_scores.pairs(["none", "int8_w8a16", "mxfp4_w4a16", "mxfp8"], every=False)
    none, int8, mxfp4, mxfp8 = task_scores.cells(model, wanted, CPU)
    assert (none.lost_nats, none.lost_error, none.bits_per_weight) == (0.0, 0.0, 16.0)
    assert (mxfp4.bits_per_weight, mxfp8.bits_per_weight) == (4.25, 8.25)
    assert mxfp8.input_format == "mxfp8" and int8.weight_format == "int8:row"
    for cell in (int8, mxfp4, mxfp8):
        assert cell.lost_nats == pytest.approx(cell.nats - none.nats) != 0
        assert cell.perplexity == pytest.approx(none.perplexity * (1 + cell.lost))
        assert cell.ranks == 1 and cell.backend
    assert abs(mxfp4.lost_nats) > abs(int8.lost_nats)


def test_formats_that_do_not_fit_are_no_figures(model: Trained) -> None:
    with pytest.raises(ValueError, match="int8_w8a16 does not fit the model: model"):
        list(task_scores.cells(model, [("int8_w8a16", "int8:1x128", "")], CPU))


def test_pairs_are_those_of_quantize_model_or_all() -> None:
    some, every = (task_scores.pairs(list(SCHEMES), every) for every in (False, True))
    assert [scheme for scheme, *_ in some] == list(SCHEMES)
    assert set(some) < set(every) and len(every) == len(set(every))
    assert ("int4_w4a16", "uint4:1x64", "") in some
    assert set(task.ordered()) == set(every)


@pytest.fixture
def run(
    model: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """The command on the tiny model, with these words beside."""
    monkeypatch.setattr(task, "RECIPE", TINY)
    monkeypatch.setattr(task, "python_help", lambda: lines(400))
    task_model.save(tmp_path / "weights", model.model, model.rows_NS.to(torch.uint8), model.about)
    figures = tmp_path / "figures.json"

    def main(*words: str) -> dict[str, Any]:
        given = ("--weights", str(tmp_path / "weights"), "--json", str(figures), "--rows", "6")
        bench(monkeypatch, "task", *given, *words)
        return json.loads(figures.read_text())

    return main


def test_the_command_goes_on_where_it_was_stopped(
    run: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = run("--schemes", SOME, "--ranks", "1", "--seconds", "0.001")
    assert [cell["scheme"] for cell in first["cells"]] == ["none"]
    second = run("--schemes", SOME, "--ranks", "1")
    assert second["cells"][0] == first["cells"][0]
    assert [cell["scheme"] for cell in second["cells"]] == ["none", *SOME.split(",")]
    assert second["command"].count("\n") == 1
    monkeypatch.setattr(task, "cells", None)
    capsys.readouterr()
    third = run("--schemes", SOME, "--ranks", "1")
    assert third["cells"] == second["cells"]
    assert {"date", "commit", "torch", "transformers", "processor"} < set(third)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith("3 steps of 4 x 16 bytes in 0 s; 90 bytes scored.")
    assert {line.split()[0] for line in printed[3:]} == {"none", *SOME.split(",")}
    lost = [float(line.split()[5]) for line in printed[3:]]
    assert lost == sorted(lost)
    with pytest.raises(
        ValueError, match="results of rows 6, this run is of rows 7; choose another"
    ):
        run("--rows", "7")


@pytest.mark.slow
@pytest.mark.every
def test_the_command_starts_ranks(run: Callable[..., dict[str, Any]]) -> None:
    found = run("--schemes", "mxfp4_w4a16")["cells"]
    assert [(cell["scheme"], cell["ranks"]) for cell in found] == [
        (scheme, n) for n in (1, 2) for scheme in ("none", "mxfp4_w4a16")
    ]
    one, two = found[:2], found[2:]
    assert [c["nats"] for c in two] == pytest.approx([c["nats"] for c in one], abs=2e-3)


@pytest.mark.gpu
def test_schemes_are_scored_on_a_gpu(model: Trained) -> None:
    wanted = task_scores.pairs(["none", "int4_w4a16", "mxfp4_w4a16"], every=False)
    here, there = (
        list(task_scores.cells(model, wanted, torch.device(device))) for device in ("cpu", "cuda")
    )
    for cpu, gpu in zip(here, there, strict=True):
        assert gpu.nats == pytest.approx(cpu.nats, abs=5e-3)


def test_the_command_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parse(["task", "--weights", "w", "--schemes", "int3"])
    assert "argument --schemes: 'int3' is none of none, fp8_w8a8" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.parse(["task"])
    assert "the following arguments are required: --weights" in capsys.readouterr().err


def made(scheme: str, weights: str, ranks: int, lost: float) -> TaskCell:
    return TaskCell(
        scheme=scheme, weight_format=weights, input_format="", ranks=ranks, bits_per_weight=4.25,
        backend="cpu", nats=1.3 + lost, accuracy=0.62, lost_nats=lost, lost_error=0.0004,
    )  # fmt: skip


@pytest.fixture
def results(model: Trained) -> TaskResults:
    about = replace(model.about, parameters=5_400_000, seconds=412.0, recipe=Recipe())
    return TaskResults(
        command="", device="Made-up Device", versions={}, about=about, rows=64,
        float32=(1.2999, 0.6201),
        cells=[
            made("mxfp4_w4a16", "mxfp4", 1, 0.02), made("none", "", 1, 0.0),
            made("mxfp4_w4a16", "mxfp4", 2, 0.021),
        ],
    )  # fmt: skip


def test_table_text(results: TaskResults) -> None:
    assert task.loaded(json.loads(json.dumps(task.dump(results)))) == results
    assert_expected_inline(
        task.table(results),
        """\
5.4 million parameters, 600 steps of 16 x 256 bytes in 412 s; 16320 bytes scored.
float32 arithmetic: perplexity 3.6689, 62.01 % accuracy; lost: perplexity above bfloat16's on one rank, ± a standard error
scheme       weights  inputs  bits  perplexity  lost, %     ±  accuracy, %  lost on 2 ranks, %
none          16-bit  16-bit  4.25      3.6693    +0.00  0.04        62.00
mxfp4_w4a16    mxfp4  16-bit  4.25      3.7434    +2.02  0.04        62.00               +2.12""",  # noqa: E501
    )


def test_the_picture_has_a_line_for_each_scheme(results: TaskResults, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image", reason="pip install torch-moe-ops[bench]")
    task_plot.draw(results, tmp_path / "plot.png")
    pixels = image.imread(tmp_path / "plot.png")
    assert pixels.shape[1] == pytest.approx(900, abs=5)
    assert pixels[..., :3].min() < 0.5  # not blank


def test_schemes_are_drawn_by_what_they_lose(results: TaskResults) -> None:
    cells = task_plot.shown(results)
    assert [(c.scheme, c.ranks) for c in cells] == [("none", 1), ("mxfp4_w4a16", 1)]
    assert [task_plot.label(c) for c in cells] == ["16-bit", "mxfp4"]
    assert task_plot.label(replace(cells[1], input_format="mxfp8")) == "mxfp4 + mxfp8"
    assert [task_plot.kind(replace(cells[1], bits_per_weight=b)) for b in (4.62, 6.25, 8.0)] == [
        4, 6, 8,
    ]  # fmt: skip

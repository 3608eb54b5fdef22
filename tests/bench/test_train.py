"""`bench train`: a file is gone on with, and what the tables say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from moe_ops.bench import __main__ as cli
from moe_ops.bench import train, train_cells
from moe_ops.bench.rates import Rates
from moe_ops.bench.timing import Timing
from moe_ops.bench.train_cells import TrainCell
from moe_ops.bench.train_contenders import CONTENDERS, TrainContender
from moe_ops.bench.train_inputs import PUBLISHED, TINY, TRAINED, Tensors, TrainLayer
from tests.bench.runs import bench, quicken

EAGER = tuple(c for c in CONTENDERS if not c.compiled)
RATES = Rates(copy_tbs=1.0, matmul_tflops=2.0)
RUN = ("train", "--layers", "tiny", "--dtype", "float32", "--repeats", "4", "--device", "cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small rates, and implementations that are not compiled."""
    quicken(monkeypatch)
    monkeypatch.setattr(train, "CONTENDERS", EAGER)


def cell(name: str, us: float | None, *, tokens: int = 64, **kwargs: Any) -> TrainCell:
    def timing(us: float) -> Timing:
        return Timing(us=us, low_us=us, high_us=us, replays=4)

    return TrainCell(
        layer="tiny", tokens=tokens, frozen=False, contender=name, products_us=50.0,
        forward=None if us is None else timing(us / 3), both=None if us is None else timing(us),
        **{"peak_bytes": 12_340_000, "saved_bytes": 64 * 264} | kwargs,
    )  # fmt: skip


def results(*cells: TrainCell) -> train.TrainResults:
    return train.TrainResults(
        command="python -m moe_ops.bench train", device="Made-up Device", dtype="bfloat16",
        versions={"torch": "2.13.0"}, rates=RATES, layers={"tiny": TRAINED["tiny"]},
        cells=list(cells),
    )  # fmt: skip


def test_table_text() -> None:
    found = results(
        cell("moe_ops", 120.0, ran={"experts_saving": "reference", "expert_wgrad": "aten"}),
        cell("moe_ops_compiled", 100.0),
        cell("grouped_mm", None, wrong="AssertionError: the gradient of x_TD: off by 1"),
        cell("grouped_mm_compiled", 240.0, saved_bytes=64 * 1076),
        cell("liger_kernel", None, refused="the package liger-kernel is not installed"),
    )
    assert_expected_inline(
        train.report(found, [("tiny", 64, False)]).replace("µ", "u"),
        """\
tiny: E=8 K=2 D=64 I=32, bfloat16
implementation       tokens  forward us  forward + backward us  x moe_ops  % of 6 products  peak MB  saved B/token
moe_ops                  64        40.0                  120.0      1.00x             41.7     12.3            264
moe_ops_compiled         64        33.3                  100.0      0.83x             50.0     12.3            264
grouped_mm               64       WRONG
grouped_mm_compiled      64        80.0                  240.0      2.00x             20.8     12.3           1076
moe_ops ran expert_wgrad:aten

WRONG, not timed: grouped_mm on tiny, 64 tokens: AssertionError: the gradient of x_TD: off by 1
liger_kernel does not take tiny: the package liger-kernel is not installed""",  # noqa: E501
    )


def test_a_file_holds_what_was_found(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    found = replace(
        results(cell("moe_ops", 120.0), cell("grouped_mm", None, wrong="it was")),
        earlier_rates=[RATES],
        layers={name: TRAINED[name] for name in TINY},
    )
    train.write(path, train.dump(found))
    assert train.load(path) == found


def test_a_run_that_was_stopped_goes_on_with_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, made = tmp_path / "train.json", train_cells.make_tensors
    seen: list[int] = []

    def stop(layer: TrainLayer, tokens: int, *rest: Any) -> Tensors:
        if tokens == 16:
            raise KeyboardInterrupt
        return made(layer, tokens, *rest)

    def note(layer: TrainLayer, tokens: int, *rest: Any) -> Tensors:
        seen.append(tokens)
        return made(layer, tokens, *rest)

    words = (*RUN, "--json", str(file))
    with monkeypatch.context() as stopping, pytest.raises(KeyboardInterrupt):
        stopping.setattr(train_cells, "make_tensors", stop)
        bench(stopping, *words, "--tokens", "8,16")
    stopped = train.load(file)
    assert [c.tokens for c in stopped.cells] == [8] * len(EAGER)
    monkeypatch.setattr(train_cells, "make_tensors", note)
    bench(monkeypatch, *words, "--tokens", "8,16")
    whole = train.load(file)
    assert seen == [16] and whole.cells[: len(EAGER)] == stopped.cells
    assert whole.earlier_rates == [stopped.rates]
    bench(monkeypatch, *words, "--tokens", "4", "--frozen")
    assert seen == [16, 4]
    mixed = train.load(file)
    assert [c.tokens for c in mixed.cells if c.frozen] == [4] * len(EAGER)
    assert (
        len(mixed.cells) == 3 * len(EAGER) and len(mixed.command.splitlines()) == 2
    )  # the first, again
    out = capsys.readouterr().out
    assert "tiny: E=8 K=2 D=64 I=32, float32, frozen experts" in out and "% of 4 products" in out
    monkeypatch.setattr(train, "measure_rates", None)  # nothing is missing
    bench(monkeypatch, *words, "--tokens", "8")
    assert train.load(file) == mixed
    with pytest.raises(ValueError, match="of dtype float32, this run is of dtype bfloat16"):
        bench(monkeypatch, *words, "--tokens", "8", "--dtype", "bfloat16")


def test_cells_that_were_wrong_are_measured_again(tmp_path: Path) -> None:
    grid = train_cells.TrainGrid(
        layers=[TRAINED["tiny"]], tokens=[8], contenders=EAGER, dtype=torch.float32,
        device=torch.device("cpu"), frozen=False, repeats=4,
    )  # fmt: skip
    place = ("tiny", 8, False)
    right = [cell(c.name, 10.0, tokens=8) for c in EAGER]
    assert train.is_done(results(*right), grid, place)
    assert not train.is_done(results(right[0]), grid, place)
    wrong = cell(EAGER[1].name, None, tokens=8, wrong="it was")
    assert not train.is_done(results(right[0], wrong), grid, place)
    # One that does not take the layer here is not waited for.
    assert train.is_done(results(*right[:2]), grid, place)


def test_a_wrong_cell_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> Callable[[], Tensor]:
        raise RuntimeError("no such product")

    broken = TrainContender(name="grouped_mm", forward=fail)
    monkeypatch.setattr(train, "CONTENDERS", (EAGER[0], broken))
    with pytest.raises(SystemExit) as ended:
        bench(monkeypatch, *RUN, "--tokens", "4")
    assert ended.value.code == 1


def test_a_file_of_another_command_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "layer.json"
    file.write_text('{"schema": 1}')
    with pytest.raises(ValueError, match=r"no results to add to: .* schema 1, this reads train 1"):
        bench(monkeypatch, *RUN, "--tokens", "4", "--json", str(file))


@pytest.mark.parametrize("gpu", [False, True], ids=["no_gpu", "gpu"])
def test_what_options_are_if_they_are_left_out(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    args = cli.parse(["train"])
    assert args.layers == (PUBLISHED if gpu else TINY)
    assert args.tokens == ([1024, 4096, 16384] if gpu else [64, 256])
    assert (args.device, args.frozen) == ("cuda" if gpu else "cpu", False)
    assert args.against == [c.name for c in CONTENDERS]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--layers olmo", "'olmo' is no layer that trains; there are qwen3_30b"),
        ("--against vllm", "'vllm' is no implementation; there are moe_ops"),
        ("--repeats 0", "'0' is no whole number from 1 on"),
    ],
)
def test_options_that_cannot_be(words: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parse(["train", *words.split()])
    assert why in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.every
def test_compiled_calls_are_checked_and_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "train.json"
    monkeypatch.setattr(train, "CONTENDERS", CONTENDERS)
    words = ("--layers", "tiny_gpt_oss", "--tokens", "8", "--json", str(file))
    bench(monkeypatch, *RUN, *words)
    cells = train.load(file).cells
    assert [c.contender for c in cells] == [c.name for c in CONTENDERS]
    assert all(c.both is not None and c.saved_bytes for c in cells if not c.refused)
    assert [c.contender for c in cells if c.refused] == ["liger_kernel"]

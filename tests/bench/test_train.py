"""`bench train`: gradients are checked first, calls take turns, a file is gone on with."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from moe_ops.bench import __main__ as cli
from moe_ops.bench import train, train_cells, train_contenders
from moe_ops.bench.rates import Rates
from moe_ops.bench.timing import Timing
from moe_ops.bench.train_cells import TrainCell, TrainGrid, calls_of
from moe_ops.bench.train_contenders import (
    CONTENDERS,
    TrainContender,
    liger,
    liger_refusal,
    ours,
    stock,
)
from moe_ops.bench.train_inputs import (
    OUT,
    PUBLISHED,
    TINY,
    TRAINED,
    Tensors,
    TrainLayer,
    make_parameters,
    make_tensors,
    want,
)
from tests.bench.runs import bench, quicken

CPU = torch.device("cpu")
EAGER = tuple(c for c in CONTENDERS if not c.compiled)
RATES = Rates(copy_tbs=1.0, matmul_tflops=2.0)
RUN = ("train", "--layers", "tiny", "--dtype", "float32", "--repeats", "4", "--device", "cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small rates, and implementations that are not compiled."""
    quicken(monkeypatch)
    monkeypatch.setattr(train, "CONTENDERS", EAGER)


def tensors_of(
    layer: TrainLayer, tokens: int, dtype: torch.dtype = torch.float32, frozen: bool = False
) -> Tensors:
    return make_tensors(layer, tokens, dtype, make_parameters(layer, dtype, CPU, frozen))


def grid_of(*contenders: TrainContender, dtype: torch.dtype = torch.float32) -> TrainGrid:
    return TrainGrid(
        layers=[TRAINED["tiny"]], tokens=[8], contenders=contenders, dtype=dtype, device=CPU,
        frozen=False, repeats=4,
    )  # fmt: skip


def measured(grid: TrainGrid) -> list[TrainCell]:
    (cells,) = train_cells.measure(grid, RATES, grid.places())
    return cells


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("forward", [ours, stock], ids=["ours", "stock"])
@pytest.mark.parametrize("name", TINY)
def test_gradients_are_those_of_float32(name: str, forward: Callable, frozen: bool) -> None:
    layer = TRAINED[name]
    tensors = tensors_of(layer, 24, frozen=frozen)
    got = calls_of(forward(layer, tensors), tensors).both()
    right = want(layer, tensors)
    weights = ["w13_EFD", "w2_EDI", *(("b13_EF", "b2_ED") if layer.bias else ())]
    assert list(got) == [OUT, "x_TD", "weights_TK", *(() if frozen else weights)]
    assert got.keys() == right.keys()
    train_cells.check(got, right, torch.float32)


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(layer: TrainLayer, tensors: Tensors) -> Callable[[], Tensor]:
        right = ours(layer, tensors)

        def call() -> Tensor:
            out_TD = right()
            out_TD.register_hook(lambda grad: 2 * grad)  # its result is right
            return out_TD

        return call

    timed: list[int] = []
    time_turns = train_cells.time_turns

    def noted(runs: Any, *rest: Any) -> Any:
        timed.append(len(runs))
        return time_turns(runs, *rest)

    monkeypatch.setattr(train_cells, "time_turns", noted)
    cells = measured(grid_of(EAGER[0], TrainContender(name="doubled", forward=wrong)))
    assert timed == [1, 1]
    assert cells[0].both is not None and not cells[0].wrong
    assert cells[1].both is None and "the gradient of x_TD: off by" in cells[1].wrong


def test_another_dtype_is_wrong() -> None:
    def wide(layer: TrainLayer, tensors: Tensors) -> Callable[[], Tensor]:
        made = ours(layer, tensors)
        return lambda: made().float()

    (cell,) = measured(grid_of(TrainContender(name="wide", forward=wide), dtype=torch.bfloat16))
    assert "out_TD: torch.float32, wanted torch.bfloat16" in cell.wrong


def test_calls_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def named(name: str) -> TrainContender:
        def forward(layer: TrainLayer, tensors: Tensors) -> Callable[[], Tensor]:
            made = ours(layer, tensors)

            def call() -> Tensor:
                order.append(name)
                return made()

            return call

        return TrainContender(name=name, forward=forward)

    monkeypatch.setattr(train_cells, "_checked", unchecked)
    cells = measured(grid_of(named("a"), named("b")))
    runs = "".join(order)
    turn = "a" * 4 + "b" * 4  # three to warm up, one of four that count
    assert runs == turn * 4 * 2  # forward, then both
    assert [cell.both.replays for cell in cells if cell.both] == [4, 4]


def unchecked(
    cell: TrainCell, contender: TrainContender, layer: TrainLayer, tensors: Tensors, right: Any
) -> tuple[TrainCell, train_cells.Calls]:
    return cell, calls_of(contender.forward(layer, tensors), tensors)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_saved_bytes_are_the_first_product_and_its_order(frozen: bool) -> None:
    layer = TRAINED["tiny"]
    tensors = tensors_of(layer, 24, torch.bfloat16, frozen)
    case, rows = layer.case, 24 * layer.case.K
    saved = train_cells.saved_bytes(ours(layer, tensors), tensors.all())
    assert saved == rows * 2 * case.I * 2 + rows * 4 + case.E * 4


def test_views_of_what_is_saved_count_once() -> None:
    x = torch.randn(100, requires_grad=True)

    def forward() -> Tensor:
        y = x * 2
        halves = y[:50] * y[50:]  # saves both, of one tensor
        return halves * halves

    # y, twice; halves.
    assert train_cells.saved_bytes(forward, [x]) == 400 + 200


def test_the_peak_is_what_a_step_holds_beside_its_gradients() -> None:
    layer = TRAINED["tiny"]
    tensors = tensors_of(layer, 8)
    floats = 2**20

    def both() -> list[Tensor]:
        most = torch.ones(floats)
        del most
        return [torch.zeros_like(t) for t in tensors.wanted().values()]

    gradients = sum(t.nbytes for t in tensors.wanted().values())
    assert train_cells.extra_bytes(both, tensors) == 4 * floats - gradients


def test_products_are_six_or_four() -> None:
    layer = TRAINED["mixtral_8x7b"]
    forward = 2 * 1024 * 2 * (2 * 14336 * 4096 + 4096 * 14336)
    assert layer.flops(1024, 2) == forward
    assert layer.flops(1024, 6) == 3 * forward and layer.flops(1024, 4) == 2 * forward


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
    grid = grid_of(*EAGER)
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


LIGER_TAKES: dict[str, tuple[str, str, bool, str]] = {
    "not there": ("tiny", "cuda", False, "the package liger-kernel is not installed"),
    "biased": ("tiny_gpt_oss", "cuda", True, "it computes silu-gated layers without bias alone"),
    "no gpu": ("tiny", "cpu", True, "its kernels need a GPU, got cpu"),
    "plain": ("tiny", "cuda", True, ""),
}


@pytest.mark.parametrize("name", LIGER_TAKES)
def test_what_liger_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, device, there, why = LIGER_TAKES[name]
    spec = object() if there else None
    monkeypatch.setattr(train_contenders.importlib.util, "find_spec", lambda package: spec)
    assert (liger_refusal(TRAINED[layer], torch.device(device)) or "") == why


def test_liger_gets_the_tensors_that_its_function_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """x, gate_up_proj, down_proj, top_k_index in int32, top_k_weights."""
    layer = TRAINED["tiny"]
    tensors = tensors_of(layer, 8)

    class Function:
        @staticmethod
        def apply(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            assert ids.dtype == torch.int32
            given = replace(tensors, x_TD=x, w13_EFD=w13, w2_EDI=w2, ids_TK=ids, weights_TK=weights)
            return ours(layer, given)()

    module = types.ModuleType("liger_kernel.ops")
    module.LigerFusedMoEFunction = Function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", module)
    got = calls_of(liger(layer, tensors), tensors).both()
    train_cells.check(got, want(layer, tensors), torch.float32)


@pytest.mark.slow
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

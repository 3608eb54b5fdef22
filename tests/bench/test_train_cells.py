"""What `bench train` checks before it times, and what it counts: bytes and products."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops.bench import train_cells, train_contenders
from moe_ops.bench.rates import Rates
from moe_ops.bench.train_cells import TrainCell, TrainGrid, calls_of
from moe_ops.bench.train_contenders import TrainContender, liger, liger_refusal, ours, stock
from moe_ops.bench.train_inputs import (
    OUT,
    TINY,
    TRAINED,
    Tensors,
    TrainLayer,
    make_parameters,
    make_tensors,
    want,
)

CPU = torch.device("cpu")
RATES = Rates(copy_tbs=1.0, matmul_tflops=2.0)


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


def test_fixed_biases_have_no_gradient() -> None:
    layer = replace(TRAINED["tiny_gpt_oss"], fixed_bias=True)
    tensors = tensors_of(layer, 24)
    right = want(layer, tensors)
    assert list(tensors.wanted()) == ["x_TD", "weights_TK", "w13_EFD", "w2_EDI"]
    for forward in (ours, stock):
        got = calls_of(forward(layer, tensors), tensors).both()
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
    cells = measured(
        grid_of(
            TrainContender(name="moe_ops", forward=ours),
            TrainContender(name="doubled", forward=wrong),
        )
    )
    assert timed == [1, 1]
    assert cells[0].both is not None and not cells[0].wrong
    assert cells[1].both is None and "the gradient of x_TD: off by" in cells[1].wrong


def test_another_dtype_is_wrong() -> None:
    def wide(layer: TrainLayer, tensors: Tensors) -> Callable[[], Tensor]:
        made = ours(layer, tensors)
        return lambda: made().float()

    (cell,) = measured(grid_of(TrainContender(name="wide", forward=wide), dtype=torch.bfloat16))
    assert "out_TD: torch.float32, wanted torch.bfloat16" in cell.wrong


def test_large_gradients_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = TRAINED["tiny"]
    tensors = tensors_of(layer, 24)
    got, right = calls_of(ours(layer, tensors), tensors).both(), want(layer, tensors)
    monkeypatch.setattr(train_cells, "AT_ONCE", tensors.w13_EFD[:2].numel())
    train_cells.check(got, right, torch.float32)
    got["w13_EFD"][-1, 3, 5] += 1.0
    with pytest.raises(AssertionError, match=r"w13_EFD, piece 3: off by .* at \(1, 3, 5\)"):
        train_cells.check(got, right, torch.float32)


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

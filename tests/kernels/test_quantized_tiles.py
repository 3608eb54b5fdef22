"""Linear layers of codes in tiles of many rows: what each program has, by torch; how parts are
added; plans and refusals. How codes are decoded and multiplied is tested where experts are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are Triton's")

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_ops.backends import triton_hopper, triton_linears
from moe_ops.backends.triton_linears import most_rows, multiply_few, multiply_normed, refuse_tiles
from moe_ops.decode_ops.linears import MOST_ROWS, MOST_TILED
from moe_ops.decode_ops.quantized_linears import QuantizedLinearsCall
from moe_ops.kernels.triton import LINEAR, activation
from moe_ops.kernels.triton.decode import blocks, quantized_tiles, quantized_tiles_gluon
from moe_ops.kernels.triton.decode.quantized_linears_plan import TiledPlan, tiled_plan_for
from moe_ops.kernels.triton.decode.quantized_tiles import run_tiles
from moe_ops.kernels.triton.experts.formats import order
from moe_ops.kernels.triton.experts.operands.permuted import arrange
from moe_ops.kernels.triton.experts.products import fragments, grouped_registers, skeleton
from moe_ops.kernels.triton.experts.products.grouped_tile import BLOCK_MEMORY, ROWS
from moe_ops.registry.invariance import invariant
from moe_ops.registry.registration import ANY_ROWS
from moe_ops.testing import DEVICE, F16, F32, Tol, assert_close
from tests.chosen import in_turn
from tests.decode_ops.test_quantized_linears import call_of
from tests.kernels.gluon_in_torch import DECODERS, LANGUAGE, functions_of, pointer, value
from tests.kernels.test_quantized_row import coded, normed_call

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")
FORMATS = ("float8_e4m3fn:row", "int4:1x128:bfloat16", "uint4:1x32", "nvfp4", "mxfp8")
TOL = Tol(2e-3, "one rounding to 11 bits, of sums in parts")
MODULES = (
    activation, *DECODERS, order, fragments, skeleton, grouped_registers, blocks,
    quantized_tiles_gluon,
)  # fmt: skip


class ByTorch:
    """In the place of `launch`: of a program each consumer stores the products that it has, with
    the values of codes."""

    def __init__(self, x_TK: Tensor, call: QuantizedLinearsCall, values: list[Tensor]) -> None:
        self.x_TK, self.at = x_TK, (0, 0, 0)
        given = zip(call.weights, call.scales, values, strict=True)
        self.values = {w.data_ptr(): (s.data_ptr(), v) for w, s, v in given}
        language = {**vars(LANGUAGE), "program_id": lambda axis: value(self.at[axis])}
        language["warp_specialize"] = self.specialize
        language["allocate_shared_memory"] = lambda *_: SimpleNamespace(index=lambda i: None)
        of = SimpleNamespace(**language)
        barriers = SimpleNamespace(MBarrierLayout=lambda: None, init=lambda *_, **__: None)
        self.functions = functions_of(
            MODULES, ROWS=ROWS, BOX=64, MOST=blocks.MOST, ACT=LINEAR, mbarrier=barriers,
            fence_async_shared=lambda: None, take_turn=lambda _: None, tl=of, gl=of,
        )  # fmt: skip
        self.functions["fragments"] = SimpleNamespace(**self.functions)
        self.launched: list[str] = []

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        self.launched.append(kernel.fn.__name__)
        if kernel is not quantized_tiles_gluon.quantized_linears_tiles:
            kernel[grid](*args, **options)
            return
        given = dict(zip(kernel.arg_names, args, strict=False))
        given |= {n: v for n, v in options.items() if n in kernel.arg_names}
        given = {n: as_given(v) for n, v in given.items()}
        for block in range(grid[0]):
            for tile in range(grid[1]):
                for part in range(grid[2]):
                    self.at = block, tile, part
                    self.functions[kernel.fn.__name__](**given)

    def specialize(self, parts: Any, *_: Any) -> None:
        *consumers, (_, (g, _, weights, *_)) = parts
        scale_at, w_NK = self.values[weights[int(g)].base.data_ptr()]
        for lower, (_, consumer) in enumerate(consumers):
            assert consumer[0] == lower
            self.consume(scale_at, w_NK, *consumer)

    def consume(
        self, scale_at: int, w_NK: Tensor, lower: int, tile: Any, begin: Any, steps: int,
        output: Any, _: Any, sizes: Any, scales: Any, how: Any,
    ) -> None:  # fmt: skip
        f, (weight, of, act) = self.functions, how
        assert scales[0].memory.data_ptr() == scale_at and int(sizes[0]) == len(w_NK)
        m = torch.arange(64)
        rows = f["first_column"](int(tile[3]), lower, weight, False) + m % 16
        rows = (rows + m // 16 * f["group_of"](weight)).clamp(max=len(w_NK) - 1)
        first = int(begin) * f["columns_of"](weight)
        columns = slice(first, first + steps * f["columns_of"](weight))
        x_TK = self.x_TK[int(tile[2]) : int(tile[2]) + of.tokens, columns].float()
        x_TK = torch.nn.functional.pad(x_TK, (0, 0, 0, of.tokens - len(x_TK)))
        sums = value(w_NK[rows, columns] @ x_TK.T)
        f["_store"](sums, output, tile, sizes, lower, weight, act)


def as_given(argument: Any) -> Any:
    """An argument as kernels have it."""
    if isinstance(argument, TensorDescriptor):
        base = argument.base
        return SimpleNamespace(base=base, dtype=base.dtype, layout=None)
    return pointer(argument) if isinstance(argument, Tensor) else argument


@pytest.mark.parametrize("format", FORMATS)
@in_turn(
    pytest.mark.parametrize("T", [1, 70, 130]),
    pytest.mark.parametrize("parts", [1, 2, 4]),
    pytest.mark.parametrize("sizes", [(160, 96, 32), (64,), (32, 32, 32, 160, 64)], ids=str),
    pytest.mark.parametrize("biases", [True, False]),
)
def test_programs_share_rows_tiles_and_parts(
    format: str, biases: bool, sizes: tuple[int, ...], parts: int, T: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    call, values = call_of(T, 512, sizes, format, F16)
    call.biases = [torch.randn(n).half() if biases else None for n in sizes]
    layers = coded(call)
    plan = TiledPlan.of(64, parts, layers.weight)
    # Without their global scales, which the kernel multiplies with.
    factors = [1.0 if g is None else float(g) for g in call.global_scales]
    own = [v / f for v, f in zip(values, factors, strict=True)]
    by_torch = ByTorch(call.x_TK, call, own)
    monkeypatch.setattr(quantized_tiles, "launch", by_torch)
    x_TC = arrange(call.x_TK, layers.weight)
    got = run_tiles(x_TC, 512, layers, plan)
    for y, w, b in zip(got, values, call.biases, strict=True):
        want = call.x_TK.double() @ w.double().T + (0 if b is None else b.double())
        assert y.dtype is F16 and y.shape == want.shape
        assert_close(y.float(), want.float(), TOL)
    assert by_torch.launched.count("sum_parts") == (parts > 1) * -(-len(sizes) // 4)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("T", [33, 64, 200, 512])
def test_a_plan_keeps_processors_and_memory(T: int, format: str) -> None:
    weight = coded(call_of(1, 256, (32,), format, F16)[0]).weight
    for sizes, K in (((4096, 512, 512), 2048), ((2048,), 4096), ((151936,), 2880), ((32,), 256)):
        tile, parts = tiled_plan_for(T, K, sizes, weight, 132)
        steps = -(-K // (64 if weight.bits == 8 else 128))
        assert steps % parts == 0 and steps // parts >= min(4, steps)
        programs = sum(-(-n // ROWS) for n in sizes) * -(-T // tile.tokens) * parts
        assert parts == 1 or programs <= 132
        stage = (64 if weight.bits == 8 else 128) * (2 * tile.tokens + ROWS * weight.bits // 8)
        assert tile.stages > 1 and tile.stages * stage * tile.blocks < BLOCK_MEMORY


def test_calls_that_run_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 33 rows on, normed or not; not where calls are invariant, nor on another GPU."""
    ran: list[int] = []

    def run(x_TC: Tensor, K: int, layers: Any) -> list[Tensor]:
        ran.append(len(x_TC))
        return [x_TC.new_empty(len(x_TC), n) for n in layers.sizes]

    from moe_ops.kernels.triton.decode import quantized_linears as kernels

    monkeypatch.setattr(kernels, "run_tiles", run)
    call, _ = call_of(40, 256, (96, 32), "int8:row", F16)
    call.biases = [None, None]
    multiply_few(call)
    assert not ran and most_rows(call) == MOST_ROWS  # there is no Hopper
    for module in (triton_linears, triton_hopper):
        monkeypatch.setattr(module, "refuse_hopper", lambda _: None)
    assert most_rows(call) == MOST_TILED
    multiply_few(call)
    multiply_normed(normed_call(call, None, torch.rand(256).half()))
    assert ran == [40, 40]
    with invariant():
        assert most_rows(call) == ANY_ROWS


@pytest.mark.parametrize(
    ("format", "K", "sizes", "why"),
    [
        ("mxfp6_e3m2", 256, (32,), "has no decoder of mxfp6_e3m2"),
        ("float8_e5m2:row", 256, (32,), "has no decoder of float8_e5m2:row"),
        ("int4:row", 256, (32, 40), "that 32 divides, got 32, 40 and 256"),
        ("int8:row", 264, (32,), "that 16 divides, got 32 and 264"),
        ("int4:1x16", 256, (32,), "needs groups of 32 columns or more, got 16"),
        ("int8:row", 256, (32, 48), "needs biases of all weights, of one dtype, or of none"),
    ],
)
def test_others_do_not(
    format: str, K: int, sizes: tuple[int, ...], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_linears, "refuse_hopper", lambda _: None)
    call, _ = call_of(40, K, sizes, format, F16)
    refusal = refuse_tiles(call)
    assert refusal is not None and why in refusal
    if "biases" in why:
        call.biases = [torch.zeros(n, dtype=d) for n, d in zip(sizes, (F16, F32), strict=True)]
        assert refuse_tiles(call) == refusal
    assert most_rows(call) == MOST_ROWS

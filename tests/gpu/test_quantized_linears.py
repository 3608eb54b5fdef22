"""Linear layers in codes on a GPU: both backends, captured, and steps of whole models."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

import moe_ops
from moe_ops.backends.triton_linears import layers_of, most_rows, refuse_tiles
from moe_ops.decode_ops import normed_linears, normed_quantized_linears, quantized_linears
from moe_ops.decode_ops.quantized_linears import QuantizedLinearsCall
from moe_ops.testing import BF16, F16, Tol, assert_close

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.kernels.triton.decode.quantized_linears_plan import TiledPlan
from moe_ops.kernels.triton.decode.quantized_tiles import run_tiles
from moe_ops.kernels.triton.experts.operands.permuted import arrange
from tests.decode_ops.test_quantized_linears import call_of
from tests.gpu.captures import captured
from tests.hf.coded_linears import FORMATS, MAKERS, in_floats

pytestmark = pytest.mark.gpu
TOL = {
    BF16: Tol(3e-2, "values and results are rounded to 8 bits"),
    F16: Tol(4e-3, "values and results are rounded to 11 bits"),
}
TILED = [f for f in FORMATS if "mxfp6" not in f]
SHAPES = [((4096, 512, 512), 2048), ((2048,), 4096), ((20000,), 2880), ((33, 7, 1), 384)]


def on_gpu(call: QuantizedLinearsCall) -> QuantizedLinearsCall:
    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(v) for v in value]
        return value.cuda() if isinstance(value, torch.Tensor) else value

    return quantized_linears.call(*map(moved, quantized_linears.arguments.flat(call)))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_every_number_of_rows(
    format: str, shape: tuple[tuple[int, ...], int], dtype: torch.dtype
) -> None:
    call, values = call_of(520, shape[1], shape[0], format, dtype)
    call = on_gpu(call)
    whole = call.x_TK
    wide = [w.cuda().double() for w in values]
    for T in (1, 2, 3, 8, 16, 17, 32, 33, 64, 65, 130, 257, 512, 520):
        call.x_TK = whole[:T]
        given = quantized_linears.arguments.flat(call)
        for name in ("triton", "triton.decoded") if most_rows(call) >= T else ("triton.decoded",):
            with moe_ops.using(name, quantized_linears):
                got, again = quantized_linears(*given), quantized_linears(*given)
            for y, same, w, b in zip(got, again, wide, call.biases, strict=True):
                want = call.x_TK.double() @ w.T + (0 if b is None else b.double())
                assert_close(y.float(), want.float(), TOL[dtype], f"{name}, T={T}")
                assert torch.equal(y, same)


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("format", TILED)
def test_tiles(format: str, parts: int) -> None:
    """Every plan, rows that are no numbers, what lies behind the rows, and global scales."""
    call, values = call_of(300, 2048, (544, 96, 32), format, BF16)
    call = on_gpu(call)
    bias = [torch.randn(w.shape[0], dtype=BF16, device="cuda") for w in call.weights]
    call.biases = bias if parts > 1 else [None] * 3
    assert refuse_tiles(call) is None
    layers, want = layers_of(call), []
    for w, b in zip(values, call.biases, strict=True):
        want.append(call.x_TK.double() @ w.cuda().double().T + (0 if b is None else b.double()))
    call.x_TK[7] = torch.nan
    x_TC = arrange(call.x_TK, layers.weight)
    for tokens, T in itertools.product((32, 64, 128, 256), (1, 31, 64, 257, 300)):
        plan = TiledPlan.of(tokens, parts, layers.weight, blocks=2 if tokens == 64 else 1)
        for y, wanted in zip(run_tiles(x_TC[:T], 2048, layers, plan), want, strict=True):
            assert bool(y[7:8].isnan().all())
            rows = [t for t in range(T) if t != 7]
            assert_close(y[rows].float(), wanted[rows].float(), TOL[BF16], f"{tokens}, T={T}")


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_a_norm_first(format: str, residual: bool) -> None:
    """In the launch that reads a row, or before those of several."""
    call = on_gpu(call_of(64, 2048, (4096, 512, 33), format, BF16)[0])
    gain, w = torch.randn(2048, dtype=BF16, device="cuda"), call.x_TK[:1].clone()
    lists = quantized_linears.arguments.flat(call)[1:]
    for T in (1, 2, 8, 32, 40, 64):
        x = call.x_TK[:T]
        added = torch.randn_like(x) if residual else None
        given = (x, added, gain, 1e-6, *lists)
        got, again = normed_quantized_linears(*given), normed_quantized_linears(*given)
        *made, _ = normed_linears(x, added, gain, 1e-6, [w], [None])
        want = [*made, *quantized_linears(made[-1], *lists)]
        for g, same, expected in zip(got, again, want, strict=True):
            assert_close(g.float(), expected.float(), TOL[BF16], f"T={T}")
            assert torch.equal(g, same)


def test_launches_that_overlap() -> None:
    """Layers in a row, each of which asks for its codes before the one before has ended."""
    layers = [on_gpu(call_of(8, 2048, (2048,), "int4:1x128:bfloat16", BF16)[0]) for _ in range(6)]
    gain = torch.rand(2048, dtype=BF16, device="cuda")

    def run(x: torch.Tensor, wait: bool = False) -> torch.Tensor:
        for call in layers:
            lists = quantized_linears.arguments.flat(call)[1:]
            _, _, x = normed_quantized_linears(x, x, gain, 1e-6, *lists)
            if wait:
                torch.cuda.synchronize()
        return x

    for T in (1, 8):
        x = layers[0].x_TK[:T]
        want = run(x, wait=True)
        graph, out = captured(partial(run, x))
        for _ in range(20):
            graph.replay()
            assert torch.equal(out, want)


def test_a_captured_call() -> None:
    call = on_gpu(call_of(1, 2048, (4096, 512, 512), "uint4:1x32", BF16)[0])
    given = quantized_linears.arguments.flat(call)
    quantized_linears(*given)
    graph, out = captured(lambda: quantized_linears(*given))
    for _ in range(3):
        call.x_TK.copy_(torch.randn_like(call.x_TK))
        graph.replay()
        want = quantized_linears(*given)
        assert all(torch.equal(a, b) for a, b in zip(out, want, strict=True))


@pytest.mark.parametrize("family", MAKERS)
def test_steps_give_the_tokens_of_the_model_with_its_codes_decoded(family: str) -> None:
    """In float32, where nothing is rounded on the way; then that steps in bfloat16 call the op."""
    model = MAKERS[family]()
    moe_ops.quantize_model(
        model, "int8_w8a16", linear_format="uint4:1x32", head_format="float8_e4m3fn:row",
        progress=False,
    )  # fmt: skip
    model = model.cuda()
    ids = torch.randint(3, 60, (2, 9), device="cuda")
    more: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    want = in_floats(model).cuda().generate(ids, **more)
    assert torch.equal(moe_ops.compile(model).generate(ids, **more), want)
    fast = moe_ops.compile(model.bfloat16())
    with torch.profiler.profile() as profile:
        fast.generate(ids, **more)
        fast.generate(ids, **more)
    assert moe_ops.generation_report(fast)[0].captured
    names = {event.key for event in profile.key_averages()}
    assert any("quantized_linears_" in name for name in names)

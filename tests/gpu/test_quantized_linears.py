"""Linear layers in codes on a GPU: both backends, captured, and steps of whole models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moe_ops
from moe_ops.decode_ops import quantized_linears
from moe_ops.decode_ops.quantized_linears import QuantizedLinearsCall
from moe_ops.testing import BF16, F16, Tol, assert_close
from tests.decode_ops.test_quantized_linears import call_of
from tests.hf.coded_linears import FORMATS, MAKERS, in_floats

pytestmark = pytest.mark.gpu
TOL = {
    BF16: Tol(3e-2, "values and results are rounded to 8 bits"),
    F16: Tol(4e-3, "values and results are rounded to 11 bits"),
}
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
    call, values = call_of(64, shape[1], shape[0], format, dtype)
    call = on_gpu(call)
    whole = call.x_TK
    wide = [w.cuda().double() for w in values]
    for T in (1, 2, 3, 8, 16, 17, 32, 33, 64):
        call.x_TK = whole[:T]
        given = quantized_linears.arguments.flat(call)
        for name in ("triton", "triton.decoded"):
            with moe_ops.using(name, quantized_linears):
                got, again = quantized_linears(*given), quantized_linears(*given)
            for y, same, w, b in zip(got, again, wide, call.biases, strict=True):
                want = call.x_TK.double() @ w.T + (0 if b is None else b.double())
                assert_close(y.float(), want.float(), TOL[dtype], f"{name}, T={T}")
                assert torch.equal(y, same)


def test_a_captured_call() -> None:
    call = on_gpu(call_of(1, 2048, (4096, 512, 512), "uint4:1x32", BF16)[0])
    given = quantized_linears.arguments.flat(call)
    quantized_linears(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = quantized_linears(*given)
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
    assert any("quantized_linears_few" in name for name in names)

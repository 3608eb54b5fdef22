"""Models at real widths become code for a GPU, here without one; tests/gpu runs them on one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import moe_ops
from moe_ops import QuantConfig
from moe_ops.testing import BF16, F32
from tests.absent_gpu import absent_gpu
from tests.hf import real

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them on the GPU"),
]


BLOCK_FLOAT8 = ("float8_e4m3fn:128x128", "float8_e4m3fn:1x128")


def model_and_ids(
    family: str, batch: int, length: int, dtype: torch.dtype = BF16
) -> tuple[nn.Module, torch.Tensor]:
    layers = 2 if family == "qwen3_moe" else None  # all are alike
    model = real.build(family, device="cuda", dtype=dtype, layers=layers)
    return model, torch.full((batch, length), real.FIRST_PLAIN_TOKEN, device="cuda")


FORWARDS = [
    ("qwen3_moe", 1, 128, BF16),
    pytest.param("olmoe", 3, 40, F32, marks=pytest.mark.every),
    # Loops of 64 * S and of 64 * S * S in one kernel.
    pytest.param("mimo_v2_flash", 3, 48, BF16, marks=pytest.mark.every),
    pytest.param("phimoe", 1, 128, BF16, marks=pytest.mark.every),
]


# Layers of a prompt, of quantised experts, are compiled so below.
@pytest.mark.every
@pytest.mark.parametrize(("family", "batch", "length", "dtype"), FORWARDS)
def test_layers_of_a_forward_run_the_same_code_with_our_kernels(
    family: str, batch: int, length: int, dtype: torch.dtype
) -> None:
    """A code for each kind of layer and for the last norm."""
    with absent_gpu() as codes:
        model, ids = model_and_ids(family, batch, length, dtype)
        with torch.inference_mode():
            out = moe_ops.compile(model)(input_ids=ids, use_cache=False)
        assert out.logits.shape == (batch, length, real.VOCAB)
    found = [calls(code, "experts") + calls(code, "experts_onto") for code in codes]
    of_layers = [lines for lines in found if lines]
    # Two kinds of attention with experts, and one of them without.
    kinds = (4, 2) if family == "mimo_v2_flash" else (2, 1)
    assert (len(codes), len(of_layers)) == kinds
    for (line,) in of_layers:
        assert "triton.grouped" in line and "aten" not in line


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ({"fullgraph": True}, "triton.grouped"),
        pytest.param({"dynamic": False}, "triton.rows", marks=pytest.mark.every),
    ],
    ids=["any size", "one size"],
)
@pytest.mark.parametrize(("family", "batch", "length", "dtype"), FORWARDS)
def test_a_forward_is_one_graph_with_our_kernels(
    family: str,
    batch: int,
    length: int,
    dtype: torch.dtype,
    options: dict[str, bool],
    backend: str,
) -> None:
    with absent_gpu() as codes:
        model, ids = model_and_ids(family, batch, length, dtype)
        with torch.inference_mode():
            out = moe_ops.compile(model, **options)(input_ids=ids, use_cache=False)
        assert out.logits.shape == (batch, length, real.VOCAB)
    (code,) = codes
    layers = model.config.num_hidden_layers
    assert code.count("torch.ops.moe_ops.experts.planned") >= layers
    assert backend in code and "aten" not in plans(code)


# Prompts and steps of quantised experts, as below, are told from these by their experts alone.
@pytest.mark.every
@pytest.mark.parametrize(("family", "batch", "length"), [("qwen3_moe", 1, 128), ("olmoe", 1, 1)])
def test_a_prompt_and_a_step_of_generate(family: str, batch: int, length: int) -> None:
    with absent_gpu() as codes:
        model, ids = model_and_ids(family, batch, length)
        decoder = moe_ops.compile(model)._moe_ops_generation.decoder
        lease = decoder.lease(batch, length + 16)
        assert lease.read(ids, use_cache=True).logits.shape == (batch, length, real.VOCAB)
        prompt = len(codes)
        lease.steps.run(lease.code)
        assert lease.steps.logits.shape == (batch, 1, real.VOCAB)
    # A layer, the rotary embedding and the last norm; steps have their masks besides.
    assert prompt == 2 and len(codes) == 6
    assert any("moe_ops.rope_attention" in code for code in codes[prompt:])


@pytest.mark.parametrize(
    "formats",
    [("int4:1x128:bfloat16", ""), BLOCK_FLOAT8, ("mxfp4", "")],
    ids=lambda formats: formats[0],
)
@pytest.mark.every
def test_quantized_experts_run_on_kernels(formats: tuple[str, str]) -> None:
    """The step of generate has them onto the residual, with their scales."""
    weights, inputs = formats
    with absent_gpu() as codes:
        model = real.build("qwen3_moe", device="cuda", dtype=BF16, layers=2)
        moe_ops.quantize_model(model, QuantConfig(weights=weights, inputs=inputs))
        decoder = moe_ops.compile(model)._moe_ops_generation.decoder
        lease = decoder.lease(1, 144)
        ids = torch.full((1, 128), real.FIRST_PLAIN_TOKEN, device="cuda")
        assert lease.read(ids, use_cache=True).logits.shape == (1, 128, real.VOCAB)
        prompt = len(codes)
        lease.steps.run(lease.code)
        assert lease.steps.logits.shape == (1, 1, real.VOCAB)
    assert prompt == 2 and len(codes) == 6  # both layers run the same code
    assert any("moe_ops.rope_attention" in code for code in codes[prompt:])
    (layer,) = {line for code in codes[:prompt] for line in calls(code, "experts")}
    assert f"'{weights}'" in layer and "triton.rows" in layer and "triton.tiny" in layer
    (step,) = {line for code in codes[prompt:] for line in calls(code, "experts_onto")}
    assert f"'{weights}'" in step and "plan='triton.tiny'" in step


def calls(code: str, op: str) -> list[str]:
    """The lines of a graph's code that call an op by a plan."""
    return [line for line in code.splitlines() if f"= torch.ops.moe_ops.{op}.planned(" in line]


def plans(code: str) -> set[str]:
    """The plans of experts in a graph's code."""
    lines = [line for line in code.splitlines() if "moe_ops.experts.planned" in line]
    return {line.partition("plan=")[2] for line in lines}

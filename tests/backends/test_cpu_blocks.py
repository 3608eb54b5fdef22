"""ggml's K quants on the CPU, by every set of instructions that is here; NF4 is in
`test_cpu_codes.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ops import experts
from moe_ops.backends.cpu_codes import refusal_of_weights
from moe_ops.backends.cpu_linears import multiply, supports
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import BF16, F32, TOL, Case, assert_close
from tests.backends.code_layers import by_format_and_instructions, layer_of, run
from tests.backends.test_cpu_codes import check
from tests.decode_ops.test_quantized_linears import call_of as linear_call_of
from tests.quant.blocks import any_blocks

FEW = Case(name="few", T=5, E=2, K=2, D=512, I=256)
MANY = Case(name="many", T=40, E=2, K=1, D=256, I=256)


def check_cases(format: str) -> None:
    for dtype in (F32, BF16):
        for case in (FEW, MANY):
            check(layer_of(case, format, dtype), f"{format}, {case.name}")


@by_format_and_instructions("format", ["q4_k", "q6_k"], "AVX512", "AVX2", "PLAIN")
def test_cpus_multiply_what_codes_stand_for(format: str, instructions: str) -> None:
    check_cases(format)


@pytest.mark.every
@by_format_and_instructions("format", ["q5_k"], "AVX512", "AVX2", "PLAIN")
def test_so_do_codes_of_five_bits(format: str, instructions: str) -> None:
    check_cases(format)


@by_format_and_instructions("format", ["q4_k", "q6_k"], "AVX2", "PLAIN")
def test_cpus_decode_every_code_exactly(format: str, instructions: str) -> None:
    """Token t reads column t of the second weight: few rows, and so many that codes are decoded
    ahead of the products."""
    n = 256
    one = packing.quantize(torch.eye(n).expand(1, n, n), Format.of(format))
    w2 = any_blocks(format, n, n)[None]
    unit = packing.dequantize(one.values, one.scale, Format.of(format))[0, 0, 0]
    for tokens in (8, n):
        x = torch.eye(n)[:tokens] / unit
        call: dict[str, Any] = {
            "x_TD": x, "weights_TK": torch.ones(tokens, 1),
            "ids_TK": torch.zeros(tokens, 1, dtype=torch.int32), "kind": "relu2", "gated": False,
            "w13_EFD": one.values, "w13_scale_EFG": one.scale,
            "w2_EDI": w2, "w2_scale_EDG": torch.ones(1, 1, 1), "w_format": format,
        }  # fmt: skip
        assert_close(run(call), experts.reference(**call), TOL["expert_gemm", F32], format)


@pytest.mark.parametrize("format", ["q4_k", "q6_k"])
def test_an_infinite_token_is_infinite_where_it_is_defined(format: str) -> None:
    """Minima are subtracted from codes then, not from sums."""
    call = layer_of(FEW, format, F32)
    call["x_TD"][1, 7] = float("inf")
    got, want = run(call), experts.reference(**call)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    others = [0, 2, 3, 4]
    assert_close(got[others], want[others], TOL["experts", F32], format)


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("format", ["q4_k", pytest.param("q6_k", marks=pytest.mark.every)])
def test_linear_layers(format: str, rows: int) -> None:
    call, values = linear_call_of(rows, 512, (37, 5), format, BF16)
    assert supports(call) is None
    for y, w, b in zip(multiply(call), values, call.biases, strict=True):
        want = call.x_TK.float() @ w.float().T + (0 if b is None else b.float())
        assert_close(y.float(), want, TOL["experts", BF16], format)


def test_blocks_have_one_scale_above_a_row() -> None:
    why = refusal_of_weights("q4_k:1x256", 512)
    assert why == "needs one scale above a row of q4_k blocks, got groups of 256"
    assert refusal_of_weights("q4_k:row", 512) is None

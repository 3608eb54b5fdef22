"""Kernels on ggml's K quants and on NF4, in Triton's interpreter without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.backends import triton_formats, triton_support
from moe_ops.testing import DEVICE, F32, Case
from tests.chosen import in_turn
from tests.kernels.codes import Weights, product
from tests.kernels.test_decoded import decoded
from tests.kernels.test_quantized_experts import call_of, check, each_dtype
from tests.quant.blocks import K_FORMATS, any_blocks

WIDE = Case(name="blocks", T=3, E=2, K=2, D=256, I=256)
each_format = pytest.mark.parametrize("w_format", K_FORMATS)
NF4 = ("nf4", "nf4:1x32", "nf4:row")


def weights(w_format: str, rows: int, columns: int) -> Weights:
    values = any_blocks(w_format, rows, columns)[None].to(DEVICE)
    scale = torch.ones(1, 1, 1, device=DEVICE)
    return Weights(values=values, scale=scale, zero=None, format=w_format)


@each_format
def test_every_code_is_decoded_to_the_bit(w_format: str) -> None:
    blocks = weights(w_format, rows=20, columns=512)
    assert torch.equal(decoded(blocks, F32)[0], blocks.decoded())
    halved = replace(blocks, scale=blocks.scale / 4)
    assert torch.equal(decoded(halved, F32)[0], blocks.decoded() / 4)


@in_turn(each_dtype, each_format)
def test_a_product_with_the_unit_matrix_is_the_matrix(w_format: str, dtype: torch.dtype) -> None:
    blocks = weights(w_format, rows=32, columns=256)
    unit = torch.eye(256, dtype=dtype, device=DEVICE)
    assert torch.equal(product(blocks, unit), blocks.decoded().to(dtype).float())


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "biases": ("q4_k", {"biases": True}),
    "no gate": ("q5_k", {"gated": False, "kind": "relu2"}),
    "interleaved": ("q6_k", {"interleaved": True, "biases": True}),
    **{format: (format, {}) for format in (*K_FORMATS, *NF4)},
}


@in_turn(
    each_dtype,
    pytest.mark.parametrize("kernel", ["triton.tiny", "triton.rows", "triton.grouped"]),
    pytest.mark.parametrize("case", CASES),
)
def test_a_layer(case: str, kernel: str, dtype: torch.dtype) -> None:
    w_format, more = CASES[case]
    check(kernel, call_of(WIDE, w_format, dtype=dtype, **more))


def test_what_is_refused_says_so() -> None:
    call = call_of(WIDE, "q6_k")
    odd = torch.empty(call.w2_EDI.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:]
    moved = replace(call, w2_EDI=odd.view(call.w2_EDI.shape))
    why = triton_support.supports_codes(moved)
    assert why == "needs weights of 6 bits that begin at a multiple of 2 bytes"
    assert triton_formats.refusal("q4_k", "", (256, 512)) is None
    why = triton_formats.refusal("q4_k:1x256", "", (256, 512))
    assert why == "needs one scale above a row of q4_k blocks, got groups of 256"

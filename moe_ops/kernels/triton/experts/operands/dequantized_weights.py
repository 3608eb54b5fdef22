"""The weights of a layer as floats, for products of so many rows that reading these is cheap.

Decoding writes 16 bits a weight once; the kernels of floats then multiply at their rate. As long as
these floats live, a layer takes their memory, and no more than one layer's do at a time.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton import Weight, in_blocks
from moe_ops.kernels.triton.experts.formats.codes import brings_its_decoder
from moe_ops.kernels.triton.experts.formats.four_bits import float4_of
from moe_ops.kernels.triton.experts.formats.halves import half_of
from moe_ops.kernels.triton.experts.formats.k_quants import halves_of_blocks
from moe_ops.kernels.triton.experts.formats.registered import values_of_words, words_of
from moe_ops.kernels.triton.experts.formats.scales import factor_at, group_row, scale_of
from moe_ops.kernels.triton.experts.formats.six_bits import in_order, sixes_of
from moe_ops.kernels.triton.experts.weights import Experts
from moe_ops.kernels.triton.launch import on_its_device, pdl_options, take_turn
from moe_ops.kernels.triton.replay import launch

ROWS_AT_ONCE, COLUMNS_AT_ONCE = 16, 256


@triton.jit
def halves_of(pairs):
    return tl.join(half_of(pairs, False, tl.float16), half_of(pairs, True, tl.float16))


@triton.jit
def decode_kernel(
    w_ptr, w_scale_ptr, w_zero_ptr, global_scale_ptr, out_ptr, ALL_ROWS,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, W: tl.constexpr, SHARED: tl.constexpr,
    EACH: tl.constexpr, PIECES: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: BM rows of all experts, BD columns; EACH columns share PIECES words or bytes."""
    ELEMENT: tl.constexpr = W.element
    GROUP: tl.constexpr = W.across
    KIND: tl.constexpr = W.kind
    take_turn(PDL)
    row_M = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    word_W = tl.program_id(1) * (BD // EACH) + tl.arange(0, BD // EACH)
    inside_MW = (row_M < ALL_ROWS)[:, None] & (word_W * EACH < COLUMNS)[None, :]
    group_M = group_row(row_M // ROWS, row_M % ROWS, ROWS, COLUMNS, W)
    group_W = 0 * word_W if GROUP == -1 else word_W * EACH // GROUP
    factor_MW = group_M[:, None] + group_W[None, :]
    scale_MW = scale_of(tl.load(w_scale_ptr + factor_MW, mask=inside_MW, other=0), KIND)
    if global_scale_ptr is not None:
        if SHARED == "":
            at_M = row_M // ROWS
        else:
            at_M = factor_at(row_M // ROWS, row_M % ROWS, ROWS, SHARED)
        global_scale_M = tl.load(global_scale_ptr + at_M, mask=row_M < ALL_ROWS, other=0.0)
        scale_MW = scale_MW * global_scale_M[:, None]
    place_W = PIECES * word_W
    at_MW = w_ptr + row_M[:, None] * (COLUMNS // EACH * PIECES) + place_W[None, :]
    if brings_its_decoder(W):
        words_MW = words_of(at_MW, inside_MW, W, "")
        value = tl.reshape(values_of_words(words_MW, W), (BM, BD // EACH, EACH))
        if w_zero_ptr is not None:
            zero_MW = tl.load(w_zero_ptr + factor_MW, mask=inside_MW, other=0).to(tl.float32)
            value -= zero_MW[:, :, None]
        value = value * scale_MW[:, :, None]
    elif W.bits == 6:
        w_MW = tl.load(at_MW, mask=inside_MW)
        second_MW = tl.load(at_MW + 1, mask=inside_MW)
        third_MW = tl.load(at_MW + 2, mask=inside_MW)
        sixes = sixes_of(w_MW, second_MW, third_MW, ELEMENT, tl.float16)
        pairs = tl.reshape(in_order(sixes), (BM, BD // EACH, 8))
        value = tl.reshape(tl.permute(halves_of(pairs), (0, 1, 3, 2)), (BM, BD // EACH, EACH))
        value = value.to(tl.float32) * scale_MW[:, :, None]
    elif EACH == 1:
        value = tl.load(at_MW, mask=inside_MW).to(tl.float32)
        if w_zero_ptr is not None:
            value -= tl.load(w_zero_ptr + factor_MW, mask=inside_MW, other=0).to(tl.float32)
        value = (value * scale_MW)[:, :, None]
    else:
        w_MW = tl.load(at_MW, mask=inside_MW)
        code = (w_MW[:, :, None] >> (4 * tl.arange(0, EACH))[None, None, :]) & 15
        if ELEMENT == "float4_e2m1":
            value = float4_of(code)
        elif w_zero_ptr is None:
            value = (code - 8).to(tl.float32)
        else:
            zero_MW = tl.load(w_zero_ptr + factor_MW, mask=inside_MW, other=0).to(tl.int32)
            value = (code - zero_MW[:, :, None]).to(tl.float32)
        value = value * scale_MW[:, :, None]
    column = (word_W * EACH)[None, :, None] + tl.arange(0, EACH)[None, None, :]
    at = out_ptr + row_M[:, None, None] * COLUMNS + column
    tl.store(at, value.to(out_ptr.dtype.element_ty), mask=inside_MW[:, :, None])


@triton.jit
def decode_blocks_kernel(
    w_ptr, w_scale_ptr, out_ptr, ALL_ROWS, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    W: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BM rows of all experts, a block of columns, whose halves come in turn."""
    KIND: tl.constexpr = W.kind
    BD: tl.constexpr = W.values
    take_turn(PDL)
    row_M = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside_M = row_M < ALL_ROWS
    group_M = group_row(row_M // ROWS, row_M % ROWS, ROWS, COLUMNS, W)
    scale_M = scale_of(tl.load(w_scale_ptr + group_M, mask=inside_M, other=0), KIND)
    w_M1 = w_ptr + (row_M * (COLUMNS // BD * W.units))[:, None]
    for half in tl.static_range(2):
        start = tl.program_id(1) * BD + half * (BD // 2)
        value = halves_of_blocks(w_M1, start, inside_M, W, "") * scale_M[:, None]
        at = out_ptr + row_M[:, None] * COLUMNS + (start + tl.arange(0, BD // 2))[None, :]
        tl.store(at, value.to(out_ptr.dtype.element_ty), mask=inside_M[:, None])


@on_its_device
def decode(
    w: Tensor, scales: tuple[Tensor | None, ...], weight: Weight, columns: int, dtype: torch.dtype,
    shared: str = "",
) -> Tensor:  # fmt: skip
    """Values [experts, rows, columns], rounded to dtype, of codes as `as_stored` gives them.

    scales: those of groups, zero points and those of experts, which there may be none of; shared:
    how the rows of an expert share the last, as `Experts.shared13` says it, or "rows" where each
    row has its own.
    """
    (E, rows), (each, pieces) = w.shape[:2], weight.together
    out = torch.empty(E, rows, columns, dtype=dtype, device=w.device)
    if in_blocks(weight):
        launch(
            decode_blocks_kernel, (triton.cdiv(E * rows, ROWS_AT_ONCE), columns // each),
            w, scales[0], out, E * rows, ROWS=rows, COLUMNS=columns, W=weight, BM=ROWS_AT_ONCE,
            num_warps=4, **pdl_options(w),
        )  # fmt: skip
        return out
    grid = (triton.cdiv(E * rows, ROWS_AT_ONCE), triton.cdiv(columns, COLUMNS_AT_ONCE))
    launch(
        decode_kernel, grid, w, *scales, out, E * rows,
        ROWS=rows, COLUMNS=columns, W=weight, SHARED=shared, EACH=each, PIECES=pieces,
        BM=ROWS_AT_ONCE, BD=COLUMNS_AT_ONCE, num_warps=4, **pdl_options(w),
    )  # fmt: skip
    return out


def decoded(layer: Experts, dtype: torch.dtype) -> Experts:
    """The layer with its codes decoded to floats."""
    c, (_, _, I) = layer.codes, layer.sizes
    assert c is not None
    return replace(
        layer,
        w13_EFD=decoded13(layer, dtype),
        w2_EDI=decode(layer.w2_EDI, layer.stack2[1:4], c.weight, I, dtype),
        codes=None,
    )


def decoded13(layer: Experts, dtype: torch.dtype) -> Tensor:
    """The codes of the first weight decoded to floats."""
    c, (_, D, _) = layer.codes, layer.sizes
    assert c is not None
    return decode(layer.w13_EFD, layer.stack13[1:4], c.weight, D, dtype, layer.shared13)

"""Quantised experts for one token, or few rows an expert, on Hopper:
`register_stream_gluon.py` launched."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton import LARGE, MOST_OF_SUMS, STEP, Constant, most_streamed
from moe_ops.kernels.triton.experts.formats.codes import Codes, floats_of
from moe_ops.kernels.triton.experts.operands.fake_quantized import emulated_hidden, emulated_tokens
from moe_ops.kernels.triton.experts.operands.group_scales import quantize_tokens
from moe_ops.kernels.triton.experts.operands.row_scales import (
    by_expert,
    quantize_h,
    quantize_pairs,
    quantize_x,
)
from moe_ops.kernels.triton.experts.schedule.combine import sum_rows
from moe_ops.kernels.triton.experts.schedule.sort import most_units, sort_pairs
from moe_ops.kernels.triton.experts.weights import Experts, bias_stride
from moe_ops.kernels.triton.launch import on_its_device, pdl_options
from moe_ops.kernels.triton.replay import launch

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Of float4, those that one tile of 8 tokens serves better than two, where columns fill all steps
# and where they do not: then loads have masks.
MOST_OF_8, MOST_OF_8_MASKED = 7, 8
SHORT = 1024  # columns, of which rows of W2 are soon read if they have fewer
FEW_PROGRAMS = 512  # of 128 rows, of a GPU with 132 processors


@dataclass(frozen=True, eq=False)
class Sizes(Constant):
    """The sizes of a tile, SIZES of kernels: S shares, MW warps along rows, MT tiles of 16 rows for
    each warp, NT tiles of 8 tokens."""

    S: int
    MW: int
    MT: int
    NT: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The sizes of a launch: S, MW, MT and NT as in `Sizes`, C parts of the columns, and how many
    steps ahead codes are loaded."""

    S: int = 1
    MW: int = 1
    MT: int = 1
    NT: int = 1
    C: int = 1
    ahead: int = 2

    @property
    def warps(self) -> int:
        return self.S * self.MW

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.S, self.MW, self.MT, self.NT)

    @property
    def rows(self) -> int:
        return 16 * self.MW * self.MT

    @property
    def tokens(self) -> int:
        return 8 * self.NT


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    up: Stream
    down: Stream


def tiles_of_one(
    x_TD: Tensor, ids_TK: Tensor, layer: Experts, expert_map: Tensor | None
) -> Streams:
    """The tiles of a call of one token by the tables."""
    return one_streams(ids_TK.shape[1], layer)


def tiles_of_few(
    x_TD: Tensor, ids_TK: Tensor, layer: Experts, expert_map: Tensor | None
) -> Streams:
    """The tiles of a call of few rows an expert by the tables."""
    experts = layer.sizes[0] if expert_map is None else expert_map.shape[0]
    streams = few_streams(ids_TK.numel() / experts, layer)
    assert streams is not None, "more rows are those of another path"
    return streams


def one_streams(K: int, layer: Experts) -> Streams:
    """The launches for one token: the fastest of about fifteen that were tried on an H200 for
    Qwen3-30B's and Mixtral's layers, or within 3 % of it."""
    codes, (_, D, I) = _codes(layer), layer.sizes
    C = max(1, 8 // triton.next_power_of_2(K))
    up, down = Stream(S=4, C=4), Stream(S=8, C=C)
    if codes.bits == 4 and codes.one_a_step:
        if D * I >= LARGE:
            return Streams(up=replace(up, MT=2), down=replace(down, MT=2, ahead=3))
        return Streams(up=up, down=replace(down, ahead=8))
    if codes.bits == 6:  # as four bits without sums by step; no other was tried
        return Streams(up=replace(up, MT=2), down=replace(down, ahead=3))
    if codes.weight.element == "float4_e2m1":
        return _one_of_float4(K, layer, up, down)
    return Streams(up=up, down=down)


def _one_of_float4(K: int, layer: Experts, up: Stream, down: Stream) -> Streams:
    """The launches for one token and weights of float4: the fastest of 5 to 9 on an H200, or within
    5 % of it, for six layers in groups of 32 and two in groups of 16
    (`benchmarks/results/float4_tiles_h200.json`)."""
    codes, (_, D, I) = _codes(layer), layer.sizes
    large, in_16 = D * I >= LARGE, codes.weight.across == 16
    few = K * triton.cdiv(_rows13(layer), 32) < FEW_PROGRAMS
    return Streams(
        up=replace(up, MT=1 if few and not large and not in_16 else 2, ahead=2 if large else 4),
        down=replace(down, ahead=3 if large or in_16 else 4),
    )


def few_streams(rows_per_expert: float, layer: Experts) -> Streams | None:
    """The launches for few rows an expert on average; None for so many that shared memory serves
    them better. They were tried from 4 to 256 tokens, on the GPU and the layers of
    `one_streams`."""
    codes, (E, D, I) = _codes(layer), layer.sizes
    large, sums = D * I >= LARGE, codes.one_a_step
    if rows_per_expert > most_streamed(codes.weight):
        return None
    stream = Stream(MW=4, MT=2)
    if codes.weight.element == "float4_e2m1" and not sums:
        stream = _few_of_float4(rows_per_expert, layer)
    elif codes.weight.element == "uint4" and not sums:
        stream = Stream(MW=4)  # more would spill
    elif codes.bits == 8:
        stream = Stream(MW=4, MT=2 if large and codes.quantizes else 1)
    elif large and not sums and rows_per_expert <= MOST_OF_SUMS:
        stream = Stream(MW=4, ahead=4)
    elif large and sums and rows_per_expert * E * triton.cdiv(D, 128) < FEW_PROGRAMS:
        stream = Stream(MW=4, ahead=4)  # twice as many
    elif not sums and rows_per_expert > MOST_OF_SUMS:
        stream = Stream(MW=4, MT=2, NT=2)
    return Streams(up=stream, down=stream)


def _few_of_float4(rows_per_expert: float, layer: Experts) -> Stream:
    """The launch for few rows an expert and weights of float4. 3 or 4 were tried from 2 to 400
    tokens, on the GPU and the layers of `_one_of_float4`."""
    codes, (E, D, I) = _codes(layer), layer.sizes
    in_16 = codes.weight.across == 16
    many = MOST_OF_8_MASKED if D % STEP or I % STEP else MOST_OF_8
    if rows_per_expert > (MOST_OF_SUMS if in_16 else many):
        return Stream(MW=4, MT=2, NT=2)
    if D * I >= LARGE:
        few = not in_16 and E * triton.cdiv(D, 128) < FEW_PROGRAMS
        if rows_per_expert <= 1 or few:
            return Stream(MW=4, ahead=4)
    elif rows_per_expert <= 1 and I < SHORT and not in_16:
        return Stream(MW=4, MT=2, ahead=3)
    return Stream(MW=4, MT=2)


def _codes(layer: Experts) -> Codes:
    assert layer.codes is not None
    return layer.codes


def _rows13(layer: Experts) -> int:
    """The rows of an expert's first weight."""
    return layer.sizes[2] * (2 if layer.act.gated else 1)


@on_its_device
def run_one(
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    layer: Experts,
    expert_map: Tensor | None,
    residual_TD: Tensor | None = None,
    tiles: Streams | None = None,
) -> Tensor:
    """The `experts` op for one token, in two launches; two more quantise inputs of 8 bits, or
    four if one scale is that of all of them. Without `tiles` by those of `tiles_of_one`."""
    from moe_ops.kernels.triton.experts.products import register_stream_gluon as kernels

    K, (E, D, I), codes = ids_TK.shape[1], layer.sizes, _codes(layer)
    tiles = tiles or tiles_of_one(x_TD, ids_TK, layer, expert_map)
    W, n_map = layer.weight, 0 if expert_map is None else expert_map.shape[0]
    up, down = tiles.up, tiles.down
    dtype = floats_of(x_TD, codes)
    h_KI, out_TD = (x_TD.new_empty(shape, dtype=dtype) for shape in ((K, I), (1, D)))
    F = _rows13(layer)
    w13, w2 = _words(layer)
    pdl, options = pdl_options(x_TD)
    x_TD, x_scale_TG, DTYPE = _operand(x_TD, layer, ids_TK, expert_map, codes.x_scale_TG)
    launch(
        kernels.one_up, (K * triton.cdiv(F, up.rows),),
        x_TD, x_scale_TG, ids_TK, weights_TK, expert_map, w13, *layer.scales13, layer.b13_EF, h_KI,
        n_map, bias_stride(layer.b13_EF),
        E=E, D=D, I=I, ACT=layer.act, W=W, SHARED=layer.shared13, DTYPE=DTYPE, P=up.ahead,
        SIZES=up.sizes, PDL=pdl, num_warps=up.warps, **options,
    )  # fmt: skip
    if codes.by_row:
        h_KI, h_scale_KG = quantize_pairs(h_KI, codes, ids_TK, expert_map, weights_TK)
        h_KI = h_KI.view(torch.int32)
    else:
        h_KI, h_scale_KG, _ = _operand(h_KI, layer, ids_TK, expert_map)
    launch(
        kernels.one_down, (triton.cdiv(D, down.rows),),
        h_KI, h_scale_KG, ids_TK, weights_TK, expert_map, w2, *layer.scales2, layer.b2_ED,
        residual_TD, out_TD, n_map, bias_stride(layer.b2_ED),
        E=E, K=K, D=D, I=I, W=W, DTYPE=DTYPE, C=down.C, P=down.ahead, SIZES=down.sizes, PDL=pdl,
        num_warps=down.warps, **options,
    )  # fmt: skip
    return out_TD


@on_its_device
def run(
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    layer: Experts,
    expert_map: Tensor | None,
    residual_TD: Tensor | None = None,
    tiles: Streams | None = None,
) -> Tensor:
    """The `experts` op, each weight read once for every few rows of its expert; without `tiles` by
    those of `tiles_of_few`."""
    from moe_ops.kernels.triton.experts.products import register_stream_gluon as kernels

    (T, K), (E, D, I), codes = ids_TK.shape, layer.sizes, _codes(layer)
    x_TD = emulated_tokens(x_TD, codes)
    tiles = tiles or tiles_of_few(x_TD, ids_TK, layer, expert_map)
    R, up, down = T * K, tiles.up, tiles.down
    rows_R, inverse_R, ends_E = sort_pairs(ids_TK, E, expert_map)
    dtype = floats_of(x_TD, codes)
    h_RI, y_RD = (x_TD.new_empty(R, width, dtype=dtype) for width in (I, D))
    F = _rows13(layer)
    BE = max(2, triton.next_power_of_2(E))
    w13, w2 = _words(layer)
    pdl, options = pdl_options(x_TD)
    x_TD, x_scale_TG, DTYPE = _operand(x_TD, layer, ids_TK, expert_map, codes.x_scale_TG)
    tokens_K = 1 if by_expert(codes.x_scale) else K  # each pair has a row of its own
    early_TK, late_TK = codes.weigh(weights_TK)
    launch(
        kernels.few_up, (most_units(R, E, up.tokens) * triton.cdiv(F, up.rows),),
        x_TD, x_scale_TG, rows_R, ends_E, early_TK, w13, *layer.scales13, layer.b13_EF, h_RI,
        x_TD.stride(0), bias_stride(layer.b13_EF),
        E=E, K=tokens_K, D=D, I=I, ACT=layer.act, W=layer.weight, SHARED=layer.shared13,
        DTYPE=DTYPE, BE=BE, P=up.ahead, SIZES=up.sizes, PDL=pdl, num_warps=up.warps, **options,
    )  # fmt: skip
    h_RI = emulated_hidden(h_RI, I, codes, ends_E)
    if codes.by_row:
        routed = (ids_TK, expert_map)
        h_RI, h_scale_RG = quantize_h(h_RI, codes, ends_E, weights_TK, rows_R, routed)
        h_RI = h_RI.view(torch.int32)
    else:
        h_RI, h_scale_RG, _ = _operand(h_RI, layer, ids_TK, expert_map)
    launch(
        kernels.few_down, (most_units(R, E, down.tokens) * triton.cdiv(D, down.rows),),
        h_RI, h_scale_RG, rows_R, ends_E, early_TK, w2, *layer.scales2, layer.b2_ED, y_RD,
        bias_stride(layer.b2_ED),
        E=E, D=D, I=I, W=layer.weight, DTYPE=DTYPE, BE=BE, P=down.ahead, SIZES=down.sizes,
        PDL=pdl, num_warps=down.warps, **options,
    )  # fmt: skip
    return sum_rows(y_RD, inverse_R, late_TK, K, residual_TD)


def _operand(
    x_TD: Tensor, layer: Experts, ids_TK: Tensor, expert_map: Tensor | None,
    given_TG: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, tl.dtype]:  # fmt: skip
    """Tokens, their scales if they have any, and what they are multiplied as: codes of 8 bits in
    words, which float16 holds exactly."""
    codes = _codes(layer)
    if not codes.quantizes:
        return x_TD, None, DTYPES[x_TD.dtype]
    if codes.by_row:
        x_TD, scale_T = quantize_x(x_TD, codes, ids_TK, expert_map)
        return x_TD.view(torch.int32), scale_T, tl.float16
    x_TD, scale_TG = (
        (x_TD, given_TG) if given_TG is not None else quantize_tokens(x_TD, codes.weight)
    )
    return x_TD.view(torch.int32), scale_TG, tl.float16


def _words(layer: Experts) -> tuple[Tensor, Tensor]:
    """Weights in words of 32 bits; of codes of six bits of 64, which a thread loads at once."""
    dtype = torch.int64 if _codes(layer).bits == 6 else torch.int32
    return layer.w13_EFD.view(dtype), layer.w2_EDI.view(dtype)

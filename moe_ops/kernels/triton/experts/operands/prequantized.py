"""Tokens that come as codes of 8 bits with their scales, as other ranks send them: copied to the
rows of their experts, or decoded where inputs are emulated. Other kernels read them as they came.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.experts.formats.codes import Codes
from moe_ops.kernels.triton.experts.formats.order import in_float8_order, place_in_stages
from moe_ops.kernels.triton.experts.formats.scales import scale_of
from moe_ops.kernels.triton.experts.operands.float8_groups import places_for_scales
from moe_ops.kernels.triton.experts.schedule.sort import row_of
from moe_ops.kernels.triton.launch import pdl_options, take_turn
from moe_ops.kernels.triton.replay import launch

BOX_BYTES = 16  # which addresses of boxes that TMA copies are multiples of
TOKENS, WORDS, COLUMNS = 16, 64, 1024  # of a program: tokens and words of codes; columns decoded


@triton.jit(do_not_specialize=["T", "M"])
def copy_to_rows_kernel(
    codes_ptr, scale_ptr, inverse_ptr, out_ptr, out_scale_ptr, stride_scale, T, M,
    K: tl.constexpr, W: tl.constexpr, G: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr,
    BG: tl.constexpr, KIND: tl.constexpr, ARRANGED: tl.constexpr, STAGED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: BW words of the codes of BT tokens, or bytes if they become ARRANGED as
    `in_float8_order` says, written to each of their rows; the first one of these tokens copies
    their scales. STAGED: the columns that share one, where they are laid out as `place_in_stages`
    has them, with zeros behind the last one."""
    take_turn(PDL)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    w = (tl.program_id(1) * BW + tl.arange(0, BW))[None, :]
    g = tl.arange(0, BG)[None, :]
    t_T1 = t.to(tl.int64)[:, None]
    here = (t < T)[:, None]
    if M is not None:  # a slot is read if it is used
        here = (row_of(inverse_ptr, t, t < T, M) >= 0)[:, None]
    words = tl.load(codes_ptr + t_T1 * W + w, mask=here & (w < W), other=0)
    mine = here & (g < tl.where(tl.program_id(1) == 0, BG if STAGED > 0 else G, 0))
    scales = scale_of(tl.load(scale_ptr + t_T1 * G + g, mask=mine & (g < G), other=0), KIND)
    if ARRANGED:
        words = in_float8_order(words)
    for k in range(K):
        row = row_of(inverse_ptr, t * K + k, t < T, M).to(tl.int64)[:, None]
        tl.store(out_ptr + row * W + w, words, mask=(row >= 0) & (w < W))
        if STAGED > 0:
            place = place_in_stages(g, STAGED)
            at, there = out_scale_ptr + row * stride_scale + place, place < stride_scale
        else:
            at, there = out_scale_ptr + g * stride_scale + row, g < G
        tl.store(at, scales, mask=mine & there & (row >= 0))


def in_rows(
    x_TD: Tensor, scale_TG: Tensor, inverse_R: Tensor, top_k: int, slots: int | None = None,
    arranged: bool = False, group: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes [R, D] of the token in each row (`sort_pairs`), and float32 scales [groups, R or more],
    as `quantize_sorted` lays them out, or of a `group` of columns each as `quantize_in_order` does.
    Rows of no pair stay unwritten. Codes fill words. inverse_R
    and slots as `row_of` takes them; codes in slots stay there where TMA can copy them, unless they
    are to be `arranged`, as `in_float8_order` says, of whole 32 columns."""
    (T, D), R, G = x_TD.shape, x_TD.shape[0] * top_k, scale_TG.shape[1]
    stays = slots is not None and not arranged and x_TD.data_ptr() % BOX_BYTES == 0
    codes_RD = x_TD if stays else x_TD.new_empty(R, D)
    if group:
        scales = places_for_scales(codes_RD)
    else:
        scales = scale_TG.new_empty(G, triton.cdiv(R, 16) * 16, dtype=torch.float32)
    unit, each = (torch.uint8, 1) if arranged else (torch.int32, 4)
    W = 0 if stays else D // each
    BW = min(4 * WORDS // each, triton.next_power_of_2(max(1, W)))
    launch(
        copy_to_rows_kernel, (triton.cdiv(T, TOKENS), max(1, triton.cdiv(W, BW))),
        x_TD.view(unit), scale_TG, inverse_R, codes_RD.view(unit), scales, scales.stride(0), T,
        slots,
        K=top_k, W=W, G=G, BT=TOKENS, BW=BW, BG=triton.next_power_of_2(max(2, G)),
        KIND=_kind_of(scale_TG), ARRANGED=arranged, STAGED=group,
        num_warps=4, **pdl_options(x_TD),
    )  # fmt: skip
    return codes_RD, scales


def _kind_of(scale_TG: Tensor) -> str:
    """How scales of tokens are stored, as `scale_of` takes it."""
    return "e8m0" if scale_TG.dtype != torch.float32 else "float32"


@triton.jit
def decode_tokens_kernel(
    codes_ptr, scale_ptr, out_ptr,
    D: tl.constexpr, GROUP: tl.constexpr, ELEMENT: tl.constexpr, KIND: tl.constexpr,
    BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BD columns of a token."""
    GROUPS: tl.constexpr = (D + GROUP - 1) // GROUP
    take_turn(PDL)
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    code = tl.load(codes_ptr + t * D + d, mask=d < D, other=0)
    if ELEMENT == "float8_e5m2":  # the upper half of a float16
        value = (code.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = scale_of(code, ELEMENT)
    scale = tl.load(scale_ptr + t * GROUPS + d // GROUP, mask=d < D, other=0)
    value *= scale_of(scale, KIND)
    tl.store(out_ptr + t * D + d, value.to(out_ptr.dtype.element_ty), mask=d < D)


def decode(x_TD: Tensor, codes: Codes) -> Tensor:
    """What codes of tokens stand for, rounded once to the dtype of results, as `emulate` rounds."""
    assert codes.x_scale_TG is not None and codes.inputs is not None
    (T, D), scale_TG = x_TD.shape, codes.x_scale_TG
    out = x_TD.new_empty(T, D, dtype=codes.result)
    whole = codes.inputs.scale == "row"
    assert whole or codes.inputs.scale in ("e8m0", "float32"), codes.inputs.scale
    BD = min(COLUMNS, triton.next_power_of_2(D))
    # As bytes: GPUs before 8.9 have no float8.
    values = x_TD if x_TD.dtype == torch.int8 else x_TD.view(torch.uint8)
    launch(
        decode_tokens_kernel, (T, triton.cdiv(D, BD)), values, scale_TG, out,
        D=D, GROUP=D if whole else codes.inputs.group,
        ELEMENT=str(x_TD.dtype).removeprefix("torch."),
        KIND=_kind_of(scale_TG), BD=BD, num_warps=4,
        **pdl_options(x_TD),
    )  # fmt: skip
    return out

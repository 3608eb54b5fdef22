"""Tokens made ready for a product in the launch that sorts their pairs, where one launch does: it
has processors left, and a launch more would be waited for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.experts.formats.codes import Codes
from moe_ops.kernels.triton.experts.formats.order import arranged
from moe_ops.kernels.triton.experts.operands.group_scales import groups_at_once, quantize_groups
from moe_ops.kernels.triton.experts.operands.permuted import arrange_block, places_at_once
from moe_ops.kernels.triton.experts.operands.row_scales import by_expert, quantize_row
from moe_ops.kernels.triton.experts.schedule.sort import ONE_LAUNCH, pairs_at_once, sort_expert
from moe_ops.kernels.triton.launch import pdl_options, take_turn
from moe_ops.kernels.triton.replay import launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """Tokens as they will be: `how` they are made, of "groups" or a "row" of columns that share a
    scale, or "arranged"; and the places, of groups so many groups, that a program makes."""

    how: str
    values: Tensor
    scale: Tensor | None
    block: int


def made_beside(x_TD: Tensor, codes: Codes | None, pairs: int, *, arranges: bool) -> Made | None:
    """Room for tokens that the launch which sorts so many pairs makes ready, or None: where others
    do so, or nobody."""
    (T, D), new = x_TD.shape, x_TD.new_empty
    if codes is None or codes.x_scale_TG is not None or pairs > ONE_LAUNCH:
        return None
    if codes.by_row:
        if by_expert(codes.x_scale) or (codes.scaled == "tensor" and codes.x_scale is None):
            return None
        values, scale = new(T, D, dtype=codes.dtype), new(T, dtype=torch.float32)
        return Made(how="row", values=values, scale=scale, block=triton.next_power_of_2(D))
    if codes.quantizes:
        group = codes.weight.across
        values, scale = new(T, D, dtype=codes.dtype), new(T, -(-D // group), dtype=torch.float32)
        return Made(how="groups", values=values, scale=scale, block=groups_at_once(D, group))
    if not arranges:
        return None
    places = arranged(D, codes.weight)
    return Made(how="arranged", values=new(T, places), scale=None, block=places_at_once(places))


# One compiled kernel serves every number of pairs up to a power of two.
@triton.jit(do_not_specialize=["R", "N_MAP"])
def sort_beside_tokens_kernel(
    ids_ptr, expert_map_ptr, rows_ptr, inverse_ptr, ends_ptr, x_ptr, static_ptr, out_ptr, scale_ptr,
    stride_x, R, N_MAP,
    E: tl.constexpr, BR: tl.constexpr, D: tl.constexpr, OUT: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, HOW: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    INT8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The programs of `sort_kernel`, and behind them those of tokens, BLOCKS for each."""
    take_turn(PDL)
    program = tl.program_id(0)
    if program <= E:
        sort_expert(
            program, ids_ptr, expert_map_ptr, rows_ptr, inverse_ptr, ends_ptr, R, N_MAP, E, BR
        )
    else:
        t, block = (program - E - 1) // BLOCKS, (program - E - 1) % BLOCKS
        if HOW == "groups":
            quantize_groups(x_ptr, out_ptr, scale_ptr, stride_x, t, block, D, BLOCK, GROUP)
        elif HOW == "row":
            quantize_row(x_ptr, static_ptr, out_ptr, scale_ptr, stride_x, t, D, BLOCK, INT8)
        else:
            arrange_block(x_ptr, out_ptr, stride_x, t, block, D, OUT, BITS, BLOCK)


def sort_beside_tokens(
    ids_TK: Tensor, num_experts: int, expert_map: Tensor | None, x_TD: Tensor, codes: Codes,
    made: Made,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `sort_pairs`; and makes tokens of x."""
    R, E, (T, D) = ids_TK.numel(), num_experts, x_TD.shape
    rows_R, inverse_R = (ids_TK.new_empty(R, dtype=torch.int32) for _ in range(2))
    ends_E = ids_TK.new_empty(E, dtype=torch.int32)
    group, out = codes.weight.across if made.how == "groups" else 1, made.values.shape[1]
    blocks = triton.cdiv(out, made.block * group)
    launch(
        sort_beside_tokens_kernel, (E + 1 + T * blocks,),
        ids_TK, expert_map, rows_R, inverse_R, ends_E, x_TD, codes.x_scale, made.values, made.scale,
        x_TD.stride(0), R, 0 if expert_map is None else expert_map.shape[0],
        E=E, BR=pairs_at_once(R), D=D, OUT=out, BLOCKS=blocks, BLOCK=made.block, HOW=made.how,
        GROUP=group, BITS=codes.bits, INT8=codes.dtype == torch.int8, num_warps=4,
        **pdl_options(ids_TK),
    )  # fmt: skip
    return rows_R, inverse_R, ends_E

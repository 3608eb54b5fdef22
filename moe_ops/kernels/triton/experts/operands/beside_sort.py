"""Tokens made ready for a product in the launch that sorts their pairs, where that is one: most of
the GPU has nothing to do meanwhile, and what follows would wait for one launch more."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton import Inputs
from moe_ops.kernels.triton.experts.call import Call
from moe_ops.kernels.triton.experts.formats.codes import Codes
from moe_ops.kernels.triton.experts.formats.order import arranged
from moe_ops.kernels.triton.experts.operands import fake_quantized, group_scales, permuted
from moe_ops.kernels.triton.experts.operands.fake_quantized import emulate_groups, needs_largest
from moe_ops.kernels.triton.experts.operands.group_scales import quantize_groups
from moe_ops.kernels.triton.experts.operands.permuted import arrange_block
from moe_ops.kernels.triton.experts.operands.row_scales import by_expert, quantize_row
from moe_ops.kernels.triton.experts.schedule.sort import ONE_LAUNCH, pairs_at_once, sort_expert
from moe_ops.kernels.triton.launch import pdl_options, take_turn
from moe_ops.kernels.triton.replay import launch

MOST_COLUMNS = 8192  # that a program quantises by one scale
NOT_EMULATED = Inputs(0, 0, 0.0, 0, False, "", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """Tokens as they will be.

    how     they are made: codes, by scales of "groups" of columns or of a "row"; "emulated"; or
            floats, "arranged"
    block   how many groups of columns a program makes, of arranged ones columns
    group   columns of a group
    static  the scale that is given
    bits    of the codes that columns are arranged for, or 0
    inputs  how they are emulated
    """

    how: str
    values: Tensor
    scale: Tensor | None = None
    block: int
    group: int = 1
    static: Tensor | None = None
    bits: int = 0
    inputs: Inputs = NOT_EMULATED


def made_beside(c: Call, x_TD: Tensor, *, adapted: bool) -> Made | None:
    """Room for tokens that the launch which sorts pairs makes ready; None where none are made, or
    by other launches: for more pairs than it sorts, if something is known of all tokens first, and
    if adapters read what they are before they are arranged."""
    codes = c.codes
    if codes is None or codes.x_scale_TG is not None or c.ids_TK.numel() > ONE_LAUNCH:
        return None
    if codes.inputs is not None:
        return _emulated(c, x_TD, codes, codes.inputs, adapted)
    if codes.by_row:
        return _of_rows(x_TD, codes)
    if codes.quantizes:
        return _of_groups(x_TD, codes)
    if not c.arranges:
        return None
    values = x_TD.new_empty(x_TD.shape[0], arranged(x_TD.shape[1], codes.weight))
    block = permuted.places_at_once(values.shape[1])
    return Made(how="arranged", values=values, block=block, bits=codes.bits)


def _emulated(c: Call, x_TD: Tensor, codes: Codes, inputs: Inputs, adapted: bool) -> Made | None:
    (T, D), arranges = x_TD.shape, c.arranges
    if needs_largest(inputs, codes.x_scale) or (adapted and arranges):
        return None
    return Made(
        how="emulated",
        values=x_TD.new_empty(T, arranged(D, codes.weight) if arranges else D),
        block=fake_quantized.groups_at_once(D, inputs.group),
        group=inputs.group,
        static=codes.x_scale,
        bits=codes.bits if arranges else 0,
        inputs=inputs,
    )


def _of_rows(x_TD: Tensor, codes: Codes) -> Made | None:
    T, D = x_TD.shape
    tensor = codes.scaled == "tensor" and codes.x_scale is None
    if tensor or by_expert(codes.x_scale) or D > MOST_COLUMNS:
        return None
    return Made(
        how="row",
        values=x_TD.new_empty(T, D, dtype=codes.dtype),
        scale=x_TD.new_empty(T, dtype=torch.float32),
        block=1,
        group=triton.next_power_of_2(D),
        static=codes.x_scale,
    )


def _of_groups(x_TD: Tensor, codes: Codes) -> Made:
    (T, D), group = x_TD.shape, codes.weight.across
    return Made(
        how="groups",
        values=x_TD.new_empty(T, D, dtype=codes.dtype),
        scale=x_TD.new_empty(T, triton.cdiv(D, group), dtype=torch.float32),
        block=group_scales.groups_at_once(D, group),
        group=group,
    )


# One compiled kernel serves every number of pairs up to a power of two.
@triton.jit(do_not_specialize=["R", "N_MAP"])
def sort_beside_tokens_kernel(
    ids_ptr, expert_map_ptr, rows_ptr, inverse_ptr, ends_ptr, x_ptr, static_ptr, out_ptr, scale_ptr,
    stride_x, R, N_MAP,
    E: tl.constexpr, BR: tl.constexpr, D: tl.constexpr, OUT: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, HOW: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    INPUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The programs of `sort_kernel`, and behind them those of tokens, BLOCKS for each."""
    SCALE: tl.constexpr = INPUTS[5]  # before Triton 3.7 no call takes a string of a tuple
    take_turn(PDL)
    program = tl.program_id(0)
    if program <= E:
        sort_expert(
            program, ids_ptr, expert_map_ptr, rows_ptr, inverse_ptr, ends_ptr, R, N_MAP, E, BR
        )
    else:
        t, block = (program - E - 1) // BLOCKS, (program - E - 1) % BLOCKS
        if HOW == "groups":
            quantize_groups(x_ptr, out_ptr, scale_ptr, stride_x, t, block, D, BLOCK, GROUP, False)
        elif HOW == "row":
            quantize_row(x_ptr, static_ptr, out_ptr, scale_ptr, stride_x, t, D, GROUP)
        elif HOW == "emulated":
            emulate_groups(
                x_ptr, None, static_ptr, out_ptr, stride_x, t, block, D, OUT, INPUTS[0], INPUTS[1],
                INPUTS[2], INPUTS[3], INPUTS[4], SCALE, GROUP, BITS, False, BLOCK, 1,
            )  # fmt: skip
        else:
            arrange_block(x_ptr, out_ptr, stride_x, t, block, D, OUT, BITS, BLOCK)


def sort_beside_tokens(
    ids_TK: Tensor, num_experts: int, expert_map: Tensor | None, x_TD: Tensor, made: Made
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of pairs as `sort_pairs` gives them; fills `made` with what becomes of x."""
    R, E, (T, D), out = ids_TK.numel(), num_experts, x_TD.shape, made.values.shape[1]
    rows_R, inverse_R = (ids_TK.new_empty(R, dtype=torch.int32) for _ in range(2))
    ends_E = ids_TK.new_empty(E, dtype=torch.int32)
    blocks = triton.cdiv(out, made.block * made.group)
    launch(
        sort_beside_tokens_kernel, (E + 1 + T * blocks,),
        ids_TK, expert_map, rows_R, inverse_R, ends_E, x_TD, made.static, made.values, made.scale,
        x_TD.stride(0), R, 0 if expert_map is None else expert_map.shape[0],
        E=E, BR=pairs_at_once(R), D=D, OUT=out, BLOCKS=blocks, BLOCK=made.block, HOW=made.how,
        GROUP=made.group, BITS=made.bits, INPUTS=tuple(made.inputs), num_warps=4,
        **pdl_options(ids_TK),
    )  # fmt: skip
    return rows_R, inverse_R, ends_E

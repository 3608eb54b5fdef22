"""In which format of the ops a matrix of a checkpoint is, and which floats it stands for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from moe_ops.checks.shapes import FLOATS
from moe_ops.quant import packing
from moe_ops.quant.formats import ROW, TENSOR, Format
from moe_ops.quant.scales import inverse, wrong_scale
from moe_ops.weights.layouts import ROWS, Block, Coding, Matrix, short, to_dtype
from moe_ops.weights.outside import group_of, said_of

Parts = Mapping[str, Tensor]  # of one matrix: "weight", "scale", "zero", "global_scale", ...
SCALES = {torch.float32: "", torch.float16: ":float16", torch.bfloat16: ":bfloat16"}
POWERS = (torch.uint8, torch.float8_e8m0fnu)  # dtypes of scales that are powers of two
MX, NV = 32, 16  # columns that share a scale


def format_of(parts: Parts, coding: Coding, block: Block, of_half: int | None = None) -> str | None:
    """The format of the ops that holds a matrix exactly; None for one in 16 or 32 bits.

    block: rows and columns of float8 matrices that share a scale, if config.json says them.
    of_half: rows of gate and up each, which no block of the format is to have parts of both of.

    Raises ValueError for codes without scales, and for those that are in none of our formats.
    """
    w = parts.get("weight")
    if w is None:
        raise ValueError("its codes are missing; complete the download")
    scale = parts.get("scale")
    if w.dtype in FLOATS and scale is None:
        return None
    if scale is None:
        raise ValueError(f"is {short(w.dtype)}, codes without a scale; complete the download")
    if w.dtype in (torch.int32, torch.int8) and coding.bits is not None:
        return _integer(parts, scale, coding)
    columns = w.shape[-1]
    if w.dtype == torch.float8_e4m3fn:
        return _float8(w, scale, block, of_half)
    of_rows = group_of(w, scale, None) is not None
    if w.dtype == torch.int8 and (of_rows or scale.dim() == 2):
        groups = 1 if of_rows else scale.shape[1]
        return f"int8:{_group(columns, groups)}" + ("" if groups == 1 else _kind(scale))
    if w.dtype == torch.uint8 and w.dim() == 3:  # blocks of gpt-oss
        columns = w.shape[1] * w.shape[2]
    if w.dtype == torch.uint8 and scale.dim() == 2:
        values = 2 * columns
        if scale.dtype == torch.float8_e4m3fn and scale.shape[1] * NV == values:
            return "nvfp4"
        if scale.dtype in POWERS and scale.shape[1] * MX == values:
            return "mxfp4"
    raise ValueError(
        f"is {short(w.dtype)} {list(w.shape)} with scales {short(scale.dtype)} "
        f"{list(scale.shape)}, which is no format of the ops; dequantise the checkpoint"
    )


def format_of_inputs(weights: str) -> str:
    """The format of inputs that have static scales beside weights of a format; "" if none goes with
    it."""
    if weights == "nvfp4":
        return weights
    format = Format.of(weights)
    by_row = format.group in (ROW, TENSOR) and format.element in ("float8_e4m3fn", "int8")
    return f"{format.element}:tensor" if by_row else ""


def decode(parts: Parts, coding: Coding, block: Block, dtype: torch.dtype) -> Tensor:
    """The matrix that codes stand for, rounded once to a dtype.

    Raises ValueError or TypeError for entries that do not fit together, for scales that are no
    positive numbers, and for columns in the order of activations.
    """
    name = format_of(parts, coding, block)
    assert name is not None
    format = Format.of(name)
    order = parts.get("g_idx")
    if order is not None and is_ordered(order):
        raise ValueError(
            "was quantised in the order of its activations, and only experts are read so; "
            "quantise without desc_act, or with static_groups"
        )
    codes = _laid_out(parts["weight"], coding.matrix("weight", format), format)
    rows, columns = codes.shape[0], packing.unpack(codes[:1], format.element).shape[1]
    groups = format.parsed.scale_shape(rows, columns)
    scale = _laid_out(parts["scale"], coding.matrix("scale", format), format)
    if format.group == ROW and scale.numel() in (1, rows):
        scale = scale.reshape(-1, 1).expand(rows, 1)
    scale = to_dtype(scale, format.parsed.scale_dtype, "scale")
    zero, second = parts.get("zero"), parts.get("global_scale")
    if zero is not None:
        zero = _laid_out(zero, coding.matrix("zero", format), format)
        if not format.has_zero:
            _check_middle(zero, format)
            zero = None
    for what, t in (("scales", scale), ("zero points", zero)):
        if t is not None and tuple(t.shape) != tuple(groups):
            raise ValueError(
                f"has {what} {list(t.shape)}, but a matrix of {rows} x {columns} in {name} has "
                f"{list(groups)}; complete the download"
            )
    for t, kind in ((scale, format.scale), (second, "float32")):
        wrong = None if t is None else wrong_scale(t, kind)
        if wrong is not None:
            raise ValueError(f"its scales hold {wrong}, but a scale is above 0")
    if format.has_global_scale and second is None:
        raise ValueError("its second scale is missing; complete the download")
    return packing.dequantize(codes, scale, format, zero, second).to(dtype)


def read_part(read: Callable[[], Tensor], reciprocal: bool) -> Tensor:
    """A tensor, as a multiplier if it is a scale that divides."""
    return inverse(read()) if reciprocal else read()


def is_ordered(g_idx: Tensor) -> bool:
    """Whether columns are no run of groups, so that they come in another order than the input's."""
    return bool((g_idx.long().diff() < 0).any())


def _integer(parts: Parts, scale: Tensor, coding: Coding) -> str:
    """int or uint of the coding's width: uint with zero points, if they are not just the middle."""
    if scale.dtype not in SCALES or scale.dim() != 2 or coding.weight is None:
        raise ValueError(f"has scales {short(scale.dtype)} {list(scale.shape)}; they are floats")
    axis = coding.weight.columns
    columns = parts["weight"].shape[axis.place] * axis.values // axis.elements
    groups = scale.shape[coding.scale.columns.place]
    # Those of GPTQ are there in any case, and config.json says what they are.
    signed = "zero" not in parts or (coding.name == "GPTQ" and coding.symmetric)
    if "zero" not in parts and not coding.symmetric:
        raise ValueError(
            "has no zero points, but config.json says that it is not symmetric; complete the "
            "download"
        )
    return f"{'' if signed else 'u'}int{coding.bits}:{_group(columns, groups)}{_kind(scale)}"


def _float8(w: Tensor, scale: Tensor, block: Block, of_half: int | None) -> str:
    group, powers = group_of(w, scale, block), scale.dtype in POWERS
    if group in (TENSOR, ROW):
        return "float8_e4m3fn:row"
    if group is not None:
        # Smaller blocks say the same: their scales are those of the block that they are in.
        rows = group[0] if of_half is None else math.gcd(group[0], of_half)
        return f"float8_e4m3fn:{rows}x{group[1]}" + (":e8m0" if powers else "")
    if powers and w.dim() == 2 and list(scale.shape) == [w.shape[0], w.shape[1] // MX]:
        return "mxfp8"
    raise ValueError(
        f"is {list(w.shape)} with scales {list(scale.shape)}, but {said_of(block)}; dequantise the "
        "checkpoint"
    )


def _group(columns: int, groups: int) -> str:
    if groups < 1 or columns % groups:
        raise ValueError(f"has {groups} groups in {columns} columns; groups are of one size")
    return "row" if groups == 1 else f"1x{columns // groups}"


def _kind(scale: Tensor) -> str:
    return SCALES.get(scale.dtype, "")


def _laid_out(t: Tensor, matrix: Matrix, format: Format) -> Tensor:
    """A stored part as the ops read it."""
    if matrix.convert is not None:
        return matrix.convert(t, format)
    return t.T.contiguous() if matrix.rows.place != ROWS.place else t


def _check_middle(zero: Tensor, format: Format) -> None:
    if not bool((zero == format.middle).all()):
        raise ValueError(
            f"has zero points other than {format.middle}, but config.json says that it is symmetric"
        )

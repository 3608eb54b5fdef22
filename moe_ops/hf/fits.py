"""What an experts module becomes in a format: whether it can, and the tensors that it then has."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_ops.hf.experts import describe
from moe_ops.hf.stored import INPUT_SCALE, StoredFormat
from moe_ops.quant.arguments import check_input_format, check_packing, ragged_axis
from moe_ops.quant.config import QuantConfig


def stored_as(module: nn.Module, config: QuantConfig) -> StoredFormat | str:
    """How a module of floats is stored once it is quantised; or why that cannot be."""
    found = describe(module)
    if isinstance(found, str):
        return found
    stored = StoredFormat(
        activation=found,
        w_format=config.weights,
        x_format=config.inputs,
        static_inputs=config.static_inputs,
    )
    try:
        for name in stored.projections:
            _check_sizes(getattr(module, name), bool(module.is_transposed), config)
    except ValueError as error:
        return str(error)
    return stored


def sizes_of(module: nn.Module, stored: StoredFormat) -> tuple[int, int, int]:
    """Experts, hidden size and intermediate size of a module of floats."""
    w = getattr(module, stored.projections[1])
    hidden, intermediate = _matrix(w, bool(module.is_transposed))
    return w.shape[0], hidden, intermediate


def empty(w: Tensor, flip: bool, config: QuantConfig, name: str) -> dict[str, Tensor]:
    """The tensors of one stacked weight by attribute name, on its device, nothing written."""
    E, rows, width = (w.shape[0], *_matrix(w, flip))
    format, parsed = config.format, config.format.parsed
    groups = (E, *parsed.scale_shape(rows, width))
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        name: ((E, rows, parsed.packed(width)), parsed.storage.dtype),
        f"{name}_scale": (groups, parsed.scale_dtype),
    }
    if format.has_zero:
        shapes[f"{name}_zero"] = (groups, torch.uint8)
    if format.has_global_scale:
        two = config.two_global_scales and name == "gate_up_proj"
        shapes[f"{name}_global_scale"] = ((E, 2) if two else (E,), torch.float32)
    if config.static_inputs:
        shapes[name + INPUT_SCALE] = ((E if config.per_expert_inputs else 1,), torch.float32)
    return {n: torch.empty(s, dtype=d, device=w.device) for n, (s, d) in shapes.items()}


def _matrix(w: Tensor, flip: bool) -> tuple[int, int]:
    """Rows, which are outputs, and columns of an expert's weight."""
    return (w.shape[2], w.shape[1]) if flip else (w.shape[1], w.shape[2])


def _check_sizes(w: Tensor, flip: bool, config: QuantConfig) -> None:
    format = config.format
    rows, width = _matrix(w, flip)
    check_packing("w_format", format, width)
    ragged = ragged_axis(format, rows, width)
    if ragged is not None:
        axis, size, group = ragged
        across = "columns" if axis == "rows" else "rows"
        raise ValueError(
            f"w_format={format.name!r} wants {across} of a multiple of {group}, got {size}"
        )
    if config.inputs:
        check_input_format("x_format", config.inputs, width)

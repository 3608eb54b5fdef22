"""From the scales and row orders that checkpoints hold to those that kernels want.

Pure functions: no argument is changed in place. Ops take every scale as a multiplier of decoding,

    value = (code - zero) * scale * global_scale

so a scale from a checkpoint first says what it is, `Multiplier` or `Reciprocal`. These functions
run when weights are loaded: their checks wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from moe_ops.options import check_int, check_type
from moe_ops.quant.packing import decode_scale
from moe_ops.shapes import FLOATS, INDICES, check_devices, check_tensor

TILE_ROWS, TILE_COLUMNS = 128, 4  # of scale factors in the blocked layout
BYTES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu)  # dtypes of scale factors


@dataclass(frozen=True, slots=True, eq=False)
class Multiplier:
    """A scale that decodes by multiplication: value = code * tensor."""

    tensor: Tensor

    def __post_init__(self) -> None:
        check_type("the tensor of a scale", self.tensor, Tensor, "a Tensor")


@dataclass(frozen=True, slots=True, eq=False)
class Reciprocal:
    """A scale that decodes by division: value = code / tensor.

    So are `weight_global_scale` and `input_global_scale` of the NVFP4 checkpoints that
    llm-compressor writes (format nvfp4-pack-quantized of compressed-tensors).
    """

    tensor: Tensor

    def __post_init__(self) -> None:
        check_type("the tensor of a scale", self.tensor, Tensor, "a Tensor")


def as_multiplier(scale: Multiplier | Reciprocal) -> Multiplier:
    """The same scale as a multiplier: 1 / tensor in float32 for a reciprocal.

    A multiplier comes back as it is. Raises ValueError for a reciprocal that is 0 or not finite,
    or so small that its inverse is not finite; TypeError for codes (such as e8m0 bytes).
    """
    _check_convention("scale", scale)
    return scale if isinstance(scale, Multiplier) else Multiplier(_inverse(scale.tensor))


def as_reciprocal(scale: Multiplier | Reciprocal) -> Reciprocal:
    """The same scale as a reciprocal: 1 / tensor in float32 for a multiplier.

    A reciprocal comes back as it is. Raises as `as_multiplier` does.
    """
    _check_convention("scale", scale)
    return scale if isinstance(scale, Reciprocal) else Reciprocal(_inverse(scale.tensor))


def alphas(
    weight: Multiplier | Reciprocal, input: Multiplier | Reciprocal | None, experts: int
) -> Tensor:
    """The factor of each expert's product: weight scale x input scale. Returns float32 [E].

    For kernels that multiply codes and scale the sum once: y = alpha_e * (w_codes @ x_codes).
    Scales have the shapes that `per_expert` takes. Without an input scale (weights alone are
    quantised, or the input is scaled at run time) alpha is the weight scale. Raises ValueError if a
    factor is not finite.
    """
    _check_convention("weight", weight)
    alpha_E = per_expert(as_multiplier(weight).tensor, experts)
    if input is not None:
        _check_convention("input", input)
        check_devices(weight.tensor, input=input.tensor)
        alpha_E *= per_expert(as_multiplier(input).tensor, experts)
    finite = alpha_E.isfinite()
    if not finite.all():
        expert = int((~finite).nonzero()[0])
        raise ValueError(
            f"weight scale x input scale of expert {expert} is {float(alpha_E[expert])}; "
            "check that each scale is named Multiplier or Reciprocal as the checkpoint means it"
        )
    return alpha_E


def per_expert(scale: Tensor, experts: int) -> Tensor:
    """One scale per expert in memory of its own: float32 [E], contiguous.

    scale: floating point; one value or one per expert, as [], [1] or [E], the latter two with any
    number of further axes of size 1 ([E, 1, 1]). Raises ValueError for other shapes.
    """
    check_int("experts", experts, least=1)
    _check_floating("scale", scale)
    wanted = scale.dim() == 0 or (scale.shape[0] in (1, experts) and scale.shape[1:].numel() == 1)
    if not wanted:
        raise ValueError(
            f"scale must be one value or one for each of {experts} experts, got shape "
            f"{tuple(scale.shape)}; merge the scales of one expert first (merge_gate_up)"
        )
    # A clone, because expanded values share memory and a kernel reads E of them.
    return scale.float().reshape(-1).expand(experts).clone(memory_format=torch.contiguous_format)


def one_input_scale(scale_E: Tensor) -> Tensor:
    """The static input scale that covers every expert: the largest multiplier, one float32 [].

    The range of codes, largest code * scale, then holds every expert's inputs; experts with smaller
    scales lose resolution. scale_E: multipliers, floating point [E]. Raises ValueError if there is
    none, or one is not positive and finite.
    """
    _check_floating("scale_E", scale_E)
    if scale_E.dim() != 1 or scale_E.numel() == 0:
        raise ValueError(f"scale_E must be [E] with E > 0, got shape {tuple(scale_E.shape)}")
    value_E = scale_E.float()
    bad = ~(value_E.isfinite() & (value_E > 0))
    if bad.any():
        expert = int(bad.nonzero()[0])
        raise ValueError(
            f"scale_E[{expert}] is {float(value_E[expert])}, but an input scale is positive and "
            "finite; calibrate that expert or give it another's scale"
        )
    return value_E.amax()


def has_gate_up_scale(scale: Tensor | None) -> TypeGuard[Tensor]:
    """Whether the scale has the shape [E, 2] or [E, 2, 1], one for gate rows and one for up."""
    return isinstance(scale, Tensor) and scale.shape[1:] in ((2,), (2, 1))


def merge_gate_up(scale_E2: Tensor) -> Tensor:
    """One scale per expert, [E, 1, 1], from equal gate and up scales; in their dtype.

    scale_E2: [E, 2] or [E, 2, 1], floating point. Raises ValueError for another shape or if an
    expert's two scales differ: its weights must then be quantised again with one scale.
    """
    if not has_gate_up_scale(scale_E2):
        raise ValueError(
            f"gate and up scales must be [E, 2] or [E, 2, 1], got shape {tuple(scale_E2.shape)}"
        )
    gate_up_E2 = scale_E2.reshape(-1, 2)
    gate_E, up_E = gate_up_E2.float().unbind(1)  # float8 has no comparison
    differs_E = gate_E != up_E
    if not scale_E2.is_meta and bool(differs_E.any()):
        expert = int(differs_E.nonzero()[0])
        gate, up = float(gate_E[expert]), float(up_E[expert])
        raise ValueError(
            f"expert {expert} has the gate scale {gate} and the up scale {up}, but one scale per "
            "expert must serve both; quantise its weights again with the larger one"
        )
    return gate_up_E2[:, 0].clone(memory_format=torch.contiguous_format).reshape(-1, 1, 1)


def local_experts(tensor: Tensor, expert_ids: Tensor | range | slice) -> Tensor:
    """This rank's experts: rows `expert_ids` of axis 0, in that order.

    A range or slice of step 1 gives a view; other steps and a tensor of ids ([e], int32 or int64)
    give a copy. Raises ValueError for an expert that does not exist: nothing is clipped, and only
    the ends of a slice may count from the back.
    """
    if tensor.dim() == 0:
        raise ValueError("tensor must have experts on axis 0, got a scalar; use per_expert first")
    E = tensor.shape[0]
    if isinstance(expert_ids, slice):
        for end in (expert_ids.start, expert_ids.stop):
            if end is not None and not -E <= end <= E:
                raise ValueError(f"{expert_ids} reaches beyond the {E} experts of the tensor")
        expert_ids = range(*expert_ids.indices(E))
    if isinstance(expert_ids, range):
        outside = [i for i in (*expert_ids[:1], *expert_ids[-1:]) if not 0 <= i < E]
        if outside:
            raise ValueError(f"{expert_ids} holds {outside[0]}, but the tensor has {E} experts")
        if expert_ids.step == 1:
            return tensor[expert_ids.start : expert_ids.start + len(expert_ids)]
        expert_ids = torch.tensor(expert_ids, dtype=torch.int64)
    check_tensor("expert_ids", expert_ids, 1, INDICES)
    bad = (expert_ids < 0) | (expert_ids >= E)
    if bad.any():
        first = int(expert_ids[bad][0])
        raise ValueError(f"expert_ids holds {first}, but the tensor has {E} experts")
    return tensor.index_select(0, expert_ids.to(tensor.device))


def e8m0_to_float32(scale: Tensor) -> Tensor:
    """Powers of two from their exponents: 2^(code - 127), and NaN for 255. Returns float32.

    scale: uint8 or float8_e8m0fnu, any shape. Code 0 is 2^-127, a subnormal float32. Source: OCP
    Microscaling (MX) 1.0, section 5.4.1.
    """
    _check_dtype("scale", scale, (torch.uint8, torch.float8_e8m0fnu))
    return decode_scale(scale.view(torch.uint8), "e8m0")


def float32_to_e8m0(scale: Tensor) -> Tensor:
    """Exponents of powers of two: log2(scale) + 127. Returns uint8.

    scale: float32, bfloat16 or float16, any shape. Raises ValueError for a value that is not a
    power of two from 2^-127 to 2^127 (NaN is none), because a rounded scale changes the weights.
    """
    _check_dtype("scale", scale, FLOATS)
    bits = scale.float().view(torch.int32)
    lowest = bits == 1 << 22  # 2^-127 is the one power of two with exponent field 0 that counts
    exponent = bits >> 23  # negative where the sign is set
    exact = lowest | ((bits & 0x7FFFFF) == 0) & (exponent > 0) & (exponent < 255)
    if not exact.all():
        first = float(scale[~exact][0])
        raise ValueError(
            f"scale {first} is not a power of two from 2^-127 to 2^127; re-quantise the weights "
            "with e8m0 scales, since rounding a scale silently changes them"
        )
    return exponent.to(torch.uint8)


def swap_gate_up(t: Tensor) -> Tensor:
    """Rows [gate; up] to [up; gate] and back. Returns a new tensor.

    t: [E, F, ...] with F even: values (packed too: rows never are), scales, zeros or biases. Scales
    of groups of several rows may be swapped only if no group holds rows of both halves: I must be
    a multiple of the group's rows.
    """
    _check_halves(t)
    return t.roll(t.shape[1] // 2, dims=1)


def interleave_gate_up(t: Tensor) -> Tensor:
    """Rows [gate; up] to g0, u0, g1, u1, ... Returns a new tensor.

    t: as `swap_gate_up` takes it, scales of one-row groups alone.
    """
    _check_halves(t)
    return torch.stack(t.chunk(2, dim=1), dim=2).flatten(1, 2)


def deinterleave_gate_up(t: Tensor) -> Tensor:
    """Rows g0, u0, g1, u1, ... to [gate; up]; undoes `interleave_gate_up`. Returns a new tensor."""
    _check_halves(t)
    return torch.cat((t[:, 0::2], t[:, 1::2]), dim=1)


def swizzle_128x4(scale: Tensor) -> Tensor:
    """Scale factors in the blocked layout of cuBLAS and CUTLASS. Returns [E, rows', columns'].

    Rows are padded to a multiple of 128 and columns to one of 4, with zeros. Tiles of 128 x 4
    follow each other along the columns; in a tile, (r, c) lies at (r % 32) * 16 + (r // 32) * 4
    + c. The padded shape is that of the memory, which alone has a meaning.

    scale: [E, rows, columns], uint8, float8_e4m3fn or float8_e8m0fnu. Source: cuBLAS, "1D Block
    Scaling Factors Layout".
    """
    check_tensor("scale", scale, 3, BYTES)
    E, rows, columns = scale.shape
    down, across = _tiles(rows, columns)
    # Bytes, because float8_e8m0fnu has no zero to pad with.
    padded = scale.new_zeros(E, down * TILE_ROWS, across * TILE_COLUMNS, dtype=torch.uint8)
    padded[:, :rows, :columns] = scale.view(torch.uint8)
    tiles = padded.view(E, down, 4, 32, across, TILE_COLUMNS).permute(0, 1, 4, 3, 2, 5)
    return tiles.reshape(padded.shape).view(scale.dtype)


def unswizzle_128x4(t: Tensor, rows: int, columns: int) -> Tensor:
    """Scale factors out of the blocked layout: undoes `swizzle_128x4`. Returns [E, rows, columns].

    t: as `swizzle_128x4` returns it. Raises ValueError if it is not the shape for so many rows and
    columns.
    """
    check_tensor("t", t, 3, BYTES)
    down, across = _tiles(rows, columns)
    E, padded = t.shape[0], (down * TILE_ROWS, across * TILE_COLUMNS)
    if tuple(t.shape[1:]) != padded:
        raise ValueError(
            f"t must be [E, {padded[0]}, {padded[1]}] for {rows} rows and {columns} columns of "
            f"scales, got shape {tuple(t.shape)}; give the sizes before padding"
        )
    tiles = t.contiguous().view(torch.uint8).view(E, down, across, 32, 4, TILE_COLUMNS)
    plain = tiles.permute(0, 1, 4, 3, 2, 5).reshape(E, *padded)[:, :rows, :columns]
    return plain.clone(memory_format=torch.contiguous_format).view(t.dtype)


def _tiles(rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)


def _inverse(tensor: Tensor) -> Tensor:
    _check_floating("scale", tensor)
    value = tensor.float()
    inverse = value.reciprocal()
    bad = ~(value.isfinite() & inverse.isfinite())
    if bad.any():
        raise ValueError(
            f"scale {float(value[bad][0])} has no finite inverse; every scale of the checkpoint "
            "must be finite and not 0"
        )
    return inverse


def _check_convention(name: str, scale: object) -> None:
    if not isinstance(scale, (Multiplier, Reciprocal)):
        raise TypeError(
            f"{name} must be a Multiplier or a Reciprocal, got {type(scale).__name__}; "
            "say how the checkpoint means it"
        )


def _check_floating(name: str, t: Tensor) -> None:
    if not t.is_floating_point():
        raise TypeError(
            f"{name} must be floating point, got {str(t.dtype).removeprefix('torch.')}; "
            "decode e8m0 bytes with e8m0_to_float32"
        )


def _check_dtype(name: str, t: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    check_tensor(name, t, t.dim(), dtypes)


def _check_halves(t: Tensor) -> None:
    if t.dim() < 2:
        raise ValueError(f"t must be [E, rows, ...], got shape {tuple(t.shape)}")
    if t.shape[1] % 2:
        raise ValueError(
            f"t must have as many rows of gate as of up on axis 1, got shape {tuple(t.shape)}; "
            "a scale that gate and up share stays as it is"
        )

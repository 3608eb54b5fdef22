"""A configuration from the tensors of a checkpoint: one function per family of schemes.

All take the sizes of the layer first, then the scales of both weights, [E, groups of rows, groups
of columns]; all scales are multipliers of decoding. All raise ValueError or TypeError, from a rule
in `moe_ops/quant`, for tensors that do not fit. `SCHEMES` lists what they can build.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_ops.fake_impls.formats import SCALES
from moe_ops.options import MOST_SIZE, check_fields, check_int, check_text, check_type
from moe_ops.quant.arguments import named_format
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.formats import ROW, TENSOR, Format, Operand
from moe_ops.quant.resolve import has_gate_up_scale, merge_gate_up
from moe_ops.quant.schemes import MX_BITS
from moe_ops.shapes import check_choice

# What belongs to the first product and to the second: (w13, w2) or (x, h).
Pair = tuple[Tensor | None, Tensor | None]
NEITHER: Pair = (None, None)
SCALE_NAMES = {SCALES[name]: name for name in ("float32", "bfloat16", "float16")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of an expert layer: E experts, model width D, expert width I."""

    E: int
    D: int
    I: int  # noqa: E741 the legend's letter
    gated: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        for name in "EDI":
            check_int(name, getattr(self, name), least=1, most=MOST_SIZE)

    @property
    def F(self) -> int:
        """Rows of one expert's first weight."""
        return 2 * self.I if self.gated else self.I


def _build(
    sizes: Sizes,
    weights: str,
    inputs: str,
    scales: Pair = NEITHER,
    *,
    zeros: Pair = NEITHER,
    global_scales: Pair = NEITHER,
    static: Pair = NEITHER,
    input_global_scales: Pair = NEITHER,
) -> QuantConfig:
    """The configuration with these formats ("" for 16 bits) and tensors."""
    check_type("sizes", sizes, Sizes, "Sizes of the layer")
    check_text("inputs", inputs)
    w = named_format("weights", weights) if weights else None
    a = named_format("inputs", inputs) if inputs else None
    first = scales[0]
    if w is not None and w.group == TENSOR and sizes.gated and has_gate_up_scale(first):
        first = merge_gate_up(first)
    w13, w2 = (
        Operand(format=w, scale=scale, zero=zero, global_scale=global_scale)
        for scale, zero, global_scale in zip((first, scales[1]), zeros, global_scales, strict=True)
    )
    x, h = (
        Operand(format=a, scale=scale, global_scale=global_scale)
        for scale, global_scale in zip(static, input_global_scales, strict=True)
    )
    return QuantConfig(
        x=x, h=h, w13=w13, w2=w2, E=sizes.E, F=sizes.F, D=sizes.D, I=sizes.I, gated=sizes.gated
    )


def unquantized(sizes: Sizes) -> QuantConfig:
    """16-bit weights and inputs."""
    return _build(sizes, "", "")


def biased(
    config: QuantConfig, w13_bias_EF: Tensor | None = None, w2_bias_ED: Tensor | None = None
) -> QuantConfig:
    """The same configuration with biases of the first product, the second, or both.

    w13_bias_EF: float [E, F], rows [gate; up] if gated; w2_bias_ED: float [E, D].
    """
    return replace(
        config,
        w13=replace(config.w13, bias=w13_bias_EF),
        w2=replace(config.w2, bias=w2_bias_ED),
    )


def fp8_w8a8(
    sizes: Sizes,
    w13_scale: Tensor,
    w2_scale: Tensor,
    *,
    group: str = "128x128",
    input_group: str = "",
    x_scale: Tensor | None = None,
    h_scale: Tensor | None = None,
) -> QuantConfig:
    """float8_e4m3fn weights and inputs.

    group: of the weights, "tensor", "row" or a block. input_group: of the inputs; left out,
    "tensor", "row" or 1 x the columns of the block. Scales are float32; for "tensor", w13_scale may
    hold gate and up scales, [E, 2] or [E, 2, 1], if they are equal. x_scale, h_scale: static scales
    of inputs in the group "tensor", float32, one value.
    """
    scales, static = (w13_scale, w2_scale), (x_scale, h_scale)
    return _w8a8("float8_e4m3fn", sizes, scales, group, input_group, static)


def int8_w8a8(
    sizes: Sizes,
    w13_scale: Tensor,
    w2_scale: Tensor,
    *,
    group: str = "row",
    input_group: str = "",
    x_scale: Tensor | None = None,
    h_scale: Tensor | None = None,
) -> QuantConfig:
    """int8 weights and inputs; arguments as for `fp8_w8a8`."""
    scales, static = (w13_scale, w2_scale), (x_scale, h_scale)
    return _w8a8("int8", sizes, scales, group, input_group, static)


def _w8a8(
    element: str, sizes: Sizes, scales: Pair, group: str, input_group: str, static: Pair
) -> QuantConfig:
    check_text("group", group)
    check_text("input_group", input_group)
    weights = Format.of(f"{element}:{group}")
    if not input_group:
        columns = weights.group[1]
        input_group = group if weights.group in (TENSOR, ROW) else f"1x{columns}"
    return _build(sizes, weights.name, f"{element}:{input_group}", scales, static=static)


def fp8_w8a16(
    sizes: Sizes, w13_scale: Tensor, w2_scale: Tensor, *, group: str = "128x128"
) -> QuantConfig:
    """float8_e4m3fn weights, 16-bit inputs. group: "tensor", "row" or a block; float32 scales."""
    check_text("group", group)
    return _build(sizes, f"float8_e4m3fn:{group}", "", (w13_scale, w2_scale))


def int8_w8a16(
    sizes: Sizes,
    w13_scale: Tensor,
    w2_scale: Tensor,
    *,
    group: str = "1x128",
    w13_zero: Tensor | None = None,
    w2_zero: Tensor | None = None,
) -> QuantConfig:
    """8-bit integer weights, 16-bit inputs.

    group: "1x32", "1x64", "1x128" columns, or "row". Scales are float32, bfloat16 or float16, both
    alike. With zero points, uint8 and one per scale, codes are unsigned; else they are signed.
    """
    return _integer("int8", sizes, (w13_scale, w2_scale), group, (w13_zero, w2_zero))


def int4_w4a16(
    sizes: Sizes,
    w13_scale: Tensor,
    w2_scale: Tensor,
    *,
    group: str = "1x128",
    w13_zero: Tensor | None = None,
    w2_zero: Tensor | None = None,
) -> QuantConfig:
    """4-bit integer weights, 16-bit inputs; arguments as for `int8_w8a16`, zero points <= 15."""
    return _integer("int4", sizes, (w13_scale, w2_scale), group, (w13_zero, w2_zero))


def _integer(element: str, sizes: Sizes, scales: Pair, group: str, zeros: Pair) -> QuantConfig:
    check_choice("group", group, ("1x32", "1x64", "1x128", "row"))
    signed = all(zero is None for zero in zeros)
    # A scale that is missing or of another dtype is refused by its rule.
    scale = SCALE_NAMES.get(getattr(scales[0], "dtype", torch.float32), "float32")
    weights = f"{element if signed else 'u' + element}:{group}:{scale}"
    return _build(sizes, weights, "", scales, zeros=zeros)


def ocp_mx(
    sizes: Sizes,
    w13_scale: Tensor,
    w2_scale: Tensor,
    *,
    weights: str,
    inputs: str = "",
    x_scale: Tensor | None = None,
    h_scale: Tensor | None = None,
) -> QuantConfig:
    """Weights in an OCP Microscaling format of 4 or 6 bits, inputs of 4, 6, 8 or 16.

    weights: "mxfp4", "mxfp6_e3m2" or "mxfp6_e2m3". inputs: one of these, "mxfp8",
    "float8_e4m3fn:row", "float8_e4m3fn:tensor", or "" for 16 bits. Scales are uint8, the codes of
    e8m0, [E, rows, columns / 32]. x_scale, h_scale: as for `fp8_w8a8`.
    """
    check_choice("weights", weights, tuple(MX_BITS))
    return _build(sizes, weights, inputs, (w13_scale, w2_scale), static=(x_scale, h_scale))


def mxfp4_w4a16(sizes: Sizes, w13_scale: Tensor, w2_scale: Tensor) -> QuantConfig:
    """mxfp4 weights, 16-bit inputs. Scales are uint8 [E, rows, columns / 32]."""
    return _build(sizes, "mxfp4", "", (w13_scale, w2_scale))


def mxfp8(
    sizes: Sizes, w13_scale: Tensor, w2_scale: Tensor, *, inputs: str = "mxfp8"
) -> QuantConfig:
    """mxfp8 weights; mxfp8 inputs, or 16-bit ones for "". Scales as for `mxfp4_w4a16`."""
    return _build(sizes, "mxfp8", inputs, (w13_scale, w2_scale))


def nvfp4_w4a4(
    sizes: Sizes,
    w13_scale: Tensor,
    w2_scale: Tensor,
    w13_global_scale_E: Tensor,
    w2_global_scale_E: Tensor,
    x_global_scale: Tensor,
    h_global_scale: Tensor,
) -> QuantConfig:
    """NVFP4 weights and inputs.

    Scales of weights are float8_e4m3fn [E, rows, columns / 16] and float32 [E]; inputs get their
    block scales at run time, and have a static global scale, float32, one value.
    """
    return _build(
        sizes,
        "nvfp4",
        "nvfp4",
        (w13_scale, w2_scale),
        global_scales=(w13_global_scale_E, w2_global_scale_E),
        input_global_scales=(x_global_scale, h_global_scale),
    )


def nvfp4_w4a16(
    sizes: Sizes,
    w13_scale: Tensor,
    w2_scale: Tensor,
    w13_global_scale_E: Tensor,
    w2_global_scale_E: Tensor,
) -> QuantConfig:
    """NVFP4 weights, 16-bit inputs; scales as for `nvfp4_w4a4`."""
    global_scales = (w13_global_scale_E, w2_global_scale_E)
    return _build(sizes, "nvfp4", "", (w13_scale, w2_scale), global_scales=global_scales)

"""What makes values of the codes of a layer's weights, and codes as the kernels load them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from moe_ops.kernels.triton import Inputs, Weight, brings_decoder, in_blocks, in_words, one_a_step

# As kernels ask them of W; their sources are part of what Triton's cache knows a kernel by.
are_words = triton.constexpr_function(in_words)
brings_its_decoder = triton.constexpr_function(brings_decoder)
POWERS = "powers of two"
are_blocks = triton.constexpr_function(in_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """What makes the values of a layer's weights of their codes: scales, zero points, and W; how
    inputs are emulated, if they are, and their static scales."""

    w13_scale_EFG: Tensor
    w2_scale_EDG: Tensor
    w13_zero_EFG: Tensor | None
    w2_zero_EDG: Tensor | None
    weight: Weight
    global_scale13_E: Tensor | None = None
    global_scale2_E: Tensor | None = None
    inputs: Inputs | None = None  # that are emulated
    # Of those of 8 bits, what has a scale: "row", "tensor", "group", or POWERS: groups whose scales
    # are powers of two.
    scaled: str = ""
    x_scale: Tensor | None = None  # static ones
    h_scale: Tensor | None = None
    x_scale_TG: Tensor | None = None  # of tokens that are codes already
    result: torch.dtype | None = None  # the dtype of results then

    @property
    def in_words(self) -> bool:
        return in_words(self.weight)

    @property
    def quantizes(self) -> bool:
        """Whether inputs have 8 bits."""
        return self.weight.inputs_8

    @property
    def by_row(self) -> bool:
        """Whether inputs have 8 bits, and scales that leave the sum: see `row_scales.py`."""
        return self.quantizes and self.scaled not in ("group", POWERS)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of codes of 8 bits, both of weights and of inputs."""
        return torch.int8 if self.weight.element == "int8" else torch.float8_e4m3fn

    @property
    def bits(self) -> int:
        return self.weight.bits

    @property
    def one_a_step(self) -> bool:
        return one_a_step(self.weight)


def with_float8(codes: Codes) -> Codes:
    """Codes whose inputs of float8 are multiplied as such, in place of being emulated: of a scale a
    row or tensor, or for as many columns as weights have one for."""
    inputs = codes.inputs
    assert inputs is not None, codes
    scaled = {"e8m0": POWERS, "float32": "group"}.get(inputs.scale, inputs.scale)
    assert scaled in ("row", "tensor") or inputs.group == codes.weight.across, inputs
    weight = replace(codes.weight, inputs_8=True)
    return replace(codes, weight=weight, inputs=None, scaled=scaled)


def floats_of(x_TD: Tensor, codes: Codes | None) -> torch.dtype:
    """The dtype of results, in which h is rounded: that of tokens, unless they are codes."""
    given = codes is not None and codes.x_scale_TG is not None
    return codes.result if given else x_TD.dtype  # type: ignore[union-attr,return-value]


@triton.constexpr_function
def by_row(W):
    """Whether inputs are codes with scales that leave the sum, as `Codes.by_row` says. W alone
    tells it: inputs in groups have weights in groups of as many columns."""
    return W is not None and W.inputs_8 and W.across == -1


def as_stored(w: Tensor, weight: Weight) -> Tensor:
    """A weight of codes as the kernels load it: words, or codes of eight bits, or bytes for its own
    decoder."""
    if brings_decoder(weight):
        return w.view(torch.uint8)
    return w.view(torch.int32) if in_words(weight) else w


def scales_as_stored(scale: Tensor, weight: Weight) -> Tensor:
    """Scales as the kernels load them: those of float8 as bytes, which every GPU has."""
    return scale.view(torch.uint8) if weight.kind == "float8_e4m3fn" else scale

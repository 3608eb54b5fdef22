"""How the operands of one expert layer are stored: what kernels and tuned tables ask of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moe_ops.options import MOST_SIZE, check_flag, check_int
from moe_ops.quant.checks import (
    check_bias,
    check_divides,
    check_global_scale,
    check_input,
    check_one_device,
    check_operand,
    check_same,
    check_weight_scale,
    check_zero,
)
from moe_ops.quant.formats import ROW, TENSOR, Operand
from moe_ops.quant.resolve import has_gate_up_scale, merge_gate_up
from moe_ops.quant.schemes import check_groups, scheme_of
from moe_ops.shapes import check_choice


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantConfig:
    """The operands of both products of an expert layer, checked when it is made.

    w13 is [E, F, D] with the rows [gate; up], F = 2 * I, if gated, else [E, I, D]; w2 is [E, D, I].
    x and h share a format, as do w13 and w2. A value is (code - zero) * scale * global_scale, so
    scales are multipliers of decoding. Per operand:

        scale         weights: [E, groups of rows, groups of columns], the dtype of the format;
                      inputs: static, one value, for the group "tensor" alone
        global_scale  NVFP4 alone: float32 [E] of weights, float32 one value of inputs
        zero          weights of unsigned integers alone: uint8, the shape of scale
        bias          weights alone: float [E, rows]

    Raises ValueError or TypeError, if the parts do not fit.
    Tensors are kept as they are; do not write to them afterwards.
    """

    x: Operand  # input of the first product
    h: Operand  # input of the second product, after the activation
    w13: Operand
    w2: Operand
    E: int
    F: int
    D: int
    I: int  # noqa: E741 the legend's letter
    gated: bool

    def __post_init__(self) -> None:
        _check(self)

    @property
    def quantized(self) -> bool:
        """Whether the weights are quantised; inputs never are alone."""
        return self.w13.format is not None

    @property
    def per_token(self) -> bool:
        """Whether each token of an input has one scale."""
        return self.x.format is not None and self.x.format.group == ROW

    @property
    def per_tensor(self) -> bool:
        """Whether an input has one scale, static or dynamic, for all tokens."""
        return self.x.format is not None and self.x.format.group == TENSOR

    @property
    def block_shape(self) -> tuple[int, int] | None:
        """Rows and columns of the weights that share a scale; None if whole rows or all do."""
        format = self.w13.format
        return None if format is None or format.group in (ROW, TENSOR) else format.group

    @property
    def scheme(self) -> str:
        """The name of the scheme, a key of `SCHEMES`; "none" if not quantised."""
        return scheme_of(self.w13.format, self.x.format)

    @property
    def table_name(self) -> str:
        """The key of tuned tables: scheme, weight format and input format, in [a-z0-9_].

        Equal for configurations with the same formats, whatever their sizes; the 16-bit dtype is
        that of the tensors, which a configuration does not hold.
        """
        names = (self.scheme, self.w13.name, self.x.name)
        return "__".join(re.sub("[^a-z0-9]+", "_", name) for name in names if name)

    def input_scale_shape(self, tokens: int, width: int) -> tuple[int, int] | None:
        """Shape of the scales of an input of so many tokens; None if it is not quantised.

        Groups: [tokens, ceil(width / group)]. Per token: [tokens, 1]. Per tensor: [1, 1].
        """
        format = self.x.format
        return None if format is None else format.parsed.scale_shape(tokens, width)

    def batched_input_scale_shape(
        self, experts: int, tokens: int, width: int
    ) -> tuple[int, int, int] | None:
        """The same for an input [experts, tokens, width] whose tokens lie by expert."""
        shape = self.input_scale_shape(tokens, width)
        return None if shape is None else (experts, *shape)

    def weight_scale_shape(self, which: str) -> tuple[int, int, int] | None:
        """Shape of the scales of "w13" or "w2"; None if it is not quantised.

        Raises ValueError for another name.
        """
        check_choice("which", which, ("w13", "w2"))
        operand, rows, columns = (
            (self.w13, self.F, self.D) if which == "w13" else (self.w2, self.D, self.I)
        )
        if operand.format is None:
            return None
        return (self.E, *operand.format.parsed.scale_shape(rows, columns))


def _check(c: QuantConfig) -> None:
    """Raise ValueError or TypeError, saying what to do, unless the parts of `c` fit together."""
    operands = {"x": c.x, "h": c.h, "w13": c.w13, "w2": c.w2}
    _check_sizes(c)
    for name, operand in operands.items():
        check_operand(name, operand)
    check_same("x", c.x, "h", c.h)
    check_same("w13", c.w13, "w2", c.w2)
    scheme_of(c.w13.format, c.x.format)
    check_groups(c.x.format, c.w13.format)
    check_one_device(operands)
    check_input("x", c.x)
    check_input("h", c.h)
    _check_gate_up(c)
    for name, operand, rows, columns in (("w13", c.w13, c.F, c.D), ("w2", c.w2, c.D, c.I)):
        check_bias(name, operand, c.E, rows)
        if operand.format is not None:
            check_divides(name, operand.format, rows, columns)
            check_weight_scale(
                name, operand, (c.E, *operand.format.parsed.scale_shape(rows, columns))
            )
            check_zero(name, operand)
            check_global_scale(name, operand, (c.E,))


def _check_sizes(c: QuantConfig) -> None:
    """Sizes are positive, and F counts the gate rows and the up rows."""
    for name in ("E", "F", "D", "I"):
        check_int(name, getattr(c, name), least=1, most=MOST_SIZE)
    check_flag("gated", c.gated)
    want = 2 * c.I if c.gated else c.I
    if want != c.F:
        raise ValueError(
            f"F={c.F} does not fit I={c.I}: gated={c.gated} wants F = {'2 * I' if c.gated else 'I'}"
            f" = {want}"
        )


def _check_gate_up(c: QuantConfig) -> None:
    """A gated first weight with one scale for all has no scales of its own for gate and up."""
    format, scale = c.w13.format, c.w13.scale
    if c.gated and format is not None and format.group == TENSOR and has_gate_up_scale(scale):
        merge_gate_up(scale)
        raise ValueError(
            f"w13.scale has a gate and an up scale, shape {list(scale.shape)}; "
            f"merge_gate_up makes it {[c.E, 1, 1]}"
        )

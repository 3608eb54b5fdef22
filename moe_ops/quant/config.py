"""How the operands of one expert layer are stored: what kernels and tuned tables ask of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moe_ops.quant.checks import check_config, scheme_of
from moe_ops.quant.formats import ROW, TENSOR, Operand
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

    Raises ValueError or TypeError, from a rule in `quant/checks.py`, if the parts do not fit.
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
        check_config(self)

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

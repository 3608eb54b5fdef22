"""What the experts of a layer compute with: tensors and options, as records.

They are made anew for each call, so they are not frozen, which would take four times as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from moe_ops.layer.factors import kept_product
from moe_ops.layer.tensors import LayerSizes
from moe_ops.main_grad import main_grads
from moe_ops.ops.activate import Activation
from moe_ops.ops.by_choice import asked
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.scales import product


@dataclass(slots=True)
class Weights:
    """One of both products: weights, the scales that decode them, the static one of inputs, and
    what the weights' gradients are added to."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    zero: Tensor | None
    global_scale: Tensor | None
    input_scale: Tensor | None
    main_grad: Tensor | None


@dataclass(slots=True)
class Operands:
    """The tensors of both products, and what is computed with them."""

    w13: Weights
    w2: Weights
    input_order: Tensor | None
    activation: Activation
    quant: QuantConfig | None
    layout: str
    sizes: LayerSizes
    expert_offset: int
    batch_invariant: bool

    @property
    def has_order_by_expert(self) -> bool:
        """Whether each expert takes the columns of its input in an order of its own."""
        return self.input_order is not None and self.input_order.dim() == 2

    @property
    def is_invariant(self) -> bool:
        """Whether a call here has to be batch invariant, as the layer or its caller asks for it."""
        return self.batch_invariant or asked()

    @property
    def quantizes_inputs(self) -> bool:
        return self.quant is not None and bool(self.quant.inputs)

    @property
    def adds_to_main_grad(self) -> bool:
        return self.w13.main_grad is not None or self.w2.main_grad is not None

    def options(self) -> dict[str, Any]:
        """The arguments of `experts`, by name, that say what it computes with the weights."""
        w13, w2 = self.w13, self.w2
        return {
            **self.plain_options(), "x_scale": w13.input_scale, "h_scale": w2.input_scale,
            "w13_scale_EFG": w13.scale, "w2_scale_EDG": w2.scale,
            "w13_zero_EFG": w13.zero, "w2_zero_EDG": w2.zero,
            "global_scale13_E": self._factors(w13), "global_scale2_E": self._factors(w2),
        }  # fmt: skip

    def _factors(self, of: Weights) -> Tensor | None:
        """The factors of a product: of weights that are stored for a backend, which may keep what
        it makes of them, at an address that stays."""
        return (kept_product if self.layout else product)(of.global_scale, of.input_scale)

    def training_options(self) -> dict[str, Any]:
        """The arguments of `experts_accumulating` that `options` would be of `experts`.

        Raises ValueError for weights that do not train as they lie.
        """
        stored = self.quant or (f"the layout {self.layout!r}" if self.layout else "")
        if stored:
            raise ValueError(
                "main_grad is of weights as they were loaded, and those of this MoELayer are in "
                f"{stored}; undo that by moe_ops.prepare(model, '')"
            )
        act = self.activation
        return {
            "kind": act.kind, "gated": act.gated, "interleaved": act.interleaved,
            "alpha": act.alpha, "limit": act.limit, "up_shift": act.up_shift,
            "main_grad13_EFD": self.w13.main_grad, "main_grad2_EDI": self.w2.main_grad,
        }  # fmt: skip

    def plain_options(self) -> dict[str, Any]:
        """The arguments among `options` that are no tensors."""
        act, quant = self.activation, self.quant
        return {
            "layout": self.layout, "kind": act.kind, "gated": act.gated,
            "interleaved": act.interleaved, "alpha": act.alpha, "limit": act.limit,
            "up_shift": act.up_shift, "w_format": quant.weights if quant else "",
            "x_format": quant.inputs if quant else "",
        }  # fmt: skip

    def ordered(self, x_TD: Tensor) -> Tensor:
        """The columns of tokens in the order that all experts take them in."""
        return x_TD if self.input_order is None else x_TD.index_select(1, self.input_order)

    def padded(self, x_TD: Tensor) -> Tensor:
        """Tokens as wide as the weights, which may be rounded up."""
        added = self.sizes.D - self.sizes.hidden_size
        return F.pad(x_TD, (0, added)) if added else x_TD

    def cut(self, out_TD: Tensor) -> Tensor:
        """A result without the columns that weights were rounded up by."""
        hidden = self.sizes.hidden_size
        return out_TD[:, :hidden] if hidden < self.sizes.D else out_TD


def operands_of(layer: Any) -> Operands:
    """The operands of a `MoELayer`, which are attributes of it."""
    sums = main_grads(layer, layer.w13_weight, layer.w2_weight) or {}
    w13 = Weights(
        layer.w13_weight, layer.w13_bias, layer.w13_scale, layer.w13_zero, layer.w13_global_scale,
        layer.x_scale, sums.get("main_grad13_EFD"),
    )  # fmt: skip
    w2 = Weights(
        layer.w2_weight, layer.w2_bias, layer.w2_scale, layer.w2_zero, layer.w2_global_scale,
        layer.h_scale, sums.get("main_grad2_EDI"),
    )  # fmt: skip
    return Operands(
        w13, w2, layer.input_order, layer.activation, layer.quant, layer.layout, layer.sizes,
        layer.expert_offset, layer.batch_invariant,
    )  # fmt: skip

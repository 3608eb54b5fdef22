"""What an MoE layer is told besides its sizes: how it routes, and how its weights are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops.ops.route import RouteCall, route
from moe_ops.options import check_fields
from moe_ops.quant.arguments import named_format
from moe_ops.quant.formats import TENSOR, Format
from moe_ops.quant.schemes import SCHEMES, check_groups, scheme_of
from moe_ops.signature import did_you_mean

CustomRouting = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a layer chooses experts: the arguments of the `route` op, and what goes with them.

    The fields from `score` to `scale` are those of `route`, `weights_dtype` is its out_dtype;
    `n_group` and `topk_group` make it grouped. Besides:

        correction_bias  the layer holds one value per expert, added where experts are chosen
        custom           takes the place of `route`: (x_TD, logits_TE, top_k) -> (weights_TK float,
                         experts_TK int32 or int64), traceable if the layer is to be compiled
        weight_on_input  an expert's input is scaled by its weight, not its output; top_k = 1 alone

    Raises TypeError for a number, a flag or a string that is none; `check`, for which a layer asks,
    looks at the rest.
    """

    score: str = "softmax"
    select_on: str = "score"
    n_group: int = 1
    topk_group: int = 1
    group_reduce: str = "top2sum"
    group_fill: str = "-inf"
    softmax_selected: bool = False
    renormalize: bool = False
    eps: float = 0.0
    min_sum: float = 0.0
    scale: float = 1.0
    weights_dtype: str = "float32"
    correction_bias: bool = False
    custom: CustomRouting | None = None
    weight_on_input: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def args(self) -> tuple[str, str, int, int, str, str, bool, bool, float, float, float, str]:
        """The arguments of `route` after its tensors."""
        return (
            self.score, self.select_on, self.n_group, self.topk_group, self.group_reduce,
            self.group_fill, self.softmax_selected, self.renormalize, self.eps, self.min_sum,
            self.scale, self.weights_dtype,
        )  # fmt: skip

    def check(self, num_experts: int, top_k: int) -> None:
        """Raise ValueError or TypeError unless so many experts can be routed like this."""
        logits_TE = torch.empty(1, num_experts, device="meta")
        bias_E = logits_TE[0] if self.correction_bias else None
        route.check(RouteCall(logits_TE, top_k, bias_E, None, *self.args))
        if self.weight_on_input and top_k != 1:
            raise ValueError(
                f"weight_on_input scales a token for its one expert, got top_k={top_k}; "
                "leave it out, or take top_k=1"
            )
        if self.custom is None:
            return
        if not callable(self.custom):
            raise TypeError(
                f"custom must be a function of (x_TD, logits_TE, top_k), got {self.custom!r}"
            )
        given = [
            name
            for name in Routing.__dataclass_fields__
            if name not in ("custom", "weight_on_input")
            and getattr(self, name) != Routing.__dataclass_fields__[name].default
        ]
        if given:
            raise ValueError(
                f"custom takes the place of `route`, which alone reads {', '.join(given)}; "
                "leave them out and let the function do it"
            )

    def __str__(self) -> str:
        """Two to five words for a log."""
        if self.custom is not None:
            return getattr(self.custom, "__name__", type(self.custom).__name__)
        words = [self.score]
        if self.correction_bias:
            words.append("+ correction bias")
        if self.n_group > 1:
            words.append(f"in {self.topk_group} of {self.n_group} groups")
        if self.renormalize or self.softmax_selected:
            words.append("renormalised")
        if self.scale != 1.0:
            words.append(f"x {self.scale:g}")
        return " ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantFormats:
    """The formats of a layer's weights and of the inputs of both products.

    Format strings as the ops take them; inputs = "" stays in 16 or 32 bits. With static_inputs the
    layer holds the scales of the inputs; without, inputs are scaled at run time. With ordered_input
    the layer holds `input_order`, in which columns of its input go to the first product: for
    weights that GPTQ quantised in the order of their activations.

    Raises ValueError for formats that no scheme of `moe_ops.quant.schemes` joins, TypeError for
    what is neither a string nor a flag.
    """

    weights: str
    inputs: str = ""
    static_inputs: bool = False
    ordered_input: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        weights = named_format("weights", self.weights)
        inputs = named_format("inputs", self.inputs) if self.inputs else None
        scheme_of(weights, inputs)
        check_groups(inputs, weights)
        if self.static_inputs and not (
            inputs is not None and (inputs.group == TENSOR or inputs.has_global_scale)
        ):
            raise ValueError(
                f"static_inputs goes with one scale for the tensor or with nvfp4, got the inputs "
                f"{self.inputs!r}; leave it out"
            )
        if self.ordered_input and (weights.integer is None or inputs is not None):
            raise ValueError(
                "ordered_input goes with integer weights and inputs in 16 bits, got "
                f"{self.weights!r} and {self.inputs!r}; leave it out"
            )

    @staticmethod
    def of(quant: str | QuantFormats | None) -> QuantFormats | None:
        """The formats of a scheme by its name; formats and None come back as they are.

        Raises ValueError for an unknown scheme, and for one that is built in several formats:
        which one it is, a checkpoint says.
        """
        if quant is None or isinstance(quant, QuantFormats):
            return quant
        if not isinstance(quant, str):
            raise TypeError(
                f"quant must be None, the name of a scheme or QuantFormats, got {quant!r}"
            )
        if quant not in SCHEMES:
            raise ValueError(
                f"scheme {quant!r} is unknown; choose one of {', '.join(SCHEMES)}"
                f"{did_you_mean(quant, SCHEMES)}"
            )
        scheme = SCHEMES[quant]
        if scheme.name == "none":
            return None
        if len(scheme.weight_formats) > 1 or len(scheme.input_formats) > 1:
            raise ValueError(
                f"scheme {quant!r} has the weights {', '.join(scheme.weight_formats)} and the "
                f"inputs {', '.join(map(repr, scheme.input_formats))}; "
                "name one of each: QuantFormats(weights=..., inputs=...)"
            )
        return QuantFormats(weights=scheme.weight_formats[0], inputs=scheme.input_formats[0])

    @property
    def format(self) -> Format:
        return Format.of(self.weights)

    @property
    def input_format(self) -> Format | None:
        return Format.of(self.inputs) if self.inputs else None

    @property
    def scheme(self) -> str:
        """The name of the scheme, a key of `SCHEMES`."""
        return scheme_of(self.format, self.input_format)

    def __str__(self) -> str:
        """Scheme and formats for a log."""
        inputs = f" x {'static ' if self.static_inputs else ''}{self.inputs}" if self.inputs else ""
        order = ", ordered input" if self.ordered_input else ""
        return f"{self.scheme} ({self.weights}{inputs}{order})"

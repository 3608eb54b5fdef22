"""How a layer is quantised: the formats of its weights and of its inputs, without any tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_ops.checks.options import check_fields
from moe_ops.checks.signature import did_you_mean
from moe_ops.fake_impls.formats import PUBLISHED
from moe_ops.quant.arguments import named_format, not_codes
from moe_ops.quant.formats import TENSOR, Format
from moe_ops.quant.schemes import SCHEMES, check_groups, format_of, scheme_of


def names_format(text: str) -> bool:
    """Whether a text that names no scheme is meant as a format."""
    return ":" in text or text in PUBLISHED


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig:
    """The formats of a layer's weights and of the inputs of both products.

    Format strings as the ops take them; inputs = "" stays in 16 or 32 bits. With static_inputs the
    layer holds the scales of the inputs; without, inputs are scaled at run time. One scale serves
    all experts, or with per_expert_inputs each has its own: of nvfp4, whose static scales are
    global ones, a backend that takes one value takes the largest, and factors that match it.

    With ordered_input the layer holds `input_order`, in which columns of its input go to the first
    product: for weights that GPTQ quantised in the order of their activations. One order serves all
    experts; with per_expert_order each has its own, and a token's columns are put in order once for
    each expert that it goes to. With two_global_scales gate and up have a global scale each, of
    weights that have one (nvfp4): for checkpoints that quantised them apart. Not every backend
    multiplies by two.

    Raises ValueError for formats that no scheme of `moe_ops.quant.schemes` joins, TypeError for
    what is neither a string nor a flag.
    """

    weights: str
    inputs: str = ""
    static_inputs: bool = False
    per_expert_inputs: bool = False
    ordered_input: bool = False
    per_expert_order: bool = False
    two_global_scales: bool = False

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
        if self.per_expert_inputs and not self.static_inputs:
            raise ValueError(
                "per_expert_inputs says that static scales of inputs are each expert's own, got "
                "static_inputs=False; give both, or leave it out"
            )
        if self.ordered_input and (weights.integer is None or inputs is not None):
            raise ValueError(
                "ordered_input goes with integer weights and inputs in 16 bits, got "
                f"{self.weights!r} and {self.inputs!r}; leave it out"
            )
        if self.per_expert_order and not self.ordered_input:
            raise ValueError("per_expert_order goes with ordered_input; give both, or leave it out")
        if self.two_global_scales and not weights.has_global_scale:
            raise ValueError(
                f"two_global_scales goes with weights that have global scales, such as nvfp4, got "
                f"{self.weights!r}; leave it out"
            )

    @staticmethod
    def of(quant: str | QuantConfig | None) -> QuantConfig | None:
        """The configuration of a scheme by its name, or of weights by their format ("int8:row",
        "mxfp4"); None for "none". What is both, as "mxfp8", is the scheme. Configurations and None
        come back as they are. Of a scheme whose weights have one format, inputs that may have
        several get a scale for each row.

        Raises ValueError for an unknown scheme, and for one whose weights have several formats:
        which one it is, a checkpoint says.
        """
        if quant is None or isinstance(quant, QuantConfig):
            return quant
        if not isinstance(quant, str):
            raise TypeError(
                f"quant must be None, the name of a scheme or a QuantConfig, got {quant!r}"
            )
        if quant not in SCHEMES and names_format(quant):
            named_format(f"scheme {quant!r}", quant)
            return QuantConfig(weights=quant)
        if quant not in SCHEMES:
            raise ValueError(
                f"scheme {quant!r} is unknown; choose one of {', '.join(SCHEMES)}"
                f"{did_you_mean(quant, SCHEMES)}"
            )
        scheme = SCHEMES[quant]
        if scheme.name == "none":
            return None
        if len(scheme.weight_formats) > 1:
            raise ValueError(
                f"scheme {quant!r} has the weights {', '.join(scheme.weight_formats)} and the "
                f"inputs {', '.join(map(repr, scheme.input_formats))}; "
                "name one of each: QuantConfig(weights=..., inputs=...)"
            )
        return QuantConfig(weights=scheme.weight_formats[0], inputs=scheme.input_formats[0])

    @staticmethod
    def with_static_inputs(weights: str, inputs: str) -> QuantConfig:
        """The formats with static scales of inputs: each expert's own where weights of 8 bits meet
        inputs with one scale for the tensor, and one for all experts beside others, as no kernel on
        GPUs takes several there. Of nvfp4 `per_expert_inputs` keeps them.
        """
        one = QuantConfig(weights=weights, inputs=inputs, static_inputs=True)
        assert one.input_format is not None
        if one.input_format.has_global_scale or one.format.bits < 8:
            return one
        return replace(one, per_expert_inputs=True)

    @property
    def format(self) -> Format:
        return Format.of(self.weights)

    @property
    def input_format(self) -> Format | None:
        return format_of(self.inputs)

    @property
    def scheme(self) -> str:
        """The name of the scheme, a key of `SCHEMES`."""
        return scheme_of(self.format, self.input_format)

    def batched_scale_shape(
        self, experts: int, max_tokens: int, width: int
    ) -> tuple[int, int, int]:
        """The shape of the scales that come with batches of quantised tokens, x_scale_EMG of
        `experts_batched`: [E, M, 1] of one scale a row, [E, M, width / 128] of 1x128.

        Raises ValueError for inputs that do not come as codes with scales of their own.
        """
        why = not_codes(self.inputs) or ("has static scales" if self.static_inputs else None)
        if why is not None:
            raise ValueError(
                f"batches of {self} have no scales, as the input format {self.inputs!r} {why}; "
                "give x_EMD as floats"
            )
        rows, groups = Format.of(self.inputs).parsed.scale_shape(max_tokens, width)
        return experts, rows, groups

    def __str__(self) -> str:
        """Scheme and formats for a log."""
        static = "static " * self.static_inputs + "per-expert " * self.per_expert_inputs
        inputs = f" x {static}{self.inputs}" if self.inputs else ""
        order = ", ordered input" * self.ordered_input + " per expert" * self.per_expert_order
        two = ", two global scales" * self.two_global_scales
        return f"{self.scheme} ({self.weights}{two}{inputs}{order})"

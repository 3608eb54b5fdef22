"""The formats that an estimate is asked for: read from words, and checked against a model."""

from __future__ import annotations

from typing import Any

from moe_ops.checks.shapes import DTYPES
from moe_ops.estimate.measured import Formats
from moe_ops.estimate.sizes import FLOAT
from moe_ops.hf.experts import describe, is_experts
from moe_ops.hf.fits import stored_as
from moe_ops.hf.linears import check_linear_format
from moe_ops.hf.quantize import DEFAULTS
from moe_ops.quant.config import QuantConfig


def formats_of(experts: str, linears: str | None, head: str | None) -> Formats:
    """The formats by these words. Linear layers and the head are floats unless something is said,
    those of the experts if these are floats.

    A scheme of several formats is taken as `quantize_model` takes it.

    Raises ValueError for what is no format, no scheme and no dtype.
    """
    weights, _, inputs = experts.partition("+")
    config = None
    if experts not in DTYPES:
        weights, inputs = DEFAULTS.get(experts, (weights, inputs))
        try:
            config = (
                QuantConfig(weights=weights, inputs=inputs) if inputs else QuantConfig.of(weights)
            )
        except ValueError as error:
            raise ValueError(
                "--format takes a dtype, formats such as int8:row, or a scheme, got "
                f"{experts!r}: {error}"
            ) from error
    floats = experts if experts in DTYPES else FLOAT
    for name, format in (("--linears", linears), ("--head", head)):
        if format is not None and format not in DTYPES:
            check_linear_format(name, format)
    name = floats if config is None else config.weights
    if config is not None and config.inputs:
        name += f"+{config.inputs}"
    return Formats(experts=name, linears=linears or floats, head=head or floats)


def require(model: Any, formats: Formats) -> None:
    """Raise ValueError unless the experts of a model can be in a format; those that ours do not run
    at all are left to what is said of them."""
    if formats.weights in DTYPES:
        return
    config = QuantConfig(weights=formats.weights, inputs=formats.inputs)
    for module in model.modules():
        if is_experts(module) and not isinstance(describe(module), str):
            stored = stored_as(module, config)
            if isinstance(stored, str):
                raise ValueError(f"its experts cannot be in {formats.experts}: {stored}")
            return

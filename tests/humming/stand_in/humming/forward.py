"""Activation, and quantisation where a layer wants it."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from humming.layer import LayerConfig, quantized


def may_process_input(
    config: LayerConfig, inputs: Tensor, *, activation_type: str, activation_impl: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Values or codes, scales of groups, and scales of rows."""
    assert activation_type == "binary_split"
    a, b = inputs.float().chunk(2, -1)
    python = re.sub(r"(\d)f\b", r"\1", activation_impl)
    values = eval(python, {"a": a, "b": b, "__expf": torch.exp})
    if config.a_dtype == "bfloat16":
        return values.bfloat16(), None, None
    codes, scale = quantized(values)
    return codes, None, scale

"""Models whose linear layers and heads hold codes, and the same in floats."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from moe_ops.hf.linears import replace_everywhere
from moe_ops.hf.quantized_linear import QuantizedLinear
from tests.hf.test_quantize import gpt_oss, qwen

FORMATS = (
    "float8_e4m3fn:row", "float8_e4m3fn:128x128", "float8_e4m3fn:tensor", "int8:row",
    "uint8:1x32:bfloat16", "int4:1x64", "uint4:1x32:float16", "mxfp4", "mxfp6_e3m2", "mxfp6_e2m3",
    "mxfp8", "nvfp4",
)  # fmt: skip


def coded(model: nn.Module) -> dict[str, QuantizedLinear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}


def in_floats(model: Any) -> Any:
    """A copy of a model whose codes of linear layers are decoded to floats."""
    model = copy.deepcopy(model)
    for module in coded(model).values():
        linear = nn.Linear(module.in_features, module.out_features, module.bias is not None)
        linear.weight = nn.Parameter(module.dequantize(), requires_grad=False)
        linear.bias = module.bias
        replace_everywhere(model, module, linear)
    return model


def tied(seed: int = 0) -> Any:
    """A model whose head has the weight of the embedding."""
    model = qwen(seed)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return model


MAKERS = {"qwen3_moe": qwen, "gpt_oss": gpt_oss, "tied": tied}

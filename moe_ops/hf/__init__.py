"""Hugging Face transformers: importing this registers the experts implementation "moe_ops",
and the quantizer of this name."""

from __future__ import annotations

import sys
from typing import Any

from moe_ops.checks.renamed import what_was
from moe_ops.installed import require_transformers

require_transformers("moe_ops.hf, with optimize, quantize_model and share_experts,")

from moe_ops.hf import experts, fp8, over_ranks, pretrained  # noqa: E402
from moe_ops.hf.mxfp4 import adopt_mxfp4  # noqa: E402
from moe_ops.hf.optimize import optimize, restore  # noqa: E402
from moe_ops.hf.over_ranks import share_experts  # noqa: E402
from moe_ops.hf.quantize import quantize_model  # noqa: E402

__all__ = ["adopt_mxfp4", "optimize", "quantize_model", "restore", "share_experts"]

experts.register()
over_ranks.register(experts.NAME)
fp8.register()
sys.modules["moe_ops.pretrained"] = pretrained  # its name in models that were pickled whole


def __getattr__(name: str) -> Any:
    found = what_was("moe_ops.hf", name)
    if found is None:
        raise AttributeError(f"module 'moe_ops.hf' has no attribute {name!r}")
    return found

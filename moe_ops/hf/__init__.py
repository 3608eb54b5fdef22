"""Hugging Face transformers: importing this registers the experts implementation "moe_ops"."""

from moe_ops.hf import experts, fp8
from moe_ops.hf.generate import generation_report
from moe_ops.hf.mxfp4 import adopt_mxfp4
from moe_ops.hf.optimize import optimize, restore
from moe_ops.hf.quantize import quantize_model

__all__ = ["adopt_mxfp4", "generation_report", "optimize", "quantize_model", "restore"]

experts.register()
fp8.register()

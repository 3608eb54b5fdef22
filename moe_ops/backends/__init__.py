"""Backends of the ops. Importing this package registers them."""

# Ahead of what backends share with ops: torch looks through all modules that are loaded whenever a
# file that it has not met registers fakes.
import moe_ops.ops
import moe_ops.streams  # noqa: F401
from moe_ops.backends import (
    aten,
    aten_decode,
    by_row,
    by_sequence,
    cpu,
    cpu_linears,
    cpu_saving,
    cpu_stages,
    dequantize,
    flashinfer,
    over_ranks,
    push,
    triton,
    triton_adapters,
    triton_batched,
    triton_decode,
    triton_decoded,
    triton_gemm,
    triton_linears,
    triton_quantize,
    triton_ranks,
    triton_routing,
    triton_training,
    triton_twice,
)

__all__ = [
    "aten", "aten_decode", "by_row", "by_sequence", "cpu", "cpu_linears", "cpu_saving",
    "cpu_stages", "dequantize", "flashinfer", "over_ranks", "push", "triton", "triton_adapters",
    "triton_batched", "triton_decode", "triton_decoded", "triton_gemm", "triton_linears",
    "triton_quantize", "triton_ranks", "triton_routing", "triton_training",
    "triton_twice",
]  # fmt: skip

"""Backends of `experts` in FlashInfer, a package that none of them imports before its first call.

In the order in which they are asked, for weights that two of them read alike: b12x, then CUTLASS.
"""

from moe_ops.backends.flashinfer import b12x, cute_dsl, cutlass, trtllm

__all__ = ["b12x", "cute_dsl", "cutlass", "trtllm"]

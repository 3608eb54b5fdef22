"""The types that Triton has of arguments, in signatures of what `offline.py` compiles."""

from __future__ import annotations

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32",
    torch.int32: "*i32", torch.int64: "*i64", torch.int16: "*i16", torch.uint8: "*u8",
    torch.bool: "*i1", torch.int8: "*i8", torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}  # fmt: skip


def type_of(boxes: TensorDescriptor) -> str:
    """The type that Triton has of what copies boxes."""
    dtype = TYPES[boxes.base.dtype][1:]
    return f"tensordesc<{dtype}{list(boxes.block_shape)},{boxes.layout!r}>"

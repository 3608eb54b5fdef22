"""Weights from any checkpoint into MoE layers, streamed from safetensors or GGUF files.

`load_checkpoint` loads layers from files, `load_expert` one tensor. What names mean is in
`names.py`, how tensors are laid out in `layouts.py`, which part a rank keeps in `shards.py`, in
which order columns come in `order.py`; GGUF and bitsandbytes have files of their own.
"""

from moe_ops.weights.experts import load_expert
from moe_ops.weights.gguf_files import gguf_formats
from moe_ops.weights.layouts import Coding
from moe_ops.weights.load import load_checkpoint
from moe_ops.weights.names import STYLES, Style
from moe_ops.weights.record import LoadRecord
from moe_ops.weights.report import LoadReport

__all__ = [
    "STYLES",
    "Coding",
    "LoadRecord",
    "LoadReport",
    "Style",
    "gguf_formats",
    "load_checkpoint",
    "load_expert",
]

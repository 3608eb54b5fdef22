"""Weights from any checkpoint into MoE layers: from safetensors or GGUF files, or from tensors.

`load_checkpoint` (`load.py`) loads layers, `load_expert` (`experts.py`) one tensor. Entries come
from `files.py` and `tensors.py`, and are checked and then written by `checkpoint.py`. What names
mean is in `names.py`, what is said of matrices in `said.py`, how JSON files say it in `codings.py`
and `mixed.py`, how tensors are laid out in `layouts.py`, which part a rank keeps in `shards.py`, in
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

"""GGUF files for tests, written by their specification (docs/gguf.md of ggml), version 3."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moe_ops.weights.gguf_header import TYPES

ALIGNMENT = 32
UINT32, STRING = 4, 8
NUMBERS = {kind.name: number for number, kind in TYPES.items()}


class Written(NamedTuple):
    """A tensor: its type, its shape in values, the columns of a row last, and its bytes."""

    kind: str
    shape: tuple[int, ...]
    data: bytes


def of_floats(values: np.ndarray) -> Written:
    kind = {"float32": "F32", "float16": "F16"}[values.dtype.name]
    return Written(kind, values.shape, values.tobytes())


def write_gguf(
    file: Path,
    tensors: Mapping[str, Written],
    architecture: str = "qwen3moe",
    alignment: int = ALIGNMENT,
    offsets: Mapping[str, int] | None = None,
) -> None:
    """Write a file with two keys, the architecture and the alignment of its tensors; those of
    offsets are said to begin there.
    """
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), 2)]
    head += [_text("general.architecture"), struct.pack("<I", STRING), _text(architecture)]
    head += [_text("general.alignment"), struct.pack("<II", UINT32, alignment)]
    body = bytearray()
    for name, (kind, shape, data) in tensors.items():
        body += bytes(-len(body) % alignment)
        axes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        begin = (offsets or {}).get(name, len(body))
        head += [_text(name), axes, struct.pack("<IQ", NUMBERS[kind], begin)]
        body += data
    written = b"".join(head)
    file.write_bytes(written + bytes(-len(written) % alignment) + body)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()

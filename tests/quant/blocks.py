"""Blocks of ggml's K quants for tests: any bits but for scales, and what they stand for by its
specification, value by value.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moe_ops.quant.elements.k_quants import K_QUANTS, reordered
from moe_ops.quant.formats import Format
from moe_ops.quant.schemes import SCHEMES

K_FORMATS = ("q4_k", "q5_k", "q6_k")
SIZES = {kind: element.storage.units for kind, element in K_QUANTS.items()}
# Where the float16 numbers of a block are.
HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def width_of(scheme: str) -> int:
    """A width of models that the formats of a scheme fill."""
    return 256 if Format.of(SCHEMES[scheme].weight_formats[0]).in_blocks else 64


def any_ggml(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Blocks [rows, bytes] as ggml has them, of random bits; scales of scales are about 0.01."""
    g = np.random.default_rng(seed)
    raw = g.integers(0, 256, (rows, columns // 256, SIZES[kind]), dtype=np.uint8)
    for first in HALVES[kind]:
        d = (0.01 * g.standard_normal(raw.shape[:2])).astype(np.float16)
        raw[..., first : first + 2] = d.view(np.uint8).reshape(*d.shape, 2)
    return raw.reshape(rows, -1)


def any_blocks(format: str, rows: int, columns: int, seed: int = 0) -> Tensor:
    """The same in the order of the element."""
    kind = format.upper()
    return reordered(torch.from_numpy(any_ggml(kind, rows, columns, seed)), kind)


def specified(raw: np.ndarray, kind: str) -> Tensor:
    """What blocks [rows, bytes] of ggml stand for: its loops over values, in float32."""
    decode = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}[kind]
    blocks = raw.reshape(-1, SIZES[kind])
    values = np.stack([decode(block) for block in blocks])
    return torch.from_numpy(values.reshape(raw.shape[0], -1))


def _half(block: np.ndarray, at: int) -> np.float32:
    return np.float32(block[at : at + 2].view(np.float16)[0])


def _scale_min(j: int, q: np.ndarray) -> tuple[np.float32, np.float32]:
    if j < 4:
        return np.float32(q[j] & 63), np.float32(q[j + 4] & 63)
    scale = (q[j + 4] & 15) | ((q[j - 4] >> 6) << 4)
    least = (q[j + 4] >> 4) | ((q[j] >> 6) << 4)
    return np.float32(scale), np.float32(least)


def _q4_k(block: np.ndarray) -> np.ndarray:
    return _with_minima(block, block[16:], None)


def _q5_k(block: np.ndarray) -> np.ndarray:
    return _with_minima(block, block[48:], block[16:48])


def _with_minima(block: np.ndarray, low: np.ndarray, high: np.ndarray | None) -> np.ndarray:
    d, d_min, y = _half(block, 0), _half(block, 2), np.empty(256, np.float32)
    for j in range(8):
        scale, least = _scale_min(j, block[4:16])
        factor, less = d * scale, d_min * least
        for i in range(32):
            byte = int(low[32 * (j // 2) + i])
            code = byte >> 4 if j % 2 else byte & 15
            if high is not None and int(high[i]) >> j & 1:
                code += 16
            y[32 * j + i] = factor * np.float32(code) - less
    return y


def _q6_k(block: np.ndarray) -> np.ndarray:
    low, high, scales = block[:128], block[128:192], block[192:208].view(np.int8)
    d, y = _half(block, 208), np.empty(256, np.float32)
    for n in range(2):
        for i in range(32):
            for q in range(4):
                byte = int(low[64 * n + 32 * (q % 2) + i])
                code = (byte >> 4 if q > 1 else byte & 15) | (
                    int(high[32 * n + i]) >> 2 * q & 3
                ) << 4
                scale = d * np.float32(scales[8 * n + i // 16 + 2 * q])
                y[128 * n + 32 * q + i] = scale * np.float32(code - 32)
    return y

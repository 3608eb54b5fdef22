"""Weights of four bits as bitsandbytes stores them, decoded when they are read.

A weight w [rows, columns] is 4-bit codes of the flattened matrix, two in a byte, the first in the
high bits, and a table of 16 values (NF4, FP4), scaled by blocks of the flattened matrix:

    w_i = table[q_i] * absmax[i / blocksize]

No format of the ops has such tables or blocks, so layers hold the decoded weight. absmax may be
stored in eight bits itself (double quantisation), with a table, a scale per block and an offset.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

STATE = re.compile(r"(?P<weight>.+)\.quant_state\.bitsandbytes__(nf4|fp4)")
SUFFIXES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
DTYPES = {
    "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32
}  # fmt: skip
Get = Callable[[str], Tensor]


def decoders(names: set[str], get: Get) -> tuple[dict[str, Callable[[], Tensor]], set[str]]:
    """What decodes each weight of a file whose names these are, and the names that belong to them.

    A weight is decoded if all that it needs is in its file.
    """
    found: dict[str, Callable[[], Tensor]] = {}
    used: set[str] = set()
    for name in names:
        state = STATE.fullmatch(name)
        if state is None:
            continue
        weight = state["weight"]
        parts = {suffix: f"{weight}.{suffix}" for suffix in SUFFIXES}
        here = {suffix: part for suffix, part in parts.items() if part in names}
        if weight in names and {"absmax", "quant_map"} <= here.keys():
            found[weight] = partial(_decode, weight, name, here, get)
            used.update(here.values(), (name,))
    return found, used


def _decode(weight: str, state_name: str, parts: Mapping[str, str], get: Get) -> Tensor:
    """The weight, in the dtype that it was quantised from. Raises ValueError if parts misfit."""
    state: dict[str, Any] = json.loads(bytes(get(state_name).tolist()))
    codes, table = get(weight).reshape(-1), get(parts["quant_map"]).float()
    shape, block = tuple(state["shape"]), int(state["blocksize"])
    absmax = get(parts["absmax"])
    if "nested_absmax" in parts:
        absmax = _unnested(
            absmax, state, get(parts["nested_absmax"]), get(parts["nested_quant_map"])
        )
    values = torch.Size(shape).numel()
    blocks = -(-values // block)
    if codes.dtype != torch.uint8 or codes.numel() != -(-values // 2) or absmax.numel() != blocks:
        raise ValueError(
            f"{weight}: {codes.numel()} {codes.dtype} codes and {absmax.numel()} scales are not "
            f"those of {list(shape)} in blocks of {block}; store 4-bit codes as uint8"
        )
    out = torch.empty(blocks, block, dtype=DTYPES[state["dtype"]])
    flat, per = out.view(-1), block // 2
    step = max(blocks // 16, 1)  # in parts, so that what is made on the way is small
    for first in range(0, blocks, step):
        part = codes[first * per : (first + step) * per]
        found = table[torch.stack((part >> 4, part & 15), -1).flatten().int()]
        scale = absmax[first : first + step].float().repeat_interleave(block)
        flat[first * block : first * block + len(found)] = found * scale[: len(found)]
    return flat[:values].view(shape)


def _unnested(absmax: Tensor, state: Mapping[str, Any], scale: Tensor, table: Tensor) -> Tensor:
    """absmax in float32, of eight bits with a table and scales of their own."""
    every = scale.repeat_interleave(int(state["nested_blocksize"]))[: absmax.numel()]
    return table[absmax.int()] * every + float(state["nested_offset"])

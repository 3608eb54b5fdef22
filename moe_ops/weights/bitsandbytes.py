"""Weights of four bits as bitsandbytes stores them, put together when they are read.

A weight w [rows, columns] is 4-bit codes of the flattened matrix, two in a byte, the first in the
high bits, and a table of 16 values (NF4, FP4), scaled by blocks of the flattened matrix:

    w_i = table[q_i] * absmax[i / blocksize]

Where the table is that of NF4 and blocks are parts of rows, that is a format of the ops: experts
keep their codes, with absmax in float32. Others, and what is no expert, are decoded. absmax may be
stored in eight bits itself (double quantisation), with a table, a scale per block and an offset; it
is decoded in any case.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_ops.quant.elements.nf4 import NF4
from moe_ops.quant.formats import Format
from moe_ops.quant.packing import dequantize
from moe_ops.quant.scales import wrong_scale
from moe_ops.weights.layouts import PLAIN, Axis, Coding, Matrix, Stored

EXPERT = re.compile(r"(^|\.)experts\.")
SCALE_BYTES = 4  # of absmax in float32, in front of the codes of a block
STATE = re.compile(r"(?P<weight>.+)\.quant_state\.bitsandbytes__(nf4|fp4)")
SUFFIXES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
DTYPES = {
    "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32
}  # fmt: skip
MOST_AXES = 4
Get = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the JSON of a weight says. Nested values are 0 without double quantisation."""

    shape: tuple[int, ...]
    blocksize: int
    dtype: torch.dtype
    nested_blocksize: int
    nested_offset: float

    @property
    def values(self) -> int:
        return math.prod(self.shape)

    @property
    def blocks(self) -> int:
        return -(-self.values // self.blocksize)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A weight: its name, that of its state, those of its parts by suffix, and who reads them."""

    name: str
    state: str
    parts: Mapping[str, str]
    get: Get

    def like(self) -> Tensor:
        """What `decode` gives, without memory. Raises ValueError or TypeError, naming the entry,
        unless all of its parts fit.
        """
        try:
            state = self._checked()
        except (ValueError, TypeError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{self.name}: {error}") from error
        return torch.empty(state.shape, dtype=state.dtype, device="meta")

    def decode(self) -> Tensor:
        """The weight, in the dtype that it was quantised from."""
        state = self._checked()
        codes, table = self.get(self.name).reshape(-1), self.get(self.parts["quant_map"]).float()
        absmax, block = self._absmax(state), state.blocksize
        out = torch.empty(state.blocks, block, dtype=state.dtype)
        flat, per = out.view(-1), block // 2
        step = max(state.blocks // 16, 1)  # in parts, so that what is made on the way is small
        for first in range(0, state.blocks, step):
            part = codes[first * per : (first + step) * per]
            found = table[torch.stack((part >> 4, part & 15), -1).flatten().int()]
            scale = absmax[first : first + step].float().repeat_interleave(block)
            flat[first * block : first * block + len(found)] = found * scale[: len(found)]
        return flat[: state.values].view(state.shape)

    def _absmax(self, state: State) -> Tensor:
        """The scales of blocks, as floats."""
        absmax = self.get(self.parts["absmax"])
        if "nested_absmax" not in self.parts:
            return absmax
        scale = self.get(self.parts["nested_absmax"])
        every = scale.repeat_interleave(state.nested_blocksize)[: absmax.numel()]
        values = self.get(self.parts["nested_quant_map"])[absmax.int()]
        return values * every + state.nested_offset

    def stored(self) -> Stored:
        """The entry of the weight: its blocks, if it is an expert's in a format of the ops."""
        plain = Stored(name=self.name, read=self.decode, coding=PLAIN, like=self.like)
        if EXPERT.search(self.name) is None:
            return plain
        try:
            state = self._checked()
        except (ValueError, TypeError):
            return plain  # whose `like` says what is wrong
        if len(state.shape) != 2 or state.shape[1] % state.blocksize:
            return plain
        table = self.get(self.parts["quant_map"]).float()
        if table.tolist() != torch.tensor(NF4.table).tolist():
            return plain
        shape = (state.shape[0], state.shape[1] // state.blocksize * _block_bytes(state.blocksize))
        coding = coding_of_blocks(state.blocksize, state.dtype)
        like = partial(self._like_blocks, state, shape)
        return Stored(name=self.name, read=self.blocks, coding=coding, like=like)

    def _like_blocks(self, state: State, shape: tuple[int, int]) -> Tensor:
        """What `blocks` gives, without memory. Raises ValueError for scales that are no numbers."""
        wrong = wrong_scale(self._absmax(state).float(), "float32", signed=True)
        if wrong is not None:
            raise ValueError(
                f"{self.name}: its absmax holds {wrong}, but a scale is finite; complete the "
                "download"
            )
        return torch.empty(shape, dtype=torch.uint8, device="meta")

    def blocks(self) -> Tensor:
        """Blocks [rows, bytes] of absmax and the codes of its columns, the first in low bits."""
        state = self._checked()
        codes = self.get(self.name).reshape(-1, state.blocksize // 2)
        absmax = self._absmax(state).float().reshape(-1, 1).view(torch.uint8)
        blocks = torch.cat((absmax, codes << 4 | codes >> 4), 1)
        return blocks.view(state.shape[0], -1)

    def _checked(self) -> State:
        state = _state(self.get(self.state), nested="nested_absmax" in self.parts)
        codes, absmax = self.get(self.name), self.get(self.parts["absmax"])
        fits = codes.numel() == -(-state.values // 2) and tuple(absmax.shape) == (state.blocks,)
        if codes.dtype != torch.uint8 or not fits:
            raise ValueError(
                f"{codes.numel()} {codes.dtype} codes and scales {list(absmax.shape)} are not those"
                f" of {list(state.shape)} in blocks of {state.blocksize}; store 4-bit codes as "
                "uint8"
            )
        _check_table("quant_map", self.get(self.parts["quant_map"]), 16)
        if "nested_absmax" not in self.parts:
            _check_table("absmax", absmax, state.blocks)
            return state
        if absmax.dtype != torch.uint8:
            raise TypeError(f"absmax is {absmax.dtype}, but scales of scales go with uint8")
        nested = -(-state.blocks // state.nested_blocksize)
        _check_table("nested_absmax", self.get(self.parts["nested_absmax"]), nested)
        _check_table("nested_quant_map", self.get(self.parts["nested_quant_map"]), 256)
        return state


def _block_bytes(columns: int) -> int:
    return SCALE_BYTES + columns // 2


@functools.cache
def coding_of_blocks(columns: int, dtype: torch.dtype) -> Coding:
    """The coding of what `Weight.blocks` gives, of weights that were quantised from a dtype."""
    size, format = _block_bytes(columns), Format.of(f"nf4:1x{columns}")

    def parts(t: Tensor) -> tuple[Tensor, Tensor]:
        scale, codes = t.unflatten(1, (-1, size)).split((SCALE_BYTES, size - SCALE_BYTES), -1)
        return codes.flatten(1), scale.contiguous().view(torch.float32).squeeze(-1)

    def weight(t: Tensor, of: Format | None) -> Tensor:
        values, scale = parts(t)
        return dequantize(values, scale, format).to(dtype) if of is None else values

    def scale(t: Tensor, of: Format | None) -> Tensor:
        return parts(t)[1]

    return Coding(
        name="bitsandbytes NF4",
        weight=Matrix(columns=Axis(place=1, values=columns, elements=size), convert=weight),
        scale=Matrix(columns=Axis(place=1, elements=size), convert=scale),
        formats=(format.name,),
        decodes=True,
    )


def decoders(names: set[str], get: Get) -> tuple[dict[str, Weight], set[str]]:
    """Each weight of a file whose names these are, and the names that belong to them.

    A weight is decoded if all that it needs is in its file.
    """
    found: dict[str, Weight] = {}
    used: set[str] = set()
    for name in names:
        state = STATE.fullmatch(name)
        if state is None:
            continue
        weight = state["weight"]
        parts = {suffix: f"{weight}.{suffix}" for suffix in SUFFIXES}
        here = {suffix: part for suffix, part in parts.items() if part in names}
        nested = len({"nested_absmax", "nested_quant_map"} & here.keys())
        if weight in names and {"absmax", "quant_map"} <= here.keys() and nested != 1:
            found[weight] = Weight(name=weight, state=name, parts=here, get=get)
            used.update(here.values(), (name,))
    return found, used


def _state(told: Tensor, *, nested: bool) -> State:
    """What the bytes of a tensor tell. Raises ValueError or TypeError for what is no state."""
    if told.dtype != torch.uint8 or told.dim() != 1:
        raise TypeError(f"its quant_state is {list(told.shape)} {told.dtype}, not bytes of JSON")
    try:
        found = json.loads(bytes(told.tolist()))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its quant_state is no JSON ({error}); write the file anew") from error
    if not isinstance(found, dict):
        raise TypeError(f"its quant_state must be an object of names and values, got {found!r:.80}")
    shape = found.get("shape")
    if not isinstance(shape, list) or not 0 < len(shape) <= MOST_AXES:
        raise ValueError(f"the shape of its quant_state must be sizes of axes, got {shape!r:.80}")
    dtype = found.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"the dtype of its quant_state must be in {list(DTYPES)}, got {dtype!r}")
    blocksize = _count(found.get("blocksize"), "blocksize")
    if blocksize % 2:
        raise ValueError(f"blocksize must be even, because bytes hold two codes, got {blocksize}")
    offset = found.get("nested_offset", 0.0) if nested else 0.0
    if isinstance(offset, bool) or not isinstance(offset, (int, float)) or not _finite(offset):
        raise ValueError(f"nested_offset of its quant_state must be a number, got {offset!r:.80}")
    return State(
        shape=tuple(_count(size, "each size of its shape") for size in shape),
        blocksize=blocksize,
        dtype=DTYPES[dtype],
        nested_blocksize=_count(found.get("nested_blocksize"), "nested_blocksize") if nested else 0,
        nested_offset=float(offset),
    )


def _count(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise ValueError(f"{what} must be an integer above 0, got {value!r:.80}")
    return value


def _finite(value: float) -> bool:
    return -3e38 < value < 3e38  # integers may be larger than any float


def _check_table(what: str, t: Tensor, values: int) -> None:
    if not t.is_floating_point() or tuple(t.shape) != (values,):
        raise ValueError(
            f"{what} is {list(t.shape)} {t.dtype}, but has to be {values} floats; "
            "write the file anew"
        )

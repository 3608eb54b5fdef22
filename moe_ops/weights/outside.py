"""What of a checkpoint lies outside the experts and holds codes: decoded, or refused by name.

DeepSeek's shared experts and dense layers are float8 values with scales in tensors of their own.
The parameter that takes one is 16 or 32 bits wide, and takes the values times their scales, rounded
to its dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from moe_ops.checks.shapes import FLOATS
from moe_ops.quant.formats import ROW, TENSOR
from moe_ops.quant.packing import expand
from moe_ops.quant.scales import e8m0_to_float32, wrong_scale
from moe_ops.weights.configuration import naming
from moe_ops.weights.layouts import Block, Stored
from moe_ops.weights.said import Codings

Target = Callable[[str], Tensor | None]
Source = tuple[str, Callable[[], Iterable[Stored]]]  # what errors call it, and its entries
SCALES = ("_scale_inv", "_scale")  # behind the name of what they multiply, in spite of the first


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scale:
    """The scales of one matrix of codes."""

    name: str
    value: Tensor  # float32 [groups of rows, groups of columns]
    group: tuple[int, int]

    def decode(self, read: Callable[[], Tensor]) -> Tensor:
        """The float32 matrix of codes that are read now."""
        codes = read()
        return codes.float() * expand(self.value, self.group, *codes.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """The codes of a checkpoint outside the experts, and how each is decoded."""

    scales: dict[str, Scale] = field(default_factory=dict)  # by the names of codes

    @staticmethod
    def of(sources: Sequence[Source], target: Target, codings: Codings) -> Outside:
        """Look through entries for float8 tensors that go to something wider.

        `target`: by an entry's name the parameter or buffer that takes it, None for what has none,
        as experts have not. codings: what config.json says of blocks that share a scale. Tensors
        are mapped for it, not read.

        Raises ValueError, naming source and entry, for one without a scale, and for scales of a
        shape or with numbers that cannot be multiplied by.
        """
        codes: dict[str, tuple[str, Tensor]] = {}
        for where, entries in sources:
            with naming(where):
                for stored in entries():
                    to = target(stored.name)
                    if to is None or stored.like is not None:
                        continue
                    t = stored.read()
                    if t.is_floating_point() and t.dtype not in FLOATS and t.dtype != to.dtype:
                        codes[stored.name] = where, t
        if not codes:
            return Outside()
        known = {name + end: name for name in codes for end in SCALES}
        found: dict[str, Scale] = {}
        for where, entries in sources:
            with naming(where):
                for stored in entries():
                    name = known.get(stored.name)
                    if name is not None:
                        block = codings.block(name.rpartition(".")[0])
                        found[name] = _scale(stored, codes[name][1], block)
        for name, (where, t) in codes.items():
            if name not in found:
                raise ValueError(
                    f"{name} in {where} is {t.dtype}, codes without a scale, which "
                    f"{' or '.join(name + end for end in SCALES)} would be; give all files of the "
                    "checkpoint and no iterator, or dequantise it"
                )
        return Outside(scales=found)

    @property
    def taken(self) -> set[str]:
        """The names of the scales, which are loaded with what they multiply."""
        return {scale.name for scale in self.scales.values()}

    def decoded(self, entries: Iterable[Stored]) -> Iterator[Stored]:
        """Entries, of which codes are decoded and their scales are left out."""
        taken = self.taken
        for stored in entries:
            scale = self.scales.get(stored.name)
            if scale is not None:
                like = partial(torch.empty_like, stored.read(), device="meta")
                yield stored._replace(read=partial(scale.decode, stored.read), like=like)
            elif stored.name not in taken:
                yield stored


def _scale(stored: Stored, codes: Tensor, block: Block) -> Scale:
    """The scales of codes: one for all, for each row or for each block.

    Raises ValueError if they do not fit, or are no positive numbers.
    """
    name, value = stored.name, stored.read()
    powers = value.dtype in (torch.float8_e8m0fnu, torch.uint8)
    if not powers and value.dtype not in FLOATS:
        raise ValueError(f"{name} is {value.dtype}, but a scale is a float or a power of two")
    wrong = wrong_scale(value, "e8m0" if powers else "float32")
    if wrong is not None:
        raise ValueError(f"{name} holds {wrong}, but a scale is above 0; complete the download")
    value = e8m0_to_float32(value) if powers else value.float()
    group = group_of(codes, value, block)
    if group is None:
        raise ValueError(
            f"{name} is {list(value.shape)}, and its codes are {list(codes.shape)}, but "
            f"{said_of(block)}; dequantise the checkpoint"
        )
    if group in (TENSOR, ROW):
        value = value.reshape(-1, 1)
    return Scale(name=name, value=value, group=group)


def group_of(codes: Tensor, scale: Tensor, block: Block) -> tuple[int, int] | None:
    """The rows and columns of a matrix of float8 that share a scale, by the shape of the scales:
    all, a row's, or the blocks that config.json says; None if they are of none of these.
    """
    if codes.dim() != 2:
        return None
    rows, columns = codes.shape
    if scale.numel() == 1:
        return TENSOR
    if tuple(scale.shape) in ((rows,), (rows, 1)):
        return ROW
    if block is not None and list(scale.shape) == [-(-rows // block[0]), -(-columns // block[1])]:
        return block
    return None


def said_of(block: Block) -> str:
    """What scales may be, for errors."""
    said = "no blocks of scales" if block is None else f"blocks of {block[0]} x {block[1]}"
    return f"config.json says {said}, and else a scale is for a matrix or for a row"

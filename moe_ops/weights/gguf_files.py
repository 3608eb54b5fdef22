"""GGUF files: their tensors as entries, and what their types are to the ops.

What a tensor's type is, only the file says, so a layer is made when its file is known:
`gguf_formats` reads the types, `load_checkpoint` the tensors. A type whose blocks hold what a
format holds is taken apart into values and scales, or, of the K quants, put in another order;
others are decoded, by the package gguf, for layers in 16 or 32 bits.
"""

from __future__ import annotations

import functools
import mmap
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from moe_ops.quant.config import QuantConfig
from moe_ops.quant.elements.k_quants import K_QUANTS, reordered
from moe_ops.quant.formats import Format
from moe_ops.quant.packing import dequantize, pack
from moe_ops.weights.configuration import naming
from moe_ops.weights.gguf_header import TYPES, Placed, tensors_of
from moe_ops.weights.layouts import PLAIN, Axis, Coding, Matrix, Stored

EXPERTS = re.compile(r"(?P<prefix>.*)\.ffn_(gate|up|down|gate_up)_exps\.weight")
# The types whose numbers are those of a format, to the bit: 32 columns in a block, after its scale,
# or the K quants.
FORMATS = {
    "Q8_0": "int8:1x32:float16", "Q4_0": "int4:1x32:float16", "MXFP4": "mxfp4",
    "Q4_K": "q4_k", "Q5_K": "q5_k", "Q6_K": "q6_k",
}  # fmt: skip
SCALE_BYTES = {"Q8_0": 2, "Q4_0": 2, "MXFP4": 1}
# Bytes of the float16 numbers of a block that scale the others.
SCALES_OF_SCALES = {"Q4_K": slice(0, 4), "Q5_K": slice(0, 4), "Q6_K": slice(208, 210)}
FLOATING = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NUMBERS = ("I8", "I16", "I32", "I64", "F64")  # which nobody decodes


def entries(file: Path) -> Iterator[Stored]:
    """The tensors of a file: of experts as their blocks are, mapped; others as floats.

    Reading one of a type that cannot be decoded raises ValueError, and ImportError for one that the
    package gguf would decode, if it were there.
    """
    tensors = _tensors(file)
    raw = _bytes_of(file)
    for tensor in tensors:
        name, kind = tensor.name, tensor.type.name
        if kind in FLOATING:
            yield Stored(name=name, read=partial(_floats, raw, tensor), coding=PLAIN)
        elif EXPERTS.fullmatch(name):
            yield Stored(name=name, read=partial(_blocks, raw, tensor), coding=coding_of_type(kind))
        else:
            yield Stored(
                name=name, read=partial(_decoded, raw, tensor), coding=PLAIN,
                like=partial(_like, tensor),
            )  # fmt: skip


def gguf_formats(source: str | Path | Iterable[str | Path]) -> dict[str, QuantConfig | None]:
    """The `quant` of every MoE layer of GGUF files, by its prefix ("blk.3"), to make it with.

    source: a folder with *.gguf, a file, or several, as `load_checkpoint` takes them. None where
    the experts' tensors are floating-point, of several types, or of a type that no format holds
    exactly, such as Q5_0: they are decoded to the layer's dtype. Reads no tensor. Raises
    ValueError for what is no GGUF file, and FileNotFoundError for a folder without one.
    """
    files = [Path(file) for file in ([source] if isinstance(source, (str, Path)) else source)]
    if len(files) == 1 and files[0].is_dir():
        files = sorted(files[0].glob("*.gguf"))
        if not files:
            raise FileNotFoundError(f"no GGUF files in {source}; give a folder with some, or files")
    kinds: dict[str, set[str]] = {}
    for file in files:
        for tensor in _tensors(file):
            found = EXPERTS.fullmatch(tensor.name)
            if found:
                kinds.setdefault(found["prefix"], set()).add(tensor.type.name)
    formats = {p: FORMATS.get(next(iter(k))) if len(k) == 1 else None for p, k in kinds.items()}
    return {p: None if f is None else QuantConfig(weights=f) for p, f in formats.items()}


@functools.cache
def coding_of_type(kind: str) -> Coding:
    """The coding of a GGUF type."""
    _, values, size = next(one for one in TYPES.values() if one.name == kind)
    known = FORMATS.get(kind)

    def weight(t: Tensor, format: Format | None) -> Tensor:
        return _decoder(kind)(t) if format is None else _values(t, kind)

    def scale(t: Tensor, format: Format | None) -> Tensor:
        return _scales(t, kind)

    return Coding(
        name=f"GGUF {kind}",
        weight=Matrix(columns=Axis(place=1, values=values, elements=size), convert=weight),
        scale=Matrix(columns=Axis(place=1, elements=size), convert=scale),
        formats=() if known is None else (known,),
        decodes=True,
        told_by="gguf_formats",
        scale_of_blocks=partial(_scale_of_blocks, kind=kind) if kind in K_QUANTS else None,
    )


def _values(t: Tensor, kind: str) -> Tensor:
    """The packed values of a format out of blocks [rows, bytes]."""
    if kind in K_QUANTS:
        return reordered(t, kind)
    stored = t.unflatten(1, (-1, _size(kind)))[..., SCALE_BYTES[kind] :]
    if kind == "Q8_0":
        return stored.flatten(1).view(torch.int8)
    # A byte holds values i and i + 16 of its block; ours hold neighbours.
    codes = torch.cat((stored & 15, stored >> 4), -1).flatten(1)
    return pack(codes, "uint4")


def _scales(t: Tensor, kind: str) -> Tensor:
    """The scales of groups out of blocks [rows, bytes]."""
    found = t.unflatten(1, (-1, _size(kind)))[..., : SCALE_BYTES[kind]].contiguous()
    return (found if kind == "MXFP4" else found.view(torch.float16)).squeeze(-1)


def _scale_of_blocks(t: Tensor, kind: str) -> Tensor:
    """1, or one of the scales of scales of blocks [..., bytes] that is no number."""
    parts = t.unflatten(-1, (-1, _size(kind)))[..., SCALES_OF_SCALES[kind]]
    scales = parts.contiguous().view(torch.float16).float()
    wrong = scales[~scales.isfinite()]
    return wrong[:1] if wrong.numel() else torch.ones(1)


def _size(kind: str) -> int:
    return next(one.size for one in TYPES.values() if one.name == kind)


def _bytes_of(file: Path) -> Tensor:
    """The bytes of a file, mapped for private changes, of which there are none: torch wants memory
    that can be written."""
    with file.open("rb") as opened:
        return torch.frombuffer(
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8
        )


def _mapped(raw: Tensor, tensor: Placed) -> Tensor:
    """The blocks of a tensor [..., rows, bytes] of a file."""
    row = tensor.shape[-1] // tensor.type.values * tensor.type.size if tensor.shape else tensor.size
    return raw[tensor.first : tensor.first + tensor.size].view(*tensor.shape[:-1], row)


def _blocks(raw: Tensor, tensor: Placed) -> Tensor:
    """The blocks of an expert's tensor, of a type that can be decoded."""
    with naming(tensor.name):
        _decoder(tensor.type.name)
    return _mapped(raw, tensor)


def _decoded(raw: Tensor, tensor: Placed) -> Tensor:
    blocks = _mapped(raw, tensor)
    rows = blocks.reshape(-1, blocks.shape[-1])
    return _decoder(tensor.type.name)(rows).reshape(tensor.shape)


def _like(tensor: Placed) -> Tensor:
    with naming(tensor.name):
        _decoder(tensor.type.name)
    return torch.empty(tensor.shape, device="meta")


def _floats(raw: Tensor, tensor: Placed) -> Tensor:
    found = raw[tensor.first : tensor.first + tensor.size]
    if tensor.first % tensor.type.size:  # a file may place tensors at any byte
        found = found.clone()
    return found.view(FLOATING[tensor.type.name]).view(tensor.shape)


def _decoder(kind: str) -> Callable[[Tensor], Tensor]:
    """From blocks [rows, bytes] to float32: of formats by theirs, of others by the package gguf."""
    if kind in FORMATS:
        format = Format.of(FORMATS[kind])

        def by_format(t: Tensor) -> Tensor:
            scale = torch.ones(1, 1) if format.in_blocks else _scales(t, kind)
            return dequantize(_values(t, kind), scale, format)

        return by_format
    if kind in NUMBERS:
        raise ValueError(f"{kind} is no type of weights; convert the file")
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError as error:
        raise ImportError(
            f"decoding {kind} needs the package gguf; install it: pip install 'torch-moe-ops[gguf]'"
        ) from error
    found = GGMLQuantizationType[kind] if kind in GGMLQuantizationType.__members__ else None
    if found not in quants._type_traits:
        raise ValueError(f"the package gguf does not decode {kind}; convert the file")
    return lambda t: torch.from_numpy(quants.dequantize(t.contiguous().numpy(), found))


def _tensors(file: Path) -> list[Placed]:
    """The tensors of a file. Raises ValueError, naming it, for what is no GGUF file."""
    try:
        return tensors_of(file)
    except (ValueError, TypeError, LookupError, OverflowError) as error:
        raise ValueError(
            f"{file} cannot be read as GGUF ({error}); complete the download, or write the file "
            "anew"
        ) from error

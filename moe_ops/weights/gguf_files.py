"""GGUF files: their tensors as entries, and what their types are to the ops.

What a tensor's type is, only the file says, so a layer is made when its file is known:
`gguf_formats` reads the types, `load_checkpoint` the tensors. A type whose blocks hold what a
format holds is taken apart into values and scales; others are decoded, by the package gguf, for
layers in 16 or 32 bits.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_ops.quant.config import QuantConfig
from moe_ops.quant.formats import Format
from moe_ops.quant.packing import pack
from moe_ops.weights.configuration import naming
from moe_ops.weights.gguf_header import check_header
from moe_ops.weights.layouts import PLAIN, Axis, Coding, Matrix, Stored

EXPERTS = re.compile(r"(?P<prefix>.*)\.ffn_(gate|up|down|gate_up)_exps\.weight")
# The types whose numbers are those of a format, to the bit: 32 columns in a block, after its scale.
FORMATS = {"Q8_0": "int8:1x32:float16", "Q4_0": "int4:1x32:float16", "MXFP4": "mxfp4"}
SCALE_BYTES = {"Q8_0": 2, "Q4_0": 2, "MXFP4": 1}
FLOATING = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def entries(file: Path) -> Iterator[Stored]:
    """The tensors of a file: of experts as their blocks are, mapped; others as floats.

    Raises ImportError without the package gguf, ValueError for a type that it does not decode.
    """
    for tensor in _tensors(file):
        name, kind = str(tensor.name), tensor.tensor_type.name
        if kind in FLOATING:
            yield Stored(name=name, read=partial(_floats, tensor), coding=PLAIN)
        elif EXPERTS.fullmatch(name):
            with naming(name):
                coding = coding_of_type(kind)
            yield Stored(name=name, read=partial(_mapped, tensor), coding=coding)
        else:
            yield Stored(
                name=name, read=partial(_decoded, tensor), coding=PLAIN, like=partial(_like, tensor)
            )


def gguf_formats(source: str | Path | Iterable[str | Path]) -> dict[str, QuantConfig | None]:
    """The `quant` of every MoE layer of GGUF files, by its prefix ("blk.3"), to make it with.

    None where the experts' tensors are floating-point, of several types, or of a type that no
    format holds exactly, such as the K-quants: they are decoded to the layer's dtype. Reads no
    tensor. Raises ImportError without the package gguf.
    """
    files = [source] if isinstance(source, (str, Path)) else list(source)
    kinds: dict[str, set[str]] = {}
    for file in files:
        for tensor in _tensors(Path(file)):
            found = EXPERTS.fullmatch(str(tensor.name))
            if found:
                kinds.setdefault(found["prefix"], set()).add(tensor.tensor_type.name)
    formats = {p: FORMATS.get(next(iter(k))) if len(k) == 1 else None for p, k in kinds.items()}
    return {p: None if f is None else QuantConfig(weights=f) for p, f in formats.items()}


@functools.cache
def coding_of_type(kind: str) -> Coding:
    """The coding of a GGUF type. Raises ValueError for one that cannot be decoded either."""
    values, size = _block(kind)
    decode = _decoder(kind)
    known = FORMATS.get(kind)

    def weight(t: Tensor, format: Format | None) -> Tensor:
        return decode(t) if format is None else _values(t, kind, size)

    def scale(t: Tensor, format: Format | None) -> Tensor:
        found = t.unflatten(1, (-1, size))[..., : SCALE_BYTES[kind]].contiguous()
        return (found if kind == "MXFP4" else found.view(torch.float16)).squeeze(-1)

    return Coding(
        name=f"GGUF {kind}",
        weight=Matrix(columns=Axis(place=1, values=values, elements=size), convert=weight),
        scale=Matrix(columns=Axis(place=1, elements=size), convert=scale),
        formats=() if known is None else (known,),
        decodes=True,
    )


def _values(t: Tensor, kind: str, size: int) -> Tensor:
    """The packed values of a format out of blocks [rows, bytes]."""
    stored = t.unflatten(1, (-1, size))[..., SCALE_BYTES[kind] :]
    if kind == "Q8_0":
        return stored.flatten(1).view(torch.int8)
    # A byte holds values i and i + 16 of its block; ours hold neighbours.
    codes = torch.cat((stored & 15, stored >> 4), -1).flatten(1)
    return pack(codes, "uint4")


def _mapped(tensor: Any) -> Tensor:
    return torch.from_numpy(tensor.data)


def _decoded(tensor: Any) -> Tensor:
    return _decoder(tensor.tensor_type.name)(_mapped(tensor))


def _like(tensor: Any) -> Tensor:
    with naming(tensor.name):
        _decoder(tensor.tensor_type.name)
    return torch.empty(tensor.shape[::-1].tolist(), device="meta")


def _floats(tensor: Any) -> Tensor:
    t = _mapped(tensor)
    return t if t.is_floating_point() else t.view(FLOATING[tensor.tensor_type.name])


def _decoder(kind: str) -> Callable[[Tensor], Tensor]:
    """From blocks to float32, by the definition of the package gguf."""
    from gguf import GGMLQuantizationType, quants

    found = GGMLQuantizationType[kind]
    if found not in quants._type_traits:
        raise ValueError(f"the package gguf does not decode {kind}; convert the file")
    return lambda t: torch.from_numpy(quants.dequantize(t.contiguous().numpy(), found))


def _block(kind: str) -> tuple[int, int]:
    """Values and bytes of a block."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return values, size


def _tensors(file: Path) -> list[Any]:
    """The tensors of a file. Raises ValueError, naming it, for what is no GGUF file."""
    try:
        from gguf import GGML_QUANT_SIZES, GGUFReader
    except ImportError as error:
        raise ImportError(
            f"reading {file} needs the package gguf; install it: pip install 'torch-moe-ops[gguf]'"
        ) from error
    try:
        check_header(file, {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()})
        # Mapped for private changes, of which there are none: torch wants memory that can be
        # written.
        return list(GGUFReader(file, "c").tensors)
    except (ValueError, TypeError, LookupError, OverflowError) as error:
        raise ValueError(
            f"{file} cannot be read as GGUF ({error}); complete the download, or write the file "
            "anew"
        ) from error

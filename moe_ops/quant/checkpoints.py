"""Weights as GPTQ and AWQ checkpoints hold them, in the layout that the ops read.

Both hold the values of a [D, F] matrix in int32 words; w = (q - zero) * scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.options import check_flag, check_int, check_type
from moe_ops.quant.packing import Quantized, pack, unpack
from moe_ops.shapes import check_size


def from_gptq(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor | None = None,
    *,
    bits: int = 4,
    plus_one: bool = True,
) -> Quantized:
    """A GPTQ weight of four or eight bits as rows: values [..., F, D packed], scale, zero [..., F,
    G].

    w_fd = (q_fd - zero_fg) * scale_fg, with g the group of d. qweight: int32 [..., D/n, F], n = 32
    / bits values along D in a word, the first in its lowest bits. scales: float [..., G, F].
    qzeros: int32 [..., G, F/n], packed along F; the first version of the format (`plus_one`) stores
    zero - 1 in so many bits, so that the largest stands for a zero point of 0. Values are the
    element uint4 or uint8; without qzeros they are symmetric about the middle code, the element
    int4 or int8, and zero is None.

    Groups must be runs of neighbouring columns: weights that were quantised in the order of their
    activations (desc_act, with a g_idx) are not, and this function cannot tell. Raises ValueError
    or TypeError for shapes or dtypes that do not fit.

    Source: Frantar et al., "GPTQ", arXiv:2210.17323; the layout is AutoGPTQ's.
    """
    _check_bits(bits)
    check_flag("plus_one", plus_one)
    _check(qweight, scales, qzeros)
    F = qweight.shape[-1]
    check_size("scales", scales, -1, F, "columns of qweight")
    if qzeros is not None:
        check_size("qzeros", qzeros, -1, F * bits // 32, f"words of {bits}-bit columns of qweight")
    values = gptq_values(qweight, bits=bits, symmetric=qzeros is None)
    zero = None if qzeros is None else gptq_zeros(qzeros, bits=bits, plus_one=plus_one)
    return Quantized(values=values, scale=_transposed(scales), zero=zero)


def gptq_values(qweight: Tensor, *, bits: int, symmetric: bool) -> Tensor:
    """The values of `from_gptq` alone, [..., F, D packed]; symmetric: those of int4 or int8."""
    _check_bits(bits)
    _check_words("qweight", qweight)
    # The bytes of a word, in order, are packed values.
    values = _bytes(_transposed(qweight))
    # Four bits are stored with the offset that int4 has; eight bits with one of 128.
    return (values ^ 128).view(torch.int8) if symmetric and bits == 8 else values


def gptq_zeros(qzeros: Tensor, *, bits: int, plus_one: bool) -> Tensor:
    """The zero points of `from_gptq` alone, uint8 [..., F, G]."""
    _check_bits(bits)
    _check_words("qzeros", qzeros)
    zero_GF = unpack(_bytes(qzeros), f"uint{bits}")
    return _transposed((zero_GF + int(plus_one)) & (2**bits - 1))


def from_awq(qweight: Tensor, scales: Tensor, qzeros: Tensor) -> Quantized:
    """A four-bit AWQ weight as packed rows: uint4 [..., F, D/2], scale and zero [..., F, G].

    w_fd = (q_fd - zero_fg) * scale_fg, with g the group of d. qweight: int32 [..., D, F/8], eight
    values along F in a word; nibble i, from the lowest bits, is value (0, 2, 4, 6, 1, 3, 5, 7)[i].
    qzeros: int32 [..., G, F/8], packed alike. scales: float [..., G, F]. D must be even. Raises
    ValueError or TypeError for shapes or dtypes that do not fit.

    Source: Lin et al., "AWQ", arXiv:2306.00978; the layout is that of its GEMM kernel.
    """
    check_type("qzeros", qzeros, Tensor, "a Tensor")
    _check(qweight, scales, qzeros)
    check_size("scales", scales, -1, 8 * qweight.shape[-1], "eight to a word of qweight")
    check_size("qzeros", qzeros, -1, qweight.shape[-1], "the words of a row of qweight")
    values, zero = awq_values(qweight), awq_zeros(qzeros)
    return Quantized(values=values, scale=_transposed(scales), zero=zero)


def awq_values(qweight: Tensor) -> Tensor:
    """The values of `from_awq` alone, uint4 [..., F, D/2]."""
    return pack(awq_zeros(qweight), "uint4")


def awq_zeros(qzeros: Tensor) -> Tensor:
    """The zero points of `from_awq` alone, uint8 [..., F, G]."""
    _check_words("qzeros", qzeros)
    return _transposed(_awq_codes(qzeros))


def _awq_codes(words: Tensor) -> Tensor:
    """[..., n / 8] words to [..., n] codes."""
    nibbles = unpack(_bytes(words), "uint4")
    # Column 2a + b of eight is nibble a + 4b: the two halves of a word interleave.
    halves = nibbles.unflatten(-1, (words.shape[-1], 2, 4))
    return halves.transpose(-1, -2).flatten(-3)


def _transposed(t: Tensor) -> Tensor:
    return t.transpose(-1, -2).contiguous()


def _bytes(words: Tensor) -> Tensor:
    """The bytes of int32 words [..., n], lowest first: [..., 4 n]."""
    # An axis of one word has the stride 1 that this view wants, whatever strides the others have.
    return words.unsqueeze(-1).view(torch.uint8).flatten(-2)


def _check_bits(bits: int) -> None:
    check_int("bits", bits)
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, got {bits}; other widths straddle words")


def _check_words(name: str, t: Tensor) -> None:
    check_type(name, t, Tensor, "a Tensor")
    if t.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {t.dtype}; view the words as int32")


def _check(qweight: Tensor, scales: Tensor, qzeros: Tensor | None) -> None:
    check_type("scales", scales, Tensor, "a Tensor")
    _check_words("qweight", qweight)
    if qzeros is not None:
        _check_words("qzeros", qzeros)
    tensors = {"qweight": qweight, "scales": scales, "qzeros": qzeros}
    for name, t in tensors.items():
        if t is not None and (t.dim() < 2 or t.shape[:-2] != qweight.shape[:-2]):
            raise ValueError(
                f"{name} must have two axes after those of the experts, got shape "
                f"{tuple(t.shape)} beside qweight {tuple(qweight.shape)}; reshape it"
            )
    if qzeros is not None and qzeros.shape[-2] != scales.shape[-2]:
        raise ValueError(
            f"qzeros must have {scales.shape[-2]} groups like scales, "
            f"got shape {tuple(qzeros.shape)}; take both from the same layer"
        )

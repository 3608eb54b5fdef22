"""GPTQ and AWQ weights against words that are packed here value by value, in plain integers."""

import re

import pytest
import torch
from torch import Tensor

from moe_ops.quant.checkpoints import from_awq, from_gptq
from moe_ops.quant.formats import Format
from moe_ops.quant.packing import dequantize, unpack

D, F, GROUP = 32, 16, 16
PLAIN, AWQ = tuple(range(8)), (0, 2, 4, 6, 1, 3, 5, 7)
each_width = pytest.mark.parametrize("bits", [4, 8])


def word(codes: list[int], bits: int) -> int:
    """Codes as one signed int32, the first in the lowest bits."""
    value = sum(code << (bits * i) for i, code in enumerate(codes))
    return value - 2**32 if value >= 2**31 else value


def along_rows(codes_DF: Tensor, bits: int) -> Tensor:
    """Words of codes along the first axis: [D / n, F]."""
    return along_columns(codes_DF.T, bits).T.contiguous()


def along_columns(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Words of codes along the last axis; place i of a word holds column order[i] of its n."""
    n = 32 // bits
    order = order or tuple(range(n))
    rows = [
        [word([row[f + column] for column in order], bits) for f in range(0, len(row), n)]
        for row in codes.tolist()
    ]
    return torch.tensor(rows, dtype=torch.int32)


def checkpoint(bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [D, F], zero points [G, F] and scales [G, F]."""
    codes = torch.randint(0, 2**bits, (D, F))
    zeros = torch.randint(0, 2**bits, (D // GROUP, F))
    codes[:8, 0] = 2**bits - 1  # the top bit of a word
    return codes, zeros, (torch.rand(D // GROUP, F) + 0.5).half()


def weight_FD(codes: Tensor, zeros: Tensor | int, scales: Tensor) -> Tensor:
    spread = scales.float().repeat_interleave(GROUP, 0)
    zeros = zeros.repeat_interleave(GROUP, 0) if isinstance(zeros, Tensor) else zeros
    return ((codes - zeros).float() * spread).T


@each_width
@pytest.mark.parametrize("plus_one", [True, False], ids=["version_1", "version_2"])
def test_gptq_with_zero_points(plus_one: bool, bits: int) -> None:
    codes, zeros, scales = checkpoint(bits)
    zeros[0, 0] = 0  # stored as the largest code by the first version
    stored = (zeros - int(plus_one)) % 2**bits
    qweight, qzeros = along_rows(codes, bits), along_columns(stored, bits)
    got = from_gptq(qweight, scales, qzeros, bits=bits, plus_one=plus_one)
    assert got.zero is not None and torch.equal(got.zero.long(), zeros.T)
    assert torch.equal(unpack(got.values, f"uint{bits}").long(), codes.T)
    x = dequantize(got.values, got.scale, Format.of(f"uint{bits}:1x16:float16"), got.zero)
    assert torch.equal(x, weight_FD(codes, zeros, scales))


@each_width
def test_gptq_without_zero_points_is_symmetric_about_the_middle(bits: int) -> None:
    codes, _, scales = checkpoint(bits)
    got = from_gptq(along_rows(codes, bits), scales, bits=bits)
    assert got.zero is None
    x = dequantize(got.values, got.scale, Format.of(f"int{bits}:1x16:float16"))
    assert torch.equal(x, weight_FD(codes, 2 ** (bits - 1), scales))


@each_width
def test_gptq_of_one_word(bits: int) -> None:
    """Rows, columns, or both are one word: the strides of axes of size one are arbitrary."""
    n = 32 // bits
    for rows, columns in ((n, 1), (n, n), (n, 3 * n), (3 * n, n)):
        codes = torch.randint(0, 2**bits, (rows, columns))
        zeros, scales = torch.randint(0, 2**bits, (1, columns)), torch.ones(1, columns)
        got = from_gptq(along_rows(codes, bits), scales, bits=bits)
        assert torch.equal(unpack(got.values.view(torch.uint8), f"uint{bits}").long().T % 2**bits,
                           codes if bits == 4 else codes ^ 128)  # fmt: skip
        if columns % n == 0:
            stored = along_columns(zeros, bits)
            for one in (stored, stored.repeat(1, 2)[:, : columns // n], stored.T.contiguous().T):
                got = from_gptq(along_rows(codes, bits), scales, one, bits=bits, plus_one=False)
                assert got.zero is not None and torch.equal(got.zero.long(), zeros.T)
                assert torch.equal(unpack(got.values, f"uint{bits}").long(), codes.T)


def test_awq_of_one_word() -> None:
    codes, zeros = torch.randint(0, 16, (2, 8)), torch.randint(0, 16, (1, 8))
    one = along_columns(zeros, 4, AWQ)
    got = from_awq(along_columns(codes, 4, AWQ), torch.ones(1, 8), one.T.contiguous().T)
    assert torch.equal(unpack(got.values, "uint4").long(), codes.T)
    assert got.zero is not None and torch.equal(got.zero.long(), zeros.T)


def test_awq() -> None:
    codes, zeros, scales = checkpoint(4)
    got = from_awq(along_columns(codes, 4, AWQ), scales, along_columns(zeros, 4, AWQ))
    assert torch.equal(unpack(got.values, "uint4").long(), codes.T)
    x = dequantize(got.values, got.scale, Format.of("uint4:1x16:float16"), got.zero)
    assert torch.equal(x, weight_FD(codes, zeros, scales))


def test_experts_are_leading_axes() -> None:
    parts = [checkpoint(4) for _ in range(3)]
    gptq = [(along_rows(c, 4), s, along_columns(z, 4)) for c, z, s in parts]
    awq = [(along_columns(c, 4, AWQ), s, along_columns(z, 4, AWQ)) for c, z, s in parts]
    for read, given in ((from_gptq, gptq), (from_awq, awq)):
        together = read(*(torch.stack(tensors) for tensors in zip(*given, strict=True)))
        for e, one in enumerate(given):
            alone = read(*one)
            assert torch.equal(together.values[e], alone.values)
            assert torch.equal(together.scale[e], alone.scale)
            assert together.zero is not None and alone.zero is not None
            assert torch.equal(together.zero[e], alone.zero)


def words(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


SCALES = torch.ones(2, 16)
BAD = {
    "bits": (lambda: from_gptq(words(4, 16), SCALES, bits=3), "bits must be 4 or 8, got 3"),
    "qweight_dtype": (
        lambda: from_gptq(words(4, 16).long(), SCALES),
        "qweight must be int32, got torch.int64; view the words as int32",
    ),
    "qzeros_dtype": (
        lambda: from_awq(words(32, 2), SCALES, SCALES),
        "qzeros must be int32, got torch.float32",
    ),
    "scales_width": (
        lambda: from_gptq(words(4, 16), SCALES[:, :8]),
        "scales must have 16 (columns of qweight) on axis -1",
    ),
    "qzeros_width": (
        lambda: from_gptq(words(4, 16), SCALES, words(2, 2), bits=8),
        "qzeros must have 4 (words of 8-bit columns of qweight) on axis -1",
    ),
    "groups": (
        lambda: from_gptq(words(4, 16), SCALES, words(3, 2)),
        "qzeros must have 2 groups like scales, got shape (3, 2)",
    ),
    "experts": (
        lambda: from_gptq(words(5, 4, 16), SCALES),
        "scales must have two axes after those of the experts, got shape (2, 16) "
        "beside qweight (5, 4, 16)",
    ),
    "awq_width": (
        lambda: from_awq(words(32, 4), SCALES, words(2, 4)),
        "scales must have 32 (eight to a word of qweight) on axis -1",
    ),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD)
def test_errors_say_what_was_wrong(call, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        call()

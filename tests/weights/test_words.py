"""GPTQ and AWQ weights against words that are packed here value by value, in plain integers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_ops.quant.formats import Format
from moe_ops.quant.packing import dequantize, unpack
from moe_ops.weights.layouts import (
    Coding,
    awq_values,
    awq_zeros,
    compressed,
    gptq,
    gptq_values,
    gptq_zeros,
)

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
    values = gptq_values(along_rows(codes, bits), bits=bits, symmetric=False)
    zero = gptq_zeros(along_columns(stored, bits), bits=bits, plus_one=plus_one)
    assert torch.equal(zero.long(), zeros.T)
    assert torch.equal(unpack(values, f"uint{bits}").long(), codes.T)
    x = dequantize(values, scales.T, Format.of(f"uint{bits}:1x16:float16"), zero)
    assert torch.equal(x, weight_FD(codes, zeros, scales))


@each_width
def test_gptq_without_zero_points_is_symmetric_about_the_middle(bits: int) -> None:
    codes, _, scales = checkpoint(bits)
    values = gptq_values(along_rows(codes, bits), bits=bits, symmetric=True)
    x = dequantize(values, scales.T, Format.of(f"int{bits}:1x16:float16"))
    assert torch.equal(x, weight_FD(codes, 2 ** (bits - 1), scales))


@each_width
def test_gptq_of_one_word(bits: int) -> None:
    """Rows, columns, or both are one word: the strides of axes of size one are arbitrary."""
    n = 32 // bits
    for rows, columns in ((n, 1), (n, n), (n, 3 * n), (3 * n, n)):
        codes = torch.randint(0, 2**bits, (rows, columns))
        zeros = torch.randint(0, 2**bits, (1, columns))
        qweight = along_rows(codes, bits)
        for symmetric in (False, True):
            got = gptq_values(qweight, bits=bits, symmetric=symmetric).view(torch.uint8)
            want = codes ^ 128 if symmetric and bits == 8 else codes
            assert torch.equal(unpack(got, f"uint{bits}").long().T, want)
        if columns % n == 0:
            stored = along_columns(zeros, bits)
            for one in (stored, stored.repeat(1, 2)[:, : columns // n], stored.T.contiguous().T):
                zero = gptq_zeros(one, bits=bits, plus_one=False)
                assert torch.equal(zero.long(), zeros.T)


def test_awq_of_one_word() -> None:
    codes, zeros = torch.randint(0, 16, (2, 8)), torch.randint(0, 16, (1, 8))
    one = along_columns(zeros, 4, AWQ)
    assert torch.equal(unpack(awq_values(along_columns(codes, 4, AWQ)), "uint4").long(), codes.T)
    assert torch.equal(awq_zeros(one.T.contiguous().T).long(), zeros.T)


def test_awq() -> None:
    codes, zeros, scales = checkpoint(4)
    values, zero = awq_values(along_columns(codes, 4, AWQ)), awq_zeros(along_columns(zeros, 4, AWQ))
    assert torch.equal(unpack(values, "uint4").long(), codes.T)
    x = dequantize(values, scales.T, Format.of("uint4:1x16:float16"), zero)
    assert torch.equal(x, weight_FD(codes, zeros, scales))


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "gptq_values": lambda t: gptq_values(t, bits=4, symmetric=True),
    "gptq_zeros": lambda t: gptq_zeros(t, bits=4, plus_one=True),
    "awq_values": awq_values,
    "awq_zeros": awq_zeros,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_experts_are_leading_axes(read: Callable[[Tensor], Tensor]) -> None:
    words = torch.randint(-(2**31), 2**31 - 1, (3, 4, 16), dtype=torch.int32)
    for together, alone in zip(read(words), words, strict=True):
        assert torch.equal(together, read(alone))


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.uint8])
def test_other_dtypes_are_no_words(read: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"words must be int32, got {dtype}; view them as int32"):
        read(torch.zeros(4, 16, dtype=dtype))


@pytest.mark.parametrize("coding", [gptq, compressed])
def test_other_widths_straddle_words(coding: Callable[[int], Coding]) -> None:
    with pytest.raises(ValueError, match="bits must be 4 or 8, got 3; other widths straddle"):
        coding(3)

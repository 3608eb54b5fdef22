"""Expert kernels on quantised weights against decoded weights and against the definition; in
Triton's interpreter without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_ops import experts
from moe_ops.backends.triton import run_experts
from moe_ops.backends.triton_device import HOPPER
from moe_ops.backends.triton_formats import weight_of
from moe_ops.backends.triton_limits import (
    MOST_ROWS_AS_STORED,
    MOST_ROWS_OF_CODES,
    MOST_ROWS_OF_HUGE,
    MOST_ROWS_OF_LARGE_AS_STORED,
    MOST_ROWS_OF_QUANTIZED_INPUTS,
    most_rows_tokens,
)
from moe_ops.ops.experts import ExpertsCall
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import ACTIVATIONS, BF16, DEVICE, F16, TOL, Case, Tol, assert_close, make_layer

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.kernels.triton.experts.operands.group_scales import quantize_sorted, quantize_tokens
from moe_ops.kernels.triton.experts.operands.permuted import arrange
from moe_ops.kernels.triton.experts.schedule.sort import sort_pairs
from tests.chosen import in_turn, those_of
from tests.kernels.codes import any_codes, product, quantized

F8 = torch.float8_e4m3fn
KERNELS = ("triton.tiny", "triton.rows")
each_kernel = pytest.mark.parametrize("kernel", KERNELS)
DTYPES = (F16, BF16) if DEVICE == "cuda" else (F16,)  # the interpreter multiplies no bfloat16
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

FORMATS = (
    "int4:1x32", "int4:1x64:bfloat16", "int4:1x128:float16", "int4:row",
    "uint4:1x32:float16", "uint4:1x128", "uint4:row:bfloat16", "mxfp4", "float4_e2m1:1x128",
    "float8_e4m3fn:128x128", "float8_e4m3fn:16x32", "float8_e4m3fn:row", "float8_e4m3fn:tensor",
    "mxfp8", "int8:1x32", "int8:1x128:bfloat16", "int8:row", "uint8:1x64:float16", "uint8:row",
    "nvfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8_e5m2",
)  # fmt: skip
BLOCK_FLOAT8 = ("float8_e4m3fn:128x128", "float8_e4m3fn:1x128")
SMALL = Case(name="small", T=3, E=4, K=2, D=128, I=128)
# Columns that fill neither a step nor the groups of float8.
ODD = Case(name="odd", T=5, E=3, K=2, D=160, I=96)


def call_of(
    case: Case, w_format: str, x_format: str = "", dtype: torch.dtype = F16, **more: Any
) -> ExpertsCall:
    layer = make_layer(case, dtype, DEVICE, gated=more.get("gated", True))
    weights = quantized(layer.w13_EFD, layer.w2_EDI, w_format)
    biases = {"b13_EF": layer.b13_EF, "b2_ED": layer.b2_ED} if more.pop("biases", False) else {}
    given = (layer.x_TD, layer.weights_TK, layer.ids_TK, weights.pop("w13"), weights.pop("w2"))
    call = experts.call(*given, **weights, x_format=x_format, **biases, **more)
    experts.check(call)
    return call


def run(kernel: str, call: ExpertsCall) -> Tensor:
    refusal = experts.backends[kernel].refusal(DEVICE, len(call.x_TD), call)
    assert refusal in (None, "needs a tensor on cuda, got cpu")
    return experts.backends[kernel].run(call)


def definition(call: ExpertsCall) -> Tensor:
    """In float32, of the same codes."""
    floats = {n: getattr(call, n) for n in ("x_TD", "weights_TK", "b13_EF", "b2_ED")}
    given = {n: None if t is None else t.float() for n, t in floats.items()}
    return experts.body(replace(call, **given))


def check(kernel: str, call: ExpertsCall) -> None:
    dtype = F8 if call.x_format else call.x_TD.dtype
    assert_close(run(kernel, call), definition(call), TOL["experts", dtype], kernel)


@in_turn(each_dtype, pytest.mark.parametrize("w_format", FORMATS))
def test_every_code_is_decoded_exactly(w_format: str, dtype: torch.dtype) -> None:
    """The product with the unit matrix is the matrix that the codes stand for."""
    weights = any_codes(w_format, rows=32, columns=128)
    unit = torch.eye(128, dtype=dtype, device=DEVICE)
    assert torch.equal(product(weights, unit), weights.decoded())
    few = product(weights, unit[:16])  # whose sums are scaled
    assert torch.equal(few, weights.decoded()[:, :16])


@each_dtype
@pytest.mark.parametrize("w_format", ["mxfp4", "mxfp8"])
def test_every_power_of_two(w_format: str, dtype: torch.dtype) -> None:
    """Scales from 2^-24 up that the dtype of tokens holds, and 255, which is NaN."""
    weights = any_codes(w_format, rows=64, columns=128)
    top = 127 + (60 if dtype is BF16 else 7)
    least = 127 - (60 if dtype is BF16 else 14)
    codes = torch.arange(least, top, device=DEVICE).repeat(4)[: weights.scale.numel()]
    scale = codes.to(torch.uint8).expand(1, -1)
    scale = scale.repeat(1, -(-weights.scale.numel() // scale.numel()))
    scale = scale[0, : weights.scale.numel()].reshape(weights.scale.shape).clone()
    scale[0, 5, 2] = 255
    weights = replace(weights, scale=scale)
    got = product(weights, torch.eye(128, dtype=dtype, device=DEVICE))
    want = weights.decoded() @ torch.eye(128, device=DEVICE)
    assert bool(want[5].isnan().all())  # a code that is NaN, or zero times NaN
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


@each_dtype
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("w_format", ["int4:1x32", "int4:1x128", "float8_e4m3fn:16x32"])
def test_scales_that_are_no_numbers_come_through(
    w_format: str, bad: float, dtype: torch.dtype
) -> None:
    weights = any_codes(w_format, rows=32, columns=128)
    weights.scale[0, 1, 0] = bad
    x_ND = torch.randn(16, 128, device=DEVICE).to(dtype)
    got = product(weights, x_ND)
    want = weights.decoded() @ x_ND.float().T
    assert torch.equal(got.isnan(), want.isnan())
    assert bool(want.isnan().any()) and not bool(want.isnan().all())


@each_dtype
@pytest.mark.parametrize("columns", [32, 96, 160, 184])
def test_widths_that_fill_no_step(columns: int, dtype: torch.dtype) -> None:
    for w_format in ("int4:row", "float8_e4m3fn:128x128"):
        weights = any_codes(w_format, rows=16, columns=columns)
        x_ND = torch.randn(16, columns, device=DEVICE).to(dtype)
        got, want = product(weights, x_ND), weights.decoded() @ x_ND.float().T
        assert_close(got, want, TOL["expert_gemm", torch.float32], w_format)


QUICK = ("int4:1x32", "mxfp4", "float8_e4m3fn:128x128", "nvfp4")


@in_turn(each_dtype, each_kernel, pytest.mark.parametrize("w_format", those_of(QUICK, FORMATS)))
def test_layers_of_every_format(kernel: str, w_format: str, dtype: torch.dtype) -> None:
    across = Format.of(w_format).group[1]
    case = SMALL if across in (64, 128) else ODD
    check(kernel, call_of(case, w_format, dtype=dtype, biases=True))


@in_turn(each_dtype, each_kernel, pytest.mark.parametrize("T", [1, 3]))
def test_float8_weights_and_inputs(kernel: str, T: int, dtype: torch.dtype) -> None:
    check(kernel, call_of(replace(SMALL, T=T, I=160), *BLOCK_FLOAT8, dtype=dtype, biases=True))


@pytest.mark.slow
@each_dtype
@pytest.mark.parametrize("formats", [("mxfp4", ""), BLOCK_FLOAT8], ids=["mxfp4", "float8"])
def test_many_rows_an_expert(formats: tuple[str, str], dtype: torch.dtype) -> None:
    """Tiles of 64 rows; inputs of their second product are quantised by a launch of their own."""
    case = Case(name="many_rows", T=45, E=2, K=1, D=128, I=96)
    check("triton.rows", call_of(case, *formats, dtype=dtype))


@each_dtype
def test_tokens_are_quantized_as_by_the_definition(dtype: torch.dtype) -> None:
    x_TD = (torch.randn(5, 1200, device=DEVICE) * 3).to(dtype)
    x_TD[2, :128] = 0
    codes_TD, scale_TG = quantize_tokens(x_TD, weight_of(*BLOCK_FLOAT8))
    want = packing.quantize(x_TD, Format.of(BLOCK_FLOAT8[1]))
    assert torch.equal(scale_TG, want.scale)
    got, wanted = codes_TD.float(), want.values.float()
    # Products with inverses are off by a bit, which matters next to a tie alone.
    assert float((got != wanted).float().mean()) < 1e-3
    assert_close(got, wanted, Tol(0.072, "one step of float8, of the largest codes 32 in 448"))


@each_dtype
@pytest.mark.parametrize("D", [400, 512])
def test_rows_are_quantized_in_the_order_of_experts(D: int, dtype: torch.dtype) -> None:
    T, K, E = 37, 3, 4
    x_TD = (torch.randn(T, D + 16, device=DEVICE) * 3).to(dtype)[:, :D]
    x_TD[2, 130] = float("nan")
    x_TD[5, :] = 0
    ids_TK = torch.randint(-1, E, (T, K), dtype=torch.int32, device=DEVICE)
    rows_R, inverse_R, ends_E = sort_pairs(ids_TK, E, None)
    codes_RD, scale_GR = quantize_sorted(x_TD, inverse_R, K, 128)
    want_TD, want_TG = quantize_tokens(x_TD, weight_of(*BLOCK_FLOAT8))
    used = int(ends_E[-1])
    token_R = rows_R[:used].long() // K
    got, want = codes_RD[:used].float(), want_TD[token_R].float()
    assert torch.equal(got.nan_to_num(1e9), want.nan_to_num(1e9))
    assert torch.equal(scale_GR[:, :used].T.nan_to_num(1e9), want_TG[token_R].nan_to_num(1e9))
    assert bool(scale_GR[:, used:].isnan().all())  # unwritten


def test_arranged_bytes_meet_their_columns() -> None:
    """Of 64 columns a thread has 16, a pair of neighbours in each run of eight places."""
    x_TD = torch.arange(80, dtype=F16, device=DEVICE)[None]
    got = arrange(x_TD, weight_of("int8:row", ""))[0].tolist()
    blocks = [got[at : at + 64] for at in (0, 64)]
    first = [block[2 * t :: 8] for block in blocks for t in range(4)]
    second = [block[2 * t + 1 :: 8] for block in blocks for t in range(4)]
    assert first[1] == [16.0 + 2 * i for i in range(8)]
    assert second[1] == [17.0 + 2 * i for i in range(8)]
    assert sorted(blocks[0]) == [float(i) for i in range(64)]
    assert first[4] == [64.0 + 2 * i for i in range(8)] and not any(first[5] + second[7])


@pytest.mark.parametrize("w_format", ["int4:1x32", "int8:row"])
@pytest.mark.parametrize("D", [96, 1184])
def test_arranged_rows_are_those_of_their_tokens(D: int, w_format: str) -> None:
    T, K, E = 21, 3, 5
    x_TD = torch.randn(T, 2 * D, dtype=F16, device=DEVICE)[:, :D]
    ids_TK = torch.randint(-1, E, (T, K), dtype=torch.int32, device=DEVICE)
    rows_R, inverse_R, ends_E = sort_pairs(ids_TK, E, None)
    weight = weight_of(w_format, "")
    used = int(ends_E[-1])
    got_RD = arrange(x_TD, weight, inverse_R, K)
    assert torch.equal(got_RD[:used], arrange(x_TD, weight)[rows_R[:used].long() // K])
    assert bool(got_RD[used:].isnan().all())  # unwritten


@each_kernel
def test_inputs_that_are_no_numbers_stay_with_their_token(kernel: str) -> None:
    call = call_of(SMALL, *BLOCK_FLOAT8)
    want = run(kernel, call)
    for bad in (float("nan"), float("inf")):
        call.x_TD[1, 3] = bad
        out = run(kernel, call)
        assert bool(out[1].isnan().all())
        assert torch.equal(out[::2], want[::2])


@pytest.mark.slow
@in_turn(
    each_kernel,
    pytest.mark.parametrize("name", those_of(["gpt_oss"], ACTIVATIONS)),
    pytest.mark.parametrize("formats", [("mxfp4", ""), BLOCK_FLOAT8], ids=["mxfp4", "float8"]),
)
def test_every_activation(kernel: str, name: str, formats: tuple[str, str]) -> None:
    check(kernel, call_of(SMALL, *formats, biases=True, **ACTIVATIONS[name]))


@pytest.mark.slow
@in_turn(
    each_kernel,
    pytest.mark.parametrize(
        "formats", [("uint4:1x128", ""), BLOCK_FLOAT8], ids=["uint4", "float8"]
    ),
)
def test_the_shares_of_two_ranks_sum_to_the_whole(kernel: str, formats: tuple[str, str]) -> None:
    call = call_of(replace(SMALL, E=6), *formats)
    whole, parts = definition(call), torch.zeros(call.x_TD.shape, device=DEVICE)
    held = ("w13_EFD", "w2_EDI", "w13_scale_EFG", "w2_scale_EDG", "w13_zero_EFG", "w2_zero_EDG")
    for rank in range(2):
        here = torch.arange(6, device=DEVICE) - 3 * rank
        share = {n: getattr(call, n) for n in held}
        share = {n: t[3 * rank : 3 * rank + 3] for n, t in share.items() if t is not None}
        expert_map = torch.where((here >= 0) & (here < 3), here, -1)
        parts += run(kernel, replace(call, expert_map=expert_map, **share)).float()
    assert_close(parts, whole, TOL["experts", F8 if formats[1] else F16])


@each_kernel
def test_experts_that_are_not_here_are_not_read(kernel: str) -> None:
    call = call_of(SMALL, "mxfp4")
    call.ids_TK[0], call.ids_TK[1] = torch.tensor([-1, 4]), -1
    assert call.w13_scale_EFG is not None
    unused = sorted(set(range(4)) - set(call.ids_TK.flatten().tolist()))
    call.w13_scale_EFG[unused] = 255
    out = run(kernel, call)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    check(kernel, call)


@each_kernel
def test_a_residual_is_added_to_what_was_rounded(kernel: str) -> None:
    call, name = call_of(SMALL, "mxfp4"), kernel.removeprefix("triton.")
    residual_TD = torch.randn(call.x_TD.shape, device=DEVICE).to(F16)
    onto = run_experts(name, call, residual_TD)
    assert torch.equal(onto, residual_TD + run_experts(name, call))


@each_kernel
def test_no_tokens(kernel: str) -> None:
    call = call_of(replace(SMALL, T=0), "mxfp4")
    assert run(kernel, call).shape == (0, SMALL.D)


REFUSED = {
    ("uint4:1x8", ""): "needs groups of 16, 32, 64, 128 or more columns, got 8",
    ("int8:1x32", "int8:row"): "needs int8 weights with a scale a row or tensor for int8:row, got "
    "int8:1x32",
    ("mxfp4", "int8:1x32"): "quantises inputs to float8_e4m3fn:1x128, float8_e4m3fn:row, "
    "float8_e4m3fn:tensor, int8:row, int8:tensor, got int8:1x32",
}


@each_kernel
@pytest.mark.parametrize("formats", REFUSED)
def test_formats_without_a_kernel_are_refused(kernel: str, formats: tuple[str, str]) -> None:
    assert experts.backends[kernel].refusal("cuda", 3, call_of(SMALL, *formats)) == REFUSED[formats]


@each_kernel
def test_widths_that_fill_no_word_are_refused(kernel: str) -> None:
    call = call_of(replace(SMALL, I=20), "int4:row")
    assert experts.backends[kernel].refusal("cuda", 3, call) == (
        "needs widths that 8 divides, got 128 and 20"
    )


@each_kernel
def test_codes_that_are_not_contiguous_are_refused(kernel: str) -> None:
    call = call_of(SMALL, "mxfp4")
    strided = call.w2_EDI.transpose(1, 2).contiguous().transpose(1, 2)
    refusal = experts.backends[kernel].refusal("cuda", 3, replace(call, w2_EDI=strided))
    assert refusal == "needs contiguous weights, scales and zero points"


@each_kernel
def test_words_that_begin_between_words_are_refused(kernel: str) -> None:
    call = call_of(SMALL, "mxfp4")
    held = torch.zeros(call.w2_EDI.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:]
    call = replace(call, w2_EDI=held.view(call.w2_EDI.shape).copy_(call.w2_EDI))
    refusal = experts.backends[kernel].refusal("cuda", 3, call)
    assert refusal == "needs weights of 4 bits that begin at a multiple of 4 bytes"


WIDE = replace(SMALL, D=512, I=448)
REFUSED_BY_GROUPED = {
    (*BLOCK_FLOAT8, SMALL): "needs widths above 384 that 16 divides, got 128 and 128",
    (*BLOCK_FLOAT8, replace(WIDE, I=464)): "needs a width of experts that 64 divides, got 464",
    ("float8_e4m3fn:32x128", BLOCK_FLOAT8[1], WIDE): "needs a scale for each 64 rows of weights or "
    "a multiple of them, got 32",
}


@pytest.mark.parametrize("case", REFUSED_BY_GROUPED, ids=lambda case: f"{case[0]} {case[2].I}")
def test_grouped_refuses_what_it_has_no_kernel_for(case: tuple[str, str, Case]) -> None:
    w_format, x_format, sizes = case
    call = call_of(sizes, w_format, x_format)
    assert experts.backends["triton.grouped"].refusal("cuda", 3, call) == REFUSED_BY_GROUPED[case]


def test_grouped_takes_float8_with_many_rows_an_expert() -> None:
    for formats in (BLOCK_FLOAT8, ("float8_e4m3fn:64x128", BLOCK_FLOAT8[1])):
        call = call_of(WIDE, *formats)
        assert experts.backends["triton.grouped"].refusal("cuda", 3, call) is None
        assert most_rows_tokens(call) == MOST_ROWS_OF_QUANTIZED_INPUTS * 4 // 2
    interleaved = call_of(WIDE, *BLOCK_FLOAT8, interleaved=True)
    assert experts.backends["triton.grouped"].refusal("cuda", 3, interleaved) is None
    assert most_rows_tokens(call_of(SMALL, *BLOCK_FLOAT8)) is None  # there is only `rows`
    small = call_of(WIDE, "mxfp4")
    large = torch.empty(2**21, 512, 448 // 2, dtype=torch.uint8, device="meta")
    with patch("torch.cuda.get_device_capability", return_value=(8, 9)):
        assert most_rows_tokens(small) == MOST_ROWS_OF_CODES[4] * 4 // 2
        assert most_rows_tokens(replace(small, w2_EDI=large)) is None  # as floats it takes 900 GB


# Widths, and up to how many rows an expert weights of them stream; the last ones are decoded first.
STORED, FIRST, OF_LARGE = MOST_ROWS_AS_STORED, MOST_ROWS_OF_CODES, MOST_ROWS_OF_LARGE_AS_STORED
ROWS_UP_TO = [
    ("mxfp4", WIDE, STORED[4, False]), ("nvfp4", WIDE, STORED[4, False]),
    ("int4:1x128", replace(WIDE, I=512), STORED[4, True]),
    ("int4:1x32", replace(WIDE, D=8192, I=1024), OF_LARGE[4]),
    ("int4:1x128", replace(WIDE, D=8192, I=1024), OF_LARGE[4]),
    ("int4:1x128", replace(WIDE, D=8192, I=4096), MOST_ROWS_OF_HUGE),
    ("mxfp4", replace(WIDE, D=8192, I=4096), MOST_ROWS_OF_HUGE),
    ("mxfp6_e3m2", replace(WIDE, D=8192, I=1024), OF_LARGE[6]),
    ("int8:1x128", replace(WIDE, D=8192, I=1024), OF_LARGE[8]),
    ("mxfp6_e3m2", WIDE, STORED[6, False]), ("float6_e2m3:row", WIDE, STORED[6, True]),
    ("int8:1x64", replace(WIDE, I=208), STORED[8, False]),
    ("float8_e4m3fn:128x128", replace(WIDE, I=512), STORED[8, True]),
    ("int4:1x16", WIDE, FIRST[4]), ("int4:1x32", replace(WIDE, I=256), FIRST[4]),
    ("mxfp6_e2m3", replace(WIDE, I=256), FIRST[4]), ("int8:row", replace(WIDE, I=192), FIRST[8]),
    ("uint8:row", replace(WIDE, I=232), FIRST[8]),
]  # fmt: skip


@pytest.mark.parametrize(("w_format", "sizes", "most"), ROWS_UP_TO)
def test_rows_up_to_which_hopper_streams_codes(w_format: str, sizes: Case, most: int) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):  # only sizes matter
        call = call_of(replace(sizes, T=1, E=2), w_format)
        call = replace(call, x_TD=torch.empty(1, sizes.D, device="cuda"))
    with patch("torch.cuda.get_device_capability", return_value=HOPPER):
        assert most_rows_tokens(call) == most * 2 // 2
    with patch("torch.cuda.get_device_capability", return_value=(8, 9)):
        assert most_rows_tokens(call) == MOST_ROWS_OF_CODES[8 if "8" in w_format[:6] else 4]


def test_packing_names_what_the_kernels_decode() -> None:
    """A word is the eight codes of four bytes, the first in the lowest bits."""
    codes = torch.arange(8, dtype=torch.uint8)
    word = packing.pack(codes, "int4").view(torch.int32)
    assert [(int(word) >> (4 * j)) & 15 for j in range(8)] == codes.tolist()

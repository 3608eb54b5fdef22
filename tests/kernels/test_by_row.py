"""Weights and inputs of 8 bits that have a scale a row or tensor, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.backends.triton import run_experts
from moe_ops.backends.triton_formats import MOST_COLUMNS_OF_INT8, refusal, scaled_of, weight_of
from moe_ops.kernels.triton.experts.formats.codes import Codes
from moe_ops.kernels.triton.experts.operands.row_scales import (
    quantize_h,
    quantize_pairs,
    quantize_x,
)
from moe_ops.kernels.triton.experts.schedule.sort import sort_pairs
from moe_ops.ops.experts import ExpertsCall, experts
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import ACTIVATIONS, BF16, DEVICE, F16, TOL, Case, assert_close
from tests.chosen import in_turn
from tests.kernels.test_quantized_experts import ODD, call_of, definition, run

F8, INT8 = torch.float8_e4m3fn, torch.int8
KERNELS = ("triton.tiny", "triton.rows")
each_kernel = pytest.mark.parametrize("kernel", KERNELS)
each_element = pytest.mark.parametrize("element", ["float8_e4m3fn", "int8"])
# Groups of weights and of inputs; how many static scales of tokens and of h there are.
SCHEMES = {
    "rows": ("row", "row", 0, 0), "one weight scale": ("tensor", "row", 0, 0),
    "tensor": ("row", "tensor", 0, 0), "static": ("tensor", "tensor", 1, 1),
    "static h": ("row", "tensor", 0, 1), "static x": ("row", "tensor", 1, 0),
    "of experts": ("row", "tensor", 3, 3), "h of experts": ("row", "tensor", 1, 3),
}  # fmt: skip
SLOW = pytest.mark.slow


def layer(
    element: str, scheme: str, case: Case = ODD, dtype: torch.dtype = F16, **more: Any
) -> ExpertsCall:
    weights, inputs, of_x, of_h = SCHEMES[scheme]
    call = call_of(case, f"{element}:{weights}", f"{element}:{inputs}", dtype=dtype, **more)
    largest = Format.of(element + ":row").largest

    def static(n: int, amax: float) -> Tensor | None:
        # By which the largest values saturate, and no two experts share one.
        steps = torch.linspace(0.5, 1.0, n) if n > 1 else torch.full((n,), 0.7)
        return (steps * amax / largest).to(DEVICE) if n else None

    amax = float(call.x_TD.abs().max()) if call.x_TD.numel() else 1.0
    call = replace(call, x_scale=static(of_x, amax), h_scale=static(of_h, amax / 4))
    experts.check(call)
    return call


def check(kernel: str, call: ExpertsCall) -> Tensor:
    got = run(kernel, call)
    assert_close(got, definition(call), TOL["experts", F8], kernel)
    return got


def codes_of(call: ExpertsCall) -> Codes:
    named = ("w13_scale_EFG", "w2_scale_EDG", "w13_zero_EFG", "w2_zero_EDG")
    given = (call.w13_scale_EFG, call.w2_scale_EDG, None, None)
    return Codes(
        **dict(zip(named, given, strict=True)), weight=weight_of(call.w_format, call.x_format),
        scaled=scaled_of(call.x_format), x_scale=call.x_scale, h_scale=call.h_scale,
    )  # fmt: skip


def same(got: Tensor, want: Tensor) -> bool:
    """To the bit, but that NaN is any NaN."""
    a, b = (t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in (got, want))
    if got.dtype == F8:
        a, b = (torch.where(t & 0x7F == 0x7F, 0x7F, t) for t in (a, b))
    return torch.equal(a.nan_to_num(7.5e9), b.nan_to_num(7.5e9)) if a.is_floating_point() else (
        torch.equal(a, b)
    )  # fmt: skip


def each_combination() -> list[Any]:
    """Of float8 those whose scales int8 has as well are left to `every`."""
    quick = ("rows", "static", "h of experts")
    left = [SLOW, pytest.mark.every]
    return [
        pytest.param(element, scheme, marks=[] if element == "int8" or scheme in quick else left)
        for element in ("float8_e4m3fn", "int8") for scheme in SCHEMES
    ]  # fmt: skip


@in_turn(pytest.mark.parametrize(("element", "scheme"), each_combination()), each_kernel)
def test_every_kind_of_scale(kernel: str, scheme: str, element: str) -> None:
    for T in (1, 5):
        case = replace(ODD, T=T)
        call = layer(element, scheme, case, dtype=BF16 if T == 1 else F16, biases=True)
        if T > 1:  # one expert twice, and one that is not here
            call.ids_TK[1], call.ids_TK[3, 0] = call.ids_TK[1, 0], -1
        if kernel == "triton.tiny" and scheme == "of experts":
            refused = experts.backends[kernel].refusal("cuda", T, call)
            assert refused == "quantises tokens by one static scale, got one for each expert"
        else:
            check(kernel, call)


@pytest.mark.slow
@in_turn(each_element, pytest.mark.parametrize("scheme", ["rows", "of experts"]))
def test_many_rows_an_expert(scheme: str, element: str) -> None:
    case = Case(name="many_rows", T=45, E=3, K=1, D=128, I=96)
    check("triton.rows", layer(element, scheme, case))


@in_turn(
    pytest.mark.parametrize(
        "name",
        [
            "gpt_oss",
            pytest.param("ungated_relu2", marks=SLOW),
            *(
                pytest.param(n, marks=[SLOW, pytest.mark.every])
                for n in ACTIVATIONS
                if n not in ("gpt_oss", "ungated_relu2")
            ),
        ],
    ),
    each_kernel,
)
def test_every_activation(kernel: str, name: str) -> None:
    """By the function that test_expert_kernels.py calls with all of them."""
    for scheme in ("rows", "static"):
        check(kernel, layer("int8", scheme, biases=True, **ACTIVATIONS[name]))


@each_kernel
def test_the_shares_of_two_ranks_sum_to_the_whole(kernel: str) -> None:
    """By static scales: of a tensor's own each rank sees a part."""
    call = layer("int8", "h of experts", replace(ODD, E=3))
    whole, parts = definition(call), torch.zeros(call.x_TD.shape, device=DEVICE)
    held = ("w13_EFD", "w2_EDI", "w13_scale_EFG", "w2_scale_EDG", "h_scale")
    for mine in ([0, 2], [1]):
        expert_map = torch.full((3,), -1, device=DEVICE)
        expert_map[mine] = torch.arange(len(mine), device=DEVICE)
        share = {n: getattr(call, n)[mine] for n in held}
        parts += run(kernel, replace(call, expert_map=expert_map, **share)).float()
    assert_close(parts, whole, TOL["experts", F8])


@in_turn(each_element, each_kernel)
def test_a_token_that_is_no_number_stays_alone(kernel: str, element: str) -> None:
    call = layer(element, "rows")
    want = run(kernel, call)
    for bad in (float("nan"), float("inf")):
        call.x_TD[1, 3] = bad
        out = run(kernel, call)
        assert bool(out[1].isnan().all())
        assert torch.equal(out[2:], want[2:]) and torch.equal(out[0], want[0])


@each_kernel
def test_one_scale_of_all_tokens_sees_all_that_is_no_number(kernel: str) -> None:
    call = layer("int8", "tensor")
    call.x_TD[1, 3] = float("nan")
    assert bool(run(kernel, call).isnan().all())


@each_kernel
def test_a_residual_and_no_tokens(kernel: str) -> None:
    call = layer("int8", "static")
    residual_TD = torch.randn(call.x_TD.shape, device=DEVICE).to(F16)
    onto = run_experts(kernel.removeprefix("triton."), call, residual_TD)
    assert torch.equal(onto, residual_TD + run(kernel, call))
    assert run(kernel, layer("int8", "tensor", replace(ODD, T=0))).shape == (0, ODD.D)


@each_element
@pytest.mark.parametrize("scheme", ["rows", "tensor", "static", "of experts"])
def test_tokens_are_quantized_to_the_bit(scheme: str, element: str) -> None:
    """In place, or in the rows of their pairs, of which those of no expert stay unwritten."""
    case = Case(name="tokens", T=37, E=3, K=2, D=200, I=128)
    call = layer(element, scheme, case, dtype=BF16)
    call.x_TD[3] = 0
    if scheme != "tensor":
        call.x_TD[5, 7], call.x_TD[6, 8] = float("nan"), float("inf")
    call.ids_TK[2], call.ids_TK[9, 1] = -1, 3
    x_TD, ids, codes = call.x_TD, call.ids_TK, codes_of(call)
    rows_R, inverse_R, ends_E = sort_pairs(ids, 3, None)
    used = int(ends_E[-1])
    pair_R = rows_R[:used].long()
    format = Format.of(call.x_format)
    if scheme == "of experts":
        assert call.x_scale is not None
        e_R = ids.flatten()[pair_R].long()
        by_row = replace(format, group=(1, -1))
        done = packing.quantize(x_TD[pair_R // 2], by_row, scale=call.x_scale[e_R, None])
        got, scale = quantize_x(x_TD, codes, ids, None)
        got, scale = got.view(torch.uint8)[pair_R].view(got.dtype), scale[pair_R]
        assert same(got, done.values) and same(scale, done.scale[:, 0])
        want_R, want_scale_R = done.values, done.scale[:, 0]
    else:
        given = None if call.x_scale is None else call.x_scale.reshape(1, 1)
        done = packing.quantize(x_TD, format, scale=given)
        got, scale = quantize_x(x_TD, codes, ids, None)
        want_scale = done.scale[:, 0].expand(37)
        assert same(got, done.values) and same(scale, want_scale)
        want_R = done.values.view(torch.uint8)[pair_R // 2].view(done.values.dtype)
        want_scale_R = want_scale[pair_R // 2]
    got_R, scale_R = quantize_x(x_TD, codes, ids, None, inverse_R)
    assert same(got_R[:used], want_R) and same(scale_R[:used], want_scale_R)
    assert bool(scale_R[used:].isnan().all())


@each_element
@pytest.mark.parametrize("scheme", ["rows", "tensor", "h of experts"])
def test_h_is_quantized_to_the_bit_and_its_scales_are_weighted(scheme: str, element: str) -> None:
    """Whatever rows hold that no expert has: here NaN, beside 17 rows that some have."""
    T, K, E, width = 11, 2, 3, 136
    call = layer(element, scheme, Case(name="h", T=T, E=E, K=K, D=128, I=width))
    ids = torch.randint(0, E, (T, K), dtype=torch.int32, device=DEVICE)
    ids[:5, 0] = -1
    rows_R, _, ends_E = sort_pairs(ids, E, None)
    used = int(ends_E[-1])
    assert used == 17
    h_RI = torch.randn(T * K, width, device=DEVICE).to(F16)
    h_RI[used:] = float("nan")
    weights_TK = torch.rand(T, K, device=DEVICE)
    codes, format = codes_of(call), Format.of(call.x_format)
    got, scale = quantize_h(h_RI, codes, ends_E, weights_TK, rows_R, (ids, None))
    pair_R = rows_R[:used].long()
    if call.h_scale is None:
        done = packing.quantize(h_RI[:used], format)
    else:
        of_rows = call.h_scale[ids.flatten()[pair_R].long(), None]
        done = packing.quantize(h_RI[:used], replace(format, group=(1, -1)), scale=of_rows)
    want = done.scale[:, 0].expand(used) * weights_TK.flatten()[pair_R]
    assert same(got[:used], done.values) and same(scale[:used], want)
    assert bool(scale[used:].isnan().all())  # unwritten


@pytest.mark.parametrize("T", [1, 3])
def test_pairs_that_were_left_out_are_not_among_the_largest(T: int) -> None:
    """Of several tokens those that name an expert again; what memory holds there is NaN."""
    call = layer("int8", "tensor", Case(name="pairs", T=T, E=4, K=3, D=128, I=40))
    ids = torch.tensor([[2, -1, 3], [3, 2, 0], [9, 0, 0]], dtype=torch.int32, device=DEVICE)[:T]
    used = [0, 2] if T == 1 else [0, 2, 5]
    h_PTI = torch.full((3 * T, T, 40), float("nan"), device=DEVICE)
    h_PTI[used] = torch.randn(len(used), T, 40, device=DEVICE)
    share_PT = torch.rand(3 * T, T, device=DEVICE)
    h = h_PTI.view(-1, 40).to(F16)
    got, scale = quantize_pairs(h, codes_of(call), ids, None, share_PT)
    rows = [p * T + t for p in used for t in range(T)]
    done = packing.quantize(h[rows], Format.of("int8:tensor"))
    assert same(got[rows], done.values)
    assert same(scale[rows], done.scale[0] * share_PT.view(-1)[rows])


def test_what_int32_has_no_room_for_is_refused() -> None:
    most = MOST_COLUMNS_OF_INT8
    assert most * 127 * 128 <= 2**31 - 1 < (most + 1) * 127 * 128
    assert refusal("int8:row", "int8:row", (most, most)) is None
    why = refusal("int8:row", "int8:row", (most, most + 1))
    assert why == f"needs widths of {most} at most, got {most} and {most + 1}"
    assert refusal("int8:row", "", (most, most + 1)) is None


def test_grouped_takes_widths_of_which_copies_take_16_bytes() -> None:
    wide = replace(ODD, D=512, I=400)
    backend = experts.backends["triton.grouped"]
    for scheme in ("rows", "of experts"):
        assert backend.refusal("cuda", 5, layer("int8", scheme, wide)) is None
    refused = backend.refusal("cuda", 5, layer("int8", "rows", replace(wide, I=408)))
    assert refused == "needs widths above 384 that 16 divides, got 512 and 408"

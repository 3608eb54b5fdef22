"""Experts on batches by Triton's kernels, in its interpreter without a GPU: rows are read and
written where they lie, and slots past a count are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from moe_ops import experts_batched, quantize
from moe_ops.backends import triton_batched, triton_hopper
from moe_ops.ops.experts_batched import ExpertsBatchedCall
from moe_ops.testing import BF16, DEVICE, F16, TOL, Case, assert_close

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.backends.triton_formats import weight_of
from moe_ops.kernels.triton.experts.operands import group_scales, permuted, prequantized
from moe_ops.kernels.triton.replay import launches_go_to
from tests.kernels.test_quantized_experts import call_of

F8 = torch.float8_e4m3fn
SMALL = Case(name="small", T=3, E=5, K=1, D=128, I=64)
M = 6
# One of more rows than there are slots, which are all of them; and one of less than none.
COUNTS = (0, 6, 2, -3, 9)
DTYPE = BF16 if DEVICE == "cuda" else F16  # the interpreter multiplies no bfloat16
FORMATS = {
    "floats": ("", ""),
    "rows": ("float8_e4m3fn:row", "float8_e4m3fn:row"),
    "blocks": ("float8_e4m3fn:128x128", "float8_e4m3fn:1x128"),
    "mxfp4": ("mxfp4", ""),
    "emulated": ("mxfp4", "mxfp8"),
}
by_format = pytest.mark.parametrize(("w_format", "x_format"), FORMATS.values(), ids=FORMATS)


def batches_of(
    w_format: str, x_format: str, M: int = M, counts: tuple[int, ...] = COUNTS, case: Case = SMALL,
    **more: Any,
) -> ExpertsBatchedCall:  # fmt: skip
    """Rows with NaN past the counts."""
    layer = call_of(case, w_format, x_format, DTYPE, **more) if w_format else plain(case, **more)
    counts_E = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    x_EMD = torch.randn(case.E, M, case.D, device=DEVICE).to(DTYPE)
    x_EMD[torch.arange(M, device=DEVICE) >= counts_E[:, None]] = float("nan")
    by_name = {n: getattr(layer, n) for n in experts_batched.arguments.paths if hasattr(layer, n)}
    call: ExpertsBatchedCall = experts_batched.call(x_EMD=x_EMD, counts_E=counts_E, **by_name)
    experts_batched.check(call)
    return call


def plain(case: Case, **more: Any) -> Any:
    from moe_ops import experts
    from moe_ops.testing import make_layer

    layer = make_layer(case, DTYPE, DEVICE)
    weights = (layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI)
    biases = {"b13_EF": layer.b13_EF, "b2_ED": layer.b2_ED} if more.pop("biases", False) else {}
    return experts.call(layer.x_TD, *weights, **biases, **more)


def run(kernel: str, call: ExpertsBatchedCall) -> Tensor:
    refusal = experts_batched.backends["triton"].refusal(DEVICE, SMALL.E, call)
    assert refusal in (None, "needs a tensor on cuda, got cpu")
    with patch.object(triton_batched, "kernel_of", lambda call: kernel):
        return triton_batched.run(call)


def check(got: Tensor, call: ExpertsBatchedCall) -> None:
    """Used slots are the definition's; others still hold the NaN that memory is filled with."""
    want = experts_batched.body(call)
    tol = TOL["experts", F8 if call.layer.x_format else DTYPE]
    for e, count in enumerate(call.batches.counts_E.clamp(min=0).tolist()):
        assert_close(got[e, :count], want[e, :count], tol)
        assert bool(got[e, count:].isnan().all())


@by_format
@pytest.mark.parametrize("kernel", ["rows", "grouped"])
def test_a_layer(kernel: str, w_format: str, x_format: str) -> None:
    if kernel == "grouped" and w_format.startswith("float8") and DEVICE != "cuda":
        kernel = "rows"  # kernels for Hopper alone multiply codes as they are
    call = batches_of(w_format, x_format, biases=True)
    check(run(kernel, call), call)


@pytest.mark.parametrize("formats", ["rows", "blocks"])
def test_tokens_as_codes(formats: str) -> None:
    w_format, x_format = FORMATS[formats]
    call = batches_of(w_format, x_format)
    b = call.batches
    codes, scale = quantize(b.x_EMD.flatten(0, 1).nan_to_num(), x_format)
    unused = torch.arange(M, device=DEVICE) >= b.counts_E[:, None]
    scale_EMG = scale.view(SMALL.E, M, -1).masked_fill(unused[..., None], float("nan"))
    given = replace(b, x_EMD=codes.view(b.x_EMD.shape), x_scale_EMG=scale_EMG)
    layer = replace(call.layer, out_dtype=str(DTYPE).removeprefix("torch."))
    coded = replace(call, batches=given, layer=layer)
    experts_batched.check(coded)
    got = run("rows", coded)
    check(got, call)
    assert torch.equal(got.nan_to_num(7.0), run("rows", call).nan_to_num(7.0))


@by_format
def test_more_rows_than_are_expected(w_format: str, x_format: str) -> None:
    """They make more tiles than there are programs for."""
    call = batches_of(w_format, x_format, M=70, counts=(35, 0, 2, 70, 17), biases=True)
    some = replace(call, batches=replace(call.batches, expected=1))
    got = run("rows", some)
    check(got, some)
    assert_close(got.nan_to_num(0.0), run("rows", call).nan_to_num(0.0), TOL["experts", DTYPE])


def test_rows_stay_in_their_slots() -> None:
    """Of floats and of blocks nothing is sorted and put back."""
    for name, stays in (("floats", True), ("blocks", True), ("rows", False), ("emulated", False)):
        launched = launches_of(batches_of(*FORMATS[name]), "rows")
        assert ({"order_kernel", "put_back_kernel"} & launched == set()) == stays, name


def launches_of(call: ExpertsBatchedCall, kernel: str = "") -> set[str]:
    """What would be launched, by a kernel or by the one that is picked."""
    names = set()

    class Names:
        def launch(self, kernel: Any, *_: Any) -> None:
            names.add(kernel.fn.__name__)

    with launches_go_to(Names()):
        run(kernel, call) if kernel else triton_batched.run(call)
    return names


def slots_of(width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of slots, counts, and which slots are used."""
    counts_E = torch.tensor(COUNTS, dtype=torch.int32, device=DEVICE)
    used_R = (torch.arange(M, device=DEVICE) < counts_E[:, None]).flatten()
    return torch.randn(SMALL.E * M, width, device=DEVICE).to(DTYPE), counts_E, used_R


@pytest.mark.parametrize("offset", [0, 4], ids=["aligned", "misaligned"])
def test_codes_in_slots_stay_there_if_tma_can_copy_them(offset: int) -> None:
    x_RD, counts_E, used_R = slots_of(256)
    codes, scale = quantize(x_RD, "float8_e4m3fn:1x128")
    moved = torch.empty(codes.numel() + 16, dtype=torch.uint8, device=DEVICE)[offset:]
    moved = moved[: codes.numel()].view(F8).view(codes.shape).copy_(codes)
    got, scale_GR = prequantized.in_rows(moved, scale, counts_E, 1, M)
    assert (got.data_ptr() == moved.data_ptr()) == (offset == 0)
    assert torch.equal(got.view(torch.uint8)[used_R], codes.view(torch.uint8)[used_R])
    assert torch.equal(scale_GR[:, : len(used_R)].t()[used_R], scale[used_R])
    assert bool(scale_GR[:, : len(used_R)].t()[~used_R].isnan().all())


def test_rows_in_slots_become_what_grouped_products_read() -> None:
    """Codes of floats, and floats whose columns are arranged: of the slots that are used."""
    x_RD, counts_E, used_R = slots_of(256)
    given = x_RD.masked_fill(~used_R[:, None], float("nan"))
    codes, scale_GR = group_scales.quantize_sorted(given, counts_E, 1, 128, M)
    want, scale = quantize(x_RD, "float8_e4m3fn:1x128")
    assert torch.equal(codes.view(torch.uint8)[used_R], want.view(torch.uint8)[used_R])
    assert torch.equal(scale_GR[:, : len(used_R)].t()[used_R], scale[used_R])
    weight = weight_of("int4:1x128", "")
    got = permuted.arrange(given, weight, counts_E, 1, M)
    assert torch.equal(got[used_R], permuted.arrange(x_RD, weight)[used_R])
    assert bool(got[~used_R].isnan().all())


def test_no_slots() -> None:
    assert run("rows", batches_of("", "", M=0)).shape == (SMALL.E, 0, SMALL.D)


def test_the_kernel_goes_by_rows_of_an_expert() -> None:
    asked = []
    with patch.object(triton_batched, "most_rows_tokens", lambda call: 3 * SMALL.E):
        for expected in (0, 3, 4):
            call = batches_of("", "")
            call = replace(call, batches=replace(call.batches, expected=expected))
            asked.append(triton_batched.kernel_of(triton_batched.as_expected(call)))
    assert asked == ["grouped", "rows", "grouped"]


PICKED = {
    "floats": {4: "rows_up", 8: "rows_up", 16: "rows_up", 48: "_grouped"},
    "blocks": {4: "few_up", 8: "rows_up", 16: "_grouped_float8", 48: "_grouped_float8"},
    "rows": {4: "few_up", 8: "rows_up", 16: "_grouped", 48: "_grouped"},
}


@pytest.mark.parametrize(("formats", "by_rows"), PICKED.items(), ids=PICKED)
def test_the_kernel_on_hopper(
    formats: str, by_rows: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of inputs of 8 bits kernels are picked for twice the rows."""
    monkeypatch.setattr(triton_hopper, "refuse_hopper", lambda _: None)
    case = Case(name="hopper", T=3, E=2, K=1, D=512, I=512)
    for expected, kernel in by_rows.items():
        call = batches_of(*FORMATS[formats], M=128, counts=(3, 90), case=case)
        call = replace(call, batches=replace(call.batches, expected=expected))
        assert kernel in launches_of(call), expected


REFUSED = {
    "strided": (lambda b: replace(b, x_EMD=b.x_EMD.expand(-1, -1, -1).transpose(0, 1).contiguous()
                .transpose(0, 1)), "needs contiguous x_EMD, got strides"),
    "gradients": (lambda b: replace(b, x_EMD=b.x_EMD.clone().requires_grad_()),
                  "is not differentiable"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "said"), REFUSED.values(), ids=REFUSED)
def test_what_it_refuses(change: Any, said: str) -> None:
    call = batches_of("", "")
    refusal = triton_batched.supports(replace(call, batches=change(call.batches)))
    assert refusal is not None and refusal.startswith(said)

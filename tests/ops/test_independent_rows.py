"""Rows of quantised inputs: their codes, scales and results do not depend on other rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops import experts, quantize
from moe_ops.ops.experts import ExpertsCall
from moe_ops.quant import packing
from moe_ops.quant.formats import TENSOR, Format
from moe_ops.testing import BF16, F32, TOL, Tol, assert_close
from tests.chosen import those_of
from tests.independent_rows import KEPT, PAIRS, assert_independent, beside_others, call_of, rows_of

QUICK = (
    ("nvfp4", "nvfp4"), ("float8_e4m3fn:128x128", "float8_e4m3fn:1x128"), ("int8:row", "int8:row"),
    ("float8_e4m3fn:row", "float8_e4m3fn:tensor"), ("mxfp4", "float8_e4m3fn:row"),
)  # fmt: skip
each_pair = pytest.mark.parametrize("formats", those_of(QUICK, PAIRS), ids="-".join)
DYNAMIC = sorted({x for _, x in PAIRS if Format.of(x).group != TENSOR})
ALL = slice(None, KEPT)


def run_by(backend: str, call: ExpertsCall) -> Tensor:
    with moe_ops.using(backend, "experts"):
        return experts.part(call)


@each_pair
def test_results_by_every_backend(formats: tuple[str, str]) -> None:
    call = call_of(*formats, F32)
    found = [name for name, why in experts.refusals_of(call).items() if why is None]
    for backend in ("reference", *found):
        assert_independent(lambda c, name=backend: run_by(name, c), call)


def test_other_experts_of_other_rows() -> None:
    """Which experts other rows go to decides how many rows a product has, and nothing else."""
    call = call_of("nvfp4", "nvfp4", BF16)
    want = rows_of(experts.part(call), ALL)
    elsewhere = call.ids_TK.clone()
    for ids in (-1, 0, 3):
        elsewhere[KEPT:] = ids
        assert torch.equal(rows_of(experts.part(replace(call, ids_TK=elsewhere)), ALL), want)


@each_pair
def test_with_rows_left_out(formats: tuple[str, str]) -> None:
    call = call_of(*formats, F32)
    few = replace(
        call, x_TD=call.x_TD[:KEPT], weights_TK=call.weights_TK[:KEPT], ids_TK=call.ids_TK[:KEPT]
    )
    # Sums in another order: no code of an activation may become another, which these do not.
    assert_close(experts.part(few), experts.part(call)[:KEPT], TOL["experts", F32], str(formats))


@pytest.mark.parametrize("format", DYNAMIC)
def test_codes_and_scales(format: str) -> None:
    call = call_of("mxfp8", "mxfp8", BF16)
    want = [rows_of(t, ALL) for t in quantize(call.x_TD, format)]
    alone = quantize(call.x_TD[:KEPT], format)
    assert all(map(torch.equal, (rows_of(t, ALL) for t in alone), want))
    for name, changed, rows in beside_others(call):
        got = [rows_of(t, rows) for t in quantize(changed.x_TD, format)]
        assert all(map(torch.equal, got, want)), name


def test_a_global_scale_for_each_row() -> None:
    """Codes by the scale of each row are those of the row alone by that scale."""
    x_RD, format = call_of("nvfp4", "nvfp4", BF16).x_TD, Format.of("nvfp4")
    x_RD = x_RD * torch.tensor([1.0, 1e-4, 3e3, 0.0, 40.0, 1.0])[:, None]
    own_R = packing.global_scale_of(x_RD, format, by_row=True)
    codes, scales = quantize(x_RD, "nvfp4", own_R)
    for r in range(x_RD.shape[0]):
        one = x_RD[r : r + 1]
        assert torch.equal(own_R[r], packing.global_scale_of(one, format))
        alone = quantize(one, "nvfp4", own_R[r])
        assert torch.equal(codes[r : r + 1], alone[0])
        assert torch.equal(rows_of(scales[r : r + 1], ALL), rows_of(alone[1], ALL))
    back = packing.dequantize(codes[:, None], scales[:, None], format, global_scale=own_R)[:, 0]
    assert_close(back, x_RD.float(), Tol(0.2, "half a step of float4"), "whatever its size")
    with pytest.raises(ValueError, match="must be one float32 or one for each of the 6 rows, got"):
        quantize(x_RD, "nvfp4", own_R[:4])


def test_global_scales_of_rows_reach_the_product() -> None:
    call = call_of("nvfp4", "nvfp4", F32)
    own_R = torch.tensor([1.0, 2.0, 0.5, 4.0, 1.0, float("nan")])
    q_RD, scale_RG = quantize(call.x_TD, "nvfp4", own_R.nan_to_num(1.0))
    product = {
        "w_EFD": call.w13_EFD, "w_scale_EFG": call.w13_scale_EFG, "w_format": "nvfp4",
        "ends_E": torch.tensor([1, 3, 3, 6], dtype=torch.int32), "out_dtype": "float32",
        "global_scale_E": call.global_scale13_E,
    }  # fmt: skip
    rows = {"x_RD": q_RD, "x_scale_RG": scale_RG, "x_format": "nvfp4"}
    plain = moe_ops.expert_gemm(**rows, **product)
    for backend in ("reference", "dequantize"):
        with moe_ops.using(backend):
            y_RF = moe_ops.expert_gemm(**rows, **product, x_global_scale_R=own_R)
            biased = moe_ops.expert_gemm(
                **rows, **product, x_global_scale_R=own_R, bias_EF=torch.ones(4, 256)
            )
        assert torch.equal(y_RF[:5], plain[:5] * own_R[:5, None])  # a power of two rounds nothing
        assert bool(y_RF[5].isnan().all())
        assert torch.equal(biased[:5], y_RF[:5] + 1)
    refused = (
        ({"x_global_scale_R": own_R[:3]}, "must be float32 [6], got shape (3,)"),
        ({"x_global_scale_R": own_R.double()}, "must be float32 [6], got torch.float64"),
    )
    for bad, message in refused:
        with pytest.raises((ValueError, TypeError)) as error:
            moe_ops.expert_gemm(**rows, **product, **bad)
        assert message in str(error.value)
    with pytest.raises(ValueError, match="goes with an x_format that has a global scale"):
        moe_ops.expert_gemm(
            torch.ones(6, 64), torch.ones(4, 8, 64), product["ends_E"], x_global_scale_R=own_R
        )


def test_one_scale_made_of_all_rows_is_for_who_names_it() -> None:
    """The documented exception: a scale of the tensor that is made at run time."""
    with pytest.raises(ValueError, match="name one of each"):
        moe_ops.QuantConfig.of("int8_w8a8")
    assert moe_ops.QuantConfig.of("mxfp4_w_fp8_a").inputs == "float8_e4m3fn:row"
    call = replace(call_of("int8:row", "int8:tensor", F32), x_scale=None, h_scale=None)
    changed = replace(call, x_TD=call.x_TD.clone())
    changed.x_TD[-1] *= 30
    assert not torch.equal(experts.part(changed)[:KEPT], experts.part(call)[:KEPT])

"""Attention of one query over latents: the op and its backend for CPUs, in float64 and by rows."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import using
from moe_ops.decode_ops.one_query_latents import OneQueryLatentsCall, one_query_latents, refusal
from moe_ops.testing import BF16, F16, F32, Tol, assert_close
from tests.chosen import in_turn
from tests.decode_ops.latents import SIZES, Size, arguments, definition, with_garbage

TOL = {
    F32: Tol(1e-5, "float32 sums in another order"),
    F16: Tol(1e-3, "outputs rounded to the 11 bits of float16"),
    BF16: Tol(8e-3, "outputs rounded to the 8 bits of bfloat16"),
}
each_backend = pytest.mark.parametrize("backend", ["reference", "aten"])


@in_turn(
    each_backend,
    pytest.mark.parametrize("size", SIZES),
    pytest.mark.parametrize("dtype", TOL, ids=str),
)
def test_the_op(size: str, dtype: torch.dtype, backend: str) -> None:
    call = arguments(SIZES[size], dtype)
    want = definition(call)
    with using(backend, "one_query_latents"):
        got = one_query_latents(**with_garbage(call))
    assert got.dtype == dtype and got.is_contiguous()
    assert_close(got.float(), want, TOL[dtype], size)


@pytest.mark.parametrize("size", ["20 heads", "chosen", "an added mask and sinks"])
def test_the_schema_and_the_fake_are_true(size: str) -> None:
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    overload = torch.ops.moe_ops.one_query_latents.default
    torch.library.opcheck(overload, (), arguments(SIZES[size]), test_utils=tests)


@each_backend
def test_keys_that_a_weight_expands_give_the_same(backend: str) -> None:
    """What models compute: softmax over the slots of q · (W_K latent) + q_rope · rotated, times
    W_V latent."""
    size, N, V = Size(H=6), 12, 10
    call = arguments(size)
    w_HNR, w_HVR = torch.randn(size.H, N, size.R), torch.randn(size.H, V, size.R)
    q_BHN = torch.randn(size.B, size.H, N)
    call["q_BHR"] = torch.einsum("bhn,hnr->bhr", q_BHN, w_HNR)
    with using(backend, "one_query_latents"):
        got = torch.einsum("bhr,hvr->bhv", one_query_latents(**call), w_HVR)
    keys, values = (torch.einsum("bsr,hnr->bhsn", call["latents_BSR"], w) for w in (w_HNR, w_HVR))
    keys = torch.cat([keys, call["rotated_BSD"][:, None].expand(-1, size.H, -1, -1)], -1)
    want = torch.nn.functional.scaled_dot_product_attention(
        torch.cat([q_BHN, call["q_rope_BHD"]], -1)[:, :, None],
        *(keys, values, call["mask_BS"][:, None, None]),
        scale=call["scale"],
    )
    assert_close(got, want[:, :, 0], TOL[F32], "expanded")


@each_backend
def test_all_slots_chosen_is_as_none_chosen(backend: str) -> None:
    call = arguments(Size(S=40))
    order = torch.stack([torch.randperm(40) for _ in range(2)])
    with using(backend, "one_query_latents"):
        want = one_query_latents(**call)
        got = one_query_latents(**{**call, "indices_BC": order})
        narrow = one_query_latents(**{**call, "indices_BC": order.int()})
    assert_close(got, want, TOL[F32], "chosen")
    assert torch.equal(narrow, got)


def test_a_row_does_not_depend_on_others() -> None:
    """Neither on how many they are, nor on how long."""
    call = arguments(Size(B=3, H=20))
    alone = one_query_latents(**row(call, 1))
    assert torch.equal(one_query_latents(**call)[1:2], alone)
    call["mask_BS"][0] = call["mask_BS"][2] = True
    assert torch.equal(one_query_latents(**call)[1:2], alone)


def test_slots_to_spare_change_nothing() -> None:
    call = arguments(Size(B=3, S=64))
    more = dict(call)
    for name in ("latents_BSR", "rotated_BSD", "mask_BS"):
        more[name] = torch.cat([call[name], torch.zeros_like(call[name])], 1)
    assert torch.equal(one_query_latents(**more), one_query_latents(**call))


def row(call: dict[str, Any], b: int) -> dict[str, Any]:
    def one(value: Any) -> Any:
        return value[b : b + 1] if isinstance(value, Tensor) and value.dim() > 1 else value

    return {name: one(value) for name, value in call.items()}


@each_backend
def test_a_sink_alone_leaves_nothing(backend: str) -> None:
    call = arguments(Size(sinks=True))
    call["mask_BS"][1] = False
    with using(backend, "one_query_latents"):
        got = one_query_latents(**call)
    assert not got[1].any() and got[0].any()


def test_a_gradient_comes_from_the_definition() -> None:
    call = arguments(Size())
    call["q_BHR"] = call["q_BHR"].clone().requires_grad_()
    backends = one_query_latents.refusals(**call)
    assert backends["aten"] == "is not differentiable, and an argument requires grad"
    one_query_latents(**call).sum().backward()
    assert call["q_BHR"].grad.any()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "axes": ({"q_BHR": torch.ones(2, 16, 1, 32)}, "q must have 3 axes, got [2, 16, 1, 32]"),
    "cache axes": (
        {"latents_BSR": torch.ones(2, 1, 70, 32)},
        "latents must have 3 axes, got [2, 1, 70, 32]; reshape it",
    ),
    "heads": (
        {"q_rope_BHD": torch.ones(2, 15, 16)},
        "[2, 16, 32], [2, 15, 16], [2, 70, 32], [2, 70, 16] do not fit each other; give "
        "[B, H, R], [B, H, D], [B, S, R], [B, S, D]",
    ),
    "slots": ({"latents_BSR": torch.ones(2, 71, 32)}, "do not fit each other"),
    "batches": ({"rotated_BSD": torch.ones(3, 70, 16)}, "do not fit each other"),
    "batch": (
        {"latents_BSR": torch.ones(3, 70, 32), "rotated_BSD": torch.ones(3, 70, 16)},
        "have other batches, or none of something; give a B of latents that divides that of q",
    ),
    "dtypes": (
        {"rotated_BSD": torch.ones(2, 70, 16, dtype=BF16)},
        "torch.bfloat16, torch.float32 is not one of float32, bfloat16, float16; convert",
    ),
    "query strides": (
        {"q_BHR": torch.ones(2, 16, 64)[..., ::2]},
        "q has the strides (1024, 64, 2); make its rows contiguous",
    ),
    "cache strides": (
        {"rotated_BSD": torch.ones(70, 2, 16).transpose(0, 1)},
        "rotated keys are a view with other strides; make them contiguous",
    ),
    "mask": (
        {"mask_BS": torch.ones(2, 71)},
        "the mask is torch.float32 [2, 71], not of 2 x 70 slots",
    ),
    "mask of ints": ({"mask_BS": torch.ones(2, 70, dtype=torch.int64)}, "give bools or floats"),
    "mask strides": ({"mask_BS": torch.ones(70, 2).T}, "the mask has the strides (1, 2)"),
    "sinks": ({"sinks_H": torch.ones(15)}, "the sinks are [15], not a contiguous [16]"),
    "indices": (
        {"indices_BC": torch.ones(2, 1, 5, dtype=torch.int64)},
        "the indices are torch.int64 [2, 1, 5]; give int32 or int64 [2, C]",
    ),
    "float indices": ({"indices_BC": torch.ones(2, 5)}, "give int32 or int64 [2, C]"),
    "no indices": ({"indices_BC": torch.ones(2, 0, dtype=torch.int64)}, "the indices are none"),
    "devices": (
        {"rotated_BSD": torch.ones(2, 70, 16, device="meta")},
        "q is on cpu, something else on meta; move one of them",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refusals_say_why(case: str) -> None:
    bad, said = BAD[case]
    call = {**arguments(Size()), **bad}
    assert said in (refusal(OneQueryLatentsCall(**call)) or "")
    with pytest.raises(ValueError, match=re.escape("one_query_latents: ")):
        one_query_latents(**call)

"""Attention of one query over latents on a GPU: the kernels, captured, and a model's steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import using
from moe_ops.decode_ops.one_query_latents import one_query_latents
from moe_ops.testing import BF16, F16, Tol, assert_close
from tests.decode_ops.latents import Size, arguments, definition, with_garbage
from tests.generation.steps import check_steps
from tests.gpu.captures import captured
from tests.hf import overrides

pytestmark = pytest.mark.gpu
TOL = {
    BF16: Tol(1.6e-2, "weights and outputs rounded to 8 bits of mantissa"),
    F16: Tol(2e-3, "weights and outputs rounded to 11 bits of mantissa"),
}
SIZES = {
    "DeepSeek-V3": Size(B=2, H=128, S=4096, R=512, D=64),
    "GLM-4.7-Flash": Size(B=3, H=20, S=8192, R=512, D=64),
    "V2-Lite": Size(B=1, H=16, S=512, R=512, D=64),
    "64 heads": Size(B=2, H=64, S=1000, R=512, D=64, adds=True, sinks=True),
    "32 heads of 256": Size(B=8, H=32, S=300, R=256, D=64),
    "DeepSeek-V3.2": Size(B=2, H=128, S=4096, R=512, D=64, chosen=2048),
    "16 heads, chosen": Size(B=2, H=16, S=2048, R=512, D=64, chosen=512, adds=True),
    "narrow latents": Size(B=2, H=20, S=300, R=64, D=16),
    "nothing rotated": Size(B=2, H=64, S=300, R=128, D=0),
    "8 queries": Size(B=16, H=128, S=4096, R=512, D=64, shared=8),
    "5 queries, chosen": Size(B=5, H=64, S=2048, R=512, D=64, chosen=512, shared=5),
    "many sequences": Size(B=160, H=64, S=256, R=512, D=64),
}


def on_gpu(call: dict[str, Any]) -> dict[str, Any]:
    return {n: v.cuda() if isinstance(v, Tensor) else v for n, v in call.items()}


@pytest.mark.parametrize("dtype", TOL, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_the_kernels(size: str, dtype: torch.dtype) -> None:
    call = arguments(SIZES[size], dtype) | {"scale": 0.02}
    with using("triton", "one_query_latents"):
        got = one_query_latents(**on_gpu(with_garbage(call)))
    assert got.dtype == dtype
    assert_close(got.float().cpu(), definition(call), TOL[dtype], size)


@pytest.mark.parametrize("size", ["DeepSeek-V3", "GLM-4.7-Flash", "DeepSeek-V3.2"])
def test_a_row_does_not_depend_on_the_lengths_of_others(size: str) -> None:
    call = on_gpu(arguments(SIZES[size], BF16))
    want = one_query_latents(**call)
    call["mask_BS"][0] = True
    got = one_query_latents(**call)
    assert torch.equal(got[1:], want[1:]) and not torch.equal(got[0], want[0])


def test_a_captured_call_reads_what_is_filled_by_then() -> None:
    call = on_gpu(arguments(SIZES["DeepSeek-V3"], BF16))
    one_query_latents(**call)
    graph, got = captured(lambda: one_query_latents(**call))
    for end in (1, 70, 3000):
        call["mask_BS"].copy_((torch.arange(4096, device="cuda") < end).expand(2, -1))
        graph.replay()
        assert torch.equal(got, one_query_latents(**call)), end


@pytest.mark.parametrize("batch", [1, 3])
def test_steps_of_a_model(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With latents of sizes that the kernels take."""
    sizes = {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "head_dim": 16}
    monkeypatch.setitem(overrides.OVERRIDES, "deepseek_v3", OVERRIDES | sizes)
    check_steps("deepseek_v3", batch, "merge_linears", 0)


OVERRIDES: dict[str, Any] = overrides.OVERRIDES.get("deepseek_v3", {})

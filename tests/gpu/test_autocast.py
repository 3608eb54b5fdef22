"""Under torch.autocast of a GPU ops take what a linear gives them, and train in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops.testing import BF16, F16, F32, Case, Tol, assert_close, make_layer

pytestmark = pytest.mark.gpu
TOLS = {
    BF16: Tol(4e-2, "products of bfloat16, against float32"),
    F16: Tol(5e-3, "products of float16, against float32"),
}


@pytest.mark.parametrize("dtype", TOLS)
@pytest.mark.parametrize("op", ["experts", "moe"])
def test_ops_follow_a_linear(op: str, dtype: torch.dtype) -> None:
    layer = make_layer(Case(name="wide", T=24, E=8, K=2, D=128, I=64), device="cuda")
    torch.manual_seed(0)
    linear = nn.Linear(128, 128, device="cuda")

    def trained(enabled: bool) -> tuple[torch.dtype, list[Tensor]]:
        x, *w = (t.clone().requires_grad_() for t in (layer.x_TD, layer.w13_EFD, layer.w2_EDI))
        with torch.autocast("cuda", dtype, enabled=enabled):
            h = linear(x)
            if op == "experts":
                out = moe_ops.experts(h, layer.weights_TK, layer.ids_TK, *w)
            else:
                out = moe_ops.moe(h, layer.logits_TE, *w, 2)
        return out.dtype, [out.float(), *torch.autograd.grad(out.float().sum(), [x, *w])]

    (kind, got), (_, want) = trained(True), trained(False)
    assert kind is dtype
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert i == 0 or g.dtype is F32
        assert_close(g.float(), w, TOLS[dtype], f"result {i}")

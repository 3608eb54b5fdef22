"""Models whose experts become fewer while graphs of them are captured on a GPU."""

from __future__ import annotations

import pytest
import torch

import moe_ops
from moe_ops.testing import Tol, assert_close
from tests.hf.test_quantize import qwen
from tests.hf.twins import PLAIN

pytestmark = pytest.mark.gpu
TOL = Tol(1e-4, "float32 sums in another order, and products of other kernels")
KEPT = (0, 1, 4)


@pytest.mark.parametrize("scheme", ["", "int8_w8a16"])
def test_forwards_and_steps_are_captured_anew(scheme: str) -> None:
    model, ids = qwen().cuda(), torch.arange(3, 10, device="cuda")[None]
    if scheme:
        moe_ops.quantize_model(model, scheme, progress=False)
    compiled = moe_ops.compile(model)
    with torch.inference_mode():
        for _ in range(4):  # the third time is captured
            compiled(ids)
            compiled.generate(ids, **PLAIN)
        report = moe_ops.restrict_experts(model, KEPT, removed="cpu")
        assert not any(t.is_cuda for t in report.removed.values())
        want, fresh = model(ids).logits, moe_ops.compile(model)
        tokens = fresh.generate(ids, **PLAIN)
        for _ in range(4):
            assert_close(compiled(ids).logits, want, TOL, scheme or "float32")
            assert torch.equal(compiled.generate(ids, **PLAIN), tokens)
        report.undo()
        assert_close(compiled(ids).logits, model(ids).logits, TOL, "all experts again")
        assert all(t.is_cuda for t in model.state_dict().values())

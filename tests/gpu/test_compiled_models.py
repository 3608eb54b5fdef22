"""Stock models compiled for a CUDA GPU with our passes: the results, and the kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._inductor import config, metrics

import moe_ops
from moe_ops.testing import BF16, F32, Tol, assert_close
from tests.hf import families
from tests.passes.test_families import assert_complete, check

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo")]
TOL = Tol(1e-4, "float32 sums in another order, and products of other kernels")


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_compiled_model_gives_what_the_model_gives(family: str) -> None:
    tiny = families.build(family)
    model, inputs = tiny.model.cuda(), {k: v.cuda() for k, v in tiny.inputs.items()}
    with torch.inference_mode():
        want = model(**inputs, use_cache=False).logits
        compiled = moe_ops.compile(model, dynamic=False)
        assert_close(compiled(**inputs, use_cache=False).logits, want, TOL, family)
    (run,) = compiled._compiled_call_impl.pipeline.runs
    lifted = {done.name: done.rewrites for done in run.passes}
    assert lifted["fuse_moe"] == len(families.experts(model))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_products_that_inductor_spells_out_when_it_tunes_are_lifted(
    family: str, dtype: torch.dtype
) -> None:
    with config.patch(coordinate_descent_tuning=True):
        assert_complete(family, check(family, "batched_mm", dtype, dynamic=False, device="cuda"))


def test_activation_and_quantization_are_one_kernel() -> None:
    def model(y: Tensor) -> tuple[Tensor, Tensor]:
        return moe_ops.quantize(moe_ops.activate(y), "float8_e4m3fn:row")

    y = torch.randn(64, 1024, device="cuda").bfloat16()
    compiled = torch.compile(model, options=moe_ops.inductor_options())
    metrics.reset()
    with torch.inference_mode(), config.patch(fx_graph_cache=False):
        values, scales = compiled(y)
    assert metrics.generated_kernel_count == 1
    want_values, want_scales = model(y)
    # In one kernel the activation is not rounded to bfloat16 before it is quantised.
    torch.testing.assert_close(scales, want_scales, rtol=2**-8, atol=0)
    steps = (values.float() - want_values.float()).abs() / want_values.float().abs().clamp(min=1)
    assert float(steps.max()) <= 1 / 8  # a step of e4m3

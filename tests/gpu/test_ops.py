"""Every op on a CUDA GPU gives what it gives on the CPU."""

from __future__ import annotations

import pytest
import torch

import moe_ops
from moe_ops.testing import BF16, CASES, F32, TOL, Case, assert_close, make_layer
from tests.gpu.captures import captured

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_a_layer_gives_on_the_gpu_what_it_gives_on_the_cpu(case: Case, dtype: torch.dtype) -> None:
    layer = make_layer(case, dtype)
    args = (layer.x_TD, layer.logits_TE, layer.w13_EFD, layer.w2_EDI, case.K)
    biases = {"b13_EF": layer.b13_EF, "b2_ED": layer.b2_ED}
    with moe_ops.using("reference"):
        want = moe_ops.moe(*(a.float() if isinstance(a, torch.Tensor) else a for a in args),
                           **{k: b.float() for k, b in biases.items()})  # fmt: skip
    got = moe_ops.moe(
        *(a.cuda() if isinstance(a, torch.Tensor) else a for a in args),
        **{k: b.cuda() for k, b in biases.items()},
    )
    assert got.device.type == "cuda"
    assert_close(got.cpu(), want, TOL["moe", dtype], case.name)


def test_a_compiled_layer_replays_as_a_cuda_graph_with_other_inputs() -> None:
    layer = make_layer(CASES[0], BF16, device="cuda")

    def run(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return moe_ops.moe(x, logits, layer.w13_EFD, layer.w2_EDI, 2)

    x, logits = layer.x_TD.clone(), layer.logits_TE.clone()
    for _ in range(2):
        run(x, logits)
    torch.cuda.synchronize()
    with torch.inference_mode():
        graph, out = captured(lambda: run(x, logits))
    for seed in (1, 2):
        other = make_layer(CASES[0], BF16, device="cuda", seed=seed)
        x.copy_(other.x_TD)
        logits.copy_(other.logits_TE)
        graph.replay()
        assert_close(out, run(other.x_TD, other.logits_TE), TOL["moe", BF16])


def test_tensors_on_two_devices_are_refused() -> None:
    layer = make_layer(CASES[0], device="cuda")
    with pytest.raises(ValueError, match=r"weights_TK is on cpu.*cuda:0"):
        moe_ops.experts(
            layer.x_TD, layer.weights_TK.cpu(), layer.ids_TK, layer.w13_EFD, layer.w2_EDI
        )

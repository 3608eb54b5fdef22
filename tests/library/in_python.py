"""A process that loads libmoe_ops before it imports moe_ops, and cannot compile.

in_python.py LIBRARY [every]; the latter also runs the conformance kit.
"""

import sys
import warnings
from unittest import mock

import torch

warnings.simplefilter("error")
torch.set_num_threads(1)
torch.ops.load_library(sys.argv[1])

import moe_ops  # noqa: E402
from moe_ops.conformance import check_backend  # noqa: E402
from moe_ops.kernels import cpu  # noqa: E402
from moe_ops.kernels.cpu import quantized  # noqa: E402
from moe_ops.library.records import LIBRARY_OPS  # noqa: E402
from moe_ops.testing import CASES, make_layer  # noqa: E402

OWN_KERNELS = ("route", "dispatch", "expert_gemm", "activate", "combine", "experts")


def stages(layer, dtype) -> torch.Tensor:
    """A layer by its stages, each on the backend that is picked for it."""
    x_RD, rows_R, ends_E = moe_ops.dispatch(layer.x_TD, layer.ids_TK, layer.w13_EFD.shape[0])
    h_RI = moe_ops.activate(moe_ops.expert_gemm(x_RD, layer.w13_EFD, ends_E))
    y_RD = moe_ops.expert_gemm(h_RI, layer.w2_EDI, ends_E)
    return moe_ops.combine(y_RD, layer.weights_TK.to(dtype), rows_R)


def runs_what_the_library_refuses() -> None:
    """Also where no autograd key leads to Python: of float16 there are no kernels."""
    layer = make_layer(CASES[0], torch.float16)
    args = (layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI)
    with torch.inference_mode():
        got = torch.ops.moe_ops.experts(*args)
    torch.testing.assert_close(got, moe_ops.experts.reference(*args), rtol=1e-2, atol=1e-3)


def picks_the_library() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        layer = make_layer(CASES[0], dtype)
        got = stages(layer, dtype)
        with moe_ops.using("reference"):
            want = stages(layer, dtype)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2)
    x = make_layer(CASES[0]).x_TD
    assert moe_ops.activate.pick(moe_ops.activate.call(x)).name == "cpu"


def has_gradients() -> None:
    x = make_layer(CASES[0]).x_TD.requires_grad_()
    moe_ops.activate(x).sum().backward()
    assert x.grad is not None


def main(words: list[str]) -> None:
    with mock.patch.object(cpu, "built", None), mock.patch.object(quantized, "built", None):
        assert {*LIBRARY_OPS} == {*OWN_KERNELS, "moe"}
        for op in OWN_KERNELS:
            assert "cpu" in moe_ops.OPS[op].backends
        picks_the_library()
        runs_what_the_library_refuses()
        has_gradients()
        if words:
            for op in OWN_KERNELS:
                check_backend(op, "cpu")
    print("ran")


if __name__ == "__main__":
    main(sys.argv[2:])

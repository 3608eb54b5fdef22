"""What a backend says of the calls that it cannot run: its limits, and the arguments it reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import OPS, Op, expert_gemm, experts, moe
from moe_ops.ops.expert_gemm import ExpertGemmCall
from moe_ops.testing import CASES, make_layer

LAYER = make_layer(CASES[0])
ENDS = torch.full((CASES[0].E,), CASES[0].T, dtype=torch.int32)
GEMM = (LAYER.x_TD, LAYER.w13_EFD, ENDS)
BIAS_EF = torch.zeros(LAYER.w13_EFD.shape[:2])


@pytest.fixture
def gemm(monkeypatch: pytest.MonkeyPatch) -> Op:
    """`expert_gemm` with backends that go when the test does."""
    monkeypatch.setattr(expert_gemm, "_backends", dict(expert_gemm.backends))
    monkeypatch.setattr(expert_gemm, "_order", {})
    return expert_gemm


def run(call: ExpertGemmCall) -> Tensor:
    return expert_gemm.body(call)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, None),
        ({"bias_EF": None, "transposed": False, "out_dtype": ""}, None),
        ({"bias_EF": BIAS_EF}, "does not read bias_EF"),
        ({"out_dtype": "float32"}, "does not read out_dtype='float32'"),
        (
            {"global_scale_E": torch.ones(8), "bias_EF": BIAS_EF},
            "does not read bias_EF, global_scale_E",
        ),
        ({"bias_EF": BIAS_EF, "out_dtype": "bfloat16"}, "does not read out_dtype='bfloat16'"),
    ],
)
def test_what_is_not_read_is_refused_where_it_differs(
    gemm: Op, more: dict[str, Any], said: str | None
) -> None:
    gemm.backend("deaf", priority=9)(run)
    assert gemm.refusals(*GEMM, **more)["deaf"] == said
    picked = gemm.pick(gemm.call(*GEMM, **more)).name
    assert (picked == "deaf") == (said is None)


def test_what_is_read_is_left_to_the_backend(gemm: Op) -> None:
    asked = []
    gemm.backend("all ears", reads=("bias_EF",), priority=9, supports=asked.append)(run)
    assert gemm.refusals(*GEMM, bias_EF=BIAS_EF)["all ears"] is None
    assert gemm.pick(gemm.call(*GEMM, bias_EF=BIAS_EF)).name == "all ears"
    assert gemm.refusals(*GEMM, out_dtype="float32")["all ears"] is not None
    assert len(asked) == 2, "it is not asked of a call in which it does not read everything"


@pytest.mark.parametrize("name", ["bias", "x_RD"])
def test_a_backend_reads_arguments_with_defaults(gemm: Op, name: str) -> None:
    with pytest.raises(ValueError, match=f"backend 'new' reads {name}, but the arguments with def"):
        gemm.backend("new", reads=(name,))(run)
    assert "new" not in gemm.backends


@pytest.mark.parametrize("op", [experts, moe], ids=lambda op: op.name)
def test_arguments_of_records_in_a_record_are_compared(op: Op) -> None:
    layer = (LAYER.x_TD, LAYER.weights_TK, LAYER.ids_TK, LAYER.w13_EFD, LAYER.w2_EDI)
    routed = (LAYER.x_TD, LAYER.logits_TE, LAYER.w13_EFD, LAYER.w2_EDI, 2)
    args = routed if op is moe else layer
    differs = op.arguments.any_differing({"b2_ED": None, "limit": None})
    which = op.arguments.differing({"b2_ED": None, "limit": None})
    assert differs is not None
    for more in ({}, {"limit": 2.0}, {"b2_ED": BIAS_EF}, {"limit": 2.0, "b2_ED": BIAS_EF}):
        call = op.call(*args, **more)
        assert differs(call) == bool(more)
        assert list(which(call)) == [n for n in op.optional if n in more]
    assert op.arguments.any_differing({}) is None


@pytest.mark.parametrize("name", OPS)
def test_the_reference_reads_everything(name: str) -> None:
    reference = OPS[name].backends["reference"]
    assert reference.ignores is None and reference.supports is None

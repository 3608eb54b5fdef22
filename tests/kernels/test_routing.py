"""The routing kernel against published routers; in Triton's interpreter without a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import route
from moe_ops.checks.shapes import DTYPES, FLOATS
from moe_ops.testing import DEVICE, TOL, assert_close
from tests.chosen import in_turn
from tests.published_routers import ROUTERS, Router, arguments, oracle

pytest.importorskip("triton", reason="the kernels are Triton's")


def run(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = route.backends["triton"].run(route.call(*args, **kwargs))
    return found


each_router = pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)


def on_device(call: dict) -> dict:
    return {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in call.items()}


@in_turn(
    each_router,
    pytest.mark.parametrize(
        "dtype",
        [pytest.param(d, marks=[] if d == torch.bfloat16 else [pytest.mark.slow]) for d in FLOATS],
        ids=DTYPES,
    ),
)
def test_matches_the_published_formula(router: Router, dtype: torch.dtype) -> None:
    call = arguments(router, dtype)
    call["logits_TE"] = call["logits_TE"][:6]  # the interpreter takes a token at a time
    weights, ids = run(**on_device(call))
    want_weights, want_ids = oracle(router, call)
    assert torch.equal(ids.cpu(), want_ids)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    # Powers and logarithms of a GPU err in the last bits.
    assert_close(weights.cpu(), want_weights, TOL["route", torch.bfloat16], "weights")
    exact = weights.double().cpu() - want_weights
    assert float(exact.abs().max()) <= 2e-6 * float(want_weights.abs().max())


@pytest.mark.slow
@in_turn(
    pytest.mark.parametrize("E", [1, 3, 72, 160]),
    pytest.mark.parametrize("dtype", FLOATS, ids=DTYPES),
)
def test_any_number_of_experts_and_choices(E: int, dtype: torch.dtype) -> None:
    logits = torch.randn(4, E).to(dtype).to(DEVICE)
    for K in sorted({1, min(3, E), min(10, E)}):
        weights, ids = run(logits, K, renormalize=True, out_dtype="float16")
        want, _ = route.reference(logits, K, renormalize=True, out_dtype="float16")
        # Equal logits may come in any order: compare what they are worth.
        assert torch.equal(logits.gather(1, ids.long()), logits.topk(K).values)
        assert all(len(set(row)) == K for row in ids.tolist())
        assert_close(weights, want, TOL["route", torch.float16])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("E", "K"), [(8, 2), (60, 4), (128, 10)])
def test_four_tokens_a_program_are_one_and_one(
    E: int, K: int, score: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_ops.kernels.triton import routing

    logits = torch.randn(7, E, dtype=torch.bfloat16, device=DEVICE)
    scale = torch.rand(E, device=DEVICE)
    want_weights, want_ids = run(logits, K, score=score, per_expert_scale_E=scale)
    monkeypatch.setattr(routing, "MANY_TOKENS", 7)
    weights, ids = run(logits, K, score=score, per_expert_scale_E=scale)
    assert torch.equal(ids, want_ids)
    assert_close(weights, want_weights, TOL["route", torch.float32])


def test_equal_logits_choose_the_lower_expert_first() -> None:
    for dtype in FLOATS:
        logits = torch.zeros(1, 8, dtype=dtype, device=DEVICE)
        assert run(logits, 3)[1].tolist() == [[0, 1, 2]]


def test_strided_logits_and_no_tokens() -> None:
    wide = torch.randn(3, 16, device=DEVICE)
    for got, want in zip(run(wide[:, ::2], 2), run(wide[:, ::2].contiguous(), 2), strict=True):
        assert torch.equal(got, want)
    weights, ids = run(torch.empty(0, 8, device=DEVICE), 2)
    assert weights.shape == ids.shape == (0, 2)

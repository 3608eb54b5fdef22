"""NaN and infinities: every backend hands them on as the definition does, and to nobody else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import experts, route
from moe_ops.ops.activate import KINDS
from moe_ops.ops.route import SCORES
from moe_ops.registry.spec import Op
from moe_ops.testing import BF16, DEVICE, F16, F32, TOL, Case, float32, make_layer
from tests.chosen import in_turn

NAN, INF = float("nan"), float("inf")


def runner(op: Op, name: str) -> Any:
    """A backend's own function, which takes what `check` accepts; those of Triton interpreted."""
    if name.startswith("triton"):
        pytest.importorskip("triton", reason="the kernels are Triton's")
    run = op.backends[name].run
    return lambda *args, **kwargs: run(op.call(*args, **kwargs))


def each_backend(names: list[str]) -> Any:
    """The interpreter takes a block at a time, which adds up."""
    slow = [pytest.mark.slow]
    marked = [pytest.param(n, marks=slow if n.startswith("triton") else []) for n in names]
    return pytest.mark.parametrize("backend", marked)


def device_of(name: str) -> str:
    return DEVICE if name.startswith("triton") else "cpu"


LOGITS = (0.1, 0.9, 0.3, 2.0, -1.0, 0.5, 0.2, 1.1)
# What takes the place of some logits, by expert.
PLANTED: dict[str, dict[int, float]] = {
    "first_nan": {0: NAN},
    "nan": {4: NAN},
    "last_nan": {7: NAN},
    "nan_beside_the_largest": {2: NAN},
    "negative_nan": {4: -NAN},
    "inf": {4: INF},
    "minus_inf": {3: -INF},
    "both_infs": {4: INF, 7: -INF},
    "both_infs_in_a_group": {4: INF, 5: -INF},
    "nan_and_infs": {1: NAN, 4: INF, 6: -INF},
}
ROUTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "by_logit": {"select_on": "logit"},
    "bias": {"bias_E": torch.arange(8) / 7},
    "nan_bias": {"bias_E": torch.tensor([0.0] * 6 + [NAN, 0.0])},
    "scales": {"per_expert_scale_E": torch.arange(1, 9) / 4},
    "renormalised": {"renormalize": True, "min_sum": 0.6, "eps": 1e-20, "scale": 2.5},
    "softmax_selected": {"softmax_selected": True},
    "groups": {"n_group": 4, "topk_group": 2},
    "groups_by_largest": {"n_group": 4, "topk_group": 2, "group_reduce": "max"},
    "groups_weighed": {"n_group": 2, "topk_group": 1, "group_fill": "zero_weight"},
    "groups_filled": {"n_group": 2, "topk_group": 1, "group_fill": "zero", "renormalize": True},
}


@in_turn(
    each_backend(["cpu", "triton"]),
    pytest.mark.parametrize(
        "dtype", [F32, pytest.param(BF16, marks=pytest.mark.every)], ids=["float32", "bfloat16"]
    ),
    pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED),
    pytest.mark.parametrize("score", SCORES),
)
def test_routes_choose_and_weigh_what_the_definition_does(
    score: str, planted: dict[int, float], dtype: torch.dtype, backend: str
) -> None:
    run, device = runner(route, backend), device_of(backend)
    logits = torch.tensor([LOGITS, LOGITS]).to(dtype)  # the first row keeps its numbers
    for expert, value in planted.items():
        logits[1, expert] = value
    for name, router in ROUTERS.items():
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in router.items()}
        got = [t.cpu() for t in run(logits.to(device), 3, score=score, **moved)]
        want = list(route.reference(logits, 3, score=score, **router))
        if name == "nan_bias":  # its NaN ties with that of the logits
            got, want = by_expert(*got), by_expert(*want)
        assert all(len(set(row)) == 3 and 0 <= min(row) <= max(row) < 8 for row in got[1].tolist())
        torch.testing.assert_close(
            got[0], want[0], rtol=2e-6, atol=1e-7, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
        any_will_do = score == "softmax" and name != "by_logit" and bool(want[0][1].isnan().all())
        rows = slice(1) if any_will_do else slice(None)
        assert torch.equal(got[1][rows], want[1][rows]), name


def by_expert(weights_TK: Tensor, ids_TK: Tensor) -> list[Tensor]:
    sorted_TK, order_TK = ids_TK.sort(-1)
    return [weights_TK.gather(1, order_TK), sorted_TK]


CASE = Case(name="not_finite", T=4, E=3, K=2, D=24, I=16)
BACKENDS = [b for b in experts.backends if b in ("reference", "aten", "cpu") or "triton." in b]
TOKEN = 2  # whose input, or whose first expert's bias, is not finite


def each_activation() -> Any:
    """A limit means the same to every kind, so one of them has it in the short run."""
    found = [(kind, gated, limit) for kind in KINDS for gated in (True, False)
             for limit in (None, 0.5)]  # fmt: skip
    return pytest.mark.parametrize(("kind", "gated", "limit"), [
        pytest.param(*f, marks=pytest.mark.every if f[2] and f[0] != "silu" else [])
        for f in found
    ])  # fmt: skip


@in_turn(each_backend(BACKENDS), each_activation())
def test_what_is_not_finite_reaches_its_token_as_in_the_definition(
    kind: str, gated: bool, limit: float | None, backend: str
) -> None:
    # The interpreter multiplies float16 and float32 alone.
    for dtype in (F16,) if backend.startswith("triton") else (F32, BF16):
        check_experts(kind, gated, limit, backend, dtype)


def check_experts(
    kind: str, gated: bool, limit: float | None, backend: str, dtype: torch.dtype
) -> None:
    run, device = runner(experts, backend), device_of(backend)
    layer = make_layer(CASE, dtype, device, gated=gated)
    layer.ids_TK[:] = torch.tensor([[0, 1], [1, 0], [2, 1], [0, 1]])  # expert 2 has one token
    others = torch.arange(CASE.T) != TOKEN
    act = {"kind": kind, "gated": gated, "limit": limit}
    gate, up = (2, 3), (2, CASE.I + 3)
    for value in (NAN, INF, -INF):
        for planted in ("x_TD", "gate", "up") if gated else ("x_TD", "gate"):
            x_TD, b13_EF = layer.x_TD.clone(), layer.b13_EF.clone()
            if planted == "x_TD":
                x_TD[TOKEN, 5] = value
            else:
                b13_EF[gate if planted == "gate" else up] = value
            call = (x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI, b13_EF)
            got = run(*call, **act).float().cpu()
            want = experts.reference(*(float32(t.cpu()) for t in call), **act)
            what = f"{value} in {planted}"
            assert bool(got[others].isfinite().all()), what
            assert value == value or bool(got[TOKEN].isnan().all()), what
            if kind == "gelu" and value == INF:
                continue  # of which torch's gelu makes infinity or NaN, as it uses vectors or not
            tol = TOL["experts", dtype].rel * float(want[want.isfinite()].abs().max())
            torch.testing.assert_close(
                got, want, rtol=0, atol=tol, equal_nan=True, msg=lambda m, w=what: f"{w}: {m}"
            )

"""`experts_saving` and `experts_backward` by Triton's grouped products, in Triton's interpreter
where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops import OPS
from moe_ops.conformance import Only, examine
from moe_ops.conformance.memory import surrounded
from moe_ops.testing import BF16, CASES, DEVICE, F16, F32, TOL, assert_close, make_layer
from tests.kernels.sampled import anywhere, hold, of_the_kit, refusal, run

BY_NAME = {case.name: case for case in CASES}
# The interpreter multiplies no bfloat16.
DTYPES = (F32, F16, BF16) if DEVICE == "cuda" else (F32, F16)
OF_LAYERS = ("experts_saving", "experts_backward")
QUICK = [("one_token", F32), ("no_tokens", F16), ("one_expert", F32), ("odd_unaligned", F32)]
each_op = pytest.mark.parametrize("name", OF_LAYERS)


def marked(case: str, dtype: torch.dtype) -> object:
    quick = (case, dtype) in QUICK
    return pytest.param(case, dtype, marks=[] if quick else [pytest.mark.slow, pytest.mark.every])


@each_op
@pytest.mark.parametrize(("case", "dtype"), [marked(c, d) for c in BY_NAME for d in DTYPES])
def test_samples(case: str, dtype: torch.dtype, name: str) -> None:
    """Of floats all but one: a gradient by the kept rows comes of a backward of a backward."""
    refused = hold(OPS[name], BY_NAME[case], dtype)
    of_codes = {label for label, why in refused.items() if why.startswith("does not read w_format")}
    others = {} if name == "experts_saving" else {"gradient_of_rows": "does not read grad_y_RF"}
    assert {label: refused[label] for label in refused.keys() - of_codes} == others


@each_op
@pytest.mark.parametrize(
    ("case", "dtype"),
    [pytest.param(c, F16, marks=[] if c == "one_token" else pytest.mark.every) for c in BY_NAME],
)
def test_samples_of_codes(case: str, dtype: torch.dtype, name: str) -> None:
    """Of every format, by the backend that decodes a layer's weights first."""
    refused = hold(OPS[name], BY_NAME[case], dtype, "triton.decoded")
    others = {} if name == "experts_saving" else {"gradient_of_rows": "does not read grad_y_RF"}
    floats = {label for label, why in refused.items() if why == "decodes codes, got floats"}
    assert floats
    assert {label: refused[label] for label in refused.keys() - floats} == others


@pytest.mark.slow
@each_op
@pytest.mark.parametrize("sample", of_the_kit("gpt_oss", "map_and_holes"))
def test_the_kit_finds_nothing(sample: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with anywhere(monkeypatch, OPS[name]):
        report = examine(name, "triton", only=Only(sample=sample), device=DEVICE)
        assert report.sound and report.ran, str(report)


def saved(case: str, ids_TK: Tensor | None = None) -> dict[str, Any]:
    """A call of `experts_saving` with biases; and what it gives by the definition, with a gradient
    and NaN in unused rows, as `experts_backward` takes it."""
    layer = make_layer(BY_NAME[case])
    names = ("x_TD", "weights_TK", "ids_TK", "w13_EFD", "w2_EDI", "b13_EF", "b2_ED")
    call = {name: getattr(layer, name) for name in names}
    if ids_TK is not None:
        call["ids_TK"] = ids_TK
    _, y_RF, rows_R, ends_E = OPS["experts_saving"].reference(**call)
    y_RF[rows_R < 0] = float("nan")
    kept = {"y_RF": y_RF, "rows_R": rows_R, "ends_E": ends_E}
    return {"grad_TD": torch.randn_like(layer.x_TD), **kept, **call}


def results(name: str, call: dict[str, Any]) -> tuple[Tensor, ...]:
    op = OPS[name]
    args = op.arguments.in_order(call)
    made: tuple[Tensor, ...] = run(op, tuple(surrounded(a, torch.device(DEVICE)) for a in args))
    return made


def test_a_layer_that_trains_runs_by_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(BY_NAME["odd"])
    names = ("x_TD", "weights_TK", "w13_EFD", "w2_EDI", "b13_EF", "b2_ED")
    leaves = {name: getattr(layer, name).to(DEVICE).requires_grad_() for name in names}
    call, weight = {**leaves, "ids_TK": layer.ids_TK.to(DEVICE)}, torch.randn(layer.x_TD.shape)

    def grads(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, [*leaves.values()], weight.to(out))

    ops = [OPS[n] for n in (*OF_LAYERS, "expert_wgrad", "activate_backward")]
    with anywhere(monkeypatch, *ops) as ran:
        found = grads(OPS["experts"](**call))
    assert ran == ["experts_saving", "experts_backward", *["expert_wgrad"] * 4]
    for name, g, w in zip(names, found, grads(OPS["experts"].reference(**call)), strict=True):
        assert_close(g, w, TOL["model", F32], name)


def test_pairs_of_no_expert_here_have_no_gradient() -> None:
    """Nor has a token whose pairs all are; their rows are not read, and not written."""
    case = BY_NAME["odd"]
    ids = make_layer(case).ids_TK.clone()
    ids[0], ids[1, 1:], ids[2, 0] = -1, case.E, 2**30
    call = saved("odd", ids)
    dx_TD, dweights_TK, dy_RF, wh_RI = results("experts_backward", call)
    unused = call["rows_R"] < 0
    assert int(unused.sum()) == 3 + 2 + 1
    here = (ids >= 0) & (ids < case.E)
    assert not dx_TD[0].any() and not dweights_TK.cpu()[~here].any()
    assert bool(dx_TD[1:].any(1).all()) and bool(dweights_TK.cpu()[here].all())
    for rows in (dy_RF, wh_RI):
        assert bool(rows[unused.to(DEVICE)].isnan().all())


@each_op
def test_the_same_call_gives_the_same_bits(name: str) -> None:
    call = saved("odd")
    known = OPS[name].arguments.paths
    call = {n: value for n, value in call.items() if n in known}
    for first, again in zip(results(name, call), results(name, call), strict=True):
        assert torch.equal(first, again)


def test_what_wants_a_gradient_is_refused() -> None:
    call = saved("one_token")
    call["grad_TD"].requires_grad_()
    op = OPS["experts_backward"]
    said = "is not differentiable, and an argument requires grad"
    assert refusal(op, op.arguments.in_order(call)) == said

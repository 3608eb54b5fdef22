"""`activate` against each formula, a number at a time in double precision."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_ops import activate
from moe_ops.checks.shapes import DTYPES, FLOATS
from moe_ops.conformance.tensors import strided
from moe_ops.testing import TOL, assert_close
from tests.ops.refused import FIRST_FLOAT_NAMES, Bad, assert_refused, wrong_dtype, wrong_rank

R, I = 11, 9  # noqa: E741  (the legend's letter for the expert width)


def silu(g: float, alpha: float = 1.0) -> float:
    return g / (1 + math.exp(-alpha * g))


def gelu(g: float) -> float:
    return g * (1 + math.erf(g / math.sqrt(2))) / 2


def gelu_tanh(g: float) -> float:
    return g * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) / 2


def relu2(g: float) -> float:
    return g * g if g > 0 else 0.0


FORMULAS: dict[str, Callable[..., float]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu2": relu2,
}
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=DTYPES)
each_kind = pytest.mark.parametrize("kind", FORMULAS)


def gated_by_hand(y: Tensor, kind: str, interleaved: bool, limit: float = math.inf) -> Tensor:
    out = torch.empty(y.shape[0], y.shape[1] // 2, dtype=torch.float64)
    for r, row in enumerate(y.tolist()):
        for i in range(out.shape[1]):
            gate, up = (row[2 * i], row[2 * i + 1]) if interleaved else (row[i], row[i + I])
            out[r, i] = FORMULAS[kind](min(gate, limit)) * max(-limit, min(up, limit))
    return out


def each(y: Tensor, f: Callable[[float], float]) -> Tensor:
    return torch.tensor([[f(v) for v in row] for row in y.tolist()], dtype=torch.float64)


@each_dtype
@pytest.mark.parametrize("limit", [None, 1.5], ids=["free", "clamped"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@each_kind
def test_gated_kinds(kind: str, interleaved: bool, limit: float | None, dtype: torch.dtype) -> None:
    y = (torch.randn(R, 2 * I) * 2).to(dtype)
    got = activate(y, kind, interleaved=interleaved, limit=limit)
    assert (got.shape, got.dtype) == ((R, I), dtype)
    assert_close(
        got, gated_by_hand(y, kind, interleaved, limit or math.inf), TOL["activate", dtype]
    )


@each_dtype
@each_kind
def test_ungated_kinds(kind: str, dtype: torch.dtype) -> None:
    y = (torch.randn(R, I) * 2).to(dtype)
    got = activate(y, kind, gated=False)
    assert (got.shape, got.dtype) == ((R, I), dtype)
    assert_close(got, each(y, FORMULAS[kind]), TOL["activate", dtype])


@each_dtype
def test_ungated_rows_are_clamped_from_above_only(dtype: torch.dtype) -> None:
    y = (torch.randn(R, I) * 4).to(dtype)
    got = activate(y, gated=False, alpha=1.702, limit=0.5)
    assert_close(got, each(y, lambda v: silu(min(v, 0.5), 1.702)), TOL["activate", dtype])


@each_dtype
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_gpt_oss_form(interleaved: bool, dtype: torch.dtype) -> None:
    y = (torch.randn(R, 2 * I) * 6).to(dtype)
    halves = torch.cat([y[:, ::2], y[:, 1::2]], dim=1) if interleaved else y
    gate = each(halves[:, :I], lambda v: silu(min(v, 7.0), 1.702))
    up = each(halves[:, I:], lambda v: max(-7.0, min(v, 7.0)) + 1.0)
    got = activate(y, interleaved=interleaved, alpha=1.702, limit=7.0, up_shift=1.0)
    assert_close(got, gate * up, TOL["activate", dtype])


CLAMPS = {
    "gate_above": ([100.0, 1.0], silu(2.0)),
    "gate_below": ([-1.0, 1.0], silu(-1.0)),
    "gate_far_below": ([-30.0, 1.0], silu(-30.0)),
    "up_above": ([1.0, 100.0], silu(1.0) * 2.0),
    "up_below": ([1.0, -100.0], silu(1.0) * -2.0),
    "both_at_the_limit": ([2.0, -2.0], silu(2.0) * -2.0),
}


@pytest.mark.parametrize(("row", "want"), CLAMPS.values(), ids=CLAMPS)
def test_the_limit_binds_the_gate_above_and_up_on_both_sides(row: list[float], want: float) -> None:
    got = activate(torch.tensor([row]), limit=2.0)
    assert_close(got, torch.tensor([[want]]), TOL["activate", torch.float32])


def test_the_shift_comes_after_the_clamp() -> None:
    got = activate(torch.tensor([[1.0, 9.0]]), "relu2", limit=2.0, up_shift=0.5)
    assert got.tolist() == [[2.5]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_rounds_once_at_the_end(dtype: torch.dtype) -> None:
    y = torch.randn(64, 64).to(dtype)
    assert torch.equal(activate(y), activate(y.float()).to(dtype))


def test_nan_in_one_row_stays_in_that_row() -> None:
    y = torch.randn(R, 2 * I)
    y[4] = float("nan")
    got = activate(y, limit=1.0)
    assert got.isnan().any(-1).nonzero().flatten().tolist() == [4]


def test_extreme_values_do_not_turn_into_nan() -> None:
    y = torch.tensor([[-3e4, 3e4, -3e4, 3e4]], dtype=torch.float16)
    for kind in FORMULAS:
        assert not bool(activate(y, kind, limit=7.0).isnan().any()), kind


def test_strided_rows_give_what_contiguous_ones_give() -> None:
    y = torch.randn(R, 2 * I)
    assert torch.equal(activate(strided(y)), activate(y))
    assert torch.equal(activate(strided(y), interleaved=True), activate(y, interleaved=True))


@pytest.mark.parametrize(("gated", "width"), [(True, I), (False, 2 * I)], ids=["gated", "ungated"])
def test_no_rows_give_an_empty_result(gated: bool, width: int) -> None:
    assert activate(torch.empty(0, 2 * I), gated=gated).shape == (0, width)


HALF = "interleaved and up_shift speak of the `up` half, which an ungated activation has not"
BAD = {
    "rank": wrong_rank("y_RF", (8,), 2),
    "dtype": wrong_dtype("y_RF", (3, 8), "int32", FIRST_FLOAT_NAMES),
    "odd_width": Bad(
        {"y_RF": torch.ones(3, 7)},
        "a gated activation halves the width of y_RF, which is odd: (3, 7)",
    ),
    "kind": Bad(
        {"kind": "relu"}, "kind='relu' is unknown; choose one of silu, gelu, gelu_tanh, relu2"
    ),
    "alpha_without_silu": Bad(
        {"kind": "gelu", "alpha": 1.702}, "alpha=1.702 goes with kind='silu', got kind='gelu'"
    ),
    "limit_zero": Bad({"limit": 0.0}, "limit=0.0 must be positive, or None for no clamp"),
    "limit_negative": Bad({"limit": -7.0}, "limit=-7.0 must be positive, or None for no clamp"),
    "limit_nan": Bad({"limit": math.nan}, "limit=nan must be positive, or None for no clamp"),
    "alpha_nan": Bad({"alpha": math.nan}, "alpha=nan must be a finite number"),
    "shift_infinite": Bad({"up_shift": math.inf}, "up_shift=inf must be a finite number"),
    "ungated_interleaved": Bad({"gated": False, "interleaved": True}, HALF),
    "ungated_shift": Bad({"gated": False, "up_shift": 1.0}, HALF),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_refuses_a_bad_call(bad: Bad) -> None:
    assert_refused(activate, {"y_RF": torch.ones(3, 8)}, bad)

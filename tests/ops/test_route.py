"""`route` against published routers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import route
from moe_ops.checks.shapes import DTYPES, FLOATS
from moe_ops.conformance.tensors import distinct_logits, strided
from moe_ops.testing import TOL, assert_close
from tests.ops.refused import (
    FIRST_FLOAT_NAMES,
    Bad,
    assert_refused,
    wrong_device,
    wrong_dtype,
    wrong_rank,
    wrong_size,
)
from tests.published_routers import ROUTERS, E, K, Router, T, arguments, oracle

each_router = pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)


@each_router
@pytest.mark.parametrize("dtype", FLOATS, ids=DTYPES)
def test_matches_the_published_formula(router: Router, dtype: torch.dtype) -> None:
    call = arguments(router, dtype)
    weights, ids = route(**call)
    want_weights, want_ids = oracle(router, call)
    assert torch.equal(ids, want_ids)
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    assert_close(weights, want_weights, TOL["route", torch.float32], "weights")


@each_router
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_only_the_result_is_rounded_to_out_dtype(router: Router, out_dtype: str) -> None:
    call = arguments(router, torch.bfloat16)
    exact, ids = route(**call)
    weights, same_ids = route(**call, out_dtype=out_dtype)
    assert weights.dtype == DTYPES[out_dtype]
    assert torch.equal(weights, exact.to(DTYPES[out_dtype]))
    assert torch.equal(ids, same_ids)


@each_router
def test_permuting_the_experts_permutes_the_ids(router: Router) -> None:
    call = arguments(router)
    # Groups move as wholes, and experts within them.
    moved = torch.randperm(4)[:, None] * 4 + torch.stack([torch.randperm(4) for _ in range(4)])
    moved = moved.flatten()
    permuted = {k: v[..., moved] if isinstance(v, Tensor) else v for k, v in call.items()}
    (weights, ids), (weights_p, ids_p) = route(**call), route(**permuted)
    assert torch.equal(moved[ids_p.long()], ids.long())
    assert_close(weights_p, weights, TOL["route", torch.float32])


@each_router
def test_permuting_the_tokens_permutes_the_rows(router: Router) -> None:
    call = arguments(router)
    moved = torch.randperm(T)
    weights, ids = route(**call)
    weights_p, ids_p = route(**{**call, "logits_TE": call["logits_TE"][moved]})
    assert torch.equal(ids_p, ids[moved])
    assert_close(weights_p, weights[moved], TOL["route", torch.float32])


@each_router
def test_ids_of_a_token_are_distinct_experts(router: Router) -> None:
    _, ids = route(**arguments(router))
    ordered = ids.sort(-1).values
    assert bool((ordered[:, 1:] > ordered[:, :-1]).all())
    assert 0 <= int(ids.min()) <= int(ids.max()) < E


@pytest.mark.parametrize("name", [n for n, r in ROUTERS.items() if not (r.biased or r.scaled)])
def test_larger_weights_come_first_where_nothing_biases_the_choice(name: str) -> None:
    weights, _ = route(**arguments(ROUTERS[name]))
    assert bool((weights[:, :-1] >= weights[:, 1:]).all())


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_renormalised_weights_sum_to_the_scale(score: str, scale: float) -> None:
    logits = distinct_logits(T, E)
    weights, _ = route(logits, K, score=score, renormalize=True, scale=scale)
    assert_close(weights.sum(-1), torch.full((T,), scale), TOL["route", torch.float32])


def test_a_selection_bias_does_not_reach_the_weights() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    for select_on in ("score", "logit"):
        bias = torch.tensor([9.0, 0.0, 0.0, 0.0])
        weights, ids = route(logits, 1, bias, score="sigmoid", select_on=select_on)
        assert ids.tolist() == [[0]]
        assert weights.tolist() == [[0.5]]


@pytest.mark.parametrize(
    ("fill", "want"), [("zero", [0, 3]), ("-inf", [0, 2])], ids=["zero", "minus_infinity"]
)
def test_a_group_filled_with_zero_still_beats_negative_scores(fill: str, want: list[int]) -> None:
    logits = torch.tensor([[0.5, -0.2, -0.1, -0.9]])
    groups: dict[str, Any] = {"n_group": 4, "topk_group": 3, "group_reduce": "max"}
    _, ids = route(logits, 2, score="logit", group_fill=fill, **groups)
    assert ids.tolist() == [want]


@pytest.mark.parametrize(
    ("fill", "want"), [("zero", [0.9, 0.6, 0.1]), ("zero_weight", [0.9, 0.6, 0.0])]
)
def test_an_expert_outside_of_the_groups_weighs_its_score_or_nothing(
    fill: str, want: list[float]
) -> None:
    """Where more experts are chosen than the groups that are kept have."""
    logits = torch.tensor([[0.1, 0.1, 0.9, 0.6]])
    groups: dict[str, Any] = {"n_group": 2, "topk_group": 1, "group_reduce": "max"}
    weights, ids = route(logits, 3, score="logit", group_fill=fill, **groups)
    assert ids[0, :2].tolist() == [2, 3]
    assert int(ids[0, 2]) in (0, 1)
    assert_close(weights, torch.tensor([want]), TOL["route", torch.float32])


def test_weights_outside_of_the_groups_are_no_part_of_sums() -> None:
    logits = torch.tensor([[1.0, 1.0, 3.0, 3.0]])
    groups: dict[str, Any] = {"n_group": 2, "topk_group": 1, "group_fill": "zero_weight"}
    for router in ({"renormalize": True}, {"renormalize": True, "score": "logit"}):
        weights, _ = route(logits, 4, **groups, **router)
        assert_close(weights, torch.tensor([[0.5, 0.5, 0.0, 0.0]]), TOL["route", torch.float32])
    bias = torch.tensor([0.0, -9.0, 0.0, -9.0])  # below the masked experts: only these are chosen
    weights, ids = route(logits, 2, bias, score="logit", group_reduce="max", **groups)
    assert ids[0, 0] == 2
    assert weights.tolist() == [[3.0, 0.0]]


def test_strided_logits_give_what_contiguous_ones_give() -> None:
    logits = distinct_logits(T, E)
    for got, want in zip(route(strided(logits), K), route(logits, K), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("router", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_no_tokens_give_empty_results(router: str) -> None:
    call = arguments(ROUTERS[router])
    weights, ids = route(**{**call, "logits_TE": torch.empty(0, E)})
    assert (weights.shape, ids.shape) == ((0, K), (0, K))


def test_extreme_logits_give_finite_weights() -> None:
    logits = torch.tensor([[-3e4, 3e4, 0.0, 100.0]])
    for score in ("softmax", "sigmoid", "sqrtsoftplus", "logit"):
        weights, ids = route(logits, 2, score=score)
        assert ids[0, 0] == 1
        assert bool(weights.isfinite().all()), score


GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2}
ONE_EACH = "8 (one per expert of logits_TE)"
BAD = {
    "rank": wrong_rank("logits_TE", (8,), 2),
    "dtype": wrong_dtype("logits_TE", (3, 8), "int32", FIRST_FLOAT_NAMES),
    "top_k_above_experts": Bad(
        {"top_k": 9}, "top_k=9 must be from 1 to the 8 experts of logits_TE; lower top_k"
    ),
    "top_k_zero": Bad({"top_k": 0}, "top_k=0 must be from 1 to the 8 experts of logits_TE"),
    "no_experts": Bad({"logits_TE": torch.ones(3, 0)}, "top_k=2 must be from 1 to the 0 experts"),
    "score": Bad(
        {"score": "relu"},
        "score='relu' is unknown; choose one of softmax, sigmoid, sqrtsoftplus, logit",
    ),
    "select_on": Bad(
        {"select_on": "bias"}, "select_on='bias' is unknown; choose one of score, logit"
    ),
    "out_dtype": Bad(
        {"out_dtype": "int8"},
        "out_dtype='int8' is unknown; choose one of float32, bfloat16, float16",
    ),
    "bias_size": wrong_size("bias_E", (7,), 0, ONE_EACH),
    "bias_rank": wrong_rank("bias_E", (8, 1), 1),
    "bias_dtype": wrong_dtype("bias_E", (8,), "int32"),
    "bias_device": wrong_device("bias_E", (8,)),
    "scale_size": wrong_size("per_expert_scale_E", (9,), 0, ONE_EACH),
    "scale_rank": wrong_rank("per_expert_scale_E", (1, 8), 1),
    "scale_dtype": wrong_dtype("per_expert_scale_E", (8,), "int64"),
    "scale_device": wrong_device("per_expert_scale_E", (8,)),
    "group_count": Bad({"n_group": 3}, "n_group=3 must divide the 8 experts of logits_TE"),
    "no_groups": Bad({"n_group": 0}, "n_group=0 must divide the 8 experts of logits_TE"),
    "kept_groups": Bad({**GROUPS, "topk_group": 5}, "topk_group=5 must be from 1 to n_group=4"),
    "no_kept_groups": Bad({**GROUPS, "topk_group": 0}, "topk_group=0 must be from 1 to n_group=4"),
    "group_reduce": Bad(
        {**GROUPS, "group_reduce": "mean"},
        "group_reduce='mean' is unknown; choose one of max, top2sum",
    ),
    "group_fill": Bad(
        {**GROUPS, "group_fill": "nan"},
        "group_fill='nan' is unknown; choose one of -inf, zero, zero_weight",
    ),
    "reduce_of_one_group": Bad(
        {"group_reduce": "top2"},
        "group_reduce='top2' is unknown; choose one of max, top2sum; did you mean 'top2sum'?",
    ),
    "fill_of_one_group": Bad(
        {"group_fill": "inf"},
        "group_fill='inf' is unknown; choose one of -inf, zero, zero_weight; did you mean '-inf'?",
    ),
    "kept_of_one_group": Bad({"topk_group": 2}, "topk_group=2 must be from 1 to n_group=1"),
    "none_kept_of_one_group": Bad({"topk_group": 0}, "topk_group=0 must be from 1 to n_group=1"),
    **{
        f"{name}_{value}": Bad({name: value}, f"{name}={value} must be a finite number")
        for name in ("eps", "min_sum", "scale")
        for value in (float("nan"), float("inf"), float("-inf"))
    },
    "groups_of_one": Bad(
        {"n_group": 8, "topk_group": 8},
        "group_reduce='top2sum' needs two experts a group, got 8 experts in 8 groups",
    ),
    "groups_too_small": Bad(
        {**GROUPS, "topk_group": 1, "top_k": 3},
        "top_k=3 exceeds the 2 experts of topk_group=1 groups",
    ),
    "normalised_twice": Bad(
        {"softmax_selected": True, "renormalize": True},
        "softmax_selected already makes weights that sum to 1; drop renormalize",
    ),
}


def test_numbers_whose_sum_is_infinite_are_taken() -> None:
    large = torch.finfo(torch.float64).max
    route(torch.ones(3, 8), 2, renormalize=True, eps=large, min_sum=large)


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_refuses_a_bad_call(bad: Bad) -> None:
    assert_refused(route, {"logits_TE": torch.ones(3, 8), "top_k": 2}, bad)

"""Routers that write down what they choose, and that take what was written."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import route, route_recording, route_replaying, using
from moe_ops.conformance.samples import samples
from moe_ops.testing import CASES, TOL, assert_close

CASE = next(case for case in CASES if case.name == "odd")
ROUTINGS = {s.name: s.args for s in samples("route", CASE, torch.float32)}
OPTIONS = list(route.arguments.signature.parameters)[1:]


def options_of(args: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(OPTIONS, args[1:], strict=True))


def ring(S: int, K: int) -> Tensor:
    return torch.full((S, K), -1, dtype=torch.int16)


@pytest.mark.parametrize(
    ("S", "at", "rows"),
    [
        (8, 0, [0, 1, 2, -1, -1, -1, -1, -1]),
        (8, 6, [2, -1, -1, -1, -1, -1, 0, 1]),
        (3, 10**12, [2, 0, 1]),
        (2, 1, [1, 2]),
    ],
    ids=["at_the_start", "over_the_end", "far", "fewer_rows"],
)
def test_rows_are_written_from_the_place_on(S: int, at: int, rows: list[int]) -> None:
    logits, ids_SK = torch.randn(3, 6), ring(S, 2)
    _, ids = route_recording(logits, 2, ids_SK, torch.tensor([at]))
    want = [[-1, -1] if t < 0 else ids[t].tolist() for t in rows]
    assert ids_SK.tolist() == want


@pytest.mark.parametrize("name", ROUTINGS)
def test_results_are_those_of_the_router(name: str) -> None:
    logits, options = ROUTINGS[name][0], options_of(ROUTINGS[name])
    weights_SK = torch.zeros(len(logits), options["top_k"])
    ids_SK, at = ring(*weights_SK.shape), torch.zeros(1, dtype=torch.int64)
    want = route(logits, **options)
    got = route_recording(logits, ring_ids_SK=ids_SK, at=at, ring_weights_SK=weights_SK, **options)
    assert all(map(torch.equal, got, want))
    assert torch.equal(ids_SK.int(), want[1])
    assert torch.equal(weights_SK, want[0].float())


@pytest.mark.parametrize("name", ROUTINGS)
def test_what_a_router_chose_gives_its_weights_again(name: str) -> None:
    logits, options = ROUTINGS[name][0], options_of(ROUTINGS[name])
    want = route.reference(logits, **options)
    got = route_replaying.reference(logits, given_ids_SK=want[1].to(torch.int16), **options)
    assert all(map(torch.equal, got, want))


def test_rows_of_a_negative_number_are_chosen_anew() -> None:
    logits, given = torch.randn(4, 6), torch.tensor([[5, 0], [-1, -1], [1, 2], [-1, -1]])
    weights, ids = route_replaying.reference(logits, 2, given.to(torch.int16))
    own_weights, own = route.reference(logits, 2)
    assert torch.equal(ids[[1, 3]], own[[1, 3]])
    assert torch.equal(weights[[1, 3]], own_weights[[1, 3]])
    assert torch.equal(ids[[0, 2]], given[[0, 2]].int())
    assert torch.equal(weights[[0, 2]], logits.softmax(-1).gather(1, given.clamp(min=0))[[0, 2]])


def test_given_experts_keep_their_scores_outside_of_the_best_groups() -> None:
    logits = torch.tensor([[5.0, 4.0, -1.0, -2.0]])
    groups = {"n_group": 2, "topk_group": 1, "group_reduce": "max", "group_fill": "zero_weight"}
    given = torch.tensor([[2, 3]], dtype=torch.int16)
    weights, _ = route_replaying.reference(logits, 2, given, **groups)
    assert torch.equal(weights, logits.softmax(-1)[:, 2:])


@pytest.mark.parametrize("name", ROUTINGS)
def test_the_kernel_weighs_what_is_given_as_the_definition_does(name: str) -> None:
    """Every third row is chosen anew; where all are what the router chose, its own weights."""
    logits, options = ROUTINGS[name][0], options_of(ROUTINGS[name])
    with using("cpu"):
        own_weights, own = route(logits, **options)
        own = own.to(torch.int16)
        same = route_replaying(logits, given_ids_SK=own, **options)
        assert torch.equal(same[0], own_weights) and torch.equal(same[1], own.int())
        given = own.roll(1, 0)
        given[::3] = -1
        weights, ids = route_replaying(logits, given_ids_SK=given, **options)
    want_weights, want = route_replaying.reference(logits, given_ids_SK=given, **options)
    assert torch.equal(ids, want)
    assert_close(weights, want_weights, TOL["route", logits.dtype])


def test_given_ids_of_no_expert_are_refused_by_the_kernel() -> None:
    given = torch.tensor([[0, 1], [-1, 7], [2, 6]], dtype=torch.int16)
    with using("cpu"):
        route_replaying(torch.randn(2, 6), 2, given[:2])  # what follows a negative number is unread
        with pytest.raises(ValueError, match="ids that none of the 6 experts of logits_TE has"):
            route_replaying(torch.randn(3, 6), 2, given)


@pytest.mark.parametrize("name", ["renormalize", "sigmoid_bias", "per_expert_scale"])
def test_gradients_reach_the_logits_of_given_experts(name: str) -> None:
    logits, options = ROUTINGS[name][0].double(), options_of(ROUTINGS[name])
    options |= {n: t.double() for n, t in options.items() if isinstance(t, Tensor)}
    E, K = logits.shape[1], options["top_k"]
    given = torch.stack([torch.randperm(E)[:K] for _ in logits]).to(torch.int16)

    def weights(logits: Tensor) -> Tensor:
        return route_replaying(logits, given_ids_SK=given, **options)[0]

    logits.requires_grad_()
    assert torch.autograd.gradcheck(weights, (logits,))


def test_gradients_of_a_recording_router_are_the_routers() -> None:
    logits, ids_SK = torch.randn(3, 6, requires_grad=True), ring(3, 2)
    at = torch.zeros(1, dtype=torch.int64)
    weights, ids = route_recording(logits, 2, ids_SK, at, renormalize=True)
    (got,) = torch.autograd.grad(weights.square().sum(), logits)
    want_weights, _ = route(logits, 2, renormalize=True)
    (want,) = torch.autograd.grad(want_weights.square().sum(), logits)
    assert torch.equal(got, want)
    assert torch.equal(ids_SK.int(), ids)


L, AT = torch.randn(3, 6), torch.zeros(1, dtype=torch.int64)
WRONG: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "dtype": (route_recording, (L, 2, ring(4, 2).int(), AT), "ring_ids_SK must be contiguous int1"),
    "choices": (route_recording, (L, 3, ring(4, 2), AT), r"top_k=3\]"),
    "no_rows": (route_recording, (L, 2, ring(0, 2), AT), "with a row or more"),
    "strides": (route_recording, (L, 2, ring(2, 4).t(), AT), "strides"),
    "place": (route_recording, (L, 2, ring(4, 2), AT.int()), r"at must be int64 \[1\]"),
    "experts": (
        route_recording,
        (torch.zeros(1, 2**15 + 1), 2, ring(4, 2), AT),
        "two bytes tell 32768 apart",
    ),
    "few_rows": (route_replaying, (L, 2, ring(2, 2)), "2 rows for 3 tokens"),
    "given_choices": (route_replaying, (L, 3, ring(4, 2)), r"top_k=3\]"),
    "beyond_groups": (
        route_replaying,
        (L, 4, ring(4, 4), None, None, "softmax", "score", 3, 1, "max", "zero_weight"),
        "exceeds the 2 experts of topk_group=1",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_do_not_fit_are_refused(name: str) -> None:
    op, args, says = WRONG[name]
    with pytest.raises((ValueError, TypeError), match=says):
        op(*args)


def test_weights_of_a_ring_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="ring_weights_SK must be contiguous"):
        route_recording(L, 2, ring(4, 2), AT, ring_weights_SK=torch.zeros(3, 2))

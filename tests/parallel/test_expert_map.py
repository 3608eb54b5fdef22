"""`place`: every expert in one slot of one rank, however many there are of either."""

import warnings
from typing import Any

import pytest
import torch

from moe_ops import experts
from moe_ops.parallel.config import COLLECTIVES, HIGH_THROUGHPUT, ParallelConfig
from moe_ops.parallel.expert_map import ExpertPlacement, place
from moe_ops.testing import Case, Tol, assert_close, make_layer
from tests.chosen import in_turn

# Experts and ranks, even and not, up to one expert a rank.
COUNTS = [(8, 1), (8, 2), (8, 8), (10, 4), (7, 3), (64, 16), (65, 64), (127, 64), (256, 64)]
SUMMED = Tol(1e-5, "each token's experts are summed in another order")
GROUPED = {"placement": "round_robin", "num_groups": 4}

each_count = pytest.mark.parametrize(("num_experts", "ranks"), COUNTS)
each_placement = pytest.mark.parametrize("asked", [{}, GROUPED], ids=["linear", "round_robin"])


def ep(ranks: int, rank: int = 0, **asked: Any) -> ParallelConfig:
    return ParallelConfig.of(**{"tp": ranks, "tp_rank": rank, "expert_parallel": True, **asked})


def all_ranks(num_experts: int, ranks: int, **asked: Any) -> list[ExpertPlacement]:
    return [place(num_experts, ep(ranks, rank), **asked) for rank in range(ranks)]


@in_turn(each_placement, each_count)
def test_each_expert_has_one_slot_of_one_rank(
    num_experts: int, ranks: int, asked: dict[str, Any]
) -> None:
    every = all_ranks(num_experts, ranks, **asked)
    each, more = divmod(num_experts, ranks)
    held = []
    for rank, here in enumerate(every):
        assert here.num_local == each + (rank < more)
        ids = here.local_to_global.tolist()
        assert [here.local_id(e) for e in ids] == list(range(here.num_local))
        assert ids == list(every[0].ids_of(rank))
        held += ids
    assert sorted(held) == list(range(num_experts))


@in_turn(each_placement, each_count)
def test_maps_are_inverse_to_each_other(
    num_experts: int, ranks: int, asked: dict[str, Any]
) -> None:
    every = torch.arange(num_experts)
    for here in all_ranks(num_experts, ranks, **asked):
        to_physical, to_global = here.global_to_physical, here.physical_to_global
        assert torch.equal(to_physical[to_global], every)
        assert torch.equal(to_global[to_physical], every)
        start = here.starts[here.config.ep_rank]
        positions = slice(start, start + here.num_local)
        assert torch.equal(to_global[positions], here.local_to_global)
        assert here.mask[-1] == 0
        if here.expert_map is None:
            assert here.mask[:-1].all()
            continue
        assert here.expert_map.dtype == torch.int32
        assert torch.equal(here.expert_map[here.local_to_global], every[: here.num_local].int())
        assert torch.equal(here.expert_map >= 0, here.mask[:-1].bool())
        assert int((here.expert_map >= 0).sum()) == here.num_local


def test_uneven_experts_by_hand() -> None:
    linear, dealt = all_ranks(7, 3), all_ranks(7, 3, **GROUPED)
    assert [p.ids_of(p.config.ep_rank) for p in linear] == [(0, 1, 2), (3, 4), (5, 6)]
    assert [p.ids_of(p.config.ep_rank) for p in dealt] == [(0, 3, 6), (1, 4), (2, 5)]
    assert linear[1].expert_map.tolist() == [-1, -1, -1, 0, 1, -1, -1]
    assert dealt[1].expert_map.tolist() == [-1, 0, -1, -1, 1, -1, -1]
    assert dealt[1].mask.tolist() == [0, 1, 0, 0, 1, 0, 0, 0]
    assert dealt[1].physical_to_global.tolist() == [0, 3, 6, 1, 4, 2, 5]
    assert dealt[1].global_to_physical.tolist() == [0, 3, 5, 1, 4, 6, 2]
    assert dealt[1].local_to_global.tolist() == [1, 4]


def test_fused_shared_experts_follow_the_routed_ones_on_every_rank() -> None:
    for here in all_ranks(6, 4, redundant=1, shared=2):
        assert here.num_slots == here.num_local + 2
        shared = [here.num_local, here.num_local + 1]
        assert here.expert_map.tolist()[7:] == shared
        assert [here.local_id(7), here.local_id(8)] == shared
        assert here.mask.tolist()[7:] == [1, 1, 0]
        assert 7 not in here.physical_to_global.tolist()


def test_redundant_experts_are_placed_as_experts() -> None:
    assert [p.num_local for p in all_ranks(8, 4, redundant=2)] == [3, 3, 2, 2]
    assert place(8, ep(4), redundant=2).num_physical == 10


def test_a_single_rank_needs_no_map() -> None:
    here = place(8, ParallelConfig(), shared=1)
    assert here.expert_map is None
    assert here.mask.tolist() == [1] * 9 + [0]
    assert here.describe() == "all 8 experts on one rank; 1 shared in every rank"


def test_tensor_parallel_ranks_hold_a_shard_of_every_expert() -> None:
    here = place(8, ParallelConfig.of(tp=4, tp_rank=2))
    assert (here.num_local, here.expert_map) == (8, None)
    assert here.describe() == "all 8 experts on each rank, a shard of every one"


REFUSED = {
    "no_groups": ({"num_groups": 1}, {}, "num_groups=1"),
    "redundant": ({"redundant": 2}, {}, "redundant=2 experts are placed by the balancer"),
    "balanced": ({"balanced": True}, {}, "placed by the balancer"),
    "collective": (
        {},
        {"collective": "alltoall_high_throughput", "dp": 2, "tp": 2},
        "alltoall_high_throughput between dp_size=2 ranks takes a rank's experts to be neighbours",
    ),
}


@pytest.mark.parametrize(("asked", "group", "why"), REFUSED.values(), ids=REFUSED)
def test_round_robin_gives_way_to_linear_and_says_why(
    asked: dict[str, Any], group: dict[str, Any], why: str
) -> None:
    with pytest.warns(UserWarning, match=why):
        got = place(8, ep(4, 1, **group), **{**GROUPED, **asked})
    assert (got.placement, got.ids_of(1)[0]) == ("linear", got.starts[1])


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("dp", [1, 2])
def test_round_robin_stands_where_it_can_serve(collective: str, dp: int) -> None:
    """With one data parallel rank by any collective, sequence parallel or not."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for sequence in (False, True) if dp == 1 or collective != HIGH_THROUGHPUT else ():
            config = ep(4 // dp, dp=dp, collective=collective, sequence_parallel=sequence)
            assert place(8, config, **GROUPED).placement == "round_robin"


BAD = {
    "no_experts": ({"num_experts": 0}, "num_experts=0 must be at least 1"),
    "redundant": ({"redundant": -1}, "redundant=-1 must be at least 0"),
    "groups": ({"num_groups": 0}, "num_groups=0 must be at least 1"),
    "placement": ({"placement": "random"}, "placement='random' is unknown; choose one of linear"),
    "ranks": ({"num_experts": 3}, "4 expert parallel ranks, but only 3 experts"),
}


@pytest.mark.parametrize(("asked", "message"), BAD.values(), ids=BAD)
def test_bad_requests_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place(**{"num_experts": 8, "config": ep(4), **asked})


def test_a_placement_cannot_be_made_that_place_would_not_make() -> None:
    with pytest.raises(ValueError, match="'round_robin' cannot serve: it spreads the groups"):
        ExpertPlacement(8, ep(4), placement="round_robin")


@pytest.mark.parametrize("e", [-1, 9])
def test_an_unknown_expert_is_refused(e: int) -> None:
    with pytest.raises(ValueError, match=f"global_expert={e} must be from 0 to 8"):
        place(8, ep(2), shared=1).local_id(e)


def test_a_group_grows_and_shrinks() -> None:
    dealt = place(16, ep(4, 1), shared=1, **GROUPED)
    grown = dealt.resized(ep(6, 5))
    assert grown == place(16, ep(6, 5), shared=1, **GROUPED)
    assert grown.ids_of(5) == (5, 11)
    assert grown.resized(ep(4, 1)) == dealt
    assert torch.equal(grown.resized(ep(4, 1)).expert_map, dealt.expert_map)


def test_what_was_asked_for_comes_back_when_the_group_can_serve_it() -> None:
    with pytest.warns(UserWarning):
        here = place(8, ep(2, dp=2, collective="alltoall_high_throughput"), **GROUPED)
    assert here.placement == "linear"
    assert here.resized(ep(2)).placement == "round_robin"


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({}, "rank 1/4 holds 3 of 10 experts, linear: 3-5"),
        (GROUPED, "rank 1/4 holds 3 of 10 experts, round_robin: 1-9 by 4"),
        ({"redundant": 2, "shared": 1},
         "rank 1/4 holds 3 of 12 experts (2 redundant), linear: 3-5; 1 shared in every rank"),
    ],
    ids=["linear", "round_robin", "extras"],
)  # fmt: skip
def test_a_log_says_who_holds_what(asked: dict[str, Any], text: str) -> None:
    assert place(10, ep(4, 1), **asked).describe() == text


@in_turn(each_placement, each_count)
def test_the_ranks_sum_to_the_whole(num_experts: int, ranks: int, asked: dict[str, Any]) -> None:
    case = Case(name="split", T=9, E=num_experts, K=min(6, num_experts), D=16, I=8)
    layer = make_layer(case)
    args = (layer.x_TD, layer.weights_TK, layer.ids_TK)
    want = experts(*args, layer.w13_EFD, layer.w2_EDI)
    total = torch.zeros_like(want)
    for here in all_ranks(num_experts, ranks, **asked):
        mine = here.local_to_global
        w13_eFD, w2_eDI = layer.w13_EFD[mine], layer.w2_EDI[mine]
        total += experts(*args, w13_eFD, w2_eDI, expert_map=here.expert_map)
    assert_close(total, want, SUMMED, "the sum over ranks", repr(case))


def test_tensors_that_were_first_asked_for_in_inference_mode_serve_in_training() -> None:
    names = ("expert_map", "mask", "physical_to_global", "global_to_physical", "local_to_global")
    here = place(8, ep(2, 1))
    with torch.inference_mode():
        found = [*(getattr(here, name) for name in names), *here.serving]
    rows = torch.ones(9, 2, requires_grad=True)
    for ids in found:
        assert not ids.is_inference()
        rows[ids.long().clamp(min=0)].sum().backward()

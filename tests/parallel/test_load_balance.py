"""`rebalance`: every expert stays, every slot is used, ranks are even, outputs do not change."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import expert_loads, experts
from moe_ops.parallel.config import ParallelConfig
from moe_ops.parallel.expert_map import place, shares
from moe_ops.parallel.load_balance import imbalance, rank_loads, rebalance
from moe_ops.parallel.moves import apply_moves
from moe_ops.parallel.packing import pack, replicate
from moe_ops.parallel.replicas import ExpertReplicas, choose_replicas
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import Case, Tol, assert_close, make_layer
from tests.chosen import in_turn
from tests.work import Calls, Values

SUMMED = Tol(1e-5, "each token's experts are summed in another order")


def initial(layers: int, E: int, P: int) -> Tensor:
    return ExpertReplicas.initial(E, P - E).physical_to_logical.repeat(layers, 1)


def loads_of(kind: str, layers: int, E: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "zipf":
        zipf = 1 / torch.arange(1, E + 1).double()
        return torch.stack([zipf[torch.randperm(E, generator=generator)] for _ in range(layers)])
    if kind == "random":
        return torch.rand(layers, E, generator=generator, dtype=torch.float64)
    if kind == "counts":
        return torch.randint(0, 1000, (layers, E), generator=generator)
    if kind == "one":
        return torch.nn.functional.one_hot(torch.arange(layers) % E, E)
    return torch.zeros(layers, E)


KINDS = ["zipf", "random", "counts", "one", "none"]
# Logical and physical experts, ranks, nodes, groups; the last ones uneven.
CLUSTERS = [
    (8, 8, 4, 1, 1), (8, 12, 4, 2, 4), (64, 72, 8, 2, 8), (16, 32, 4, 1, 1), (4, 24, 2, 1, 1),
    (10, 13, 4, 1, 1), (60, 67, 64, 1, 1), (12, 19, 6, 3, 6), (5, 9, 1, 1, 1),
]  # fmt: skip
each_cluster = pytest.mark.parametrize(("E", "P", "ranks", "nodes", "groups"), CLUSTERS)


@in_turn(each_cluster, pytest.mark.parametrize("kind", KINDS))
def test_each_expert_is_present_and_each_slot_used(
    kind: str, E: int, P: int, ranks: int, nodes: int, groups: int
) -> None:
    loads, now = loads_of(kind, 3, E), initial(3, E, P)
    done = rebalance(loads, now, ranks=ranks, nodes=nodes, num_groups=groups)
    assert done.physical_to_logical.shape == (3, P)
    for layer, row in enumerate(done.physical_to_logical):
        assert set(row.tolist()) == set(range(E))
        moved = now[layer].clone()
        apply_moves({"experts": moved}, done.moves[layer])
        assert torch.equal(moved, row), "the moves lead to it"
        assert float(imbalance(loads, done.physical_to_logical, ranks)[layer]) == done.after[layer]
    torch.testing.assert_close(
        rank_loads(loads, done.physical_to_logical, ranks).sum(1), loads.double().sum(1)
    )
    if groups > 1 and nodes > 1:
        for row in done.physical_to_logical:
            parts = row.split([sum(s) for s in torch.tensor(shares(P, ranks)).chunk(nodes)])
            on_node = [set((part // (E // groups)).tolist()) for part in parts]
            assert [len(found) for found in on_node] == [groups // nodes] * nodes


def perfect(loads_E: Tensor, P: int, ranks: int) -> float:
    """No packing gets below this: some rank holds the largest replica and fills its other slots."""
    counts = replicate(loads_E[None], P, ranks)
    share = (loads_E / counts[0]).repeat_interleave(counts[0]).sort().values
    least = share[-1] + share[: P // ranks - 1].sum()
    return max(1.0, float(least * ranks / loads_E.sum()))


@pytest.mark.parametrize("ranks", [2, 8, 9, 16, 32, 36, 48, 64])
def test_zipf_loads_are_packed_within_5_percent_of_even(ranks: int) -> None:
    loads = loads_of("zipf", 3, 256, seed=ranks)
    assert perfect(loads[0], 288, ranks) < 1.001, "a perfect packing is not ruled out"
    done = rebalance(loads, initial(3, 256, 288), ranks=ranks)
    assert float(done.after.max()) <= 1.05 < float(done.before.min())


@pytest.mark.parametrize("ranks", [72, 96, 144])
def test_where_no_even_packing_exists_the_best_is_near(ranks: int) -> None:
    loads = loads_of("zipf", 3, 256, seed=ranks)
    bound = perfect(loads[0], 288, ranks)
    assert bound > 1.05
    done = rebalance(loads, initial(3, 256, 288), ranks=ranks)
    assert bound <= float(done.after.max()) + 1e-9 <= bound * 1.05


@pytest.mark.parametrize("ranks", [2, 8, 32, 64])
def test_random_loads_are_packed_within_2_percent_of_even(ranks: int) -> None:
    for kind in ("random", "counts"):
        done = rebalance(loads_of(kind, 3, 256), initial(3, 256, 288), ranks=ranks)
        assert float(done.after.max()) <= 1.02


@pytest.mark.parametrize("seed", range(4))
def test_a_packing_that_exists_is_found(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.rand(8, 7, generator=generator, dtype=torch.float64).sort(1).values
    parts = torch.nn.functional.pad(cuts, (1, 1), value=0.0)
    parts[:, -1] = 1
    loads = parts.diff(dim=1).flatten()[torch.randperm(64, generator=generator)][None]
    done = rebalance(loads, initial(1, 64, 64), ranks=8)
    assert float(done.after) <= 1.05


def test_replicas_go_where_the_load_is() -> None:
    counts = replicate(torch.tensor([[12.0, 6.0, 3.0, 1.0]]), 8, bins=8)
    assert counts.tolist() == [[4, 2, 1, 1]]
    assert replicate(torch.tensor([[9.0, 1.0]]), 5, bins=3).tolist() == [[3, 2]]
    assert replicate(torch.tensor([[9.0, 1.0]]), 6, bins=2).sum() == 6


@pytest.mark.parametrize(("E", "P"), [(256, 288), (64, 128)])
@pytest.mark.parametrize("ranks", [4, 16, 32])
def test_no_rank_holds_an_expert_twice(ranks: int, E: int, P: int) -> None:
    done = rebalance(loads_of("zipf", 2, E), initial(2, E, P), ranks=ranks)
    for row in done.physical_to_logical:
        for held in row.split(list(shares(P, ranks))):
            assert len(set(held.tolist())) == len(held)


def test_replicas_of_one_expert_do_not_meet_while_there_is_another_rank() -> None:
    loads = torch.tensor([[100.0, 1, 1, 1, 1, 1]])
    (row,) = pack(loads, torch.tensor([[4, 1, 1, 1, 1, 1]]), (3, 2, 2, 2))
    assert [sorted(r.tolist()).count(0) for r in row.split([3, 2, 2, 2])] == [1, 1, 1, 1]


def test_experts_without_loads_are_spread_over_the_ranks() -> None:
    done = rebalance(torch.zeros(1, 4), initial(1, 4, 8), ranks=4)
    assert torch.bincount(done.physical_to_logical[0]).tolist() == [2, 2, 2, 2]
    assert done.after.tolist() == [1.0]


@each_cluster
def test_the_same_loads_move_nothing_more(
    E: int, P: int, ranks: int, nodes: int, groups: int
) -> None:
    asked = {"ranks": ranks, "nodes": nodes, "num_groups": groups}
    loads = loads_of("zipf", 2, E)
    first = rebalance(loads, initial(2, E, P), **asked)
    again = rebalance(loads, first.physical_to_logical, **asked)
    assert [len(moves.pairs) for moves in again.moves] == [0, 0]
    assert torch.equal(again.physical_to_logical, first.physical_to_logical)


def test_experts_keep_their_ranks_when_loads_change_a_little() -> None:
    loads = loads_of("counts", 4, 64) + 500
    first = rebalance(loads, initial(4, 64, 72), ranks=8)
    second = rebalance(loads, first.physical_to_logical.flip(1), ranks=8)
    kept = 72 - max(len(moves.pairs) for moves in second.moves)
    assert kept == 72, "bins that only changed their order are not moved"


@pytest.mark.parametrize("ranks", [6, 10, 12])
def test_after_the_group_changed_the_same_experts_are_spread_anew(ranks: int) -> None:
    loads = loads_of("zipf", 2, 64)
    before = rebalance(loads, initial(2, 64, 72), ranks=8).physical_to_logical
    done = rebalance(loads, before, ranks=ranks)
    assert float(done.after.max()) <= 1.05 < float(done.before.max())
    for layer, row in enumerate(before.clone()):
        apply_moves({"experts": row}, done.moves[layer])
        assert torch.equal(row, done.physical_to_logical[layer])


ZIPF, NOW = loads_of("zipf", 2, 8), initial(2, 8, 12)
BAD = {
    "loads": ({"loads_LE": ZIPF[0]}, "loads_LE must have 2 axes"),
    "layers": ({"current_LP": NOW[:1]}, "must have the same layers"),
    "few": (
        {"current_LP": initial(2, 7, 7)},
        "7 physical experts: too few for 8 logical ones",
    ),
    "ranks": (
        {"ranks": 13},
        "12 physical experts: too few for 8 logical ones on ranks=13",
    ),
    "nodes": ({"ranks": 4, "nodes": 3}, "ranks=4 must be a multiple of nodes=3"),
    "negative": ({"loads_LE": -ZIPF}, "must be finite and not negative"),
    "nan": ({"loads_LE": ZIPF * float("nan")}, "must be finite and not negative"),
    "missing": ({"current_LP": NOW * 0}, "must name each of the 8 experts"),
    "invented": ({"current_LP": NOW + 1}, "must name each of the 8 experts"),
    "groups": ({"ranks": 4, "nodes": 4, "num_groups": 2}, "num_groups=2 cannot be shared by 4"),
    "uneven": ({"nodes": 2, "num_groups": 3}, "pass num_groups=1 to balance without groups"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_bad_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rebalance(**{"loads_LE": ZIPF, "current_LP": NOW, "ranks": 2, **change})


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="loads_LE must be one of int32, int64, float32, float64"):
        rebalance(ZIPF.half(), NOW, ranks=2)


CASE = Case(name="balanced", T=33, E=12, K=4, D=32, I=32)
SPLITS = [(12, 1), (17, 1), (16, 4), (19, 6), (64, 64), (70, 64)]


@pytest.mark.parametrize(("P", "ranks"), SPLITS)
def test_no_rebalancing_changes_the_output(P: int, ranks: int) -> None:
    layer = make_layer(CASE)
    x, weights, ids = layer.x_TD, layer.weights_TK, layer.ids_TK
    want = experts(x, weights, ids, layer.w13_EFD, layer.w2_EDI, layer.b13_EF, layer.b2_ED)
    replicas = ExpertReplicas.initial(CASE.E, P - CASE.E)
    names = ("w13_EFD", "w2_EDI", "b13_EF", "b2_ED")
    held = {name: getattr(layer, name)[replicas.physical_to_logical] for name in names}
    addresses = [t.data_ptr() for t in held.values()]
    ranks_of = [
        place(CASE.E, ParallelConfig.of(dp=ranks, dp_rank=r, expert_parallel=True),
              redundant=P - CASE.E)
        for r in range(ranks)
    ]  # fmt: skip
    for round, kind in enumerate(KINDS):
        physical = choose_replicas(ids, replicas.logical_to_physical, replicas.counts, round)
        total = torch.zeros_like(want)
        for here in ranks_of:
            mine = [held[name][here.local_to_global] for name in names]
            total += experts(x, weights, physical, *mine, expert_map=here.expert_map)
        assert_close(total, want, SUMMED, f"after {round} rebalancings")
        loads = loads_of(kind, 1, CASE.E, seed=round)
        done = rebalance(loads, replicas.physical_to_logical[None], ranks=ranks)
        apply_moves(held, done.moves[0])
        replicas.update_(ExpertReplicas.of(done.physical_to_logical[0], CASE.E))
    assert [t.data_ptr() for t in held.values()] == addresses


@pytest.mark.parametrize("w_format", ["uint4:1x16", "mxfp4", "float8_e4m3fn:16x16"])
def test_scales_and_zero_points_move_with_their_weights(w_format: str) -> None:
    layer, replicas = make_layer(CASE), ExpertReplicas.initial(CASE.E, 4)
    call: dict[str, Tensor] = {}
    for name, w, axes in (("w13", layer.w13_EFD, "FD"), ("w2", layer.w2_EDI, "DI")):
        done = packing.quantize(w, Format.of(w_format))
        call |= {f"{name}_E{axes}": done.values, f"{name}_scale_E{axes[0]}G": done.scale}
        if done.zero is not None:
            call[f"{name}_zero_E{axes[0]}G"] = done.zero
    routed = {"x_TD": layer.x_TD, "weights_TK": layer.weights_TK, "w_format": w_format}
    want = experts(**routed, ids_TK=layer.ids_TK, **call)
    held = {name: t[replicas.physical_to_logical] for name, t in call.items()}
    balanced = rebalance(loads_of("zipf", 1, CASE.E), initial(1, CASE.E, 16), ranks=4)
    apply_moves(held, balanced.moves[0])
    replicas.update_(ExpertReplicas.of(balanced.physical_to_logical[0], CASE.E))
    physical = choose_replicas(layer.ids_TK, replicas.logical_to_physical, replicas.counts)
    assert len(balanced.moves[0].pairs) > 0
    assert_close(experts(**routed, ids_TK=physical, **held), want, SUMMED)


def test_recorded_loads_are_what_the_ranks_then_get() -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = loads_of("zipf", 1, 32)[0]
    ids = torch.stack(
        [torch.multinomial(probabilities, 4, generator=generator) for _ in range(2000)]
    )
    loads = expert_loads(ids, 32)
    done = rebalance(loads[None], initial(1, 32, 40), ranks=8)
    replicas = ExpertReplicas.of(done.physical_to_logical[0], 32)
    physical = choose_replicas(ids, replicas.logical_to_physical, replicas.counts)
    assert torch.equal(expert_loads(physical, 32, replicas.physical_to_logical), loads)
    got = expert_loads(physical, 40).view(8, 5).sum(1).double()
    assert float(got.max() / got.mean()) <= float(done.after) * 1.03 <= 1.1


@pytest.mark.parametrize(("ranks", "nodes"), [(32, 1), (64, 8)])
def test_a_large_model_is_rebalanced_with_little_work(ranks: int, nodes: int) -> None:
    """All its layers at once; limits are twice what it takes."""
    loads, now = loads_of("zipf", 58, 256), initial(58, 256, 288)
    with Values() as values:
        rebalance(loads, now, ranks=ranks, nodes=nodes, num_groups=nodes)
    with Calls() as calls:
        rebalance(loads, now, ranks=ranks, nodes=nodes, num_groups=nodes)
    assert values.ops < 23_000
    assert values.count < 125e6
    assert calls.count < 1_300_000

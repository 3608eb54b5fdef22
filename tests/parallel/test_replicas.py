"""`ExpertReplicas` and `choose_replicas`: every expert somewhere, its replicas in turns."""

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from moe_ops.parallel.replicas import ExpertReplicas, choose_replicas

SIZES = [(1, 0), (4, 0), (4, 1), (3, 7), (256, 32)]
REPLICAS = ExpertReplicas.of(torch.tensor([2, 0, 1, 2, 2]), 3)


def chosen(ids: Tensor, start: int = 0, of: ExpertReplicas = REPLICAS) -> Tensor:
    return choose_replicas(ids, of.logical_to_physical, of.counts, start)


@pytest.mark.parametrize(("num_logical", "redundant"), SIZES)
def test_the_maps_of_replicas_are_inverse_to_each_other(num_logical: int, redundant: int) -> None:
    generator = torch.Generator().manual_seed(0)
    first = ExpertReplicas.initial(num_logical, redundant)
    P = num_logical + redundant
    assert first.physical_to_logical.tolist() == [p % num_logical for p in range(P)]
    shuffled = first.physical_to_logical[torch.randperm(P, generator=generator)]
    for replicas in (first, ExpertReplicas.of(shuffled, num_logical)):
        logical = replicas.physical_to_logical.tolist()
        assert replicas.logical_to_physical.shape == (num_logical, redundant + 1)
        assert int(replicas.counts.sum()) == P
        for e in range(num_logical):
            here = replicas.physical_of(e)
            assert list(here) == [p for p in range(P) if logical[p] == e]
            assert len(here) == int(replicas.counts[e])
            row = replicas.logical_to_physical[e].tolist()
            assert row == [*here, *[-1] * (redundant + 1 - len(here))]


def test_replicas_by_hand() -> None:
    assert REPLICAS.logical_to_physical.tolist() == [[1, -1, -1], [2, -1, -1], [0, 3, 4]]
    assert REPLICAS.counts.tolist() == [1, 1, 3]
    ids = torch.tensor([[2, 0], [2, 1], [1, 2], [2, 0]], dtype=torch.int32)
    assert chosen(ids).tolist() == [[0, 1], [3, 2], [2, 4], [0, 1]]
    assert chosen(ids, start=1).tolist() == [[3, 1], [4, 2], [2, 0], [3, 1]]
    assert chosen(ids).dtype == torch.int32


def test_ids_that_go_nowhere_stay_nowhere() -> None:
    ids = torch.tensor([[-1, 3], [2**40, 2]])
    assert chosen(ids).tolist() == [[-1, -1], [-1, 3]]
    assert chosen(ids[:0]).shape == (0, 2)


@pytest.mark.parametrize("start", [0, 5])
def test_replicas_take_turns_and_compute_what_was_asked_for(start: int) -> None:
    replicas = ExpertReplicas.of(torch.tensor([0, 1, 2, 3, 0, 0, 1]), 4)
    ids = torch.arange(4).repeat(101, 1)
    physical = chosen(ids, start, replicas)
    assert torch.equal(replicas.physical_to_logical[physical], ids)
    for e in range(4):
        taken = Counter(physical[:, e].tolist())
        assert set(taken) == set(replicas.physical_of(e))
        assert max(taken.values()) - min(taken.values()) <= 1


def test_first_tokens_of_ranks_do_not_meet() -> None:
    one = torch.tensor([[2]])
    assert {int(chosen(one, start=rank)) for rank in range(3)} == {0, 3, 4}


def test_an_update_keeps_memory_and_is_seen_by_a_traced_graph() -> None:
    replicas = ExpertReplicas.initial(3, 2)
    fields = (replicas.physical_to_logical, replicas.logical_to_physical, replicas.counts)
    ids = torch.tensor([[2, 0], [1, 2], [2, 0]])
    graph = make_fx(lambda ids: chosen(ids, 0, replicas))(ids)
    addresses = [t.data_ptr() for t in fields]
    replicas.update_(REPLICAS)
    assert [t.data_ptr() for t in fields] == addresses
    assert torch.equal(graph(ids), chosen(ids))
    assert torch.equal(replicas.logical_to_physical, REPLICAS.logical_to_physical)


def test_replicas_of_other_sizes_are_refused_and_change_nothing() -> None:
    replicas = ExpertReplicas.initial(3, 1)
    with pytest.raises(ValueError, match="of 3 logical and 5 physical experts, these of 3 and 4"):
        replicas.update_(REPLICAS)
    assert replicas.physical_to_logical.tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("row", [[0, 1, 1], [0, 1, 2, 3], [0, -1, 1, 2]])
def test_maps_that_miss_an_expert_or_invent_one_are_refused(row: list[int]) -> None:
    with pytest.raises(ValueError, match="must name each of the experts 0 to 2, and no other"):
        ExpertReplicas.of(torch.tensor(row), 3)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="redundant=-1 must be at least 0"):
        ExpertReplicas.initial(3, -1)
    with pytest.raises(ValueError, match="logical=3 must be from 0 to 2"):
        REPLICAS.physical_of(3)


@pytest.mark.slow
def test_one_compiled_graph_serves_any_number_of_tokens() -> None:
    torch.compiler.reset()
    graphs = []

    def count(gm: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(gm)
        return gm

    for backend in (count, "inductor"):
        compiled = torch.compile(chosen, fullgraph=True, dynamic=True, backend=backend)
        for T in (5, 64):
            ids = torch.arange(T * 2).view(T, 2) % 3
            assert torch.equal(compiled(ids), chosen(ids))
    assert len(graphs) == 1

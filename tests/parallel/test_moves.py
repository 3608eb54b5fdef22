"""`Moves`: rows change places in place, in lockstep, whatever cycles there are."""

import itertools

import pytest
import torch
from torch import Tensor

from moe_ops.parallel.expert_map import shares
from moe_ops.parallel.moves import HELD, Moves, apply_moves, moves_between


def rows(n: int) -> dict[str, Tensor]:
    """Tensors of an expert layer, row by row recognisable: values, scales, zero points, bias."""
    ids = torch.arange(n)
    return {
        "w13": (ids[:, None, None] * 10 + torch.arange(6).view(2, 3)).bfloat16(),
        "w13_scale": (ids[:, None] + torch.zeros(4)).to(torch.float8_e8m0fnu),
        "w13_zero": (ids[:, None] + torch.arange(3)).to(torch.uint8),
        "w2": torch.stack((ids, -ids), 1).int().T.contiguous().T,  # experts are not outermost
        "bias": torch.nn.Parameter(ids.float()[:, None].clone()),
        "nothing": torch.empty(n, 0),
    }


def bits(t: Tensor) -> Tensor:
    return t.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8)


# What lies in each row afterwards, as rows before.
NAMED = {
    "nothing": [0, 1, 2, 3],
    "a_copy": [0, 0, 2, 3],
    "a_chain": [1, 2, 3, 3],
    "a_swap": [1, 0, 2, 3],
    "a_cycle": [1, 2, 3, 0],
    "two_cycles": [1, 0, 3, 2],
    "a_cycle_with_a_branch": [1, 2, 0, 1],
    "one_for_all": [2, 2, 2, 2],
}


@pytest.mark.parametrize("take", NAMED.values(), ids=NAMED)
def test_rows_of_all_tensors_move_in_lockstep_and_in_place(take: list[int]) -> None:
    tensors, before = rows(4), rows(4)
    addresses = {name: t.data_ptr() for name, t in tensors.items()}
    versions = {name: t._version for name, t in tensors.items()}
    moves = Moves(4, tuple((source, to) for to, source in enumerate(take)))
    apply_moves(tensors, moves)
    for name, t in tensors.items():
        assert torch.equal(bits(t), bits(before[name][take])), name
        assert t.data_ptr() == addresses[name]
        assert take == [0, 1, 2, 3] or t._version > versions[name], "autograd must notice"


def test_every_way_to_move_four_rows() -> None:
    for take in itertools.product(range(4), repeat=4):
        t = torch.arange(4)
        apply_moves({"t": t}, Moves(4, tuple((source, to) for to, source in enumerate(take))))
        assert t.tolist() == list(take)


def test_a_row_is_set_aside_for_a_cycle_alone() -> None:
    chain, cycle = Moves(3, ((0, 1), (1, 2))), Moves(3, ((0, 1), (1, 2), (2, 0)))
    assert list(chain.steps()) == [(1, 2), (0, 1)]
    held = [step for step in cycle.steps() if HELD in step]
    assert len(held) == 2


def test_views_of_the_same_rows_move_once() -> None:
    w = torch.arange(12.0).view(3, 4).clone()
    swap = Moves(3, ((0, 1), (1, 0)))
    apply_moves({"w": w, "as_bytes": w.view(torch.uint8)}, swap)
    assert w[:, 0].tolist() == [4, 0, 8]


def test_fused_shared_experts_stay() -> None:
    t, swap = torch.arange(5), Moves(3, ((0, 2), (2, 0)))
    apply_moves({"t": t}, swap, shared=2)
    assert t.tolist() == [2, 1, 0, 3, 4]
    with pytest.raises(ValueError, match="t must have 3 physical experts"):
        apply_moves({"t": t}, swap)


W = torch.zeros(3, 4)
with torch.inference_mode():
    INFERENCE = torch.zeros(3, 4)
BAD = {
    "rows": ({"w": W, "s": torch.zeros(4, 3)}, r"s must have 3 physical experts on axis 0, got"),
    "scalar": ({"w": W, "s": torch.tensor(1.0)}, "leave out what experts share"),
    "expanded": ({"w": W, "s": torch.zeros(1).expand(3)}, "s is expanded"),
    "overlap": ({"w": W, "s": W[:, 1:3]}, "w and s share a part of their memory"),
    "inference": ({"w": W, "s": INFERENCE}, "s was made under torch.inference_mode"),
}


@pytest.mark.parametrize(("tensors", "message"), BAD.values(), ids=BAD)
def test_bad_tensors_are_refused_and_nothing_moves(
    tensors: dict[str, Tensor], message: str
) -> None:
    W.copy_(torch.arange(12.0).view(3, 4))
    with pytest.raises(ValueError, match=message):
        apply_moves(tensors, Moves(3, ((0, 1), (1, 0))))
    assert torch.equal(W, torch.arange(12.0).view(3, 4))


def test_bad_moves_are_refused() -> None:
    with pytest.raises(ValueError, match="row 3 must be from 0 to 2"):
        Moves(3, ((0, 3),))
    with pytest.raises(
        ValueError, match="row 1 is the destination of two moves; leave all but one"
    ):
        Moves(3, ((0, 1), (2, 1)))
    with pytest.raises(ValueError, match=r"expert 7 .* row 1; give `new` only"):
        moves_between([0, 1], [0, 7], (2,), 1)
    with pytest.raises(ValueError, match="2 old rows, 3 new ones, 2 on all ranks"):
        moves_between([0, 1], [0, 1, 1], (2,), 1)


def test_an_expert_comes_from_as_near_as_it_can() -> None:
    # Two nodes of two ranks with two rows each; expert 0 is on every rank but the third.
    old, new = [0, 1, 0, 2, 3, 4, 5, 0], [0, 0, 0, 2, 3, 0, 0, 0]
    moves = moves_between(old, new, (2, 2, 2, 2), 2)
    assert moves.pairs == ((0, 1), (7, 5), (7, 6))


@pytest.mark.parametrize(("P", "ranks"), [(8, 2), (11, 4), (130, 64)])
def test_ranks_that_send_move_and_receive_do_what_one_does(P: int, ranks: int) -> None:
    generator = torch.Generator().manual_seed(P)
    sizes = shares(P, ranks)
    old = list(range(P))
    new = torch.randint(0, P, (P,), generator=generator).tolist()
    moves = moves_between(old, new, sizes, ranks)
    whole = torch.arange(P)
    parts = [t.clone() for t in whole.split(list(sizes))]
    starts = [sum(sizes[:rank]) for rank in range(ranks)]
    mine = [moves.of_rank(s, s + n) for s, n in zip(starts, sizes, strict=True)]
    wire = {to: parts[rank][row].clone() for rank, m in enumerate(mine) for row, to in m.sends}
    assert len(wire) == sum(len(m.receives) for m in mine) > 0
    for rank, (m, part) in enumerate(zip(mine, parts, strict=True)):
        apply_moves({"w": part}, m.local)
        for source, row in m.receives:
            assert not starts[rank] <= source < starts[rank] + sizes[rank]
            part[row] = wire[starts[rank] + row]
    apply_moves({"w": whole}, moves)
    assert whole.tolist() == new
    assert torch.equal(torch.cat(parts), whole)

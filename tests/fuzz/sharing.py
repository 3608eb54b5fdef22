"""How experts are shared: replicas, moves, and loads that are to be even."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops.parallel.load_balance import Rebalanced, rebalance
from moe_ops.parallel.moves import Moves, apply_moves, moves_between
from moe_ops.parallel.replicas import ExpertReplicas
from tests.fuzz.attempts import (
    INF,
    NAN,
    NO_COUNT,
    NO_LAYER_SIZE,
    NO_OBJECT,
    NO_SIZE,
    Attempt,
    Slot,
    Target,
    attempt_of,
    kept,
    tensors,
)

E, D, I = 4, 64, 32  # noqa: E741  the legend's letter


NO_LIST = (None, 3, True, NAN, object(), torch.float32)
PHYSICAL = tensors(
    (torch.arange(4), torch.tensor([3, 2, 1, 0, 0], dtype=torch.int32)),
    torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([0, 1, 2, 4]), torch.tensor([0, 1, 2, -1]),
    torch.zeros(0, dtype=torch.int64),
)  # fmt: skip


def right_replicas(got: ExpertReplicas, given: dict[str, Any]) -> None:
    """Each physical expert is a replica of the logical one that it computes, and counted."""
    for e in range(given["num_logical"]):
        replicas = got.physical_of(e)
        assert len(replicas) == got.counts[e] >= 1
        assert all(int(got.physical_to_logical[p]) == e for p in replicas)


def moved(**given: Any) -> Tensor:
    t = torch.arange(4.0)
    given = {"tensors": {"w": t}, "moves": Moves(4, ((0, 1), (1, 0))), **given}
    apply_moves(**given)
    return t


def right_move(got: Tensor, given: dict[str, Any]) -> None:
    assert got.tolist() == [1.0, 0.0, 2.0, 3.0]


def right_moves(got: Moves, given: dict[str, Any]) -> None:
    """After them each row holds what it is to hold."""
    rows = torch.tensor(given["old"])
    apply_moves({"rows": rows}, got)
    assert rows.tolist() == list(given["new"])


ROWS = Slot(
    legal=((0, 1, 2, 3), [3, 2, 1, 0], (0, 0, 1, 2)),
    illegal=(*NO_LIST, "0123", (0, 1), (0.0, 1, 2, 3), (None,) * 4, ("a",) * 4, (9, 8, 7, 6, 5)),
    words=("rows", "row"),
)
PAIRS = Slot(
    legal=((), ((0, 1),), ((0, 1), (1, 0)), ((2, 2),)),
    illegal=(
        *NO_LIST, "01", (0, 1), ((0,),), ((0, 1, 2),), ((0, 4),), ((-1, 0),), ((0, 1.0),),
        ((0, 1), (2, 1)), ((None, 1),), (("0", 1),), ((True, 1),),
    ),
    words=("row",),
)  # fmt: skip


def right_balance(got: Rebalanced, given: dict[str, Any]) -> None:
    """Every expert is somewhere, and no layer's highest load is higher than before, but where
    groups have to stay on nodes.
    """
    assert all({*row} == set(range(4)) for row in got.physical_to_logical.tolist())
    by_node = given.get("nodes", 1) > 1 and given.get("num_groups", 1) > 1
    assert by_node or bool((got.after <= got.before + 1e-9).all())


REBALANCE = {
    "loads_LE": tensors(
        (torch.ones(2, 4), torch.tensor([[9, 1, 1, 1], [0, 0, 0, 5]])),
        torch.ones(2, 4, dtype=torch.bfloat16), torch.full((2, 4), NAN), torch.full((2, 4), INF),
        -torch.ones(2, 4), torch.ones(3, 4), torch.ones(2, 0), torch.ones(0, 4),
    ),
    "current_LP": tensors(
        (torch.arange(4).repeat(2, 1), torch.tensor([[0, 1, 2, 3, 0, 1]] * 2)),
        torch.ones(2, 4), torch.zeros(2, 4, dtype=torch.int64), torch.full((2, 4), 9),
        torch.zeros(2, 0, dtype=torch.int64),
    ),
    "ranks": Slot(legal=(1, 2, 4), illegal=(*NO_SIZE, 9)),
    "nodes": Slot(legal=(1, 2), illegal=(*NO_SIZE, 3, 2**31)),
    "num_groups": Slot(legal=(1, 2, 4), illegal=NO_SIZE),
}  # fmt: skip

TARGETS: dict[str, Target] = {
    "ExpertReplicas.initial": Target(
        run=ExpertReplicas.initial,
        slots={
            "num_logical": Slot(legal=(1, 4, 7), illegal=NO_LAYER_SIZE),
            "redundant": Slot(legal=(0, 1, 9), illegal=(*NO_COUNT, 2**31)),
        },
        base={"num_logical": 4},
        right=right_replicas,
    ),
    "ExpertReplicas.of": Target(
        run=ExpertReplicas.of,
        slots={
            "physical_to_logical": PHYSICAL,
            "num_logical": Slot(legal=(4,), illegal=(*NO_LAYER_SIZE, 5), words=("experts",)),
        },
        base={"physical_to_logical": PHYSICAL.legal[0], "num_logical": 4},
        right=right_replicas,
    ),
    "Moves": Target(
        run=Moves,
        slots={"num_rows": Slot(legal=(4,), illegal=NO_COUNT), "pairs": PAIRS},
        base={"num_rows": 4, "pairs": ()},
        right=kept,
    ),
    "moves_between": Target(
        run=moves_between,
        slots={
            "old": ROWS,
            "new": ROWS,
            "sizes": Slot(
                legal=((2, 2), [4], (1, 3)),
                illegal=(*NO_LIST, "4", (2, 3), (), (2.0, 2), (None,), (-1, 5)),
                words=("ranks",),
            ),
            "ranks_per_node": Slot(legal=(1, 2), illegal=NO_SIZE),
        },
        base={"old": (0, 1, 2, 3), "new": (1, 0, 2, 3), "sizes": (2, 2), "ranks_per_node": 1},
        right=right_moves,
    ),
    "apply_moves": Target(
        run=moved,
        slots={
            "tensors": Slot(
                legal=(),
                illegal=(*NO_OBJECT[:4], {"w": 3}, {"w": torch.ones(3)}, {"w": torch.ones(())}),
                words=("w",),
            ),
            "moves": Slot(
                legal=(Moves(4, ((1, 0), (0, 1))),), illegal=(*NO_OBJECT, Moves, ((0, 1),))
            ),
            "shared": Slot(legal=(0,), illegal=(*NO_COUNT, 1), words=("w",)),
        },
        right=right_move,
    ),
    "rebalance": Target(
        run=rebalance,
        slots=REBALANCE,
        base={
            "loads_LE": REBALANCE["loads_LE"].legal[1],
            "current_LP": REBALANCE["current_LP"].legal[1],
            "ranks": 2,
        },
        right=right_balance,
    ),
}


def attempt(name: str, number: int) -> Attempt:
    return attempt_of(TARGETS, __name__, name, number)

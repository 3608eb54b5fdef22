"""How experts are shared and quantised: replicas, moves, loads, scales and formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_ops.parallel.load_balance import Rebalanced, rebalance
from moe_ops.parallel.moves import Moves, apply_moves, moves_between
from moe_ops.parallel.replicas import ExpertReplicas
from moe_ops.quant.builders import Sizes, int4_w4a16, int8_w8a8, nvfp4_w4a4, ocp_mx
from moe_ops.quant.checkpoints import from_awq, from_gptq
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.packing import Quantized
from moe_ops.quant.resolve import Multiplier, Reciprocal, alphas
from tests.fuzz.attempts import (
    FLAG,
    INF,
    NAN,
    NO_COUNT,
    NO_INT,
    NO_LAYER_SIZE,
    NO_NAME,
    NO_OBJECT,
    NO_SIZE,
    NO_TENSOR,
    Attempt,
    Slot,
    Target,
    attempt_of,
    kept,
    optional,
    tensors,
    worded,
)
from tests.fuzz.constructors import NO_FORMAT, one_of

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

SIZES = Sizes(E=E, D=D, I=I)


def scales(rows13: int, cols13: int, rows2: int, cols2: int, dtype: torch.dtype) -> dict[str, Slot]:
    """Scales of these groups, of both weights; and the sizes, which may not be others."""

    def scale(rows: int, cols: int) -> Slot:
        fill = 100 if dtype == torch.uint8 else 0.5
        t = torch.full((E, rows, cols), fill).to(dtype)
        bad = torch.full((E, rows, cols), 255 if dtype == torch.uint8 else NAN).to(dtype)
        return tensors((t,), t[:-1], t.double(), t[..., None], bad)

    other = (Sizes(E=2, D=D, I=I), Sizes(E=E, D=128, I=I))
    return {
        "sizes": Slot(
            legal=(SIZES,), illegal=(*NO_OBJECT, Sizes, *other), words=("scale", "global_scale")
        ),
        "w13_scale": worded(scale(rows13, cols13), "w13"),
        "w2_scale": worded(scale(rows2, cols2), "w2"),
    }


STATIC = worded(
    optional(tensors((torch.ones(1),), torch.zeros(1), -torch.ones(1), torch.ones(2))), "x", "h"
)
GLOBAL_E = tensors((torch.ones(E),), torch.zeros(E), torch.full((E,), NAN), torch.ones(E + 1))
GLOBAL = Slot(
    legal=(torch.ones(1), torch.full((), 2.0)),
    illegal=(None, *NO_TENSOR, torch.zeros(1), torch.ones(3), torch.ones(1).double()),
)
ZERO = torch.full((E, D, 2), 7, dtype=torch.uint8)
NO_GROUP = (*NO_NAME, "rows", "1x0", "0x1", "1x-1", "tensor row")
BUILDERS: dict[str, tuple[Callable[..., QuantConfig], dict[str, Slot]]] = {
    "int8_w8a8": (
        int8_w8a8,
        {
            **scales(D, 1, D, 1, torch.float32),
            "group": Slot(legal=("row",), illegal=NO_GROUP, words=("format",)),
            "input_group": Slot(
                legal=("", "row"), illegal=tuple(g for g in NO_GROUP if g != ""), words=("format",)
            ),
            "x_scale": worded(optional(Slot(legal=(), illegal=STATIC.illegal)), "x"),
        },
    ),
    "int4_w4a16": (
        int4_w4a16,
        {
            **scales(D, 2, D, 1, torch.float32),
            "group": Slot(legal=("1x32",), illegal=NO_GROUP),
            "w13_zero": worded(optional(tensors((ZERO,), ZERO[:-1], ZERO + 9)), "w13", "w2"),
        },
    ),
    "ocp_mx": (
        ocp_mx,
        {
            **scales(D, 2, D, 1, torch.uint8),
            "weights": one_of("mxfp4", "mxfp6_e3m2", "mxfp6_e2m3"),
            "inputs": Slot(
                legal=("", "mxfp8", "mxfp4"),
                illegal=tuple(f for f in NO_FORMAT if f),
                words=("format",),
            ),
            "x_scale": worded(optional(Slot(legal=(), illegal=STATIC.illegal)), "x"),
        },
    ),
    "nvfp4_w4a4": (
        nvfp4_w4a4,
        {
            **scales(D, 4, D, 2, torch.float8_e4m3fn),
            "w13_global_scale_E": worded(GLOBAL_E, "w13"),
            "w2_global_scale_E": worded(GLOBAL_E, "w2"),
            "x_global_scale": worded(GLOBAL, "x"),
            "h_global_scale": worded(GLOBAL, "h"),
        },
    ),
}


def right_config(got: QuantConfig, given: dict[str, Any]) -> None:
    """It is quantised, and its scales are those that were given."""
    assert got.quantized and (got.E, got.D, got.I) == (E, D, I)
    assert got.w13.scale is given["w13_scale"] and got.w2.scale is given["w2_scale"]


def built(name: str) -> Target:
    run, slots = BUILDERS[name]
    optionals = ("group", "input_group", "x_scale", "w13_zero", "inputs")
    base = {key: slot.legal[0] for key, slot in slots.items() if key not in optionals}
    return Target(run=run, slots=slots, base=base, right=right_config)


WORDS_DF = torch.randint(-(2**31), 2**31 - 1, (4, 16), dtype=torch.int32)
GPTQ = {
    "qweight": tensors((WORDS_DF,), WORDS_DF.long(), WORDS_DF[0]),
    "scales": tensors((torch.ones(2, 16),), torch.ones(2, 15), torch.ones(16)),
    "qzeros": optional(tensors((WORDS_DF[:2, :2].contiguous(),), WORDS_DF, WORDS_DF[:2].float())),
    "bits": Slot(legal=(4,), illegal=(*NO_INT, 0, 2, 3, -4)),
    "plus_one": FLAG,
}
AWQ = {
    "qweight": tensors((WORDS_DF[:, :2].contiguous(),), WORDS_DF[:, :2].long(), WORDS_DF[0]),
    "scales": tensors((torch.ones(2, 16),), torch.ones(2, 15), torch.ones(16)),
    "qzeros": tensors((WORDS_DF[:2, :2].contiguous(),), WORDS_DF, WORDS_DF[:2, :2].float()),
}


def right_words_of(columns: int) -> Callable[[Quantized, dict[str, Any]], None]:
    """Sixteen rows of four-bit values, and the scales beside each."""

    def right(got: Quantized, given: dict[str, Any]) -> None:
        assert got.values.shape == (16, columns // 2)
        assert torch.equal(got.scale, given["scales"].T)

    return right


def right_alphas(got: Tensor, given: dict[str, Any]) -> None:
    """Scales that multiply are 1, those that divide 2."""
    half = sum(isinstance(scale, Reciprocal) for scale in (given["weight"], given["input"]))
    assert got.tolist() == [0.5**half] * E


SCALE = Slot(
    legal=(Multiplier(torch.ones(E)), Reciprocal(torch.tensor(2.0))),
    illegal=(
        *NO_OBJECT, torch.ones(E), Multiplier(torch.ones(3)), Multiplier(torch.full((E,), NAN)),
        Reciprocal(torch.zeros(E)), Multiplier(torch.ones(E, dtype=torch.int32)),
    ),
    words=("scale",),
)  # fmt: skip


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
    **{name: built(name) for name in BUILDERS},
    "from_gptq": Target(
        run=from_gptq,
        slots=GPTQ,
        base={"qweight": WORDS_DF, "scales": torch.ones(2, 16)},
        right=right_words_of(32),
    ),
    "from_awq": Target(
        run=from_awq,
        slots=AWQ,
        base={name: slot.legal[0] for name, slot in AWQ.items()},
        right=right_words_of(4),
    ),
    "alphas": Target(
        run=alphas,
        slots={
            "weight": SCALE,
            "input": optional(SCALE),
            "experts": Slot(legal=(E,), illegal=NO_SIZE, words=("scale",)),
        },
        base={"weight": SCALE.legal[0], "input": None, "experts": E},
        right=right_alphas,
    ),
}


def attempt(name: str, number: int) -> Attempt:
    return attempt_of(TARGETS, __name__, name, number)

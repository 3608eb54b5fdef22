"""Arguments of the experts with adapters, and of what their gradients are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops.conformance.gradient_samples import backwards
from moe_ops.conformance.tensors import strided
from moe_ops.ops.experts_saving import ROUNDED
from moe_ops.registry.spec import OPS

Calls = dict[str, dict[str, Any]]
# The ranks of both pairs, 0 for one that is missing, and how many adapters tokens choose among,
# 0 where all have the first: calls take these in turn.
FORMS = ((4, 4, 0), (3, 0, 0), (0, 5, 0), (2, 6, 3))
PAIRS = (("a13_GrD", "b13_GFr"), ("a2_GrI", "b2_GDr"))


def adapters(call: dict[str, Any], ranks: tuple[int, int], N: int) -> dict[str, Any]:
    """Random adapters for a call of `experts`, which add about as much as there is. Of several
    tokens one has none, and one an index that is none of theirs."""
    x_TD, w13, count = call["x_TD"], call["w13_EFD"], max(N, 1)
    layer = OPS["experts"].call(**call)
    (D, I), E = layer.widths, w13.shape[0]  # noqa: E741
    F = 2 * I if layer.gated else I

    def normal(rows: int, width: int) -> Tensor:
        return (torch.randn(count * E, rows, width) * width**-0.5).to(x_TD.dtype)

    found: dict[str, Any] = {"scale_N": torch.rand(count) + 0.5}
    for names, rank, sizes in zip(PAIRS, ranks, ((D, F), (I, D)), strict=True):
        if rank:
            given = normal(rank, sizes[0]), normal(sizes[1], rank)
            found |= dict(zip(names, given, strict=True))
    if N:
        adapter_T = torch.randint(N, (x_TD.shape[0],), dtype=torch.int32)
        adapter_T[1:2], adapter_T[2:3] = -1, N
        found["adapter_T"] = adapter_T
    return found


def experts_adapted(of_experts: Calls) -> Calls:
    """Calls of `experts` with adapters of each form in turn; and of all forms the first."""
    of_floats = {n: c for n, c in of_experts.items() if "x_scale_TG" not in c}
    calls: Calls = {}
    for i, (name, call) in enumerate(of_floats.items()):
        *ranks, N = FORMS[i % len(FORMS)]
        calls[name] = {**call, **adapters(call, (ranks[0], ranks[1]), N)}
    call = of_floats["bias"]
    for *ranks, N in FORMS:
        name = f"ranks_{ranks[0]}_{ranks[1]}_of_{N}"
        calls[name] = {**call, **adapters(call, (ranks[0], ranks[1]), N)}
    several = calls["ranks_2_6_of_3"]
    none = {"adapter_T": torch.full_like(several["adapter_T"], -1)}
    views = {n: strided(several[n]) for pair in PAIRS for n in pair}
    return {
        **calls,
        "no_adapter": {**several, **none},
        "int64_adapters": {**several, "adapter_T": several["adapter_T"].long()},
        "first_of_three": {**several, "adapter_T": None},
        "strided_adapters": {**several, **views, "adapter_T": strided(several["adapter_T"])},
    }


def experts_adapted_saving(of_experts: Calls) -> Calls:
    """The calls of `experts_adapted` whose inputs are not rounded."""
    return {
        name: {k: v for k, v in call.items() if k not in ROUNDED}
        for name, call in experts_adapted(of_experts).items()
        if not call.get("x_format")
    }


def experts_adapted_backward(of_experts: Calls, dtype: torch.dtype) -> Calls:
    """The backward of each call of `experts_adapted_saving`."""
    return backwards("experts_adapted_saving", experts_adapted_saving(of_experts), dtype)


def used_rows(op_name: str, args: tuple[Any, ...], got: Any) -> list[Tensor] | None:
    """What these ops return, without rows that are left unspecified; None of others."""
    of_rows = {"experts_adapted_saving": (1, 2, 3), "experts_adapted_backward": (2, 3, 4, 5)}
    if op_name not in of_rows:
        return None
    used = (got[4] if op_name == "experts_adapted_saving" else args[2]) >= 0
    R = used.shape[0]
    return [t[used] if i in of_rows[op_name] and t.shape[0] == R else t for i, t in enumerate(got)]

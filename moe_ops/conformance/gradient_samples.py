"""Arguments of the ops of which gradients are made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops.conformance.tensors import padded, strided, with_holes
from moe_ops.ops.experts_saving import ROUNDED
from moe_ops.registry.spec import OPS
from moe_ops.testing import ACTIVATIONS, Case, make_layer

Calls = dict[str, dict[str, Any]]


def activate_backward(case: Case, dtype: torch.dtype) -> Calls:
    R = case.T * case.K
    y, dh = ((torch.randn(R, n * case.I) * 2).to(dtype) for n in (2, 1))
    rows = torch.randperm(R).to(torch.int32)
    used = R - R // 3
    holes_y, holes_dh, holed_rows = y.clone(), dh.clone(), rows.clone()
    holes_y[used:] = holes_dh[used:] = float("nan")
    holed_rows[used:] = -1
    weights = make_layer(case, dtype).weights_TK
    call = {"dh_RI": dh, "y_RF": y, "weights_TK": weights, "rows_R": rows}
    ungated = {"dh_RI": (torch.randn(R, 2 * case.I) * 2).to(dtype)}
    found = {
        name: {**call, **(ungated if not kwargs.get("gated", True) else {}), **kwargs}
        for name, kwargs in ACTIVATIONS.items()
    }
    return {
        **found,
        "same_dtype": {**call, "weights_TK": weights.to(dtype)},
        "holes": {**call, "dh_RI": holes_dh, "y_RF": holes_y, "rows_R": holed_rows},
        "without_weights": {**call, "for_weights": False},
        "strided": {**call, "y_RF": strided(y), "dh_RI": strided(dh)},
    }


def expert_wgrad(case: Case, dtype: torch.dtype) -> Calls:
    layer, E, R = make_layer(case, dtype), case.E, case.T * case.K
    g_RF = torch.randn(R, 2 * case.I).to(dtype)
    x_RD, rows_R, ends_E = OPS["dispatch"].reference(layer.x_TD, layer.ids_TK, E)
    holed_x, holed, holed_ends = OPS["dispatch"].reference(
        layer.x_TD, with_holes(layer.ids_TK, E), E
    )
    used = int(holed_ends[-1])
    tail = g_RF.clone()
    tail[used:] = holed_x[used:] = float("nan")
    token_R, holed_R = rows_R // case.K, torch.where(holed >= 0, holed // case.K, -(2**31))
    call = {"a_RM": g_RF, "b_RN": x_RD, "ends_E": ends_E}
    everything = torch.full_like(ends_E, R)
    return {
        "plain": call,
        "strided": {**call, "a_RM": strided(g_RF), "b_RN": padded(x_RD)},
        "tail": {"a_RM": tail, "b_RN": holed_x, "ends_E": holed_ends},
        "rows_of_b": {**call, "b_RN": layer.x_TD, "b_rows_R": token_R},
        "rows_of_a": {
            "a_RM": layer.x_TD, "b_RN": g_RF, "ends_E": ends_E, "a_rows_R": token_R,
        },
        "rows_of_both": {
            "a_RM": layer.x_TD, "b_RN": layer.x_TD, "ends_E": ends_E, "a_rows_R": token_R,
            "b_rows_R": token_R,
        },
        "rows_and_tail": {
            "a_RM": tail, "b_RN": layer.x_TD, "ends_E": holed_ends, "b_rows_R": holed_R,
        },
        "to_float32": {**call, "out_dtype": "float32"},
        "one_column": {**call, "b_RN": x_RD[:, :1]},
        "no_rows_used": {**call, "ends_E": torch.zeros_like(ends_E)},
        "first_expert": {**call, "ends_E": everything},
        "last_expert": {**call, "ends_E": torch.where(torch.arange(E) < E - 1, 0, everything)},
    }  # fmt: skip


def expert_wgrad_onto(case: Case, dtype: torch.dtype) -> Calls:
    """The calls of `expert_wgrad`, and sums so far that are as large as what is added."""
    found: Calls = {}
    for name, call in expert_wgrad(case, dtype).items():
        sizes = (call["ends_E"].shape[0], call["a_RM"].shape[1], call["b_RN"].shape[1])
        given = {k: v for k, v in call.items() if k != "out_dtype"}
        found[name] = {**given, "main_grad_EMN": torch.randn(sizes) * case.T**0.5}
    first = found["plain"]
    lies = torch.randn(3, *first["main_grad_EMN"].shape)[1]  # as in a buffer of several weights
    return {**found, "in_a_buffer": {**first, "main_grad_EMN": lies}}


def experts_saving(of_experts: Calls) -> Calls:
    """The calls of `experts` whose inputs are not rounded."""
    return {
        name: {k: v for k, v in call.items() if k not in ROUNDED}
        for name, call in of_experts.items()
        if not call.get("x_format")
    }


def experts_accumulating(of_experts: Calls) -> Calls:
    """The calls of `experts` on plain weights, with sums so far."""
    names = OPS["experts_accumulating"].arguments.signature.parameters
    found = {
        name: {**call, **_sums(call)}
        for name, call in of_experts.items()
        if call.keys() <= {*names}
    }
    first = next(iter(found.values()))
    return {**found, "of_one_weight": {**first, "main_grad13_EFD": None}}


def _sums(call: dict[str, Any]) -> dict[str, Tensor]:
    weights = {"main_grad13_EFD": call["w13_EFD"], "main_grad2_EDI": call["w2_EDI"]}
    return {name: torch.zeros(w.shape) for name, w in weights.items()}


def experts_backward(of_experts: Calls, dtype: torch.dtype) -> Calls:
    """The backward of each call of `experts_saving`."""
    return backwards("experts_saving", experts_saving(of_experts), dtype)


def backwards(saving: str, calls: Calls, dtype: torch.dtype) -> Calls:
    """What the backward is given of calls of an op that keeps what that reads; what it keeps ends
    with the order of rows."""
    found: Calls = {}
    for name, call in calls.items():
        _, y_RF, *_, rows_R, ends_E = OPS[saving].reference(**call)
        y_RF[int(ends_E[-1]) :] = float("nan")
        saved = {"y_RF": y_RF, "rows_R": rows_R, "ends_E": ends_E}
        found[name] = {"grad_TD": torch.randn(call["x_TD"].shape).to(dtype), **saved, **call}
    first = next(iter(found.values()))
    return {
        **found,
        "frozen_weights": {**first, "for_weights": False},
        "frozen_tokens": {**first, "for_tokens": False},
        "gradient_of_rows": {**first, "grad_y_RF": torch.randn_like(first["y_RF"])},
    }


def used_rows(op_name: str, args: tuple[Any, ...], got: Any) -> list[Tensor] | None:
    """What these ops return, without rows that are left unspecified; None of others."""
    if op_name == "activate_backward":
        used = args[3] >= 0
    elif op_name == "experts_saving":
        used = got[2] >= 0
    elif op_name == "experts_backward":
        used = args[2] >= 0
    else:
        return None
    R = used.shape[0]
    of_rows = {"activate_backward": (0, 1), "experts_saving": (1,), "experts_backward": (2, 3)}
    return [t[used] if i in of_rows[op_name] and t.shape[0] == R else t for i, t in enumerate(got)]

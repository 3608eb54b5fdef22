"""The types of what a `MoELayer` is made of, checked before anything is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops.checks.options import MOST_SIZE, check_fields, check_flag, check_int, check_type
from moe_ops.checks.shapes import check_device, check_size
from moe_ops.checks.signature import described
from moe_ops.layer.options import Routing
from moe_ops.ops.activate import Activation
from moe_ops.parallel.config import ParallelConfig
from moe_ops.ranks.groups import resolve

COUNTS = {
    "num_experts": 1, "top_k": 1, "hidden_size": 1, "intermediate_size": 1,
    "redundant_experts": 0, "hidden_multiple": 1,
}  # fmt: skip
CLASSES: dict[str, tuple[type, str]] = {
    "routing": (Routing, "a moe_ops.Routing, such as Routing(renormalize=True)"),
    "activation": (Activation, "an Activation, such as Activation(kind='silu')"),
    "parallel": (ParallelConfig, "a ParallelConfig, such as ParallelConfig.of(tp=4, tp_rank=1)"),
    "placement": (str, "a str"),
    "shared_reduction": (str, "a str"),
}


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError, naming the argument, unless those of a `MoELayer` are of the
    types that it takes, and its process group and its device exist.
    """
    for name, least in COUNTS.items():
        check_int(name, given[name], least=least, most=MOST_SIZE)
    if given["intermediate_multiple"] is not None:
        check_int("intermediate_multiple", given["intermediate_multiple"], most=MOST_SIZE)
    if given["padding"] is not None:
        check_type(
            "padding", given["padding"], str, "a moe_ops.layer.Padding, a backend's name or None"
        )
    for name in ("bias", "balanced", "separate", "batch_invariant"):
        check_flag(name, given[name])
    if given["beside"] is not None:
        check_flag("beside, where it is not None,", given["beside"])
    for name, (kind, wanted) in CLASSES.items():
        check_type(name, given[name], kind, wanted)
    for name in ("routing", "activation", "parallel"):
        check_fields(given[name], f"{name}.")
    if not isinstance(given["shared_experts"], nn.Module):
        check_int("shared_experts, where it is no module,", given["shared_experts"])
        check_int("shared_experts", given["shared_experts"], least=0, most=MOST_SIZE)
    if not isinstance(given["internal_gate"], nn.Module):
        check_flag("internal_gate, where it is no module,", given["internal_gate"])
    for name in ("routed_input_transform", "routed_output_transform"):
        if given[name] is not None:
            check_type(name, given[name], nn.Module, "a module or None")
    _check_gate(given)
    device = given["device"]
    if device is not None:
        check_type("device", device, (str, torch.device), "a torch.device, its name or None")
        check_device("device", device)
    _check_reduction(given["reduce_results"])


def check_input(x: Any, logits: Any, gate: nn.Module | None) -> None:
    """Raise TypeError or ValueError, naming the argument, unless a forward can be given these."""
    for name, t in (("x", x), ("logits", logits)):
        if t is None and name == "logits":
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {described(t)}")
        if t.dim() == 0:
            raise ValueError(f"{name} must be [..., width], got a tensor without axes")
    if gate is not None and logits is not None:
        raise ValueError("the layer has a gate of its own; leave out logits")
    if gate is None and logits is None:
        raise ValueError("the layer has no gate; pass logits, or make it with internal_gate")
    if type(gate) is nn.Linear:
        check_size("x", x, x.dim() - 1, gate.in_features, "the width that the gate takes")


def _check_gate(given: Mapping[str, Any]) -> None:
    """Raise ValueError for a linear gate of another number of experts."""
    gate, experts = given["internal_gate"], given["num_experts"]
    if type(gate) is nn.Linear and gate.out_features != experts:
        raise ValueError(
            f"internal_gate has {gate.out_features} outputs, but there are num_experts={experts}; "
            "give it one for each"
        )


def _check_reduction(reduce: Any) -> None:
    if not (reduce is None or isinstance(reduce, (bool, str)) or callable(reduce)):
        raise TypeError(
            "reduce_results must be the name of a process group, a function of a tensor, True for "
            f"the default group, or None, got {reduce!r}"
        )
    if isinstance(reduce, str):
        resolve(reduce, "reduce_results")

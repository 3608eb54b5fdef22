"""transformers' fine-grained FP8 experts: from a module's flags to formats."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts

from moe_ops.hf.experts import NAME, activation_kind, run, unknown_activation
from moe_ops.hf.source import fingerprint
from moe_ops.hf.stored import StoredFormat
from moe_ops.ops.activate import Activation

# The gates that are known: (softcapped,) clamped and shifted, clamped, or plain, by attributes.
GATES = ("d37222d0944d", "317d7c058d2c")


@torch.compiler.assume_constant_result
def _gate() -> str:
    return fingerprint(FP8Experts._apply_gate)


def fp8_experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward of FP8 experts, by the `experts` op where that is exact."""
    fallback = ALL_FP8_EXPERTS_FUNCTIONS["grouped_mm"]
    found = describe_fp8(self)
    return run(self, found, hidden_states, top_k_index, top_k_weights, fallback)


def register() -> None:
    """Add the implementation "moe_ops" to transformers' registry of FP8 experts."""
    type(ALL_FP8_EXPERTS_FUNCTIONS).register(NAME, fp8_experts_forward)


def describe_fp8(module: Any) -> StoredFormat | str:
    """The formats of an FP8 experts module, or why the `experts` op cannot express it.

    Weights are float8_e4m3fn in blocks, or with one scale for gate, up and down each; inputs are
    quantised at run time with a scale for each token and block of columns, as transformers' own
    kernels do. FP4 experts quantise their inputs with scales rounded up, which no format of ours
    does.
    """
    activation = _activation(module)
    if isinstance(activation, str):
        return activation
    if module.activation_scheme != "dynamic":
        return "it has static activation scales for each expert"
    first = "gate_up_proj" if module.has_gate else "up_proj"
    for name in (first, "down_proj"):
        dtype = getattr(module, name).dtype
        if dtype != torch.float8_e4m3fn:
            return f"its {name} is {dtype}"
    if module.block_size is None:
        return StoredFormat(
            activation=activation,
            w_format="float8_e4m3fn:row",
            x_format="float8_e4m3fn:row",
            codes_suffix="",
            scale_suffix="_scale_inv",
            repeat_rows=True,
        )
    down, across = module.block_size
    for name in (first, "down_proj"):
        w, scale = getattr(module, name), getattr(module, f"{name}_scale_inv")
        want = (w.shape[0], -(-w.shape[1] // down), -(-w.shape[2] // across))
        if tuple(scale.shape) != want:
            return f"its {name}_scale_inv is {list(scale.shape)}, not {list(want)}"
    powers = getattr(module, f"{first}_scale_inv").dtype == torch.float8_e8m0fnu
    return StoredFormat(
        activation=activation,
        w_format=f"float8_e4m3fn:{down}x{across}" + (":e8m0" if powers else ""),
        x_format=f"float8_e4m3fn:1x{across}",
        codes_suffix="",
        scale_suffix="_scale_inv",
    )


def _activation(module: Any) -> Activation | str:
    if _gate() not in GATES:
        return f"its gate is an unknown function (fingerprint {_gate()})"
    if getattr(module, "gate_softcap", None) is not None:
        return "its gate is softcapped"
    if module.has_gate and module.swiglu_alpha is not None:
        return Activation(
            kind="silu",
            alpha=float(module.swiglu_alpha),
            limit=float(module.swiglu_limit),
            up_shift=1.0,
        )
    kind = activation_kind(module)
    if kind is None:
        return unknown_activation(module)
    limit = None if module.limit is None or not module.has_gate else float(module.limit)
    return Activation(kind=kind, gated=bool(module.has_gate), limit=limit)

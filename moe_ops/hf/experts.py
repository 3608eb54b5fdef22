"""The "moe_ops" experts implementation of transformers: from a module's flags to one `experts` op.

What a module computes is read off its flags and off the source of its gate. What cannot be
expressed exactly is handed to transformers' own grouped_mm, with one logged reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    _default_apply_gate,
    grouped_mm_experts_forward,
)

from moe_ops.checks.shapes import FLOATS
from moe_ops.hf.adapters.held import CHILD, adapters_of
from moe_ops.hf.report import warn_once
from moe_ops.hf.source import fingerprint
from moe_ops.hf.stored import StoredFormat, stored_format
from moe_ops.main_grad import adds, main_grads
from moe_ops.ops import experts, experts_accumulating, experts_adapted
from moe_ops.ops.activate import Activation
from moe_ops.ops.adapters import ADAPTER
from moe_ops.registry.gradients import needs_grad, without_gradient

NAME = "moe_ops"
NO_GRADIENT = (
    "{} quantises the inputs of its experts, through which no gradients are defined, as rounding "
    "is flat; for inference call the model under torch.inference_mode(), or train with a format "
    "of weights alone"
)

# What a module of plain weights holds; of fake ones while torch.export or FakeTensorMode runs it.
PLAIN_TENSORS = (Tensor, nn.Parameter, FakeTensor)

DOUBLE = "its weights are torch.float64"  # which grouped_mm does not take either

# Classes of activation functions (transformers.activations and torch.nn) by the `kind` that
# computes the same.
ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLUSquaredActivation": "relu2",
}

ACTIVATION_FUNCTIONS = {F.silu: "silu", F.gelu: "gelu"}

# Gates by the fingerprint of `_apply_gate`, with the names of the attributes that hold alpha and
# limit.
PLAIN, CLAMPED, SHIFTED = "plain", "clamped", "shifted"
GATES: dict[str, tuple[str, str | None, str | None]] = {
    "edc6d33a1bdb": (PLAIN, None, None),  # in float32 and rounded once, as `activate` does: beam
    "6a75f21b2314": (CLAMPED, None, "limit"),  # clamp, then act_fn: deepseek_v4
    "58d8ee1f0cf8": (CLAMPED, None, "swiglu_limit"),  # clamp, then silu: glm5_next, hy_v4
    "7bcc81175575": (
        SHIFTED,
        "alpha",
        "limit",
    ),  # interleaved, clamp, silu of alpha, up + 1: gpt_oss
    "ece39582c4e0": (SHIFTED, "alpha", "limit"),  # the same, concatenated: openai_privacy_filter
    "5b56cc12d61a": (SHIFTED, "swiglu_alpha", "swiglu_limit"),  # the same: minimax_m3_vl
}
SILU_GATES = ("58d8ee1f0cf8",)  # these call silu themselves, whatever act_fn is
INTERLEAVED_GATES = ("7bcc81175575",)


@torch.compiler.assume_constant_result
def _gate_of(cls: type[nn.Module]) -> str:
    """Fingerprint of a class's gate, or "default"; a constant to Dynamo."""
    gate = cls._apply_gate  # type: ignore[attr-defined]
    return "default" if gate is _default_apply_gate else fingerprint(gate)


def describe(module: nn.Module) -> Activation | str:
    """What an experts module computes between its two products, or why the `experts` op cannot
    express it.

    Reads the flags that transformers' decorator sets; attributes that older releases lack count as
    unset.
    """
    if getattr(module, "has_post_expert_norm", False):
        return "it normalises each expert's output before the weighted sum"
    weight = module.gate_up_proj if module.has_gate else module.up_proj
    if type(weight) not in PLAIN_TENSORS or type(module.down_proj) not in PLAIN_TENSORS:
        return f"its weights are {type(weight).__name__}, not plain tensors"
    if weight.dtype not in FLOATS:
        return f"its weights are {weight.dtype}"
    act = activation_kind(module)
    if not module.has_gate:
        return Activation(kind=act, gated=False) if act else unknown_activation(module)
    gate = _gate_of(type(module))
    if gate == "default":
        if not module.is_concatenated:
            return "its weights are interleaved, but its gate splits them in halves"
        return Activation(kind=act) if act else unknown_activation(module)
    if gate not in GATES:
        return f"its gate is an unknown function (fingerprint {gate})"
    form, alpha, limit = GATES[gate]
    if form == SHIFTED or gate in SILU_GATES:
        act = "silu"
    if act is None:
        return unknown_activation(module)
    if form == PLAIN:
        return Activation(kind=act)
    return Activation(
        kind=act,
        interleaved=gate in INTERLEAVED_GATES,
        alpha=1.0 if alpha is None else float(getattr(module, alpha)),
        limit=None
        if limit is None or getattr(module, limit) is None
        else float(getattr(module, limit)),
        up_shift=1.0 if form == SHIFTED else 0.0,
    )


def is_experts(module: nn.Module) -> bool:
    """Whether a module has the flags that transformers gives to experts in stacked weights."""
    return stored_format(module) is not None or (
        hasattr(module, "has_gate") and hasattr(module, "is_transposed")
    )


def activation_kind(module: nn.Module) -> str | None:
    """The `kind` of `activate` that computes the module's act_fn, or None."""
    act_fn = getattr(module, "act_fn", None)
    if act_fn in ACTIVATION_FUNCTIONS:
        return ACTIVATION_FUNCTIONS[act_fn]
    return ACTIVATIONS.get(type(act_fn).__name__)


def unknown_activation(module: nn.Module) -> str:
    """Why a module with another act_fn cannot be expressed."""
    act = type(module.act_fn).__name__ if hasattr(module, "act_fn") else "no act_fn"
    return f"its activation ({act}) is not one of {', '.join(sorted(set(ACTIVATIONS.values())))}"


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """An experts forward of transformers, by the `experts` op where that is exact."""
    found = stored_format(self) or describe(self)
    given = hidden_states, top_k_index, top_k_weights
    if found == DOUBLE and CHILD not in self._modules:
        require_no_main_grad(self, found)
        name = type(self).__name__
        warn_once(f"{name} runs on transformers' loop over experts: {found}")
        forward: Callable[..., Tensor] = type(self).forward.__wrapped__  # type: ignore[attr-defined]
        return forward(self, *given)
    return run(self, found, *given, grouped_mm_experts_forward)


def run(
    module: nn.Module,
    found: StoredFormat | Activation | str,
    x: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    fallback: Callable[..., Any],
    adapters: Mapping[str, Any] | None = None,
) -> Tensor:
    """A forward by the `experts` op as described, with these adapters by `experts_adapted`, or by
    transformers' own code.

    Gradients reach the tokens and the routing weights through weights of every format, and plain
    weights have their own. Where the inputs of the products are quantised there is none: a backward
    through such an output raises RuntimeError.
    """
    name = type(module).__name__
    if not adapters and CHILD in module._modules:
        child: Any = module._modules[CHILD]
        adapters = adapters_of(child, x, weights_TK, *module.parameters(recurse=False))
    if isinstance(found, str):
        if adapters:
            raise ValueError(f"{name} has an adapter that only the ops of moe_ops add: {found}")
        require_no_main_grad(module, found)
        warn_once(f"{name} runs on transformers' grouped_mm: {found}")
        return fallback(module, x, ids_TK, weights_TK)
    act = found.activation if isinstance(found, StoredFormat) else found
    w13, w2 = weights_of(module, found, act.gated)
    rounds = isinstance(found, StoredFormat) and bool(found.x_format)
    sources = x, weights_TK, w13, w2, *(adapters or {}).values()
    if rounds and needs_grad(*sources):
        with torch.no_grad():
            out_TD = run(module, found, x, ids_TK, weights_TK, fallback, adapters)
        return without_gradient(out_TD, NO_GRADIENT.format(name), *sources)
    b13 = b2 = None
    if module.has_bias:
        b13 = module.gate_up_proj_bias if act.gated else module.up_proj_bias
        b2 = module.down_proj_bias
    quantized: dict[str, Any] = {}
    transposed, inputs = False, x
    op: Callable[..., Tensor] = experts
    if isinstance(found, StoredFormat):
        quantized = found.arguments(module)
    else:
        transposed = bool(module.is_transposed)
        # Under autocast the activations may come in another dtype than the weights; the products
        # are the weights'.
        inputs = x.to(w13.dtype)
        sums = main_grads(module, w13, w2)
        if sums is not None:
            op, quantized = experts_accumulating, sums
    more: tuple[Any, ...] = ()
    if adapters:
        if op is not experts:
            raise ValueError(
                f"the weights of {name} add to main_grad and have adapters, which no op does at "
                "once; freeze the weights, or remove the adapters"
            )
        op, more = experts_adapted, tuple(map(adapters.get, ADAPTER))
    out_TD = op(
        inputs, weights_TK, ids_TK, w13, w2, *more, b13, b2, None, transposed,
        *act.args, **quantized,
    )  # fmt: skip
    return out_TD.to(x.dtype)


def require_no_main_grad(module: nn.Module, reason: str) -> None:
    """Raise ValueError if a module that runs transformers' own code is to add to main_grad."""
    if adds(module) and torch.is_grad_enabled():
        raise ValueError(
            f"{type(module).__name__} runs transformers' own code, which adds to .grad and not to "
            f"main_grad: {reason}"
        )


def weights_of(
    module: nn.Module, found: StoredFormat | Activation, gated: bool
) -> tuple[Tensor, Tensor]:
    """The weights of both products, or their codes."""
    suffix = found.codes_suffix if isinstance(found, StoredFormat) else ""
    first = "gate_up_proj" if gated else "up_proj"
    return getattr(module, first + suffix), getattr(module, "down_proj" + suffix)


def register() -> None:
    """Add the implementation "moe_ops" to transformers' experts registry."""
    type(ALL_EXPERTS_FUNCTIONS).register(NAME, experts_forward)

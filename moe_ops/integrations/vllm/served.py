"""What a layer of vLLM computes, as arguments of `experts`; and what of it is not served."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ops.checks.shapes import FLOATS
from moe_ops.ops import experts
from moe_ops.ops.activate import Activation

# vLLM's names of activations. Those that end in _no_mul have no gate.
PLAIN = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh"}
UNGATED = {f"{name}_no_mul": kind for name, kind in {**PLAIN, "relu2": "relu2"}.items()}
INTERLEAVED, HALVES = "swigluoai", "swigluoai_uninterleave"
GPT_OSS_ALPHA, GPT_OSS_LIMIT = 1.702, 7.0  # which vLLM takes where a layer names none
KNOWN = (*PLAIN, *UNGATED, INTERLEAVED, HALVES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """How a layer is computed. What varies from call to call is not here."""

    activation: Activation
    weight_on_input: bool = False  # the routing weight scales the token, not the result
    adds_b2: bool = True  # one rank adds the bias to the sum over ranks

    def run(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, layer: Any) -> Tensor:
        """This rank's part of the layer: its experts, or its columns of all experts.

        x_TD: float [T, D]; weights_TK: float32 [T, K]; ids_TK: int32 or int64 [T, K], ids among
        the experts of all ranks. Result [T, D] in x's dtype; the sum over the ranks is the layer.
        """
        if self.weight_on_input:
            x_TD = x_TD * weights_TK.to(x_TD.dtype)
            weights_TK = torch.ones_like(weights_TK)
        b13_EF = getattr(layer, "w13_bias", None)
        b2_ED = getattr(layer, "w2_bias", None) if self.adds_b2 else None
        return experts(
            x_TD, weights_TK, ids_TK, layer.w13_weight, layer.w2_weight, b13_EF, b2_ED,
            layer.expert_map, False, *self.activation.args,
        )  # fmt: skip


def served(layer: Any) -> Served:
    """How a layer of vLLM's class RoutedExperts is computed.

    Raises NotImplementedError that names the layer and everything in it that is not served.
    """
    activation = _activation(layer)
    reasons = [*_refusals(layer), *([activation] if isinstance(activation, str) else [])]
    if reasons or isinstance(activation, str):
        raise NotImplementedError(
            f"moe_ops does not run the experts of {layer.layer_name}: {'; '.join(reasons)}. Leave "
            "moe_ops out of VLLM_PLUGINS to run them by vLLM's own kernels"
        )
    return Served(
        activation=activation,
        weight_on_input=layer.apply_router_weight_on_input,
        adds_b2=layer.moe_config.moe_parallel_config.tp_rank == 0,
    )


def _refusals(layer: Any) -> Iterator[str]:
    config = layer.moe_config
    parallel = config.moe_parallel_config
    if config.is_lora_enabled:
        yield "LoRA adapters of experts (is_lora_enabled) are not served"
    for name in ("dp_size", "pcp_size", "sp_size"):
        size = getattr(parallel, name)
        if size != 1:
            yield (
                f"{name}={size} is not served, as tokens would travel between ranks; tensor and "
                "expert parallelism within one replica are"
            )
    if layer.apply_router_weight_on_input and config.experts_per_token != 1:
        yield (
            "apply_router_weight_on_input is served with one expert a token, got "
            f"{config.experts_per_token}"
        )
    if layer.activation.value == INTERLEAVED and parallel.tp_size > 1:
        yield (
            f"{INTERLEAVED!r} over tp_size={parallel.tp_size} is not served, as vLLM splits "
            "interleaved rows like halves when it loads models of transformers; expert "
            "parallelism is"
        )
    if config.in_dtype not in FLOATS:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        yield f"the dtype must be one of {wanted}, got {config.in_dtype}"


def _activation(layer: Any) -> Activation | str:
    """The activation of a layer, or why it is not served."""
    name = layer.activation.value
    limit, alpha, shift = layer.swiglu_limit, layer.swiglu_alpha, layer.swiglu_beta
    if name not in KNOWN:
        return f"activation {name!r} is not served, these are: {', '.join(KNOWN)}"
    if name not in (INTERLEAVED, HALVES) and (alpha not in (None, 1.0) or shift):
        return (
            f"activation {name!r} is served without swiglu_alpha and swiglu_beta, got {alpha} and "
            f"{shift}"
        )
    if name == "silu":
        return Activation(kind="silu", limit=limit)
    if name == INTERLEAVED:
        return Activation(
            kind="silu",
            interleaved=True,
            alpha=GPT_OSS_ALPHA if alpha is None else alpha,
            limit=GPT_OSS_LIMIT if limit is None else limit,
            up_shift=1.0 if shift is None else shift,
        )
    if name == HALVES:
        if limit is None:
            return f"activation {name!r} needs a swiglu_limit, got none"
        return Activation(kind="silu", alpha=1.0 if alpha is None else alpha, limit=limit,
                          up_shift=0.0 if shift is None else shift)  # fmt: skip
    if limit is not None:
        return f"activation {name!r} is served without a swiglu_limit, got {limit}"
    if name in PLAIN:
        return Activation(kind=PLAIN[name])
    return Activation(kind=UNGATED[name], gated=False)

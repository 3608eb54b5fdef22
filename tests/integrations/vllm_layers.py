"""Layers of experts as vLLM names them, and what they compute, written as a loop over tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

T, E, K, D, I = 7, 8, 2, 32, 16  # noqa: E741
GATED = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda g: F.gelu(g, approximate="tanh")}
UNGATED = {**GATED, "relu2": lambda g: F.relu(g) ** 2}


@dataclass(frozen=True)
class Layer:
    """What vLLM is told of a layer."""

    activation: str = "silu"
    has_bias: bool = False
    top_k: int = K
    options: dict[str, Any] = field(default_factory=dict)  # of RoutedExperts

    def act(self, y: Tensor) -> Tensor:
        """The activation of one token's row, as vLLM defines it."""
        name, limit = self.activation, self.options.get("swiglu_limit")
        if name.endswith("_no_mul"):
            return UNGATED[name.removesuffix("_no_mul")](y)
        gate, up = (y[::2], y[1::2]) if name == "swigluoai" else y.chunk(2)
        alpha, shift = 1.0, 0.0
        if name == "swigluoai":
            alpha, shift, limit = 1.702, 1.0, 7.0 if limit is None else limit
        elif name == "swigluoai_uninterleave":
            alpha, shift = self.options["swiglu_alpha"], self.options["swiglu_beta"]
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        if name in GATED and name != "silu":
            return GATED[name](gate) * up
        return gate * torch.sigmoid(alpha * gate) * (up + shift)

    def weights(self) -> dict[str, Tensor]:
        """The whole layer's weights by vLLM's names."""
        width = I if self.activation.endswith("_no_mul") else 2 * I
        made = {
            "w13_weight": torch.randn(E, width, D) * D**-0.5,
            "w2_weight": torch.randn(E, D, I) * I**-0.5,
        }
        if self.has_bias:
            made |= {"w13_bias": torch.randn(E, width), "w2_bias": torch.randn(E, D)}
        return made

    def tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, ids and weights as a router of transformers gives them."""
        ids_TK = torch.stack([torch.randperm(E)[: self.top_k] for _ in range(T)])
        return torch.randn(T, D), ids_TK, torch.rand(T, self.top_k)

    def loop(self, w: dict[str, Tensor], x_TD: Tensor, ids_TK: Tensor, scores_TK: Tensor) -> Tensor:
        """What the layer computes, token by token and expert by expert."""
        out_TD = torch.zeros_like(x_TD)
        zero = torch.zeros(E, 1)
        for t, (x, ids, scores) in enumerate(zip(x_TD, ids_TK, scores_TK, strict=True)):
            for e, score in zip(ids, scores, strict=True):
                scaled = self.options.get("apply_router_weight_on_input", False)
                y = w["w13_weight"][e] @ (x * score if scaled else x)
                h = self.act(y + w.get("w13_bias", zero)[e])
                one = w["w2_weight"][e] @ h + w.get("w2_bias", zero)[e]
                out_TD[t] += one if scaled else one * score
        return out_TD


OAI = {"swiglu_limit": 0.5, "swiglu_alpha": 1.702, "swiglu_beta": 1.0}
LAYERS = {
    "silu": Layer(),
    "silu_bias": Layer(has_bias=True),
    "silu_limit": Layer(options={"swiglu_limit": 0.25}),
    "gelu": Layer("gelu"),
    "gelu_tanh": Layer("gelu_tanh"),
    "gpt_oss": Layer("swigluoai", has_bias=True),
    "gpt_oss_limit": Layer("swigluoai", has_bias=True, options={"swiglu_limit": 0.25}),
    "oai_halves": Layer("swigluoai_uninterleave", has_bias=True, options=OAI),
    "relu2_no_mul": Layer("relu2_no_mul"),
    "silu_no_mul": Layer("silu_no_mul", has_bias=True),
    "weight_on_input": Layer(top_k=1, options={"apply_router_weight_on_input": True}),
}

"""What is timed for the experts of a layer that trains: ours, transformers' grouped_mm, and
Liger-Kernel's function."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_ops.bench.contenders import OURS
from moe_ops.bench.train_inputs import Tensors, TrainLayer
from moe_ops.ops import experts
from moe_ops.ops.activate import Activation
from moe_ops.passes.inductor.compiled import inductor_options

STOCK, LIGER = "grouped_mm", "liger_kernel"
COMPILED = "_compiled"
PLAIN = Activation(kind="silu")

Call = Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainContender:
    """One implementation of experts. `forward` gives a call of a layer on its tensors, which
    autograd differentiates; `refusal` why there is none, or None."""

    name: str
    forward: Callable[[TrainLayer, Tensors], Call]
    refusal: Callable[[TrainLayer, torch.device], str | None] = lambda layer, device: None
    compiled: bool = False


def ours(layer: TrainLayer, tensors: Tensors, compiled: bool = False) -> Call:
    """The op `experts`."""
    t, options, transposed = tensors, layer.activation.args, layer.transposed

    def run(
        x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, w13_EFD: Tensor, w2_EDI: Tensor,
        b13_EF: Tensor | None, b2_ED: Tensor | None,
    ) -> Tensor:  # fmt: skip
        return experts(
            x_TD, weights_TK, ids_TK, w13_EFD, w2_EDI, b13_EF, b2_ED, None, transposed, *options
        )

    made = _compile(run, inductor_options()) if compiled else run
    return lambda: made(t.x_TD, t.weights_TK, t.ids_TK, t.w13_EFD, t.w2_EDI, t.b13_EF, t.b2_ED)


def stock(layer: TrainLayer, tensors: Tensors, compiled: bool = False) -> Call:
    """transformers' experts on its grouped_mm."""
    module, t, wide_TK = _module(layer), tensors, tensors.ids_TK.long()
    module.gate_up_proj, module.down_proj = t.w13_EFD, t.w2_EDI
    if layer.bias:
        module.gate_up_proj_bias, module.down_proj_bias = t.b13_EF, t.b2_ED

    def run(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out_TD: Tensor = module(x_TD, ids_TK, weights_TK)
        return out_TD

    made = _compile(run) if compiled else run
    return lambda: made(t.x_TD, wide_TK, t.weights_TK)


def _module(layer: TrainLayer) -> Any:
    """A module of transformers that computes the layer, without memory for its weights."""
    from transformers import GptOssConfig, Qwen3MoeConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    case = layer.case
    common = {"hidden_size": case.D, "num_experts_per_tok": case.K}
    kind: Any
    if layer.activation == PLAIN:
        kind = Qwen3MoeExperts
        config = Qwen3MoeConfig(num_experts=case.E, moe_intermediate_size=case.I, **common)
    else:
        kind = GptOssExperts
        config = GptOssConfig(num_local_experts=case.E, intermediate_size=case.I, **common)
    config._experts_implementation = STOCK
    with torch.device("meta"):
        return kind(config)


def liger(layer: TrainLayer, tensors: Tensors) -> Call:
    """Liger-Kernel's function of experts."""
    from liger_kernel.ops import LigerFusedMoEFunction

    t = tensors
    return lambda: LigerFusedMoEFunction.apply(t.x_TD, t.w13_EFD, t.w2_EDI, t.ids_TK, t.weights_TK)


def liger_refusal(layer: TrainLayer, device: torch.device) -> str | None:
    """Why Liger-Kernel does not compute a layer here, or None."""
    if importlib.util.find_spec("liger_kernel") is None:
        return "the package liger-kernel is not installed"
    if layer.bias or layer.transposed or layer.activation != PLAIN:
        return "it computes silu-gated layers without bias alone"
    if device.type != "cuda":
        return f"its kernels need a GPU, got {device.type}"
    return None


def _compile(run: Callable[..., Tensor], options: Any = None) -> Callable[..., Tensor]:
    return torch.compile(run, fullgraph=True, dynamic=False, options=options)


CONTENDERS = (
    TrainContender(name=OURS, forward=ours),
    TrainContender(name=OURS + COMPILED, forward=partial(ours, compiled=True), compiled=True),
    TrainContender(name=STOCK, forward=stock),
    TrainContender(name=STOCK + COMPILED, forward=partial(stock, compiled=True), compiled=True),
    TrainContender(name=LIGER, forward=liger, refusal=liger_refusal),
)
NAMES = tuple(contender.name for contender in CONTENDERS)

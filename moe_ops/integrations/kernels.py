"""Layers for Hugging Face's `kernels`: `kernelize` gives modules of transformers our forwards.

`kernels` knows a layer by a name that its class has, and looks it up in a mapping of names to
repositories. Ours is in memory, so nothing is downloaded:

    name_experts(model)
    with kernels.use_kernel_mapping(mapping()):
        kernels.kernelize(model, mode=kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from moe_ops.hf.experts import describe, experts_forward, is_experts
from moe_ops.hf.stored import stored_format

EXPERTS = "MoeOpsExperts"
BLOCK = "MegaBlocksMoeMLP"  # transformers' own name for the block of gpt-oss
DEVICES = ("cpu", "cuda", "rocm")


class Experts(nn.Module):
    """The forward of an experts module of transformers, by the op `experts`.

    hidden_states: float [T, D]; top_k_index: int [T, K]; top_k_weights: float [T, K]. Result
    [T, D] in the dtype of hidden_states.
    """

    # `kernels` takes a class without a constructor, and with no other members than these two.
    can_torch_compile = True
    has_backward = False

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)


class Block(nn.Module):
    """The forward of the block of gpt-oss: its own router, then the op `experts`.

    hidden_states: float [B, S, D]. Returns the result [B, S, D] and the router's weights [B * S,
    K]. Raises TypeError for experts that the op does not run.
    """

    router: nn.Module
    experts: nn.Module
    can_torch_compile = True
    has_backward = False

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        reason = refusal(self.experts)
        if reason is not None:
            raise TypeError(
                f"{BLOCK} of moe_ops does not run {type(self.experts).__name__}: {reason}; leave "
                f"{BLOCK} out of the mapping"
            )
        x_TD = hidden_states.flatten(0, -2)
        _, weights_TK, ids_TK = self.router(x_TD)
        out_TD = experts_forward(self.experts, x_TD, ids_TK, weights_TK)
        return out_TD.view(hidden_states.shape), weights_TK


@dataclass(frozen=True, slots=True)
class Held:
    """A repository, as `kernels` asks for one, of a layer that is in memory."""

    layer_name: str

    def load(self) -> type[nn.Module]:
        """The class whose forward a module gets."""
        return LAYERS[self.layer_name]


LAYERS: dict[str, type[nn.Module]] = {EXPERTS: Experts, BLOCK: Block}


def mapping(*names: str) -> dict[str, dict[str, Held]]:
    """What `kernels.use_kernel_mapping` and `kernels.register_kernel_mapping` take: our layers of
    these names, or all of them, on every device that has backends.

    Raises ValueError for an unknown name.
    """
    unknown = sorted(set(names) - set(LAYERS))
    if unknown:
        raise ValueError(f"there is no layer {', '.join(unknown)}; take of {', '.join(LAYERS)}")
    return {name: dict.fromkeys(DEVICES, Held(name)) for name in names or LAYERS}


def name_experts(model: nn.Module) -> dict[str, str]:
    """Give the classes of a model's experts the name "MoeOpsExperts", by which `kernelize` finds
    them. Returns the modules that keep their own forward, with the reasons.

    The name stays with the class, for every model of it. Nothing computes otherwise before
    `kernelize` is called.
    """
    import kernels

    kept = {}
    for name, module in model.named_modules():
        if not is_experts(module):
            continue
        cls = type(module)
        reason = refusal(module)
        other = getattr(cls, "kernel_layer_name", EXPERTS)
        if other != EXPERTS:
            reason = f"its class has the name {other!r} for kernels already"
        else:
            kernels.replace_kernel_forward_from_hub(cls, EXPERTS, condition=_served)
        if reason is not None:
            kept[name] = reason
    return kept


def _served(module: nn.Module) -> bool:
    """Whether `kernelize` may replace a module's forward."""
    return refusal(module) is None


def refusal(module: nn.Module) -> str | None:
    """Why our forward cannot replace that of an experts module, or None."""
    if not is_experts(module):
        return "it holds no stacked weights as transformers decorates them"
    # transformers marks both: experts shared over ranks, and modules wrapped for that.
    if getattr(module, "_is_expert_parallel", False) or getattr(module, "_is_hooked", False):
        return "its experts are shared over ranks"
    found = stored_format(module) or describe(module)
    return found if isinstance(found, str) else None

"""Routers and experts of transformers that write down which experts tokens are sent to, or send
them where it was written before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from moe_ops.hf.experts import is_experts
from moe_ops.hf.report import info_once
from moe_ops.hf.rules import RULES, Arguments, Rule, router_fingerprint
from moe_ops.interop.subclass import CopiedAsItWas, Swapped
from moe_ops.ops import route_recording, route_replaying
from moe_ops.ops.route_recording import write_rows

RULE = "_moe_ops_rule"  # of a router: the fingerprint of its code
RING_IDS, RING_WEIGHTS, AT = "moe_ops_ring_ids", "moe_ops_ring_weights", "moe_ops_ring_at"
GIVEN_IDS, GIVEN_WEIGHTS = "moe_ops_given_ids", "moe_ops_given_weights"


# Under which names modules and configurations say how many experts there are, and are chosen.
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOICES = (
    "top_k", "num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk", "num_experts_per_token",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routed:
    """A module of experts, and the router that chooses them with the key of its rule, if a rule
    says what it computes."""

    name: str
    experts: nn.Module
    router: nn.Module | None
    key: str
    num_experts: int
    top_k: int


def routed_of(model: nn.Module) -> list[Routed]:
    """The modules of experts of a model of transformers, in their order.

    Raises ValueError where a module does not tell how many experts there are, or are chosen, and
    where a layer divides its tokens among several modules of experts.
    """
    named = dict(model.named_modules())
    experts = {path for path, m in named.items() if path and is_experts(m)}
    for path, module in named.items():
        inside = sorted(other for other in experts if other.startswith(f"{path}."))
        if isinstance(module, GradientCheckpointingLayer) and len(inside) > 1:
            raise ValueError(
                f"{path} divides its tokens among {', '.join(inside)}, whose rows are no longer "
                "those of the call; such layers have no record"
            )
    keys = _rules_of(named)
    found = []
    for path in (path for path in named if path in experts):
        beside = _router_beside(path, list(keys), experts)
        router, module = None if beside is None else named[beside], named[path]
        found.append(
            Routed(
                name=path,
                experts=module,
                router=router,
                key="" if beside is None else keys[beside],
                num_experts=_number(path, "experts", _sources(model, module, router), COUNTS),
                top_k=_number(path, "choices", _sources(model, router, module), CHOICES),
            )
        )
    return found


def _rules_of(named: dict[str, nn.Module]) -> dict[str, str]:
    """The paths of routers that have a rule, and its key."""
    by_code: dict[Any, str] = {}  # of modules of the same classes, as sources take long to read
    found = {}
    for path, module in named.items():
        key = getattr(module, RULE, "")
        if not key and type(module).__module__.startswith("transformers."):
            code = type(module), *((name, type(part)) for name, part in module.named_children())
            if code not in by_code:
                by_code[code] = router_fingerprint(module)
            key = by_code[code]
        if key in RULES:
            found[path] = key
    return found


def _router_beside(path: str, routers: list[str], experts: set[str]) -> str | None:
    """The router in the smallest part of the model that holds these experts and a router; None if
    that part holds several of either."""
    while path:
        path = path.rpartition(".")[0]
        inside = f"{path}." if path else ""
        found = [router for router in routers if router.startswith(inside)]
        if found:
            alone = sum(other.startswith(inside) for other in experts) == 1
            return found[0] if alone and len(found) == 1 else None
    return None


def _sources(model: nn.Module, *modules: nn.Module | None) -> list[Any]:
    """Where numbers of a module are looked for: in modules, then in their configurations."""
    own: list[Any] = [m for m in modules if m is not None]
    configs: list[Any] = [m.config for m in (*own, model) if getattr(m, "config", None) is not None]
    texts = [c.get_text_config() for c in configs if hasattr(c, "get_text_config")]
    return [*own, *configs, *texts]


def _number(path: str, what: str, sources: list[Any], names: tuple[str, ...]) -> int:
    for source in sources:
        for name in names:
            value = getattr(source, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    raise ValueError(f"{path} does not say how many {what} it has, by none of {', '.join(names)}")


def recording(
    layers: list[Routed], ids: list[Tensor], weights: list[Tensor] | None, at: Tensor
) -> Swapped:
    """Have layers write to rings, each to its own."""
    swapped = Swapped()
    for i, layer in enumerate(layers):
        buffers = {RING_IDS: ids[i], RING_WEIGHTS: weights[i] if weights else None, AT: at}
        if layer.router is None:
            swapped.swap(layer.experts, RecordingExperts, buffers)
        else:
            swapped.swap(layer.router, RecordingRouter, buffers, {RULE: layer.key})
    return swapped


def replaying(layers: list[Routed], ids_LSK: Tensor, weights_LSK: Tensor | None) -> Swapped:
    """Have layers read windows, each its own: ids before weights are computed, or both."""
    swapped = Swapped()
    for i, layer in enumerate(layers):
        if weights_LSK is not None:
            buffers = {GIVEN_IDS: ids_LSK[i], GIVEN_WEIGHTS: weights_LSK[i]}
            swapped.swap(layer.experts, ReplayingExperts, buffers)
        else:
            assert layer.router is not None, "see `replay_refusal`"
            swapped.swap(layer.router, ReplayingRouter, {GIVEN_IDS: ids_LSK[i]}, {RULE: layer.key})
    return swapped


def replay_refusal(layer: Routed) -> str | None:
    """Why the weights of given experts cannot be computed from the logits of a layer, or None."""
    if layer.router is None:
        return "no rule says what its router computes"
    rule = RULES[layer.key]
    found = rule.arguments(layer.router)
    if isinstance(found, str):
        return found
    rounded = {p.dtype for p in layer.router.parameters()} - {torch.float32}
    if rule.rounds_scores and rounded:
        return f"its router rounds its scores to {', '.join(sorted(map(str, rounded)))}"
    return None


def _records(module: Any, ids_TK: Tensor, weights_TK: Tensor) -> None:
    """Write what was chosen by a launch of its own."""
    at = getattr(module, AT)
    write_rows(getattr(module, RING_IDS), at, ids_TK)
    ring = getattr(module, RING_WEIGHTS)
    if ring is not None:
        write_rows(ring, at, weights_TK)


def _arguments(
    router: nn.Module, rule: Rule, x_TD: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Arguments | str]:
    """The logits of a router, and the arguments of `route` beside them or why there are none."""
    logits_TE = rule.logits(router, x_TD)
    given = args[0] if args else next(iter(kwargs.values()), None)
    return logits_TE, rule.read(router, x_TD, logits_TE, given)


def _as_router(rule: Rule, logits_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Any:
    """What transformers expects of a router."""
    ids_TK = ids_TK.to(torch.int64)  # transformers indexes and scatters with int64
    first = logits_TE.float().softmax(-1) if rule.returns_probabilities else logits_TE
    return (ids_TK, weights_TK, first) if rule.logits_last else (first, weights_TK, ids_TK)


class RecordingRouter(CopiedAsItWas, nn.Module):
    """What stands before the class of a router whose choices are recorded.

    A class, because all layers share it, so that they are compiled once.
    """

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The router through `route_recording` in compiled code. Uncompiled, for gradients, under
        autocast and where no arguments of `route` say what it does it runs its own code, so that
        results keep their bits, and ids are copied."""
        device = hidden_states.device.type
        own = not torch.compiler.is_compiling() or torch.is_autocast_enabled(device)
        if not (own or _wants_gradient(self, hidden_states)):
            rule = RULES[getattr(self, RULE)]
            logits_TE, found = _arguments(self, rule, hidden_states, args, kwargs)
            if not isinstance(found, str):
                rings = {"ring_ids_SK": getattr(self, RING_IDS), "at": getattr(self, AT)}
                ring_weights_SK = getattr(self, RING_WEIGHTS)
                weights_TK, ids_TK = route_recording(
                    logits_TE, **found, **rings, ring_weights_SK=ring_weights_SK
                )
                return _as_router(rule, logits_TE, weights_TK, ids_TK)
            info_once(f"{type(self).__name__} is recorded by a copy of its ids: {found}")
        out = super().forward(hidden_states, *args, **kwargs)
        ids_TK = next(t for t in out if not t.is_floating_point())
        weights_TK = next(t for t in out if t.is_floating_point() and t.shape == ids_TK.shape)
        _records(self, ids_TK, weights_TK)
        return out


class RecordingExperts(CopiedAsItWas, nn.Module):
    """What stands before the class of experts whose router has no rule: what they are given is
    recorded, by a launch of its own."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        _records(self, top_k_index, top_k_weights)
        return super().forward(hidden_states, top_k_index, top_k_weights)


class ReplayingRouter(CopiedAsItWas, nn.Module):
    """What stands before the class of a router whose choices are given."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The router through `route_replaying`. Raises ValueError where its weights are none that
        `route` computes."""
        rule = RULES[getattr(self, RULE)]
        logits_TE, found = _arguments(self, rule, hidden_states, args, kwargs)
        if isinstance(found, str):
            raise ValueError(
                f"{type(self).__name__} cannot weigh given experts: {found}; replay with "
                "weights=True"
            )
        given = getattr(self, GIVEN_IDS)
        weights_TK, ids_TK = route_replaying(logits_TE, given_ids_SK=given, **found)
        return _as_router(rule, logits_TE, weights_TK, ids_TK)


class ReplayingExperts(CopiedAsItWas, nn.Module):
    """What stands before the class of experts whose tokens, and weights, are given."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        """The experts of rows that begin with a negative number are those that the router chose."""
        T = top_k_index.shape[0]
        given = getattr(self, GIVEN_IDS)[:T].to(top_k_index.dtype)
        weights = getattr(self, GIVEN_WEIGHTS)[:T].to(top_k_weights.dtype)
        own = given[:, :1] < 0
        ids_TK = torch.where(own, top_k_index, given)
        weights_TK = torch.where(own, top_k_weights, weights)
        return super().forward(hidden_states, ids_TK, weights_TK)


def _wants_gradient(module: nn.Module, x: Tensor) -> bool:
    return torch.is_grad_enabled() and (
        x.requires_grad or any(p.requires_grad for p in module.parameters())
    )

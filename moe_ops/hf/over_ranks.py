"""Experts of transformers' models over the ranks of a process group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe_ops.checks.options import check_text, check_type
from moe_ops.checks.shapes import check_choice
from moe_ops.hf.adapters.held import CHILD
from moe_ops.hf.experts import NO_GRADIENT, describe, is_experts, weights_of
from moe_ops.hf.stored import StoredFormat, stored_format
from moe_ops.interop.subclass import subclass
from moe_ops.main_grad import main_grads
from moe_ops.ops import experts, experts_accumulating, experts_over_ranks, sum_ranks
from moe_ops.ops.activate import Activation
from moe_ops.ops.by_choice import asked, sum_over_ranks
from moe_ops.ops.dispatch_tokens import MOST_ROWS
from moe_ops.ops.experts_over_ranks import ExpertsOverRanksCall, in_turn
from moe_ops.ranks import peers
from moe_ops.ranks.groups import Group
from moe_ops.ranks.shares import in_shares
from moe_ops.ranks.transport import AUTO, EXCHANGE, GATHER, PUSH, TRANSPORTS
from moe_ops.ranks.turns import agreed, turns
from moe_ops.registry.gradients import needs_grad, without_gradient

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Model = TypeVar("Model", bound=PreTrainedModel)
TOKENS = ("replicated", "own")
WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
QUANTIZED = "its weights are quantised; share the model first, then quantize_model on every rank"
# How configurations call the number of experts of a token.
CHOICES = ("num_experts_per_tok", "moe_topk")
PER_EXPERT = (*WEIGHTS, *(f"{name}_bias" for name in WEIGHTS))


@dataclass(frozen=True, slots=True)
class Over:
    """Over which group, and how, tokens reach their experts: all ranks have the same tokens where
    `collective` is "", else each has its own."""

    group: str
    collective: str = ""


class ExpertsOverRanks(nn.Module):
    """What `share_experts` puts before the class of an experts module."""

    _moe_ops_over: Over
    _moe_ops_rank_of: Tensor
    _moe_ops_slot_of: Tensor

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tables = (self._moe_ops_rank_of, self._moe_ops_slot_of)
        return run(self, self._moe_ops_over, tables, hidden_states, top_k_weights, top_k_index)

    def _moe_ops_sends(self, x_TD: Tensor) -> ExpertsOverRanksCall | None:
        """A call for no tokens of this kind: what ranks would send, and to whom; None where they
        send none. A choice of one expert stands for those of which nothing is known."""
        over, config = self._moe_ops_over, getattr(self, "config", None)
        if not over.collective:
            return None
        found: Any = stored_format(self) or describe(self)
        act = found.activation if isinstance(found, StoredFormat) else found
        w13, w2 = weights_of(self, found, act.gated)
        K = next((k for n in CHOICES if (k := getattr(config, n, None))), 1)
        return experts_over_ranks.call(
            x_TD[:0], x_TD.new_empty((0, K)), x_TD.new_empty((0, K), dtype=torch.int64), w13, w2,
            self._moe_ops_rank_of, self._moe_ops_slot_of, 1, over.group, over.collective,
            **_options(self, found, act),
        )  # fmt: skip


def share_experts(
    model: Model, group: str, *, tokens: str = "replicated", collective: str = GATHER
) -> Model:
    """Leave this rank its share of a transformers model's experts, in place; returns the model.

    Rank r of R keeps the experts r * E / R to (r + 1) * E / R - 1; everything else stays whole.
    Forwards run the experts of all ranks, so every rank of the group has to call the model, as
    often, in the same order.

    tokens: "replicated": all ranks are given the same input, and get the same output to the bit;
    "own": each is given its own. Then "gather" and "push", which CUDA graphs can hold, take as many
    tokens on every rank in each forward, and "exchange" any number. "auto" is the cheapest for as
    many. Where tokens are replicated "push" and "auto" let ranks store their parts of a sum to each
    other, as long as that is the faster way. Of a model on a GPU, all ranks find out together here
    whether they can.

    A shared model can be quantised, by `quantize_model` on every rank alike; one that is quantised
    cannot be shared.

    A model on the meta device is shared likewise: make the rest with `to_empty`, call this again,
    which writes the tables of a shared model anew, and load or make this rank's weights. A state
    dict has this rank's experts alone.

    Raises TypeError for anything but a transformers PreTrainedModel, ValueError for a group that is
    none, for experts that the ops cannot run or that do not divide among the ranks, for a model
    that was shared otherwise before, and for "push" of replicated tokens where ranks cannot store
    to each other, with the reason; then nothing was changed.
    """
    check_type("model", model, PreTrainedModel, "a transformers PreTrainedModel")
    check_text("group", group)
    check_choice("tokens", tokens, TOKENS)
    check_choice("collective", collective, (AUTO, *TRANSPORTS))
    found, over = Group.of(group), Over(group, collective if tokens == "own" else "")
    modules = {name: m for name, m in model.named_modules() if is_experts(m)}
    if not modules:
        raise ValueError(f"{type(model).__name__} has no experts in stacked weights to share")
    for name, module in modules.items():
        _check(name, module, found, over)
    if found.size > 1 and model.device.type != "meta":
        _connect(model.device, group, collective, tokens)
    for module in modules.values():
        _share(module, found, over)
    return model


def run(
    module: nn.Module,
    over: Over,
    tables: tuple[Tensor, Tensor],
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
) -> Tensor:
    """The experts of all ranks on tokens, given the module that holds this rank's."""
    if CHILD in module._modules:
        raise ValueError(
            f"{type(module).__name__} has adapters, which experts over ranks do not add; "
            "remove_adapter first"
        )
    found: Any = stored_format(module) or describe(module)
    stored = isinstance(found, StoredFormat)
    act = found.activation if stored else found
    w13, w2 = weights_of(module, found, act.gated)
    sources = x_TD, weights_TK, w13, w2
    if stored and found.x_format and needs_grad(*sources):
        with torch.no_grad():
            out_TD = run(module, over, tables, x_TD, weights_TK, ids_TK)
        return without_gradient(out_TD, NO_GRADIENT.format(type(module).__name__), *sources)
    inputs = x_TD if stored else x_TD.to(w13.dtype)  # under autocast they may differ
    options = _options(module, found, act)
    sums = None if stored else main_grads(module, w13, w2)
    if over.collective and sums is not None:
        raise ValueError(
            f"experts that exchange tokens by {over.collective!r} do not add to main_grad; share "
            "them with tokens='replicated', or train a MoELayer, which does"
        )
    if over.collective:
        # An exchange counts for itself; to gather, all have as many.
        here = MOST_ROWS if over.collective == EXCHANGE else max(x_TD.shape[0], 1)
        rows, taken = agreed() or here, turns()
        args = (inputs, weights_TK, ids_TK, w13, w2, *tables, rows, over.group, over.collective)
        if taken is None:
            out_TD = experts_over_ranks(*args, **options)
        else:
            out_TD = in_turn(experts_over_ranks.call(*args, **options), taken)
    else:
        op = experts if sums is None else experts_accumulating
        given = {**options, **(sums or {}), "expert_map": tables[1]}

        def part(x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
            part_TD: Tensor = op(x_TD, weights_TK, ids_TK, w13, w2, **given)
            return part_TD

        routed = (inputs, weights_TK, ids_TK)
        if asked():
            out_TD = sum_over_ranks(part, *routed, over.group)
        else:
            out_TD = sum_ranks(part(*routed), over.group)
    return out_TD.to(x_TD.dtype)


def _options(
    module: nn.Module, found: StoredFormat | Activation, act: Activation
) -> dict[str, Any]:
    """The arguments of the ops but for tokens, routing and weights."""
    codes = found if isinstance(found, StoredFormat) else None
    given: dict[str, Any] = {
        "transposed": codes is None and bool(module.is_transposed), "kind": act.kind,
        "gated": act.gated, "interleaved": act.interleaved, "alpha": act.alpha,
        "limit": act.limit, "up_shift": act.up_shift,
    }  # fmt: skip
    if module.has_bias:
        given["b13_EF"] = module.gate_up_proj_bias if act.gated else module.up_proj_bias
        given["b2_ED"] = module.down_proj_bias
    return given if codes is None else given | codes.arguments(module)


def tables_of(num_experts: int, group: Group, over: Over) -> tuple[Tensor, Tensor]:
    """The rank and the slot of each expert, int32; slots are -1 elsewhere for replicated tokens."""
    each = num_experts // group.size
    ids = torch.arange(num_experts, dtype=torch.int32, device="cpu")
    ranks, slots = ids // each, ids % each
    return ranks, slots if over.collective else torch.where(ranks == group.rank, slots, -1)


def _connect(device: torch.device, group: str, collective: str, tokens: str) -> None:
    """Find out whether ranks store to each other, where that is asked for. Raises ValueError if
    replicated tokens need it and it cannot be; those of a rank's own are refused in their op."""
    sums = collective == PUSH and tokens == "replicated"
    if not sums and collective != AUTO:
        return
    reason: str | None = f"needs a model on cuda, got {device}"
    if device.type == "cuda":
        reason = peers.connect(group, device).reason
    if sums and reason is not None:
        raise ValueError(f"collective='push' {reason}; take 'auto' or 'gather' on every rank")


def _check(name: str, module: nn.Module, group: Group, over: Over) -> None:
    """Raise ValueError unless an experts module can be shared like this."""
    if isinstance(module, ExpertsOverRanks):
        if module._moe_ops_over != over:
            raise ValueError(f"{name} is shared as {module._moe_ops_over} already, not as {over}")
        return
    act = describe(module) if stored_format(module) is None else QUANTIZED
    if CHILD in module._modules:
        act = "it has adapters, which each rank would have whole; remove_adapter first"
    if not isinstance(act, Activation):
        raise ValueError(f"{name} ({type(module).__name__}) cannot be shared: {act}")
    down: Any = module.down_proj
    num_experts = down.shape[0]
    if num_experts % group.size:
        raise ValueError(
            f"{name} has {num_experts} experts, which do not divide among the {group.size} ranks "
            f"of {group.name!r}; take a number of ranks that divides them"
        )


def _share(module: nn.Module, group: Group, over: Over) -> None:
    down: Any = module.down_proj
    if isinstance(module, ExpertsOverRanks):
        num_experts = down.shape[0] * group.size
    else:
        num_experts = down.shape[0]
        each = num_experts // group.size
        for name in PER_EXPERT:
            whole = getattr(module, name, None)
            if whole is not None:
                mine = whole.detach().narrow(0, group.rank * each, each).clone()
                setattr(module, name, nn.Parameter(mine, requires_grad=whole.requires_grad))
        module.__class__ = subclass(ExpertsOverRanks, type(module))  # type: ignore[arg-type]
        setattr(module, "_moe_ops_over", over)  # noqa: B010  nn.Module declares none
    for name, t in zip(("rank", "slot"), tables_of(num_experts, group, over), strict=True):
        placed = t if down.is_meta else t.to(down.device)
        module.register_buffer(f"_moe_ops_{name}_of", placed, persistent=False)


def expert_parallel_class(base: type) -> type:
    """The class that transformers' registry of expert-parallel implementations takes, given its
    base class, which older releases lack."""

    class MoeOpsEP(base):
        """transformers' plan of expert parallelism on our ops. Ranks that hold one batch add their
        parts, which CUDA graphs can hold; others exchange tokens, of which those of a tensor
        parallel group send a share each."""

        def __init__(self, module: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
            super().__init__(module, ep_mesh, tp_mesh)
            self.module: Any = module
            collective = "" if self.shares_batch else EXCHANGE
            self.over = Over(ep_mesh.get_group().group_name, collective)
            self.tables: tuple[Tensor, Tensor] | None = None

        def __call__(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
            found = describe(self.module)
            if not isinstance(found, Activation):
                name = type(self.module).__name__
                raise ValueError(
                    f"{name} cannot run on ep_implementation='moe_ops': {found}; take 'auto'"
                )
            if self.tables is None:  # weights may be cut after this was made, but not after a call
                self.tables = self._tables(x_TD.device)
            call: Callable[..., Tensor] = partial(run, self.module, self.over, self.tables)
            if not self.over.collective or self.tp_mesh.size() == 1:
                return call(x_TD, weights_TK, ids_TK)
            tp = Group.of(self.tp_mesh.get_group().group_name)
            return in_shares(tp, call, x_TD, weights_TK, ids_TK)

        def _tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
            """The tables of ranks and slots. They stay, and may be saved for a gradient later,
            whatever the mode of this call."""
            down, group = self.module.down_proj, Group.of(self.over.group)
            traced = torch.compiler.is_compiling()
            with contextlib.nullcontext() if traced else torch.inference_mode(False):
                ranks, slots = tables_of(down.shape[0] * group.size, group, self.over)
                return ranks.to(device), slots.to(device)

    return MoeOpsEP


def register(name: str) -> None:
    """Add our implementation to transformers' registry, where it has one."""
    try:
        from transformers.distributed import expert_parallel
    except ImportError:
        return
    interface = getattr(expert_parallel, "EPImplementationInterface", None)
    if interface is not None:
        interface.register(name, expert_parallel_class(expert_parallel.EPImplementation))

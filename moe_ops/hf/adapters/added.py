"""Adapters that `add_adapter` adds to experts, which may be codes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe_ops.checks.options import (
    check_finite,
    check_flag,
    check_int,
    check_number,
    check_text,
    check_type,
)
from moe_ops.checks.signature import did_you_mean
from moe_ops.hf.adapters.held import CHILD, MOST_RANK, Bank, Factors, HoldsAdapters, identity
from moe_ops.hf.experts import describe, is_experts, run
from moe_ops.hf.optimize import optimize
from moe_ops.hf.stored import StoredFormat, stored_format
from moe_ops.interop.subclass import former_class, new_object, subclass
from moe_ops.interop.switches import Board, Switches

TARGETS = ("w13", "w2")


class AddedAdapter(nn.Module):
    """One adapter of a module of experts: A [E, r, inputs] and B [E, outputs, r] of each weight
    that it adapts, and what B A x is multiplied by."""

    def __init__(self, scale: float, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.scale = scale
        for target in TARGETS:
            pair = pairs.get(target)
            for letter, t in zip("ab", pair or (None, None), strict=True):
                parameter = None if t is None else nn.Parameter(t)
                self.register_parameter(f"{letter}_{target}", parameter)

    def pair(self, target: str) -> tuple[Tensor, Tensor] | None:
        a, b = (self._parameters[f"{letter}_{target}"] for letter in "ab")
        return None if a is None or b is None else (a, b)


class AddedAdapters(HoldsAdapters):
    """All adapters of one module of experts, by name, and which of them is active."""

    def __init__(self, board: Board, experts: nn.Module) -> None:
        super().__init__()
        self._experts = (experts,)  # which is no part of this, but has it
        self.by_name = nn.ModuleDict()
        self.chosen: str | None = None
        self.bank, self.board = Bank(), board

    def refusal(self) -> None:
        return None

    def names(self) -> tuple[str, ...]:
        return tuple(self.by_name)

    def active(self) -> tuple[str, ...]:
        return () if self.chosen is None else (self.chosen,)

    def factors(self, name: str) -> Factors:
        found: Any = self.by_name[name]
        return Factors(scale=found.scale, first=found.pair("w13"), second=found.pair("w2"))

    def sources(self, name: str) -> list[Tensor]:
        return list(self.by_name[name].parameters())

    def scales(self, names: Sequence[str]) -> tuple[object, ...]:
        found: list[Any] = [self.by_name[name] for name in names]
        return tuple(one.scale for one in found)

    def pulse(self) -> Switches:
        found: list[object] = [self.board.index is None, self.chosen]
        for name, one in self.by_name._modules.items():
            assert isinstance(one, AddedAdapter)
            found += name, one.scale
            found += (identity(p) for p in one._parameters.values() if p is not None)
        found.append(self._experts[0]._parameters["down_proj"].dtype)  # type: ignore[union-attr]
        return tuple(found)

    def dtype_for(self, tokens: torch.dtype) -> torch.dtype:
        return _float_of(self._experts[0]) or tokens


class WithAdded(nn.Module):
    """What stands before the class of experts in floats that have adapters of ours: whatever else
    runs experts of the model would leave these out."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        own, given = super().forward, (hidden_states, top_k_index, top_k_weights)
        return run(self, describe(self), *given, lambda _, *same: own(*same))

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        # Not what object gives: pickle finds classes by name, and this one has the name of another.
        return _new_with_added, (former_class(self),), reduced[2]


def _new_with_added(cls: Any) -> Any:
    return new_object(subclass(WithAdded, cls))


def add_adapter(
    model: PreTrainedModel,
    rank: int = 16,
    *,
    alpha: float | None = None,
    target: Sequence[str] = TARGETS,
    name: str = "default",
    rslora: bool = False,
) -> int:
    """Add an adapter to all experts of a transformers model, in codes or in floats, in place;
    returns how many modules of experts got one.

    W x becomes W x + scale * B (A x) for the weights in `target`, "w13" (gate and up) and "w2"
    (down), where A is random, as torch makes a linear layer, and B is zero, so that nothing changes
    until it is trained. scale is alpha / rank, or alpha / sqrt(rank) with `rslora`; without an
    alpha it is 1. A and B are float32 beside experts of 16 bits or codes, and converted in a
    forward. The weights stay as they are: codes are no floats, of which peft could make W + B A.

    The adapter is active from then on, and the parameters that require gradients are its own: of
    the model, others than those of adapters no longer do. Add adapters of peft to other layers
    before, and give what `get_base_model()` returns. The model is `optimize`d. `set_adapter`,
    `save_adapter`, `load_adapter`, `remove_adapter` and `adapters` are for what was added.

    Raises TypeError for anything but a transformers PreTrainedModel, ValueError for a model without
    experts, for experts that our ops cannot run, that are over ranks or that peft wraps, for a rank
    above 128, and for a name that the model has; then nothing was changed.
    """
    check_type("model", model, PreTrainedModel, "a transformers PreTrainedModel")
    check_int("rank", rank, 1, MOST_RANK)
    check_number("alpha", rank if alpha is None else alpha)
    check_finite("alpha", rank if alpha is None else alpha)
    check_flag("rslora", rslora)
    check_name(name)
    given = rank if alpha is None else alpha
    scale = float(given) / (math.sqrt(rank) if rslora else rank)
    if alpha is None:
        scale = 1.0
    made = {}
    for path, module in adaptable(model, name).items():
        sizes = Sizes.of(module)
        made[path] = scale, {t: _fresh(sizes.shapes(t, rank), module) for t in _targets(target)}
    put(model, name, made)
    return len(made)


def put(
    model: PreTrainedModel,
    name: str,
    made: Mapping[str, tuple[float, Mapping[str, tuple[Tensor, Tensor]]]],
    *,
    trainable: bool = True,
) -> None:
    """Give modules of experts, by their names, an adapter of this scale and these tensors, and make
    it the active one. If it is trainable all but adapters is frozen."""
    optimize(model)
    held = holders_of(model)
    board = held[0].board if held else Board()
    for path, (scale, pairs) in made.items():
        module = model.get_submodule(path)
        if CHILD not in module._modules:
            module.add_module(CHILD, AddedAdapters(board, module))
            kind: Any = type(module)
            if stored_format(module) is None:
                module.__class__ = subclass(WithAdded, kind)
        child: Any = module.get_submodule(CHILD)
        child.by_name[name] = AddedAdapter(scale, pairs).requires_grad_(trainable)
        child.train(module.training)
    set_adapter(model, name)
    if not trainable:
        return
    ours = {id(p) for m in model.modules() if isinstance(m, AddedAdapters) for p in m.parameters()}
    for path, p in model.named_parameters():
        if id(p) not in ours and "lora_" not in path:  # by which peft knows its own
            p.requires_grad_(False)


def set_adapter(model: nn.Module, name: str | None) -> None:
    """Make an adapter that was added the one that forwards add; None: none.

    Captured calls of a compiled model stay, as they read adapters where the one before was. Raises
    ValueError for a name that the model does not have.
    """
    held = added_to(model)
    if name is not None:
        check_known(held, name)
    for child in held:
        child.chosen = name if name is not None and name in child.by_name else None


def remove_adapter(model: nn.Module, name: str) -> None:
    """Remove an adapter that was added. Raises ValueError for a name that the model lacks, and
    inside of `adapters`."""
    held = added_to(model)
    check_known(held, name)
    _check_removable(held)
    for child in held:
        if name in child.by_name:
            del child.by_name[name]
        if child.chosen == name:
            child.chosen = None
    for module in list(model.modules()):
        child = module._modules.get(CHILD)  # type: ignore[assignment]
        if isinstance(child, AddedAdapters) and not child.by_name:
            del module._modules[CHILD]
            without_class(module)


def without_class(module: nn.Module) -> None:
    """Give experts the class back that they had without adapters; codes run on our ops anyway."""
    if isinstance(module, WithAdded):
        module.__class__ = former_class(module)


@torch.no_grad()
def merge_adapter(model: nn.Module, name: str) -> None:
    """Make W + scale * B A of experts in floats and an adapter that was added, and remove it.

    Raises ValueError for a name that the model lacks, inside of `adapters`, and for experts in
    codes, which have no sum with floats; nothing is changed then.
    """
    held = added_to(model)
    check_known(held, name)
    _check_removable(held)
    found = {n: m for n, m in model.named_modules() if CHILD in m._modules}
    for path, module in found.items():
        stored = stored_format(module)
        if stored is not None:
            raise ValueError(
                f"{path} holds codes of {stored.w_format}, to which no adapter can be added; "
                "dequantise, merge and quantise again: load the model in floats, "
                "peft.PeftModel.from_pretrained(model, folder) with what save_adapter wrote, "
                "merge_and_unload(), and moe_ops.quantize_model of what that returns"
            )
    for module in found.values():
        child: Any = module.get_submodule(CHILD)
        if name not in child.by_name:
            continue
        adapter = child.factors(name)
        projections = first_of(module), "down_proj"
        for projection, pair in zip(projections, adapter.pairs, strict=True):
            if pair is not None:
                w: Any = getattr(module, projection)
                w = w.mT if module.is_transposed else w
                add_products(w, pair[0], pair[1], adapter.scale)
    remove_adapter(model, name)


def add_products(w_EFD: Tensor, a_ErD: Tensor, b_EFr: Tensor, scale: float) -> None:
    """Add scale * B A to weights in place, in float32, rounded once; one expert at a time, as all
    of them in float32 are large."""
    wide = torch.promote_types(w_EFD.dtype, torch.float32)
    for w_FD, a_rD, b_Fr in zip(w_EFD, a_ErD.to(wide), b_EFr.to(wide), strict=True):
        w_FD.copy_(w_FD.to(wide).addmm(b_Fr, a_rD, alpha=scale))


def holders_of(model: nn.Module) -> list[HoldsAdapters]:
    """The modules of a model that hold adapters of experts, ours and those that wrap them."""
    return [m for m in model.modules() if isinstance(m, HoldsAdapters)]


def added_to(model: nn.Module) -> list[AddedAdapters]:
    """What `add_adapter` added to a model. Raises TypeError for what is no module."""
    check_type("model", model, nn.Module, "a model with experts")
    return [m for m in model.modules() if isinstance(m, AddedAdapters)]


def check_known(held: Iterable[HoldsAdapters], name: str) -> None:
    """Raise ValueError unless experts have an adapter of this name."""
    check_text("name", name)
    known = list(dict.fromkeys(n for holder in held for n in holder.names()))
    if name not in known:
        raise ValueError(
            f"the experts have no adapter {name!r}; there are {', '.join(known) or 'none'}"
            f"{did_you_mean(name, known)}"
        )


def _check_removable(held: Iterable[HoldsAdapters]) -> None:
    if any(holder.board.is_on for holder in held):
        raise ValueError("sequences have adapters of their own; leave `adapters`, and remove then")


def check_name(name: str) -> None:
    """Raise ValueError for what a part of a module's name cannot be."""
    check_text("name", name)
    if not name or "." in name:
        raise ValueError(f"name={name!r} must be a word without dots, as parameters have it")
    if hasattr(nn.ModuleDict(), name):
        raise ValueError(f"name={name!r} is an attribute of modules of torch; give another name")


def adaptable(model: PreTrainedModel, name: str) -> dict[str, nn.Module]:
    """The modules of experts that can get an adapter of this name. Raises ValueError as
    `add_adapter` does."""
    found = {n: m for n, m in model.named_modules() if is_experts(m)}
    if not found:
        raise ValueError(f"{type(model).__name__} has no experts in stacked weights to adapt")
    for path, module in found.items():
        reason = _refusal(path, module, name)
        if reason is not None:
            raise ValueError(f"{path} ({type(module).__name__}) gets no adapter: {reason}")
    return found


def _refusal(path: str, module: nn.Module, name: str) -> str | None:
    """Why experts cannot get an adapter of this name, or None."""
    if hasattr(module, "_moe_ops_over"):
        return "its experts are over ranks; add adapters to a model that holds all of them"
    if path.endswith(".base_layer"):
        return "peft wraps it; add adapters by its target_parameters, too"
    child = module._modules.get(CHILD)
    if isinstance(child, AddedAdapters) and name in child.by_name:
        return f"it has an adapter {name!r}; give another name, or remove_adapter first"
    found = stored_format(module) or describe(module)
    return found if isinstance(found, str) else None


class Sizes:
    """The sizes of a module of experts: E experts, of widths D of the model and I inside, and F
    rows of the first weight."""

    def __init__(self, E: int, F: int, D: int, I: int) -> None:  # noqa: E741
        self.E, self.F, self.D, self.I = E, F, D, I

    @classmethod
    def of(cls, module: Any) -> Sizes:
        stored = stored_format(module)
        found = stored or describe(module)
        act: Any = found.activation if isinstance(found, StoredFormat) else found
        suffix = "" if stored is None else stored.codes_suffix
        first = getattr(module, ("gate_up_proj" if act.gated else "up_proj") + suffix)
        second = getattr(module, f"down_proj{suffix}")
        rows = 2 if stored is None and module.is_transposed else 1  # codes have rows as outputs
        F = first.shape[rows]
        return cls(first.shape[0], F, second.shape[rows], F // 2 if act.gated else F)

    def shapes(self, target: str, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of A and B of a weight."""
        inputs, outputs = (self.D, self.F) if target == "w13" else (self.I, self.D)
        return (self.E, rank, inputs), (self.E, outputs, rank)


def first_of(module: Any) -> str:
    """The name of the weight of the first product."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def _targets(target: Sequence[str]) -> tuple[str, ...]:
    found = (target,) if isinstance(target, str) else tuple(target)
    for one in found:
        check_text("target", one)
        if one not in TARGETS:
            raise ValueError(f"target={one!r} must be one of {', '.join(TARGETS)}")
    if not found:
        raise ValueError("target names no weight; give w13, w2 or both")
    return tuple(t for t in TARGETS if t in found)


def _fresh(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], module: nn.Module
) -> tuple[Tensor, Tensor]:
    """A as torch makes a linear layer, and B of zeros, where the module's weights are."""
    options = where(module)
    a_ErD = torch.empty(shapes[0], **options)
    bound = a_ErD.shape[2] ** -0.5
    return a_ErD.uniform_(-bound, bound), torch.zeros(shapes[1], **options)


def where(module: nn.Module) -> dict[str, Any]:
    """The device and the dtype of the adapters of experts."""
    wide = torch.float64 if _float_of(module) == torch.float64 else torch.float32
    return {"device": next(module.parameters()).device, "dtype": wide}


def _float_of(module: Any) -> torch.dtype | None:
    """The dtype of experts in floats; None for codes."""
    return None if stored_format(module) is not None else module.down_proj.dtype

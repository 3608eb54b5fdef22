"""Float experts with adapters of peft, which wraps them once for each weight that is adapted."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops.hf.adapters.held import (
    MOST_RANK,
    Bank,
    Factors,
    HoldsAdapters,
    adapters_of,
    check_sequences,
    identity,
    reads_bank,
)
from moe_ops.hf.experts import describe, is_experts, run
from moe_ops.hf.report import warn_once
from moe_ops.interop.subclass import former_class, new_object, subclass
from moe_ops.interop.switches import INSIDE, Board, Switches, switches_of_peft

OURS = ("bank", "board")


class AdaptedExperts(HoldsAdapters):
    """What stands before the class of the outermost wrapper of experts: their weights and their
    adapters stay apart, where peft would make W + scale * B A of them in each forward."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = nn.Module.__reduce_ex__(self, protocol)
        if not self.bank.follows:  # of a model, whose copies are as it is
            return _new_adapted, (former_class(self),), reduced[2]
        state = {name: value for name, value in reduced[2].items() if name not in OURS}
        return new_object, (former_class(self),), state

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **others: Any
    ) -> Any:
        own = super().forward
        given = hidden_states, top_k_index, top_k_weights
        if others:  # of peft
            return own(*given, **others)
        base = experts_of(self)
        tensors = hidden_states, top_k_weights, *base.parameters(recurse=False)
        reason = self._reason(*tensors)
        if reason is not None:
            check_sequences(self, reason)
            warn_once(f"adapted {type(base).__name__} runs on W + scale * B A of peft: {reason}")
            return own(*given)
        adapters = adapters_of(self, *tensors)
        if not adapters:
            return own(*given)
        return run(base, describe(base), *given, lambda _, *same: own(*same), adapters)

    def _reason(self, *tensors: Tensor) -> str | None:
        return self.bank.refusal if reads_bank(self, *tensors) else self.refusal()

    def refusal(self) -> str | None:
        wrappers, base = list(wrappers_of(self)), experts_of(self)
        states = {(w.disable_adapters, w.merged, tuple(w.active_adapters)) for w in wrappers}
        if len(states) > 1:
            return "its weights have other adapters each"
        found = describe(base)
        if isinstance(found, str):
            return found
        if self.board.index is None and len(self.active()) > 1:
            return "several adapters are active at once"
        if self.merged and (self.disable_adapters or self.board.is_on):
            return "adapters are merged into the weights"
        if self.disable_adapters and self.board.is_on:
            return "adapters are disabled"
        if hasattr(base, "_moe_ops_over"):
            return "its experts are over ranks"
        inside = [base, *(w for w in wrappers if w is not self)]
        if any(map(_is_hooked, inside)):
            return "a hook is on what is inside of the wrapper"
        return next(filter(None, (_refusal(w, base) for w in wrappers)), None)

    def names(self) -> tuple[str, ...]:
        found = (name for wrapper in wrappers_of(self) for name in wrapper.r)
        return tuple(dict.fromkeys(found))

    def active(self) -> tuple[str, ...]:
        found = (name for wrapper in wrappers_of(self) for name in _active(wrapper))
        return tuple(dict.fromkeys(found))

    def factors(self, name: str) -> Factors:
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        scales: dict[str, float] = {}
        for wrapper in wrappers_of(self):
            if name in wrapper.r:
                which = "second" if wrapper.parameter_name == "down_proj" else "first"
                pairs[which] = _pair(wrapper, name)
                scales[which] = wrapper.scaling[name]
        scale = next(iter(scales.values()))
        if any(s != scale for s in scales.values()):
            pairs = {which: (a, b * scales[which]) for which, (a, b) in pairs.items()}
            scale = 1.0
        return Factors(scale=scale, first=pairs.get("first"), second=pairs.get("second"))

    def sources(self, name: str) -> list[Tensor]:
        return [t for w in wrappers_of(self) if name in w.r for t in _weights(w, name)]

    def scales(self, names: Sequence[str]) -> tuple[object, ...]:
        return tuple(w.scaling.get(name) for w in wrappers_of(self) for name in names)

    def pulse(self) -> Switches:
        found: list[object] = [self.board.index is None]
        module: Any = self
        while is_wrapper(module):
            own, modules = vars(module), module._modules
            active = own["_active_adapter"]
            found += [active] if isinstance(active, str) else active
            found += own.get("_disable_adapters", False), *own["merged_adapters"]
            found += own["scaling"].items()
            for name in ("lora_A", "lora_B"):
                for linear in modules[name]._modules.values():
                    found.append(identity(linear._parameters["weight"]))
            module = modules["base_layer"]
            found += len(module._forward_hooks), len(module._forward_pre_hooks)
        found += "forward" in vars(module), module._parameters["down_proj"].dtype
        return tuple(found)

    def dtype_for(self, tokens: torch.dtype) -> torch.dtype:
        dtype: torch.dtype = experts_of(self).down_proj.dtype
        return dtype

    @property
    def switched(self) -> Switches:
        if self.bank.follows and self.bank.refusal is None and self.bank.stack:
            return super().switched
        return (*super().switched, *map(switches_of_peft, wrappers_of(self)))


def _new_adapted(cls: Any) -> Any:
    return new_object(subclass(AdaptedExperts, cls))


def wrappers_of(module: nn.Module) -> Iterator[Any]:
    """The wrappers of experts from the outermost to the innermost; none where there is none."""
    while is_wrapper(module):
        yield module
        module = module.base_layer  # type: ignore[assignment]


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is peft's wrapper of a parameter."""
    is_peft = type(module).__module__.startswith("peft.")
    return is_peft and type(module).__name__ == "ParamWrapper"


def experts_of(module: nn.Module) -> Any:
    """What is inside of all wrappers."""
    while is_wrapper(module):
        module = module.base_layer  # type: ignore[assignment]
    return module


def run_apart(model: nn.Module, board: Board, *, shared: Container[int] = ()) -> int:
    """Have the wrapped experts of a model, but modules of these ids, run with weights and adapters
    apart; returns how many do so from now on. `board` is for new ones."""
    wrappers: list[Any] = [m for m in model.modules() if is_wrapper(m)]
    inside = {id(m.base_layer) for m in wrappers}
    done = 0
    for module in wrappers:
        is_ours = isinstance(module, AdaptedExperts) or id(module) in shared
        if is_ours or id(module) in inside or not is_experts(experts_of(module)):
            continue
        for wrapper in wrappers_of(module.base_layer):
            setattr(wrapper, INSIDE, True)
        kind: Any = type(module)
        module.bank, module.board = Bank(), board
        module.__class__ = subclass(AdaptedExperts, kind)
        done += 1
    return done


@contextmanager
def apart(model: nn.Module) -> Iterator[None]:
    """A context in which wrapped experts of a model, and of copies of it, run with weights and
    adapters apart."""
    before = {id(m): (m, m.bank) for m in model.modules() if isinstance(m, AdaptedExperts)}
    for module, _ in before.values():
        module.bank = Bank()
    run_apart(model, Board())
    try:
        yield
    finally:
        for module, bank in before.values():
            module.bank = bank
        for other in model.modules():
            if id(other) not in before:
                run_as_wrapped(other)


def run_as_wrapped(module: nn.Module) -> None:
    """Undo `run_apart` for a module, unless somebody follows what it holds."""
    if isinstance(module, AdaptedExperts) and not module.bank.follows:
        module.__class__ = former_class(module)
        for name in OURS:
            delattr(module, name)
        for wrapper in wrappers_of(module):
            vars(wrapper).pop(INSIDE, None)


def _refusal(wrapper: Any, base: Any) -> str | None:
    """Why the op cannot add the adapters of a wrapper, or None."""
    first = "gate_up_proj" if base.has_gate else "up_proj"
    if wrapper.parameter_name not in (first, "down_proj"):
        return f"{wrapper.parameter_name} has an adapter, and is no weight of a product"
    if wrapper._did_swap_in_out_features == bool(base.is_transposed):
        return f"the adapter of {wrapper.parameter_name} takes its outputs for inputs"
    if any(rank > MOST_RANK for rank in wrapper.r.values()):
        return f"an adapter has a rank above {MOST_RANK}"
    return None


def _active(wrapper: Any) -> list[str]:
    """The adapters that a forward of a wrapper adds."""
    if wrapper.disable_adapters or wrapper.merged:
        return []
    return [name for name in wrapper.active_adapters if name in wrapper.r]


def _pair(wrapper: Any, name: str) -> tuple[Tensor, Tensor]:
    """A [E, r, inputs] and B [E, outputs, r] of the layout in which peft holds them."""
    (a, b), E = _weights(wrapper, name), wrapper.num_experts
    return a.reshape(E, -1, a.shape[1]), b.reshape(b.shape[0], -1, E).permute(2, 0, 1)


def _weights(wrapper: Any, name: str) -> tuple[Tensor, Tensor]:
    """The parameters of an adapter of a wrapper."""
    a, b = (getattr(wrapper, f"lora_{letter}")[name].weight for letter in "AB")
    return a, b


def _is_hooked(module: nn.Module) -> bool:
    own = vars(module)
    return bool(own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own)

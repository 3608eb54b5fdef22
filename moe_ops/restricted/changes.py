"""What layers become when they keep some experts alone: found first for all, then done, and undone
where the others went to the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops.interop.told import are_watched
from moe_ops.main_grad import MAIN_GRAD
from moe_ops.prepared import HoldsExperts, as_loaded

FREED, CPU = "freed", "cpu"
ABSENT = object()  # of an attribute that an object has not itself
WATCHED = (
    "routings of the model are recorded or replayed, by the numbers that its experts have now; "
    "leave that context first"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sliced:
    """A parameter or buffer of a module with one entry for each expert on an axis."""

    path: str  # its name in the model
    module: nn.Module
    name: str
    axis: int
    more: int = 0  # entries after those of experts, which stay
    others: tuple[tuple[nn.Module, str], ...] = ()  # where the same tensor is besides

    @property
    def tensor(self) -> Tensor:
        found: Tensor = getattr(self.module, self.name)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """An attribute of a module or a configuration that gets another value, or none: ABSENT."""

    owner: Any
    name: str
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What one layer becomes; what is empty of it stays as it is."""

    name: str
    num_experts: int
    kept: tuple[int, ...]
    tensors: tuple[Sliced, ...] = ()
    settings: tuple[Setting, ...] = ()
    # What follows from these, both ways, given the number of experts that there are then.
    adopt: Callable[[int], None] | None = None

    @property
    def rest(self) -> tuple[int, ...]:
        kept = set(self.kept)
        return tuple(e for e in range(self.num_experts) if e not in kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restriction:
    """What `restrict_experts` did.

    kept: the former ids of the experts of each layer that was named; expert i is now kept[name][i].
    bytes_before, bytes_after: of all tensors with an entry for each expert. removed: the entries of
    the other experts, ascending, on the CPU, by the name of the tensor; empty if they were freed.
    """

    kept: Mapping[str, tuple[int, ...]]
    bytes_before: int
    bytes_after: int
    removed: Mapping[str, Tensor]
    _layers: tuple[Layer, ...] = field(repr=False)
    _settings: tuple[tuple[Setting, Any], ...] = field(repr=False)  # with the former value
    _undone: list[bool] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Give the model the removed experts again, in place, at their former ids.

        Raises ValueError if they were freed, if they are there again, and if the model was
        restricted further since, or is recorded or replayed now; nothing is changed then.
        """
        if self._undone:
            raise ValueError("this restriction was undone before; the experts are all there")
        if _are_watched(self._layers):
            raise ValueError(f"this restriction cannot be undone: {WATCHED}")
        for layer in self._layers:
            for one in layer.tensors:
                if one.path not in self.removed:
                    raise ValueError(
                        "the weights of the other experts were freed; load the model again, and "
                        "restrict it with removed='cpu' if it is to be undone"
                    )
                number = one.tensor.shape[one.axis] - one.more
                if number != len(layer.kept):
                    raise ValueError(
                        f"{one.path} has {number} experts, not the "
                        f"{len(layer.kept)} that this restriction left; undo the later one first"
                    )
        with torch.no_grad(), torch.inference_mode(False), _as_loaded(self._layers):
            for layer in self._layers:
                for one in layer.tensors:
                    _put(one, _joined(one, layer, self.removed[one.path]))
            for setting, before in reversed(self._settings):
                _set(setting.owner, setting.name, before)
            for layer in self._layers:
                if layer.adopt is not None:
                    layer.adopt(layer.num_experts)
        self._undone.append(True)


def refusal_of_tensors(layer: Layer) -> str | None:
    """Why the tensors of a layer cannot be cut, or None."""
    if _are_watched([layer]):
        return WATCHED
    for one in layer.tensors:
        t = one.tensor
        if type(t) not in (Tensor, nn.Parameter):
            return f"{one.path} is a {type(t).__name__}; cut weights that are whole, plain tensors"
        if t.is_meta:
            return (
                f"{one.path} is on the meta device, so it has no numbers; load the weights first, "
                "on devices with room for them: what a device_map offloads is there only while it "
                "runs"
            )
        if t.grad is not None or getattr(t, MAIN_GRAD, None) is not None:
            return (
                f"{one.path} has a gradient, which would be of other experts; restrict between "
                "steps, after zero_grad(set_to_none=True), and make the optimizer anew"
            )
    return None


@torch.inference_mode(False)
@torch.no_grad()
def restrict(layers: Sequence[Layer], others: Iterable[Setting], removed: str) -> Restriction:
    """Do what was found, one tensor at a time; raises nothing."""
    before = sum(one.tensor.nbytes for layer in layers for one in layer.tensors)
    gone: dict[str, Tensor] = {}
    with _as_loaded(layers):
        for layer in layers:
            for one in layer.tensors:
                if removed == CPU:
                    gone[one.path] = _entries(one, layer.rest).cpu()
                last = range(layer.num_experts, layer.num_experts + one.more)
                _put(one, _entries(one, (*layer.kept, *last)))
        settings = [s for layer in layers for s in layer.settings]
        done = []
        for setting in (*settings, *others):
            done.append((setting, vars(setting.owner).get(setting.name, ABSENT)))
            _set(setting.owner, setting.name, setting.value)
        for layer in layers:
            if layer.adopt is not None:
                layer.adopt(len(layer.kept))
    return Restriction(
        kept={layer.name: layer.kept for layer in layers}, bytes_before=before,
        bytes_after=sum(one.tensor.nbytes for layer in layers for one in layer.tensors),
        removed=gone, _layers=tuple(layers), _settings=tuple(done),
    )  # fmt: skip


def _are_watched(layers: Iterable[Layer]) -> bool:
    return are_watched(one.tensor for layer in layers for one in layer.tensors)


def _as_loaded(layers: Iterable[Layer]) -> ExitStack:
    """A context in which weights that are stored for a backend are as they were loaded."""
    modules = {id(one.module): one.module for layer in layers for one in layer.tensors}
    stack = ExitStack()
    stack.enter_context(as_loaded(m for m in modules.values() if isinstance(m, HoldsExperts)))
    return stack


def _entries(one: Sliced, ids: Sequence[int]) -> Tensor:
    t = one.tensor.detach()
    raw = _raw(t)
    at = torch.tensor(ids, dtype=torch.int64, device=t.device)
    return raw.index_select(one.axis, at).view(t.dtype)


def _joined(one: Sliced, layer: Layer, rest: Tensor) -> Tensor:
    """All entries again."""
    t = one.tensor.detach()
    last = range(layer.num_experts, layer.num_experts + one.more)
    order = torch.tensor((*layer.kept, *last, *layer.rest), device=t.device).argsort()
    both = torch.cat((_raw(t), _raw(rest.to(t.device))), one.axis)
    return both.index_select(one.axis, order).view(t.dtype)


def _raw(t: Tensor) -> Tensor:
    """Numbers of eight bits as bytes, as not every type can be gathered."""
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t


def _set(owner: Any, name: str, value: Any) -> None:
    if value is ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _put(one: Sliced, t: Tensor) -> None:
    parameter = one.module._parameters.get(one.name)
    if parameter is None:
        one.module._buffers[one.name] = t
        return
    made = nn.Parameter(t, requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    for module, name in ((one.module, one.name), *one.others):
        module._parameters[name] = made

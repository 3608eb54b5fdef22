"""Tensors made from a layer's checkpoint tensors, and made anew when those change.

A kernel may want swizzled scales, interleaved rows or products of scales. `Derived` keeps them
beside the checkpoint tensors, which stay what the checkpoint says: another backend derives what it
wants under another name, and `state_dict` does not know. `permute_experts` and `permute_experts_`
reorder the experts of all tensors of a layer at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops.shapes import INDICES, check_tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """A source as it was when something was derived from it. Keeps neither it nor its memory."""

    tensor: weakref.ref[Tensor]
    storage: weakref.ref[torch.UntypedStorage]
    state: tuple[object, ...]

    def is_still(self, tensor: Tensor) -> bool:
        # Addresses and ids are used again once freed; objects behind weak references are not.
        return (
            self.tensor() is tensor
            and self.storage() is tensor.untyped_storage()
            and self.state == _state(tensor)
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    sources: tuple[_Seen, ...]
    result: Tensor

    def is_of(self, sources: tuple[Tensor, ...]) -> bool:
        return len(self.sources) == len(sources) and all(
            seen.is_still(tensor) for seen, tensor in zip(self.sources, sources, strict=True)
        )


class Derived:
    """The tensors derived for one layer, each rebuilt when a source has changed.

    A source has changed if it is another tensor object, lies in other memory, has another shape,
    stride, dtype or device, or was written in place (`Tensor._version`). Two writes go unseen,
    because torch does not count them: through `source.data`, and through NumPy or a kernel that
    torch does not know. Call `forget` after those.

    Sources are held weakly; a derived tensor lives until it is rebuilt or forgotten. Copies and
    pickles are empty. Not safe for threads: two that ask at once may both build. Not for code
    under torch.compile: derive when weights are loaded, or before the compiled region.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def get(self, name: str, sources: tuple[Tensor, ...], build: Callable[..., Tensor]) -> Tensor:
        """`build(*sources)`, remembered under `name` until a source changes. Do not write to it.

        The name stands for what `build` does: one name with two builders returns what the first
        built. `build` runs without gradients and outside inference mode, so that the result serves
        any caller. Give the layer's own tensors as sources: a view made for the call is a new
        tensor each time. A result that shares memory with a source follows by itself, and is not
        kept: it would keep the source alive.

        Raises ValueError for no sources, and for tensors made under torch.inference_mode(), whose
        writes torch does not count; RuntimeError if `build` changes a source.
        """
        if not sources:
            raise ValueError(f"{name!r} needs at least one source tensor, got none")
        for place, source in enumerate(sources):
            _check_counts_writes(f"source {place} of {name!r}", source)
        entry = self._entries.get(name)
        if entry is not None and entry.is_of(sources):
            return entry.result
        del entry
        self._entries.pop(name, None)  # before the build, which then may use the memory
        seen = tuple(_see(source) for source in sources)
        with torch.inference_mode(False), torch.no_grad():
            result = build(*sources)
        for place, (before, source) in enumerate(zip(seen, sources, strict=True)):
            if not before.is_still(source):
                raise RuntimeError(
                    f"building {name!r} changed its source {place}, a checkpoint tensor; "
                    "build from a copy"
                )
        if all(result.untyped_storage() is not s.untyped_storage() for s in sources):
            self._entries[name] = _Entry(seen, result)
        return result

    def forget(self, name: str | None = None) -> None:
        """Drop what is kept under `name`, or everything. Nothing happens if there is nothing."""
        if name is None:
            self._entries.clear()
        else:
            self._entries.pop(name, None)

    def __reduce__(self) -> tuple[type[Derived], tuple[()]]:
        # A copy of the layer has sources of its own, and weak references cannot be pickled.
        return type(self), ()


def permute_experts(order: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of a layer with their experts in a new order: new[i] = old[order[i]], copied.

    The tensors are everything with one entry per expert on axis 0: values, scales, zeros, global
    scales, biases, and also the rows of the router. order: a permutation of 0 ... E - 1, int32 or
    int64 [E]. Results are new, carry no gradient, and the arguments stay as they are. Raises
    ValueError, naming the tensor, for one that does not have E experts.
    """
    _check_order(order)
    for name, tensor in tensors.items():
        _check_experts(name, tensor, order.numel())
    with torch.no_grad():
        return {name: t.index_select(0, order.to(t.device)) for name, t in tensors.items()}


def permute_experts_(order: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Reorder the experts of all tensors of a layer in place; what is derived from them follows.

    As `permute_experts`, written back to the tensors, Parameters too. Either all change or none:
    everything is checked and copied before the first write, at the price of a second layer's
    memory for that time. The copies also make tensors that share memory change once. Raises
    ValueError also for tensors made under torch.inference_mode() and for expanded ones.
    """
    for name, tensor in tensors.items():
        _check_counts_writes(name, tensor)
        if any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(f"{name} is expanded and cannot be written to; clone it first")
    permuted = permute_experts(order, tensors)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(permuted[name])


def _state(tensor: Tensor) -> tuple[object, ...]:
    return (
        tensor._version,
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
    )


def _see(tensor: Tensor) -> _Seen:
    return _Seen(weakref.ref(tensor), weakref.ref(tensor.untyped_storage()), _state(tensor))


def _check_counts_writes(name: str, tensor: Tensor) -> None:
    if tensor.is_inference():
        raise ValueError(
            f"{name} was made under torch.inference_mode(), where torch does not count writes; "
            "load weights under torch.no_grad() instead, or clone the tensor outside of it"
        )


def _check_order(order: Tensor) -> None:
    check_tensor("order", order, 1, INDICES)
    missing = set(range(order.numel())) - set(order.tolist())
    if missing:
        raise ValueError(
            f"order must hold each of the {order.numel()} experts once, but expert {min(missing)} "
            "is missing"
        )


def _check_experts(name: str, tensor: Tensor, experts: int) -> None:
    if tensor.dim() == 0 or tensor.shape[0] != experts:
        raise ValueError(
            f"{name} must have the {experts} experts of order on axis 0, got shape "
            f"{tuple(tensor.shape)}; leave out what experts share"
        )

"""Tensors without memory that say they are on a GPU: what host code sees where nothing is run.

Their results are shadows, too, and inside a `Shadows` context so is all that is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

ALIGNMENT = 16  # bytes, the only multiple of which Triton asks where a tensor begins
SOME_ROWS = 2


class Shadow(Tensor):
    """A tensor of a device, made of one on the meta device; its storage begins at address 0."""

    behind: Tensor

    @staticmethod
    def __new__(cls, behind: Tensor, device: torch.device) -> Shadow:
        shadow: Shadow = Tensor._make_wrapper_subclass(
            cls, behind.shape, strides=behind.stride(), storage_offset=behind.storage_offset(),
            dtype=behind.dtype, device=device,
        )  # fmt: skip
        shadow.behind = behind
        return shadow

    def data_ptr(self) -> int:
        return int(self.storage_offset()) * self.itemsize

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _shadowed(func, args, kwargs or {})


class Shadows(TorchDispatchMode):
    """A context in which what is allocated on a device is a shadow."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _shadowed(func, args, kwargs or {})


def _shadowed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device = kwargs.get("device")
    if device is not None:
        kwargs = {**kwargs, "device": "meta"}

    def behind(shadow: Shadow) -> Tensor:
        nonlocal device
        device = device or shadow.device
        return shadow.behind

    out = func(*_each(Shadow, behind, args), **_each(Shadow, behind, kwargs))
    return _each(Tensor, lambda t: Shadow(t, torch.device(device or "cpu")), out)


def _each(kind: type, change: Callable[[Any], Any], value: Any) -> Any:
    """A value with what is of a kind changed, also in the lists, tuples and dicts that operators
    take and return. torch's maps of trees take as long as all else together."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {name: _each(kind, change, x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_each(kind, change, x) for x in value])
    return value


def shadow_of(t: Tensor, rows: int | None = None) -> Shadow:
    """What stands for a tensor, or for one like it of so many rows: it begins alike within
    ALIGNMENT bytes, and rows lie as far apart, one behind the other where they did."""
    shape, stride = [*t.shape], [*t.stride()]
    if rows is not None:
        shape[0] = rows
        if t.is_contiguous():
            stride = [*torch.empty(shape, device="meta").stride()]
    return _placed(t, shape, stride, t.data_ptr() % ALIGNMENT // t.itemsize)


def shadow_of_traced(t: Tensor, any_rows: bool) -> Shadow | None:
    """What stands for a tensor of which a compiler knows the sizes, in memory that begins at a
    multiple of ALIGNMENT bytes; None if it does not. With `any_rows` it need not know the rows."""
    shape, stride = [*t.shape], [*t.stride()]
    begin: Any = t.storage_offset()
    if any_rows and not isinstance(shape[0], int):
        shape[0] = SOME_ROWS
    if not all(isinstance(n, int) for n in (*shape, *stride, begin)):
        return None
    return _placed(t, shape, stride, begin % max(1, ALIGNMENT // t.itemsize))


def _placed(t: Tensor, shape: list[int], stride: list[int], begin: int) -> Shadow:
    last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if all(shape) else -1
    with _disable_current_modes():  # of a compiler
        memory = torch.empty(begin + last + 1, dtype=t.dtype, device="meta")
        return Shadow(memory.as_strided(shape, stride, begin), t.device)

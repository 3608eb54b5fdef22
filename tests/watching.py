"""Whether calls of an op go by torch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Watching(TorchDispatchMode):
    """Notes the ops that torch's dispatcher sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def counted(overload: Callable[..., Any]) -> tuple[list[int], Callable[..., Any]]:
    """A list that grows by one for each call of the function beside it, which is an op's overload
    otherwise."""
    calls: list[int] = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return overload(*args, **kwargs)

    return calls, counting

"""A throw-away op that remembers, and who notes what is asked about its calls."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

SETTING: ContextVar[str] = ContextVar("tests_memo_setting", default="")


@dataclass(slots=True)
class RememberedCall:
    x: Tensor
    w: Tensor
    times: float = 2.0
    name: str = ""
    bias: Tensor | None = None


def remembered(call: RememberedCall) -> Tensor:
    """A throw-away op."""
    return call.x * call.times


def by_backend(call: RememberedCall) -> Tensor:
    return call.x * call.times


class Asked(list[str]):
    """Notes what is asked about calls."""

    def check(self, call: RememberedCall) -> None:
        self.append("check")
        if call.name == "bad" or call.x.dim() != 2:
            raise ValueError(f"bad: {call.name} {tuple(call.x.shape)}")

    def supports(self, call: RememberedCall) -> str | None:
        self.append("supports")
        return None

    def of(self, call: Callable[[], object]) -> list[str]:
        """What is asked about one call."""
        self.clear()
        call()
        return list(self)


BOTH = ["check", "supports"]


def tensors() -> tuple[Tensor, Tensor]:
    return torch.ones(3, 4), torch.zeros(2, 4)


def twice(call: Callable[[], object]) -> None:
    """After which calls like it are known."""
    for _ in range(2):
        call()

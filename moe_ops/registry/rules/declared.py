"""The rules of one op as a record, and how torch gets to know them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe_ops.registry.rules import flops

Formula = Callable[[Any], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What torch is told of an op. Each is a rule, or in words the reason why there is none.

    `flops` gives the floating-point operations of a call's products, two for each multiplication.
    """

    flops: Formula | str

    def register(self, name: str, call: Callable[..., Any]) -> None:
        """Tell torch of the rules that it keeps by the packet of an op's overloads, which is
        another one whenever an overload is defined. Of arguments `call` makes a record."""
        if not isinstance(self.flops, str):
            flops.register(name, call, self.flops)

"""The rules of one op as a record, and how torch gets to know them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.library import Library

from moe_ops.registry.rules import autocast, flops

Formula = Callable[[Any], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What torch is told of an op. Each is a rule, or in words the reason why there is none.

    `flops` gives the floating-point operations of a call's products, two for each multiplication.
    `autocast` names the arguments that torch.autocast casts.
    """

    flops: Formula | str
    autocast: tuple[str, ...] | str

    def implement(self, name: str, arguments: Iterable[str], library: Library) -> None:
        """Give torch's dispatcher what the rules of an op with these arguments say."""
        overload = getattr(torch.ops.moe_ops, name).default
        if not isinstance(self.autocast, str):
            autocast.implement(name, arguments, self.autocast, overload, library)

    def register(self, name: str, call: Callable[..., Any]) -> None:
        """Tell torch of the rules that it keeps by the packet of an op's overloads, which is
        another one whenever an overload is defined. Of arguments `call` makes a record."""
        if not isinstance(self.flops, str):
            flops.register(name, call, self.flops)

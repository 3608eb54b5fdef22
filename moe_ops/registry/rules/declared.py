"""The rules of one op as a record, and how torch gets to know them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.library import Library

from moe_ops.registry.record import Arguments
from moe_ops.registry.rules import autocast, flops
from moe_ops.registry.rules.sharding import Sharded
from moe_ops.registry.rules.vmap import Batched, Vmapped

Formula = Callable[[Any], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What torch is told of an op. Each is a rule, or in words why the op has none: what it does
    that needs none, or does instead.

    `flops` gives the floating-point operations of a call's products, two for each multiplication.
    `autocast` names the arguments that torch.autocast casts. `vmap` says how a batch is run,
    `sharding` how DTensors are.
    """

    flops: Formula | str
    autocast: tuple[str, ...] | str
    vmap: Batched | str
    sharding: Sharded | str

    def told(self) -> dict[str, str]:
        """Each consumer, and in words what it does with the op."""
        return {
            "flops": _or_reason(self.flops, "counts the products of the op by a formula"),
            "autocast": _or_reason(self.autocast, f"casts {_listed(self.autocast)}"),
            "vmap": _or_reason(self.vmap, str(self.vmap)),
            "sharding": _or_reason(self.sharding, str(self.sharding)),
        }

    def implement(self, name: str, arguments: Arguments, library: Library) -> None:
        """Give torch's dispatcher what the rules of an op with these arguments say."""
        overload = getattr(torch.ops.moe_ops, name).default
        names = tuple(arguments.signature.parameters)
        if not isinstance(self.autocast, str):
            autocast.implement(name, names, self.autocast, overload, library)
        if not isinstance(self.vmap, str):
            Vmapped(
                name=name, arguments=names, mutated=arguments.mutated, call=arguments.of,
                overload=overload, rule=self.vmap,
            ).register(library)  # fmt: skip

    def register(self, name: str, call: Callable[..., Any]) -> None:
        """Tell torch of the rules that it keeps by the packet of an op's overloads, which is
        another one whenever an overload is defined. Of arguments `call` makes a record."""
        if not isinstance(self.flops, str):
            flops.register(name, call, self.flops)


def _or_reason(rule: object, said: str) -> str:
    return f"no rule: it {rule}" if isinstance(rule, str) else said


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)

"""Exchanges that compiled code has to make, in their order, though nothing else asks for it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.node import has_side_effect
from torch.library import Library

from moe_ops.registry.watched import compiled

_library = Library("moe_ops", "FRAGMENT")
# That it has to be called keeps what it is given.
_library.define("kept(Tensor received) -> ()")
# A copy that is not made before the other tensor is there.
_library.define("after(Tensor t, Tensor received) -> Tensor")


def _nothing(received: Tensor) -> None:
    return None


def _copy(t: Tensor, received: Tensor) -> Tensor:
    return t.clone()


for _name, _run in (("kept", _nothing), ("after", _copy)):
    _library.impl(_name, _run, "CompositeExplicitAutograd")  # of fake tensors, too
has_side_effect(torch.ops.moe_ops.kept.default)


def keep(received: Tensor | tuple[Tensor, ...]) -> None:
    """Have compiled code receive this, a tensor or several of one exchange, where the program does,
    also where it is of no tokens.

    A rank without tokens takes part in an exchange for those of others. Its own result is empty,
    and Inductor leaves out what only empty results need: the others would wait for it. Where there
    are tokens Inductor moves an exchange to where its result is read, and so changes the order of
    two that do not need each other: they would get what was sent in the other one.
    """
    if compiled():
        first = received if isinstance(received, Tensor) else received[0]
        torch.ops.moe_ops.kept(first.detach())


def after(ids_TK: Tensor, received_TD: Tensor | None) -> Tensor:
    """The ids of tokens that are sent after others were received. Inductor puts exchanges that do
    not need each other in an order of its own, which is another one on other ranks."""
    if received_TD is None or not torch.compiler.is_compiling():
        return ids_TK
    later_TK: Tensor = torch.ops.moe_ops.after(ids_TK, received_TD.detach())
    return later_TK

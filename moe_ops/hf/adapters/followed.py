"""Adapters in the twin that `compile` makes of a model: banks that compiled code reads."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from moe_ops.hf.adapters.held import Bank, HoldsAdapters
from moe_ops.hf.adapters.wrapped import run_apart
from moe_ops.interop.switches import Board


class Banks:
    """The banks of a twin's adapters. `adapt` is called where the twin got new modules, `follow`
    before each call of it that runs compiled code."""

    def __init__(self) -> None:
        self._board = Board()
        self._held: list[HoldsAdapters] = []

    def adapt(self, twin: nn.Module, model: nn.Module) -> None:
        """Give the adapters of a model's twin banks of their own."""
        own = {id(module) for module in model.modules()}  # some cannot be twinned, and are shared
        run_apart(twin, self._board, shared=own)
        self._held = []
        for module in twin.modules():
            if isinstance(module, HoldsAdapters) and id(module) not in own:
                if not module.bank.follows:
                    module.bank, module.board = Bank(follows=True), self._board
                self._held.append(module)

    def follow(self, model: PreTrainedModel) -> None:
        """Make the banks what the twin's adapters are now, but for those in training."""
        if self._held:
            self._board.reset()
            dtype = model.dtype
            for holder in self._held:
                holder.bank.follow(holder, dtype, is_before=True)

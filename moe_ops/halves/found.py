"""What of a block sends tokens to other ranks, and why it might not do so in halves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops.checks.options import check_type
from moe_ops.layer.module import MoELayer
from moe_ops.layer.operands import operands_of
from moe_ops.layer.run import Ranks, Routed, arguments_over_ranks, why_by_parts
from moe_ops.ops import experts_over_ranks
from moe_ops.ops.dispatch_tokens import MOST_ROWS
from moe_ops.ops.experts_over_ranks import ExpertsOverRanksCall
from moe_ops.ranks.transport import AUTO, EXCHANGE, GATHER, PUSH
from moe_ops.registry.gradients import needs_grad
from moe_ops.registry.spec import FORCED


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanging:
    """The experts of a block. call: one of theirs without tokens; most: the tokens that a rank
    sends at once; experts: the names of their tensors; why: they do not take turns, or None."""

    call: ExpertsOverRanksCall
    most: int
    module: nn.Module
    why: str | None

    @property
    def group(self) -> str:
        return self.call.ranks.group

    @property
    def collective(self) -> str:
        return self.call.ranks.collective


def blocks_of(block: Any) -> tuple[nn.Module, ...]:
    """The blocks that run one after the other. Raises TypeError or ValueError for what is none."""
    if isinstance(block, nn.Module) and not isinstance(block, nn.ModuleList):
        return (block,)
    check_type("block", block, (nn.ModuleList, list, tuple), "an nn.Module or a sequence of them")
    for each in block:
        check_type("block", each, nn.Module, "an nn.Module or a sequence of them")
    if not len(block):
        raise ValueError("block is empty; give an nn.Module, or several of them")
    return tuple(block)


def exchanging(blocks: Sequence[nn.Module], x: Tensor) -> Exchanging:
    """The experts over ranks of the first block, of whose kind those of all are. Raises ValueError
    unless exactly one module of each exchanges tokens of a rank's own, all in one group."""
    found = [_of_block(block, x) for block in blocks]
    kinds = {(e.group, e.collective): e for e in found}
    if len(kinds) > 1:
        said = " and ".join(f"{group!r} by {collective!r}" for group, collective in kinds)
        raise ValueError(
            f"block: its blocks exchange tokens over {said}; give blocks that do so alike at once"
        )
    why = next((e.why for e in found if e.why is not None), None)
    return replace(found[0], most=min(e.most for e in found), why=why)


def _of_block(block: nn.Module, x: Tensor) -> Exchanging:
    x_TD = x.reshape(-1, x.shape[-1])[:0]
    found = {
        name or type(m).__name__: e for name, m in block.named_modules() if (e := _of(m, x_TD))
    }
    if not found:
        raise ValueError(
            f"block={type(block).__name__} has no module that exchanges tokens of a rank's own; "
            "give a block with a MoELayer of tokens='own' in it, or a decoder layer of a model "
            "after share_experts(model, group, tokens='own')"
        )
    if len(found) > 1:
        raise ValueError(
            f"block={type(block).__name__} exchanges tokens in {', '.join(found)}, and halves take "
            "turns at one exchange; give a sequence of blocks of one each"
        )
    return next(iter(found.values()))


def why_whole(blocks: Sequence[nn.Module], x: Tensor, experts: Exchanging) -> str | None:
    """Why this rank would not run blocks in halves, whatever it costs, or None."""
    if needs_grad(x, *(p for block in blocks for p in block.parameters())):
        return "a gradient is asked for"
    for name, module in (named for block in blocks for named in block.named_modules()):
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            return f"{name or 'the block'} is compiled, and runs from its start to its end"
    return experts.why


def transport_of(experts: Exchanging, rows: int, captured: bool, most_gathered: int | None) -> str:
    """By what two halves of so many rows send."""
    asked = _asked(experts.collective)
    if asked != AUTO:
        return asked
    gathers = captured or most_gathered is None or rows <= most_gathered
    return GATHER if gathers else EXCHANGE


def _of(module: nn.Module, x_TD: Tensor) -> Exchanging | None:
    sends = getattr(module, "_moe_ops_sends", None)
    if sends is not None:
        call: ExpertsOverRanksCall | None = sends(x_TD)
        if call is None:
            return None
        return Exchanging(call=call, most=MOST_ROWS, module=module, why=_why_not(call))
    if not isinstance(module, MoELayer) or module.exchange is None:
        return None
    held, exchange, K = operands_of(module), module.exchange, module.top_k + module.placement.shared
    like = x_TD.new_empty((0, module.sizes.hidden_size))
    routed = Routed(like, like.new_empty((0, K)), like.new_empty((0, K), dtype=torch.int64))
    ranks = Ranks(exchange, module.rank_of_P, module.slot_of_P)
    why = why_by_parts(held)
    # No tokens are in no order, and one of each expert's own is not of `experts_over_ranks`.
    args, options = arguments_over_ranks(replace(held, input_order=None), ranks, 1, routed)
    call = experts_over_ranks.call(*args, **options)
    if exchange.sharers > 1:
        why = "neighbours with the same tokens send a share each"
    return Exchanging(call=call, most=exchange.most, module=module, why=why or _why_not(call))


def _why_not(call: ExpertsOverRanksCall) -> str | None:
    if _asked(call.ranks.collective) == PUSH:
        return "push waits for other ranks on the multiprocessors that compute; take auto or gather"
    return None


def _asked(collective: str) -> str:
    """The transport that is asked for, or forced."""
    return (FORCED.get() or {}).get(experts_over_ranks.name, collective)

"""Several adapters in one batch: one for each sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from moe_ops.checks.options import check_type
from moe_ops.checks.signature import described
from moe_ops.hf.adapters.added import check_known, holders_of
from moe_ops.hf.adapters.held import HoldsAdapters, check_sequences
from moe_ops.hf.adapters.wrapped import is_wrapper
from moe_ops.interop.switches import CHECKS, Board, batch_of, may_branch


@contextmanager
def adapters(model: nn.Module, names: Sequence[str | None]) -> Iterator[None]:
    """Inside, each sequence of a batch has its own adapter of the experts, or none:

        with moe_ops.adapters(model, ["french", "code", None]):
            model.generate(input_ids)

    names: one for each sequence of the calls inside, in their order; None for none. Adapters are
    those of `add_adapter` and `load_adapter`, or those that peft's `target_parameters` made. A
    row's result is what its adapter alone gives. Beams and several results of a sequence have its
    adapter. Batches of other names share graphs. It goes for all calls of the model, in any thread,
    that has to be the one that is called: what `compile` returned, or one that was `optimize`d.

    Raises TypeError or ValueError for names that the model lacks, a model without adapters of
    experts, experts whose adapters peft adds, as `explain` says, layers that divide tokens among
    several modules of experts, and for a name that is also an adapter of other layers, which add
    one to all sequences. A call of another number of sequences raises ValueError.
    """
    check_type("model", model, nn.Module, "a model with experts")
    if isinstance(names, str) or not isinstance(names, Sequence) or not names:
        raise TypeError(
            f"names must have an adapter or None for each sequence, got {described(names)}"
        )
    held = _holders(model)
    for name in names:
        if name is not None:
            check_known(held, name)
    _check_layers(model)
    _check_others(model, {name for name in names if name is not None})
    board = held[0].board
    before = [holder.board for holder in held]
    entries, known_before = board.entries, board.names
    device = next(model.parameters()).device
    known = {holder.names() for holder in held}
    if len(known) != 1:
        raise ValueError(
            "layers have other adapters each, so that no number is the same in all of them; load "
            "the same adapters for all experts"
        )
    numbers = {name: i for i, name in enumerate(held[0].names())}
    for holder in held:
        holder.board = board
    given = [-1 if name is None else numbers[name] for name in names]
    board.turn_on(given, held[0].names(), device)
    checks, twins = _checks(model, board), _models(model, compiled=True)
    held_to = [twin.__dict__.get(CHECKS) for twin in twins]
    for twin in twins:
        twin.__dict__[CHECKS] = board
    try:
        for holder in held:
            check_sequences(holder, holder.refusal())
        yield
    finally:
        for check in checks:
            check.remove()
        for twin, outer in zip(twins, held_to, strict=True):
            twin.__dict__[CHECKS] = outer
        for holder, own in zip(held, before, strict=True):
            holder.board = own
        if entries:
            board.turn_on(entries, known_before, device)
        else:
            board.turn_off()


def _holders(model: nn.Module) -> list[HoldsAdapters]:
    """The modules with adapters of experts. Raises ValueError where there are none, or where peft
    adds them."""
    held = holders_of(model)
    if held:
        return held
    if any(map(is_wrapper, model.modules())):
        raise ValueError(
            f"this {type(model).__name__} has adapters of experts that peft adds, to all sequences "
            "alike; give it to moe_ops.compile, and the result here, or to moe_ops.optimize before"
        )
    raise ValueError(
        f"this {type(model).__name__} has no adapters of experts; add them by add_adapter, "
        "load_adapter or peft's target_parameters"
    )


def _checks(model: nn.Module, board: Board) -> list[RemovableHandle]:
    """Have calls of a model that is not compiled counted, as experts see tokens alone: calls of
    compiled ones lay out adapters themselves, and hooks would be in their way."""

    def check(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        batch = batch_of(args, kwargs)
        if batch is not None and module in called:  # a twin of it has the hook, too
            board.check(batch)

    called = _models(model, compiled=False)
    return [m.register_forward_pre_hook(check, with_kwargs=True) for m in called]


def _models(model: nn.Module, compiled: bool) -> list[nn.Module]:
    """The models of transformers with adapters in a module: those that are compiled, or the
    others."""
    found = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    return [m for m in found if (own := holders_of(m)) and own[0].bank.follows == compiled]


def _check_layers(model: nn.Module) -> None:
    """Raise ValueError if tokens may be divided among experts, so that these cannot tell which
    sequence one is of."""
    for path, layer in model.named_modules():
        if isinstance(layer, GradientCheckpointingLayer) and len(holders_of(layer)) > 1:
            raise ValueError(
                f"{path} ({type(layer).__name__}) has several modules of experts, which tokens are "
                "divided among; give each batch one adapter, by set_adapter"
            )


def _check_others(model: nn.Module, names: set[str]) -> None:
    """Raise ValueError if other layers have adapters of these names."""
    for path, module in model.named_modules():
        if isinstance(module, HoldsAdapters) or is_wrapper(module):
            continue
        shared = sorted(names & _names_of_peft(module))
        if shared:
            raise ValueError(
                f"{path} has an adapter {shared[0]!r}, too, which is no module of experts and adds "
                "one adapter to all sequences; give adapters of experts alone"
            )


def _names_of_peft(module: nn.Module) -> set[str]:
    """The adapters of a layer of peft, whose kinds hold them in tables of other names; none of
    another module."""
    kind: Any = type(module)
    if not may_branch(kind):
        return set()
    tables: list[Any] = [module._modules.get(name) for name in kind.adapter_layer_names]
    return {str(name) for table in tables if table is not None for name in table}

"""A live layer whose ranks become more or fewer: its experts go to where the new group has them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_ops.checks.options import check_flag, check_int, check_text, check_type
from moe_ops.layer.exchange import OWN_TOKENS, Exchange, check_group
from moe_ops.layer.loads import count_anew
from moe_ops.layer.module import MoELayer
from moe_ops.layer.parts import ALONE, LEFT, PARTIAL, Combination, Reduction, missing_exchange
from moe_ops.layer.resized import NOWHERE, TABLES, Change, move, replicated
from moe_ops.layer.tensors import layer_buffers
from moe_ops.main_grad import MAIN_GRAD
from moe_ops.ops.experts import experts
from moe_ops.parallel.config import ParallelConfig
from moe_ops.parallel.expert_map import ExpertPlacement
from moe_ops.ranks.agree import compare, said_together
from moe_ops.ranks.groups import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a layer's arguments for the new group make of it."""

    placement: ExpertPlacement
    exchange: Exchange | None
    reduction: Reduction
    most: int | None  # tokens that a rank sends at once, also while there is one rank


@torch.inference_mode(False)
@torch.no_grad()
def resize_layer(
    layer: MoELayer,
    parallel: ParallelConfig | None,
    group: str,
    *,
    over: str,
    joins: bool = False,
    tp_group: str = "",
    max_num_tokens: int | None = None,
) -> None:
    """Give a layer, in place, the experts that this rank holds in another group of ranks.

    For layers of whole experts, quantised or not, prepared for a backend or not, with any replicas.
    Every rank that is in the old group, in the new one or in both calls it between the same two
    steps: `over` is a group of all of them. parallel: of the new group, as for `MoELayer`. group:
    its name. Where tokens are a rank's own, they go over it; where reduce_results was the name of
    the old group, or of one rank True, it becomes that of this one. A function stays, and has to
    add over the new ranks. tp_group and max_num_tokens: as for `MoELayer`; without the latter it
    stays.

    A rank that leaves gives None and "": it keeps its weights, but its forward raises from then on.
    One that joins gives a layer that was made for the new group, and says so by `joins`. It gets
    replicated tensors too, as gate, shared experts and replicas, and its weights are prepared as
    those of the others. A group may be of one rank, before or after.

    An expert comes from a rank that holds it, its own first. One tensor at a time is held twice.
    Results stay the same. Loads are counted from zero. Weights get new addresses: what `capture`
    and `compile` captured is captured again, and a CUDA graph of your own has to be.

    Raises, on every rank, ValueError or TypeError for arguments and layers that cannot be resized
    like this, with the words of the rank that has them, and RuntimeError, naming the ranks, where
    they do not answer or have other layers, or those of `over` are not the ranks of one old and one
    new group; then nothing was moved.
    """
    check_type("layer", layer, MoELayer, "a MoELayer")
    found = Group.of(over, "over")
    asked, refusal = None, None
    try:
        check_flag("joins", joins)
        _check_layer(layer, parallel)
        asked = _asked(layer, parallel, joins, group, tp_group, max_num_tokens)
    except (TypeError, ValueError) as error:
        refusal = error
    change = _agreed(layer, asked, found, joins, refusal)
    own_layout = layer.layout
    layer.prepare_weights("")
    try:
        move(layer, change, found, joins)
        if asked is not None:
            _adopt(layer, asked)
    finally:
        layer.prepare_weights(_layout_here(change.layout) if joins else own_layout)
    if asked is None:
        layer._missing_exchange = LEFT
    layer._stored.resized += 1
    count_anew([layer])
    if layer.layout != change.layout:
        raise ValueError(
            f"the weights of the other ranks are prepared as {change.layout!r}, which no backend "
            "registered here; import the one that does, and call "
            f"moe_ops.prepare(layer, {change.layout!r}). Else all is done"
        )


def _check_layer(layer: MoELayer, parallel: ParallelConfig | None) -> None:
    """Raise ValueError or TypeError, saying what to do, unless a layer's experts are whole, before
    and after, and all of it can be given to other ranks."""
    check_type("parallel", parallel, (ParallelConfig, type(None)), "a ParallelConfig or None")
    configs = [config for config in (layer.parallel, parallel) if config is not None]
    for config in configs:
        if config.size > 1 and not config.uses_ep:
            raise ValueError(
                f"experts can move to a resized group where each rank holds whole ones, and this "
                f"is {config.describe()}; load a checkpoint into a new layer instead"
            )
    if layer._missing_exchange == LEFT:
        raise ValueError(LEFT)
    alone = all(config.size == 1 for config in configs)
    if layer.shared_experts is not None and layer.shared_reduction == PARTIAL and not alone:
        raise ValueError(
            "shared_reduction='partial' says that each rank's shared experts return a part of a "
            "sum, and how they are cut anew for other ranks only their module knows; give shared "
            "experts that are whole on every rank: shared_reduction='replicated'"
        )
    for name, t in layer.expert_tensors().items():
        given = getattr(layer, name)
        if given.grad is not None or getattr(given, MAIN_GRAD, None) is not None:
            raise ValueError(
                f"{name} has a gradient, which does not move with it; resize between steps, after "
                "zero_grad(set_to_none=True), and give it a new main_grad afterwards"
            )
        if t.is_inference():
            raise ValueError(
                f"{name} was made under torch.inference_mode(), so that it cannot be replaced "
                "outside; make the layer outside, and load weights under torch.no_grad()"
            )
    on_gpu = layer.w13_weight.is_cuda
    if on_gpu and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "a CUDA graph is captured, which would hold the weights of the old group; call "
            "resize_layer outside, and capture afterwards"
        )


def _asked(
    layer: MoELayer,
    parallel: ParallelConfig | None,
    joins: bool,
    group: str,
    tp_group: str,
    max_num_tokens: int | None,
) -> Asked | None:
    """What the arguments make of a layer; None of one whose rank leaves. Raises as `MoELayer`."""
    check_text("group", group)
    check_text("tp_group", tp_group)
    if max_num_tokens is not None:
        check_int("max_num_tokens", max_num_tokens, least=1)
    if parallel is None:
        if joins:
            raise ValueError("a rank that joins needs the ParallelConfig of the new group")
        if group or tp_group:
            raise ValueError(
                f"group={(group or tp_group)!r} is of the new ranks, of which one that gives "
                "parallel=None is none; give '', or the ParallelConfig"
            )
        return None
    if joins and layer.parallel != parallel:
        raise ValueError(
            f"a layer that joins is made for the new group, {parallel.describe()}, but this one is "
            f"{layer.parallel.describe()}"
        )
    exchange, reduction = None, layer.reduce_results
    most = layer.max_num_tokens if max_num_tokens is None else max_num_tokens
    if layer.tokens == OWN_TOKENS:
        given = {
            "parallel": parallel, "tokens": OWN_TOKENS, "group": group, "tp_group": tp_group,
            "max_num_tokens": most, "reduce_results": reduction, "quant": layer.quant,
        }  # fmt: skip
        exchange = Exchange.of(given)
    elif tp_group or max_num_tokens is not None:
        raise ValueError(
            "tp_group and max_num_tokens are read where ranks exchange tokens of their own, and "
            f"this layer has tokens={layer.tokens!r}; leave them out"
        )
    elif isinstance(reduction, str) and parallel.size == 1:
        reduction = ALONE
    elif isinstance(reduction, str) or group:
        check_group("group", group, parallel.size, parallel.rank, "reduce_results")
        reduction = group if isinstance(reduction, str) else reduction
    placement = layer.placement if joins else layer.placement.resized(parallel)
    how = replace(Combination.of(layer), reduction=reduction)
    how.check(parallel.size, exchange is not None and not exchange.tp_group)
    return Asked(placement=placement, exchange=exchange, reduction=reduction, most=most)


def _agreed(
    layer: MoELayer, asked: Asked | None, over: Group, joins: bool, refusal: Exception | None
) -> Change:
    """What all ranks agree on. Raises RuntimeError, naming them, unless they do, and the refusal of
    any of them."""
    before = None if joins else layer.placement
    after = None if asked is None else asked.placement
    own = {
        "place": (*_place(before), *_place(after)),
        "placed": None if before is None else _kind(before),
        "placed_anew": None if after is None else _kind(after),
        "layout": None if joins else layer.layout,
    }
    every = said_together(
        "resize_layer", {**_alike(layer, asked), **own}, over, refusal,
        own=("max_num_tokens", *own), device=layer.w13_weight.device,
    )  # fmt: skip
    for name in ("max_num_tokens", "placed", "placed_anew", "layout"):
        _compare_given(name, every)
    said = [values["place"] for values in every]
    for what, at in (("old", 0), ("new", 2)):
        named = [(row[at], row[at + 1]) for row in said if row[at + 1] != NOWHERE]
        size = len(named)
        if size == 0 or sorted(named) != [(size, rank) for rank in range(size)]:
            each = ", ".join(
                f"rank {r}: {row[at + 1]} of {row[at]}"
                if row[at + 1] != NOWHERE
                else f"rank {r}: -"
                for r, row in enumerate(said)
            )
            raise RuntimeError(
                f"the ranks of over={over.name!r} are not those of one {what} group: {each}; every "
                f"rank of it has to be in `over`, and give its own place"
            )
    first: dict[str, Any] = {
        name: next(v[name] for v in every if v[name] is not None)
        for name in ("placed", "placed_anew", "layout")
    }
    return Change(
        old=tuple(row[1] for row in said),
        new=tuple(row[3] for row in said),
        sizes=(max(row[0] for row in said), max(row[2] for row in said)),
        placed=(first["placed"].split()[0], first["placed_anew"].split()[0]),
        layout=first["layout"],
    )


def _compare_given(name: str, every: Sequence[Mapping[str, Any]]) -> None:
    """Raise RuntimeError, naming the ranks, unless all that give something give the same."""
    given = next((v[name] for v in every if v[name] is not None), None)
    compare("resize_layer", [{name: given if v[name] is None else v[name]} for v in every])


def _alike(layer: MoELayer, asked: Asked | None) -> dict[str, Any]:
    """What ranks of one layer have alike, but for max_num_tokens of one that leaves."""
    placement, others = layer.placement, dict(replicated(layer))
    exchange = None if asked is None else asked.exchange
    return {
        "num_experts": layer.num_experts, "P": placement.num_physical, "top_k": layer.top_k,
        "shared": placement.shared, "balanced": placement.balanced,
        "hidden_size": layer.sizes.hidden_size, "intermediate_size": layer.sizes.intermediate_size,
        "dtype": str(layer.w13_weight.dtype), "quant": str(layer.quant)[:100],
        "tokens": layer.tokens, "reduce_results": _said_of(layer.reduce_results),
        "activation": _checksum(layer.activation),
        "routing": _checksum(str(layer.routing)),
        "expert_tensors": _checksum(_forms(layer.expert_tensors(), 1)),
        "other_tensors": _checksum(_forms(others, 0)),
        "max_num_tokens": None if exchange is None else exchange.most,
    }  # fmt: skip


def _said_of(reduction: Reduction) -> str | None:
    """What adds the parts; a group may have another name on each rank, and may be to come."""
    return "a group" if isinstance(reduction, str) else reduction and "a function"


def _checksum(value: object) -> int:
    return zlib.crc32(repr(value).encode())


def _forms(tensors: Mapping[str, Tensor], axis: int) -> list[tuple[Any, ...]]:
    """Names, sizes from an axis on and dtypes."""
    return [(name, *t.shape[axis:], str(t.dtype)) for name, t in sorted(tensors.items())]


def _place(placement: ExpertPlacement | None) -> tuple[int, int]:
    if placement is None:
        return 0, NOWHERE
    return placement.config.ep_size, placement.config.ep_rank


def _kind(placement: ExpertPlacement) -> str:
    """How a group places experts, and what says whose tokens its ranks start with."""
    config = placement.config
    sizes = f"dp {config.dp_size}, pcp {config.pcp_size}, sp {config.sp_size}"
    return f"{placement.placement} {sizes}, {config.collective}"


def _layout_here(layout: str) -> str:
    """The layout of the others, or none where it is not known."""
    return layout if layout in experts.layouts else ""


def _adopt(layer: MoELayer, asked: Asked) -> None:
    """Write down who serves what in the new group."""
    placement, exchange = asked.placement, asked.exchange
    layer.placement, layer.parallel, layer.exchange = placement, placement.config, exchange
    layer.reduce_results = asked.reduction
    layer._missing_exchange = missing_exchange(placement.config, layer.tokens)
    layer.max_num_tokens = asked.most
    layer.expert_offset = placement.offset
    layer.sizes = replace(layer.sizes, E=placement.num_slots)
    slots = layer.expert_tensors()
    layer._specs = {
        name: replace(spec, shape=(placement.num_slots, *spec.shape[1:])) if name in slots and spec
        else spec
        for name, spec in layer._specs.items()
    }  # fmt: skip
    buffers = (placement, layer.sizes, layer.quant, exchange is not None)
    layer._first_buffers = partial(layer_buffers, *buffers)
    first = layer._first_buffers()
    for name in TABLES:
        made, own = first[name], getattr(layer, name)
        if made is None or own is None:  # one rank holds all, before or after
            device = layer.w13_weight.device
            setattr(layer, name, None if made is None else made.to(device))
        else:
            own.copy_(made)

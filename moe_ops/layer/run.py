"""The experts of a layer run: those of this rank on tokens given, or all ranks' on its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ops.layer.exchange import Exchange
from moe_ops.layer.parts import ordered_rows
from moe_ops.ops import combine_tokens, dispatch_tokens, experts, experts_over_ranks
from moe_ops.ops.experts_over_ranks import alike
from moe_ops.quant.scales import product
from moe_ops.ranks.groups import Group
from moe_ops.ranks.shares import in_shares, share_of
from moe_ops.ranks.transport import AUTO, GATHER
from moe_ops.registry.gradients import needs_grad, without_gradient

if TYPE_CHECKING:
    from moe_ops.layer.module import MoELayer

NO_GRADIENT = (
    "this MoELayer quantises its inputs, through which no gradients are defined, as rounding is "
    "flat; for inference call it under torch.inference_mode(), or train without quantised inputs"
)


def run_here(
    layer: MoELayer, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, map_P: Tensor | None
) -> Tensor:
    """The weighted sum of this rank's experts; map_P as `experts` takes it."""
    return _recorded(layer, partial(_run_here, layer, ids_TK=ids_TK, map_P=map_P), x_TD, weights_TK)


def _run_here(
    layer: MoELayer, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, map_P: Tensor | None
) -> Tensor:
    if layer.input_order is None or layer.input_order.dim() == 1:
        return _once(layer, _ordered(layer, x_TD), weights_TK, ids_TK, map_P)
    # Each expert has an order of its own: a pair of a token and an expert is a row.
    x_RD = ordered_rows(x_TD, ids_TK, layer.input_order, map_P)
    out_RD = _once(layer, x_RD, weights_TK.reshape(-1, 1), ids_TK.reshape(-1, 1), map_P)
    return out_RD.unflatten(0, ids_TK.shape).sum(1)


def run_over_ranks(
    layer: MoELayer,
    exchange: Exchange,
    rows: int,
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
) -> Tensor:
    """The weighted sum of the experts of all ranks for this rank's tokens, at most `rows`."""
    run = partial(_run_over_ranks, layer, exchange, rows, ids_TK=ids_TK)
    return _recorded(layer, run, x_TD, weights_TK)


def _recorded(
    layer: MoELayer, run: Callable[[Tensor, Tensor], Tensor], x_TD: Tensor, weights_TK: Tensor
) -> Tensor:
    """What a run makes of tokens and weights. Rounding is flat: where a gradient is wanted of what
    is quantised, a backward raises RuntimeError."""
    quantises = layer.quant is not None and bool(layer.quant.inputs)
    if not (quantises and needs_grad(x_TD, layer.w13_bias)):
        return run(x_TD, weights_TK)
    with torch.no_grad():
        out_TD = run(x_TD, weights_TK)
    sources = (x_TD, weights_TK, layer.w13_bias, layer.w2_bias)
    return without_gradient(out_TD, NO_GRADIENT, *sources)


def _run_over_ranks(
    layer: MoELayer,
    exchange: Exchange,
    rows: int,
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
) -> Tensor:
    if exchange.sharers == 1:
        return _exchanged(layer, exchange, rows, x_TD, weights_TK, ids_TK)
    group = Group.of(exchange.tp_group)
    run = partial(_exchanged, layer, exchange, share_of(rows, group))
    return in_shares(group, run, x_TD, weights_TK, ids_TK)


def _exchanged(
    layer: MoELayer,
    exchange: Exchange,
    rows: int,
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
) -> Tensor:
    tables = (layer.rank_of_P, layer.slot_of_P)
    group, collective = exchange.group, exchange.collective
    if layer.input_order is None or layer.input_order.dim() == 1:
        out_TD = experts_over_ranks(
            _padded(layer, _ordered(layer, x_TD)), weights_TK, ids_TK, layer.w13_weight,
            layer.w2_weight, *tables, rows, group, collective, b13_EF=layer.w13_bias,
            b2_ED=layer.w2_bias, **_options(layer),
        )  # fmt: skip
        return _cut(layer, out_TD)
    # An expert's order of columns is known where it lies.
    plain = _plain_options(layer)
    collective = GATHER if collective == AUTO else collective
    x_GD, _, weights_GK, ids_GK, *handle = dispatch_tokens(
        x_TD, weights_TK, ids_TK, *tables, rows, group, collective=collective,
        alike=alike(lambda name: plain[name], x_TD, group),
    )  # fmt: skip
    y_GD = run_here(layer, x_GD, weights_GK, ids_GK, None)
    return combine_tokens(y_GD, ids_TK, *tables, *handle, rows, group, collective)


def _once(
    layer: MoELayer, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, map_P: Tensor | None
) -> Tensor:
    out_TD = experts(
        _padded(layer, x_TD), weights_TK, ids_TK, layer.w13_weight, layer.w2_weight,
        layer.w13_bias, layer.w2_bias, expert_map=map_P,
        expert_offset=None if map_P is None else layer.expert_offset, **_options(layer),
    )  # fmt: skip
    return _cut(layer, out_TD)


def _options(layer: MoELayer) -> dict[str, Any]:
    """The arguments of `experts`, by name, that say what the layer computes with its weights."""
    return {
        **_plain_options(layer), "x_scale": layer.x_scale, "h_scale": layer.h_scale,
        "w13_scale_EFG": layer.w13_scale, "w2_scale_EDG": layer.w2_scale,
        "w13_zero_EFG": layer.w13_zero, "w2_zero_EDG": layer.w2_zero,
        "global_scale13_E": product(layer.w13_global_scale, layer.x_scale),
        "global_scale2_E": product(layer.w2_global_scale, layer.h_scale),
    }  # fmt: skip


def _plain_options(layer: MoELayer) -> dict[str, Any]:
    """Those that are no tensors."""
    act, quant = layer.activation, layer.quant
    return {
        "layout": layer.layout, "kind": act.kind, "gated": act.gated,
        "interleaved": act.interleaved, "alpha": act.alpha, "limit": act.limit,
        "up_shift": act.up_shift, "w_format": quant.weights if quant else "",
        "x_format": quant.inputs if quant else "",
    }  # fmt: skip


def _ordered(layer: MoELayer, x_TD: Tensor) -> Tensor:
    order = layer.input_order
    return x_TD if order is None else x_TD.index_select(1, order)


def _padded(layer: MoELayer, x_TD: Tensor) -> Tensor:
    added = layer.sizes.D - layer.sizes.hidden_size
    return F.pad(x_TD, (0, added)) if added else x_TD


def _cut(layer: MoELayer, out_TD: Tensor) -> Tensor:
    hidden = layer.sizes.hidden_size
    return out_TD[:, :hidden] if hidden < layer.sizes.D else out_TD

"""Layers of every format with random weights, and the share of one rank cut out of a whole one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ops.layer import MoELayer
from moe_ops.parallel.config import ParallelConfig
from moe_ops.quant import packing


@dataclass(frozen=True, kw_only=True)
class Split:
    """Sizes of the groups that share a layer."""

    name: str
    tp: int = 1
    dp: int = 1
    pcp: int = 1
    ep: bool = False

    def ranks(self) -> Iterator[ParallelConfig]:
        """The configuration of every rank."""
        for dp_rank in range(self.dp):
            for pcp_rank in range(self.pcp):
                for tp_rank in range(self.tp):
                    yield ParallelConfig.of(
                        tp=self.tp, dp=self.dp, pcp=self.pcp,
                        tp_rank=tp_rank, dp_rank=dp_rank, pcp_rank=pcp_rank,
                        expert_parallel=self.ep,
                    )  # fmt: skip


@torch.no_grad()
def randomize(layer: MoELayer, seed: int = 0) -> MoELayer:
    """Give a whole layer random weights, quantised by its format; returns the layer."""
    g = torch.Generator().manual_seed(seed)
    s, quant = layer.sizes, layer.quant
    for name, rows, columns in (("w13", s.F, s.D), ("w2", s.D, s.I)):
        w = torch.randn(s.E, rows, columns, generator=g) * columns**-0.5
        bias = getattr(layer, f"{name}_bias")
        if bias is not None:
            bias.copy_(torch.randn(bias.shape, generator=g) * 0.1)
        if quant is None:
            getattr(layer, f"{name}_weight").copy_(w)
            continue
        for e in range(s.E):
            global_scale = None
            if quant.format.has_global_scale:
                global_scale = packing.global_scale_of(w[e], quant.format)
                getattr(layer, f"{name}_global_scale")[e] = global_scale
            q = packing.quantize(w[e], quant.format, global_scale=global_scale)
            getattr(layer, f"{name}_weight")[e] = q.values
            getattr(layer, f"{name}_scale")[e] = q.scale
            if q.zero is not None:
                getattr(layer, f"{name}_zero")[e] = q.zero
    if layer.correction_bias is not None:
        layer.correction_bias.copy_(torch.randn(layer.num_experts, generator=g))
    if layer.x_scale is not None:
        # Tokens and activations of order one: the largest code stands for four of them.
        format = quant.input_format
        largest = format.largest * (448 if format.has_global_scale else 1)
        for t in (layer.x_scale, layer.h_scale):
            t.copy_(torch.linspace(4, 5, t.numel()) / largest)
    return layer


@torch.no_grad()
def take_share(whole: MoELayer, part: MoELayer) -> MoELayer:
    """Copy a rank's share of a whole layer's parameters into the layer of that rank."""
    placement = part.placement
    ids = list(placement.ids_of(placement.config.ep_rank))
    if part.replicas is not None:
        ids = part.replicas.physical_to_logical[ids].tolist()
    ids += range(whole.num_experts, whole.num_experts + placement.shared)
    for name, t in part.named_parameters(recurse=False):
        source = getattr(whole, name)
        one = name in ("x_scale", "h_scale") and not part.quant.per_expert_inputs
        if one or name == "correction_bias":
            t.copy_(source)
            continue
        source = source[ids] if source.dtype.itemsize > 1 else source.view(torch.uint8)[ids]
        t = t if t.dtype.itemsize > 1 else t.view(torch.uint8)
        for to, of in zip(halves(name, t, part), halves(name, source, whole), strict=True):
            copy_narrowed(name, to, of, part)
    if part.gate is not None:
        part.gate.load_state_dict(whole.gate.state_dict())
    return part


def halves(name: str, t: Tensor, layer: MoELayer) -> list[Tensor]:
    """The gate and the up rows of a first weight and of what goes with its rows."""
    activation = layer.activation
    if not name.startswith("w13") or not activation.gated or activation.interleaved:
        return [t]
    if t.dim() == 1 or (t.dim() == 3 and t.shape[1] == 1):
        return [t]  # for the whole matrix
    return list(t.chunk(2, dim=1))


def copy_narrowed(name: str, to: Tensor, of: Tensor, part: MoELayer) -> None:
    """Copy the rows (w13) or columns (w2) of a rank to the start of its tensor."""
    first, used = part.sizes.first, part.sizes.used
    axis = 1 if name.startswith("w13") else 2
    if axis == 1 and part.activation.gated and part.activation.interleaved:
        first, used = 2 * first, 2 * used
    values = units = 1
    if part.quant is not None:
        group = part.quant.format.group[axis - 1]
        storage = part.quant.format.parsed.storage
        if name.endswith(("scale", "zero")):
            values = group
        elif name.endswith("weight") and axis == 2:
            values, units = storage.values, storage.units
    if to.dim() > axis and values != -1:
        start, stop = first * units // values, -(-(first + used) * units // values)
        of = of.narrow(axis, start, stop - start)
    for other in range(1, to.dim()):
        to = to.narrow(other, 0, of.shape[other])
    to.copy_(of)


def pair(split: Split, **options: Any) -> tuple[MoELayer, list[MoELayer]]:
    """A whole layer and the layers of all ranks of a split, each for all tokens."""
    rank_only = ("intermediate_multiple", "hidden_multiple", "placement")
    whole = MoELayer(**{k: v for k, v in options.items() if k not in rank_only})
    randomize(whole)
    parts = [
        take_share(whole, MoELayer(**options, parallel=rank, tokens="replicated"))
        for rank in split.ranks()
    ]
    return whole, parts

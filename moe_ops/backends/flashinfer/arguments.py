"""Arguments of calls as FlashInfer's functions take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ops.backends.flashinfer import fits, package
from moe_ops.ops.experts import ExpertsCall
from moe_ops.registry.backend import is_aligned


@dataclass(slots=True)  # to freeze it would take longer than to make it
class Routed:
    """Which experts tokens go to, by ids among `experts` of which those from `offset` on are here;
    pairs with other ids add nothing."""

    ids_TK: Tensor  # int32
    weights_TK: Tensor  # float32
    experts: int
    offset: int


def routed(call: ExpertsCall, equal: bool = False) -> Routed:
    """Global ids and an offset where the experts here are consecutive, else slots of this rank.

    `equal`: an offset is taken only for one of equal shares, as ranks may hold one expert more.
    """
    c, E = call, call.w13_EFD.shape[0]
    weights_TK = _contiguous(c.weights_TK, torch.float32)
    if c.expert_map is None:
        return Routed(_contiguous(c.ids_TK, torch.int32), weights_TK, E, 0)
    total = c.expert_map.shape[0]
    offset = c.expert_offset
    if offset is not None and not (equal and (total % E or offset % E)):
        return Routed(_contiguous(c.ids_TK, torch.int32), weights_TK, total, offset)
    known_TK = (c.ids_TK >= 0) & (c.ids_TK < total)
    slots_TK = c.expert_map[c.ids_TK.clamp(0, total - 1).long()]
    ids_TK = _contiguous(torch.where(known_TK, slots_TK, -1), torch.int32)
    return Routed(ids_TK, weights_TK, E, 0)


def as_taken(call: ExpertsCall) -> bool:
    """Whether tokens, ids and weights are as FlashInfer takes them, and ids need no map."""
    c = call
    routing = ((c.ids_TK, torch.int32), (c.weights_TK, torch.float32))
    taken = is_aligned(c.x_TD) and all(_is_taken(t, dtype) for t, dtype in routing)
    return taken and (c.expert_map is None or c.expert_offset is not None)


def aligned(x_TD: Tensor) -> Tensor:
    """Tokens that begin at a multiple of 16 bytes, in a copy if need be: kernels read so many at
    once, and nothing checks it."""
    return x_TD if is_aligned(x_TD) else x_TD.clone()


def nvfp4(x_TD: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of tokens by one global scale, and their block scales, row by row."""
    made: tuple[Tensor, Tensor] = package.call(
        package.found("flashinfer", "fp4_quantize"),
        aligned(x_TD),
        global_scale=scale.reciprocal(),
        sf_vec_size=16,
        is_sf_swizzled_layout=False,
    )
    return made


def only_here(ids_TK: Tensor, experts: int) -> Tensor:
    """Slots with -1 in place of what is none, for functions that check nothing themselves."""
    return torch.where((ids_TK >= 0) & (ids_TK < experts), ids_TK, -1)


def activation_type(call: ExpertsCall) -> Any:
    """The member of FlashInfer's `ActivationType`."""
    kinds = package.module("flashinfer.fused_moe").ActivationType
    return getattr(kinds, fits.activation(call))


def _contiguous(t: Tensor, dtype: torch.dtype) -> Tensor:
    """`t` in `dtype` and contiguous. A check comes first because `to` and `contiguous` take a
    microsecond even where nothing is to be done."""
    return t if _is_taken(t, dtype) else t.to(dtype).contiguous()


def _is_taken(t: Tensor, dtype: torch.dtype) -> bool:
    return t.dtype is dtype and t.is_contiguous()

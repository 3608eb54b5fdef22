"""The factors of products with static inputs: made once, and anew after what they are made of was
written to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from moe_ops.quant.scales import product
from moe_ops.registry.backend import PLAIN
from moe_ops.registry.derived import Derived, written
from moe_ops.registry.watched import watched


@dataclass(frozen=True, slots=True)
class Kept:
    """The factors of one weight, and what writes them."""

    factors: Tensor
    derived: Derived


_KEPT: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by the global scales of a weight


def kept_product(global_scale_E: Tensor | None, scale: Tensor | None) -> Tensor | None:
    """`product`, at an address that stays: captured graphs read it, and run nothing that makes it.

    Where code is traced or watched it is what `product` gives, and so in a capture before which
    no call was.
    """
    if global_scale_E is None or scale is None or not _is_plain(global_scale_E, scale):
        return product(global_scale_E, scale)
    kept = _KEPT.get(global_scale_E)
    if kept is None or kept.factors.device != global_scale_E.device:
        if global_scale_E.is_cuda and torch.cuda.is_current_stream_capturing():
            return product(global_scale_E, scale)
        kept = _KEPT[global_scale_E] = _made(global_scale_E)
    kept.derived.follow(global_scale_E, scale)
    return kept.factors


def _made(global_scale_E: Tensor) -> Kept:
    with torch.inference_mode(False), torch.no_grad():
        factors = torch.empty_like(global_scale_E, requires_grad=False)

    def write(global_scale_E: Tensor, scale: Tensor) -> None:
        made = product(global_scale_E, scale)
        assert made is not None
        factors.copy_(made)
        written((factors,))

    return Kept(factors, Derived(write))


def _is_plain(*tensors: Tensor) -> bool:
    """Whether tensors have memory, and nobody looks at what is made of them."""
    if torch.compiler.is_compiling() or watched():
        return False
    return all(type(t) in PLAIN and not t.is_meta for t in tensors)

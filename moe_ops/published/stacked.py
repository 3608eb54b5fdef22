"""Experts in floats, published one tensor each, in the one tensor that a model has for all."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_ops.checks.shapes import FLOATS
from moe_ops.published.survey import Experts, Found
from moe_ops.weights.layouts import short

GATED = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
PLAIN = {"up_proj": ("w3",), "down_proj": ("w2",)}


def stacked(experts: Experts, module: nn.Module) -> dict[str, Tensor]:
    """The tensors of an experts module by attribute, from entries of single experts.

    Raises ValueError, naming file and entry, for one that is missing, has another shape or another
    dtype than a float, or is no part of such a module.
    """
    done: dict[str, Tensor] = {}
    left = {found.name for found in experts.parts.values()}
    for attribute, shards in (GATED if module.has_gate else PLAIN).items():
        for part, name in (("weight", attribute), ("bias", f"{attribute}_bias")):
            wanted = getattr(module, name, None)
            if not isinstance(wanted, Tensor):
                continue
            flip = part == "weight" and bool(module.is_transposed)
            into = torch.empty(wanted.shape, dtype=wanted.dtype)
            for e, one in enumerate(into):
                rows = one.T if flip else one
                both = len(shards) == 2 and (part, "w13", e) in experts.parts
                for i, shard in enumerate(("w13",) if both else shards):
                    found = experts.parts.get((part, shard, e))
                    if found is None:
                        raise ValueError(
                            f"{experts.prefix}.experts has no {part} of {shard} of expert {e}, "
                            f"beside {experts.first.name} (in {experts.first.file}); complete the "
                            "download"
                        )
                    of = 1 if both else len(shards)
                    half = _half(rows, i, of, bool(module.is_concatenated))
                    half.copy_(_read(found, half.shape))
                    left.discard(found.name)
            done[name] = into
    if left:
        raise ValueError(
            f"{min(left)} is no part of {type(module).__name__} (in {experts.first.file}); give "
            "the checkpoint of this model"
        )
    return done


def _half(rows: Tensor, i: int, of: int, halves: bool) -> Tensor:
    """The rows of gate or of up, which stand one after the other, or in turn."""
    if of == 1:
        return rows
    return rows.chunk(of)[i] if halves else rows[i::of]


def _read(found: Found, shape: torch.Size) -> Tensor:
    t = found.read()
    if t.shape != shape:
        raise ValueError(
            f"{found.name}: expected the shape {list(shape)}, found {list(t.shape)} (in "
            f"{found.file}); complete the download"
        )
    if t.dtype not in FLOATS:
        raise ValueError(f"{found.name} is {short(t.dtype)} among floats (in {found.file})")
    return t

"""Calls of `one_query_latents`, and what they give in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ops.testing import F32

NAN = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Sequences, heads, slots, widths of latents and of rotated keys, and how many are chosen."""

    B: int = 2
    H: int = 16
    S: int = 70
    R: int = 32
    D: int = 16
    chosen: int = 0
    sinks: bool = False
    adds: bool = False  # a mask of floats
    shared: int = 1  # queries of one sequence; B counts all


SIZES = {
    "8 heads": Size(H=8, B=3),
    "16 heads": Size(H=16, S=64),
    "20 heads": Size(H=20, S=100, R=64),
    "128 heads": Size(H=128, B=1),
    "one head": Size(H=1),
    "one slot": Size(S=1),
    "sinks": Size(H=20, sinks=True),
    "an added mask": Size(adds=True),
    "an added mask and sinks": Size(adds=True, sinks=True),
    "chosen": Size(chosen=24),
    "all chosen": Size(S=40, chosen=40, sinks=True),
    "chosen of an added mask": Size(H=20, chosen=33, adds=True),
    "nothing rotated": Size(H=20, D=0),
    "many slots": Size(B=1, S=600),
    "two queries": Size(B=4, H=20, shared=2, sinks=True),
    "chosen by three queries": Size(B=6, chosen=24, shared=3),
}


def arguments(size: Size, dtype: torch.dtype = F32, seed: int = 0) -> dict[str, Any]:
    """Sequences that see some slots: the first one alone, the others from a few on, up to half."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    B, H, S, R, D = size.B, size.H, size.S, size.R, size.D
    ends = torch.randint(1 + S // 3, 1 + S // 2 + S % 2, (B, 1), generator=generator)
    seen = torch.arange(S) < ends
    seen[1:, : S // 8] = False
    seen[:, 0] |= ~seen.any(1)
    if B > 1:
        seen[0] = torch.arange(S) == S // 3
    call: dict[str, Any] = {
        "q_BHR": noise(H, B, R).transpose(0, 1),
        "q_rope_BHD": noise(B, H, D + 8)[..., 8:],
        "latents_BSR": noise(B // size.shared, S, R),
        "rotated_BSD": noise(B // size.shared, S, D),
        "mask_BS": seen,
        "scale": 0.3,
    }
    if size.adds:
        call["mask_BS"] = torch.where(seen, noise(B, S).float(), torch.finfo(dtype).min).to(dtype)
    call["sinks_H"] = noise(H) if size.sinks else None
    call["indices_BC"] = None
    if size.chosen:
        # Seen ones first, as they have the highest scores, then others; and some that are no slots.
        order = (torch.rand(B, S, generator=generator) - 0.5 * seen).argsort(1)[:, : size.chosen]
        order[:, -2:] = torch.tensor([-1, S])
        call["indices_BC"] = order.contiguous()
    return call


def chosen(call: dict[str, Any]) -> Tensor:
    """[B, S]: the slots that may be looked at."""
    if call["indices_BC"] is None:
        return torch.ones(call["mask_BS"].shape, dtype=torch.bool)
    return (call["indices_BC"][..., None] == torch.arange(call["mask_BS"].shape[1])).any(1)


def seen_by(call: dict[str, Any]) -> Tensor:
    """[B, S]: the slots that a sequence sees."""
    mask = call["mask_BS"]
    shown = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return shown & chosen(call)


def definition(call: dict[str, Any]) -> Tensor:
    """In float64, one sequence after the other, of the slots alone that it sees."""
    rows = []
    for b, seen in enumerate(seen_by(call)):
        shared = len(call["q_BHR"]) // len(call["latents_BSR"])
        q, q_rope = (call[n][b].double() for n in ("q_BHR", "q_rope_BHD"))
        latents, rotated = (call[n][b // shared].double() for n in ("latents_BSR", "rotated_BSD"))
        scores = (q @ latents[seen].T + q_rope @ rotated[seen].T) * call["scale"]
        if call["mask_BS"].dtype != torch.bool:
            scores = scores + call["mask_BS"][b, seen].double()
        if call["sinks_H"] is not None:
            scores = torch.cat([scores, call["sinks_H"].double()[:, None]], 1)
        rows.append(scores.softmax(1)[:, : int(seen.sum())] @ latents[seen])
    return torch.stack(rows).to(F32)


def with_garbage(call: dict[str, Any]) -> dict[str, Any]:
    """The same call with NaN in all slots behind the last that queries of a sequence see, and, if
    they chose some, in those that they did not choose."""
    call = {**call, **{n: call[n].clone() for n in ("latents_BSR", "rotated_BSD")}}
    queries = (len(call["latents_BSR"]), -1)
    picked = chosen(call).unflatten(0, queries).any(1)
    for b, seen in enumerate(seen_by(call).unflatten(0, queries).any(1)):
        end = int(seen.nonzero().max()) + 1
        behind = torch.arange(len(seen)) >= end
        if call["indices_BC"] is not None:
            behind = ~picked[b]
            behind[0] = False
        call["latents_BSR"][b, behind] = call["rotated_BSD"][b, behind] = NAN
    return call

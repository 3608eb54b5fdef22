"""Weights, tokens and routings of a layer that take turns, so that no call finds them in a cache.

Everything is made on the device: some layers hold gigabytes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ops.bench.formats import matrices
from moe_ops.bench.rates import Work
from moe_ops.checks.shapes import check_choice
from moe_ops.ops import route
from moe_ops.planning.layers import ROUTINGS
from moe_ops.quant import packing
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.formats import Format
from moe_ops.testing import Case

MOST_SETS, MOST_COPIES = 8, 8
# A token reads a quarter as much in 4 bits; so more calls lie between two uses of a weight.
FEW_TOKENS, MOST_SETS_OF_FEW = 4, 16
MANY_TOKENS = 4096  # from which on one call moves more than any cache holds, and two sets will do
CPU_CACHE = 2**26
# Between two uses of a weight other calls move this many times what the cache holds.
CACHES_BETWEEN = 3
MEMORY_SHARE = 0.4  # of what is free, for copies of weights
CALIBRATED = 4096  # tokens that static scales of inputs are made of


# Scales, zeros and global scales of both weights, as `moe` names them.
BESIDE = (
    ("w13_scale_EFG", "w13_zero_EFG", "global_scale13_E"),
    ("w2_scale_EDG", "w2_zero_EDG", "global_scale2_E"),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """The weights of a gated layer; with `quant`, their codes and what decodes them."""

    w13_EFD: Tensor
    w2_EDI: Tensor
    quant: QuantConfig | None = None
    beside: dict[str, Tensor] = field(default_factory=dict)  # scales and zeros, as `moe` names them
    layout: str = ""  # in which a backend reads them

    @property
    def nbytes(self) -> int:
        tensors = (self.w13_EFD, self.w2_EDI, *self.beside.values())
        return sum(t.nbytes for t in tensors)

    @property
    def keywords(self) -> dict[str, Any]:
        """What `moe` takes beside the two weights."""
        given: dict[str, Any] = {"layout": self.layout} if self.layout else {}
        if self.quant is None:
            return given
        return {
            **given,
            **self.beside,
            "w_format": self.quant.weights,
            "x_format": self.quant.inputs,
        }

    def expert(self, e: int) -> tuple[Tensor, Tensor]:
        """Both weights of an expert in float32, decoded if they are codes."""
        if self.quant is None:
            return self.w13_EFD[e].float(), self.w2_EDI[e].float()
        decoded = []
        for values, names in zip((self.w13_EFD, self.w2_EDI), BESIDE, strict=True):
            scale, zero, common = (self.beside.get(name) for name in names)
            assert scale is not None, "every format has scales"
            own = (None if t is None else t[e] for t in (zero, common))
            decoded.append(packing.dequantize(values[e], scale[e], self.quant.format, *own))
        return decoded[0], decoded[1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routed:
    """Tokens, their logits, and the routing that the logits give: weights that sum to 1."""

    x_TD: Tensor
    logits_TE: Tensor
    weights_TK: Tensor  # float32
    ids_TK: Tensor  # int32
    rounded_TK: Tensor  # as transformers' routers give both: weights in x's dtype,
    wide_TK: Tensor  # and ids in int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """How many copies of the weights and sets of inputs take turns; whether that is enough."""

    copies: int
    sets: int
    cold: bool


def make_weights(
    case: Case, dtype: torch.dtype, g: torch.Generator, quant: QuantConfig | None = None
) -> Weights:
    """Normal weights that keep the size of what they multiply; with `quant`, their codes."""
    if quant is not None:
        return _quantized_weights(case, dtype, g, quant)

    def normal(rows: int, cols: int) -> Tensor:
        w = torch.empty(case.E, rows, cols, dtype=dtype, device=g.device)
        return w.normal_(std=cols**-0.5, generator=g)

    return Weights(w13_EFD=normal(2 * case.I, case.D), w2_EDI=normal(case.D, case.I))


def _quantized_weights(
    case: Case, dtype: torch.dtype, g: torch.Generator, quant: QuantConfig
) -> Weights:
    codes: list[Tensor] = []
    beside: dict[str, Tensor] = {}
    for (_, rows, cols), names in zip(matrices(case), BESIDE, strict=True):
        values, *others = _quantized(case.E, (rows, cols), dtype, g, quant.format)
        codes.append(values)
        beside |= {n: t for n, t in zip(names, others, strict=True) if t is not None}
    weights = Weights(w13_EFD=codes[0], w2_EDI=codes[1], quant=quant, beside=beside)
    if quant.static_inputs:
        beside |= _static_scales(case, weights, g, Format.of(quant.inputs))
    return weights


def _static_scales(
    case: Case, weights: Weights, g: torch.Generator, format: Format
) -> dict[str, Tensor]:
    """Scales of both products' inputs, as a calibration has them: the largest of CALIBRATED tokens
    and of what one expert makes of them are the largest codes."""
    x_TD = torch.empty(CALIBRATED, case.D, device=g.device).normal_(generator=g)
    w13_FD, _ = weights.expert(0)
    gate_TI, up_TI = F.linear(x_TD, w13_FD).chunk(2, dim=-1)
    largest = (t.abs().amax().reshape(1) for t in (x_TD, F.silu(gate_TI) * up_TI))
    return {n: t / format.largest for n, t in zip(("x_scale", "h_scale"), largest, strict=True)}


def _quantized(
    E: int, shape: tuple[int, int], dtype: torch.dtype, g: torch.Generator, format: Format
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Codes, scales, zeros and global scales of E normal matrices. One of them at a time is made
    in `dtype`: all of a large layer would not leave room for the codes.
    """
    (rows, cols), parsed, device = shape, format.parsed, g.device
    values = torch.empty(E, rows, parsed.packed(cols), dtype=parsed.storage.dtype, device=device)
    groups = (E, *parsed.scale_shape(rows, cols))
    scale = torch.empty(groups, dtype=parsed.scale_dtype, device=device)
    zero = torch.empty(groups, dtype=torch.uint8, device=device) if format.has_zero else None
    common = torch.empty(E, device=device) if format.has_global_scale else None
    w = torch.empty(shape, dtype=dtype, device=device)
    for e in range(E):
        w.normal_(std=cols**-0.5, generator=g)
        own = packing.global_scale_of(w, format) if format.has_global_scale else None
        done = packing.quantize(w, format, global_scale=own)
        values[e], scale[e] = done.values, done.scale
        if zero is not None and done.zero is not None:
            zero[e] = done.zero
        if common is not None and own is not None:
            common[e] = own
    return values, scale, zero, common


def make_routed(case: Case, T: int, routing: str, dtype: torch.dtype, g: torch.Generator) -> Routed:
    """Normal tokens, and logits by one of ROUTINGS.

    "uniform": every expert as often as any other. "zipf": the n-th most popular one n times less
    often than the first, as far as the choices of one token, which are different, allow.
    """
    logits_TE = make_logits(case, T, routing, dtype, g)
    weights_TK, ids_TK = route.reference(logits_TE, case.K, renormalize=True)
    x_TD = torch.empty(T, case.D, dtype=dtype, device=g.device).normal_(generator=g)
    return Routed(
        x_TD=x_TD,
        logits_TE=logits_TE,
        weights_TK=weights_TK,
        ids_TK=ids_TK,
        rounded_TK=weights_TK.to(dtype),
        wide_TK=ids_TK.long(),
    )


def make_logits(case: Case, T: int, routing: str, dtype: torch.dtype, g: torch.Generator) -> Tensor:
    """Logits whose largest K are a routing, with no tie at the K-th."""
    check_choice("routing", routing, ROUTINGS)
    uniform_TE = torch.rand(T, case.E, generator=g, device=g.device)
    # The largest K of log p + Gumbel noise are K draws without replacement.
    noise_TE = -uniform_TE.clamp(1e-20, 1 - 2**-24).log().neg().log()
    if routing == "zipf":
        # The popular experts are the same ones in every set, as they are in a model.
        order = torch.randperm(case.E, generator=torch.Generator().manual_seed(0)) + 1
        noise_TE -= order.to(g.device).log()
    return without_tie(noise_TE.to(dtype), noise_TE.topk(case.K, dim=-1).indices)


def without_tie(logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    """The logits with those that are not chosen clearly below the least that is: after rounding, or
    in a softmax, they may be equal, and which of them a backend takes is its own affair.
    """
    chosen_TE = torch.zeros_like(logits_TE, dtype=torch.bool).scatter(1, chosen_TK, True)
    least_T1 = logits_TE.gather(1, chosen_TK).amin(-1, keepdim=True)
    below_T1 = least_T1 - 2**-6 * least_T1.abs().clamp(min=2**-6)
    return torch.where(chosen_TE, logits_TE, torch.minimum(logits_TE, below_T1))


def rotate(
    works: Sequence[Work],
    copy_bytes: int,
    device: torch.device,
    kept: int = 0,
    most: int = MOST_COPIES,
) -> Rotation:
    """The rotation for calls of this work, each of which may touch the same experts; so many copies
    of the weights are kept already.
    """
    needed = CACHES_BETWEEN * cache_bytes(device)
    least = min(work.bytes for work in works)
    fit = int(MEMORY_SHARE * (free_bytes(device) + kept * copy_bytes) // copy_bytes)
    copies = max(1, min(int(needed // least) + 1, fit, most, len(works)))
    sets = copies * (len(works) // copies)  # whole turns: the last copy is followed by the first
    return Rotation(copies=copies, sets=sets, cold=copies * least > needed)


def sets_for(T: int, quant: QuantConfig | None = None) -> int:
    """How many sets of inputs to make at most."""
    if quant is not None and T <= FEW_TOKENS:
        return MOST_SETS_OF_FEW
    return MOST_SETS if T < MANY_TOKENS else 2


def cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return CPU_CACHE


def free_bytes(device: torch.device) -> int:
    """Memory that nobody uses, with what torch keeps for itself."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + kept)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

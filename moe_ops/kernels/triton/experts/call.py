"""A call of experts while it runs, as its launches read it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton import brings_decoder
from moe_ops.kernels.triton.experts.adapters import NOTHING, Added
from moe_ops.kernels.triton.experts.formats.codes import Codes
from moe_ops.kernels.triton.experts.schedule.batches import Batches
from moe_ops.kernels.triton.experts.schedule.sort import most_units
from moe_ops.kernels.triton.experts.schedule.tile_map import TileMap
from moe_ops.kernels.triton.experts.weights import Experts

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """How the products of a path read x and h.

    gathered  x has a row for each pair, in the order of experts; else one for each token
    arranged  codes of these bits meet columns in the order of `order.py`
    in_words  inputs of 8 bits come in words of 32 bits
    float8    inputs of float8 that other paths emulate are codes, in the order of `order.py`
    stores    the codes that the first product stores: by "static" scales, or by those of a "group"
    weighs    h, or its scales, are multiplied by weights of routing; else the last sum does that
    """

    gathered: bool = False
    arranged: tuple[int, ...] = ()
    in_words: bool = False
    float8: bool = False
    stores: str = ""
    weighs: bool = False

    @property
    def apart(self) -> Reads:
        """Where the first product stores h as it is, and nothing has weights of routing but the
        last sum, as on the paths for many rows."""
        return replace(self, weighs=False, stores="") if self.weighs else self


@dataclass(slots=True)
class Operand:
    """x or h as a product reads it; codes have scales. Pair p reads row p // `choices` of x."""

    values: Tensor
    scale: Tensor | None = None
    choices: int = 1


@dataclass(slots=True, kw_only=True)
class Call:
    """The arguments of a call, and what `run` of `driver.py` has made of them so far."""

    layer: Experts  # decoded, if its codes are decoded first
    codes: Codes | None  # those of the layer before that
    sizes: tuple[int, int, int]  # E, D, I
    reads: Reads
    ids_TK: Tensor
    expert_map: Tensor | None
    residual_TD: Tensor | None
    # By which the products multiply h or its scales, if they do; behind `tiny_up` its shares.
    weights: Tensor | None
    dtype: torch.dtype  # of results
    tiles: Any  # the sizes of launches, None for products that have one
    rounds_x: bool = False  # whether the products make codes of x, and of h, as they load them
    rounds_h: bool = False
    batches: Batches | None = None  # tokens are the slots of these
    invariant: bool = False  # whether rows are computed as those of any other number are
    # Weights of routing by which the second product of pairs that are not sorted sums them then.
    summed: Tensor | None = None
    # If pairs are sorted, the pair in each row, ends of experts; where rows stay in their slots,
    # None and the counts of batches.
    order: tuple[Any, ...] = ()
    inverse_R: Tensor | None = None  # and the row of each pair
    table: Tensor | None = None  # of experts in use, which `tiny_up` writes
    tile_map: TileMap = field(init=False)  # of sorted rows, for products with a table of tiles
    references: tuple[Tensor | None, Tensor | None] = None, None  # of weights, see `references.py`
    added13: Added = NOTHING  # what the products add for adapters
    added2: Added = NOTHING
    x: Operand = field(init=False)
    h: Operand = field(init=False)
    out: Tensor = field(init=False)  # rows of pairs; of pairs that are not sorted, the result

    @property
    def arranges(self) -> bool:
        """Whether tokens are arranged for codes; those that a decoder of another package makes
        values of meet columns in order."""
        codes = self.codes
        if codes is None or brings_decoder(codes.weight):
            return False
        return codes.bits in self.reads.arranged

    @property
    def static(self) -> Tensor | None:
        """The static scales by which the first product stores h as codes, if it does."""
        return None if self.codes is None or self.h.scale is None else self.codes.h_scale

    @property
    def rounded(self) -> tl.dtype | None:
        """What h is rounded to before the first product makes codes of it by static scales."""
        return None if self.static is None else DTYPES[self.dtype]

    @property
    def n_map(self) -> int:
        return 0 if self.expert_map is None else self.expert_map.shape[0]

    @property
    def BE(self) -> int:
        """Experts as vectors have them."""
        return max(2, triton.next_power_of_2(self.sizes[0]))

    @property
    def slots(self) -> int | None:
        """The slots of each expert, where rows stay in them; None of rows that are sorted."""
        return self.batches.slots if self.batches is not None and self.inverse_R is None else None

    @property
    def loops(self) -> bool:
        """Whether there may be more units of work than programs, which take several then."""
        return self.batches is not None

    def units(self, rows: int) -> int:
        """The most units of work of up to so many rows of an expert; of batches, as many as the
        rows make that are expected, however they fall."""
        R, E = self.ids_TK.numel(), self.sizes[0]
        return most_units(R if self.batches is None else E * self.batches.expected, E, rows)

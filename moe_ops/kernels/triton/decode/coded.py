"""Linear layers of one input whose weights are codes of one format, as their kernels take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from moe_ops.kernels.triton import Weight
from moe_ops.kernels.triton.decode.blocks import MOST
from moe_ops.kernels.triton.experts.formats.codes import as_stored, scales_as_stored

Some = Sequence[Tensor | None]


class Coded(NamedTuple):
    """Codes [N, K packed] of each layer and what belongs to them. Zero points and global scales are
    there for all layers, or for none."""

    weights: Sequence[Tensor]
    scales: Sequence[Tensor]
    zeros: Some
    global_scales: Some
    biases: Some
    weight: Weight

    def part(self, part: slice) -> Coded:
        """Some of the layers."""
        return Coded(
            self.weights[part], self.scales[part], self.zeros[part], self.global_scales[part],
            self.biases[part], self.weight,
        )  # fmt: skip

    @property
    def sizes(self) -> list[int]:
        """The rows of each weight."""
        return [w.shape[0] for w in self.weights]

    @property
    def row(self) -> int:
        """The words or bytes of a row, as `as_stored` has them."""
        return as_stored(self.weights[0], self.weight).shape[1]

    @property
    def factors(self) -> list[Tensor]:
        """The scales of each weight, as kernels read them."""
        return [scales_as_stored(scale, self.weight) for scale in self.scales]

    def results(
        self, x_TK: Tensor, launch: Callable[[Coded, Sequence[Tensor]], None]
    ) -> list[Tensor]:
        """[T, N] of each layer, which `launch` fills for MOST of them at a time."""
        outs = [x_TK.new_empty(x_TK.shape[0], n) for n in self.sizes]
        for first in range(0, len(outs), MOST):
            part = slice(first, first + MOST)
            launch(self.part(part), outs[part])
        return outs

    def arguments(self, outs: Sequence[Tensor], in_words: bool = False) -> tuple[Any, ...]:
        """What a kernel takes of these layers, of which a launch has MOST: addresses of codes,
        scales, zero points, global scales, biases and results. A layer that is not there has no
        blocks; the addresses of its codes are not looked at. In words all codes come as 32 bits, or
        64 if they have six."""
        rest, word = MOST - len(self.weights), torch.int64 if self.weight.bits == 6 else torch.int32
        stored = [w.view(word) if in_words else as_stored(w, self.weight) for w in self.weights]
        first = filled(stored, self.factors, self.zeros, self.global_scales)
        return *first, *self.biases, *[None] * rest, *outs, *[None] * rest

    def constants(self, rows: int) -> tuple[int, dict[str, int]]:
        """How many programs of so many rows there are, and what kernels know of the layers: the
        rows of each, and where the blocks of each but the first begin."""
        sizes = self.sizes
        blocks = [triton.cdiv(n, rows) for n in sizes]
        firsts = [sum(blocks[:g]) for g in range(MOST + 1)]
        known = {f"N{g}": n for g, n in enumerate([*sizes, 0, 0, 0][:MOST])}
        known |= {f"F{g}": firsts[g] for g in range(1, MOST)}
        return firsts[MOST], known


def filled(*lists: Some) -> Iterator[Tensor | None]:
    """MOST tensors of each list, of which a kernel looks at no more than there are layers."""
    for given in lists:
        yield from given
        yield from [given[0]] * (MOST - len(given))

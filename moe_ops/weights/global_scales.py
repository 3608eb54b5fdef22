"""Second-level scales of gate and up that differ, where a layer has one for both (NVFP4).

A layer of `QuantConfig(two_global_scales=True)` takes both as they are, and needs nothing of this.

A weight is code x scale of its block x global scale. With another global scale the same weight has
other scales of blocks, and they are float8: some numbers are in it, as with a power of two between
the global scales, and most are not. So weights keep their values, or are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_ops.weights.advice import advising
from moe_ops.weights.shards import ShardPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The scales of the blocks of a half of an expert, and where in the layer they go."""

    plan: ShardPlan
    slots: tuple[int, ...]
    half: int
    scales: Tensor

    def under(self, scale: Tensor, instead_of: Tensor) -> Tensor | None:
        """The scales that make the same weights under another global scale, if their dtype has
        them."""
        return rescaled(self.scales, scale, instead_of)


def rescaled(blocks: Tensor, scale: Tensor, instead_of: Tensor) -> Tensor | None:
    """The scales of blocks that make the same weights under another global scale, if their dtype
    has them. Products of both scales have 28 bits, which float64 holds.
    """
    wanted = blocks.double() * instead_of.double()
    found = (wanted / scale.double()).to(blocks.dtype)
    return found if torch.equal(found.double() * scale.double(), wanted) else None


@dataclass(eq=False, slots=True)
class GlobalScales:
    """What one load found so far, by logical expert and half."""

    found: dict[int, dict[int, tuple[Tensor, str]]] = field(default_factory=dict)
    blocks: dict[tuple[int, int], Blocks] = field(default_factory=dict)

    def tell(self, expert: int, half: int, scale: Tensor, name: str) -> None:
        """Keep the scale of a half, and the entry that it is from."""
        self.found.setdefault(expert, {})[half] = (scale.clone(), name)

    def settle(self, global_scale_E: Tensor) -> list[tuple[Tensor, Tensor]]:
        """What is to be written, after all else, where the two of an expert differ.

        Raises ValueError, naming the entry, for an expert whose weights would change.
        """
        writes: list[tuple[Tensor, Tensor]] = []
        for expert, halves in self.found.items():
            if len(halves) == 2 and not torch.equal(halves[0][0], halves[1][0]):
                writes += self._one(expert, global_scale_E)
        return writes

    def _one(self, expert: int, global_scale_E: Tensor) -> list[tuple[Tensor, Tensor]]:
        halves = self.found[expert]
        for kept, other in ((0, 1), (1, 0)):
            if (expert, other) not in self.blocks:
                continue
            blocks, scale = self.blocks[expert, other], halves[kept][0]
            changed = blocks.under(scale, instead_of=halves[other][0])
            if changed is None:
                continue
            targets = [global_scale_E[slot : slot + 1] for slot in blocks.slots]
            return [
                *((target, scale.reshape(1)) for target in targets),
                *((blocks.plan.region(s, changed, blocks.half, 0), changed) for s in blocks.slots),
            ]
        (a, _), (b, name) = halves[0], halves[1]
        raise advising(
            ValueError,
            f"{name}: expert {expert} has {float(b)} here and {float(a)} in {halves[0][1]}, one "
            "number has to serve both, and the scales of blocks cannot make up for the other one "
            "without rounding",
            "make the layer with QuantConfig(two_global_scales=True), or quantise gate and up with "
            "one global scale",
        )

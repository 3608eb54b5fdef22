"""A layer's experts on several ranks, and tokens of each rank's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_ops import experts, experts_over_ranks
from moe_ops.ops.experts_over_ranks import sends_codes
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import Case, make_layer

NO_EXPERT = -1


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Tokens of each rank, and which experts they choose."""

    name: str
    tokens: tuple[int, ...]
    choose: str = "any"  # or "none"; "first": the first expert alone; "together": one rank's

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    @property
    def rows(self) -> int:
        return max(1, *self.tokens)


SPREADS = (
    Spread(name="even", tokens=(4, 4)),
    Spread(name="uneven", tokens=(5, 0, 7, 1)),
    Spread(name="none", tokens=(0, 0)),
    Spread(name="one_sided", tokens=(0, 0, 0, 6)),
    Spread(name="one_expert", tokens=(3, 2, 4, 1), choose="first"),
    Spread(name="nowhere", tokens=(3, 2), choose="none"),
)


@dataclass(frozen=True, kw_only=True)
class Whole:
    """All experts of a layer and the tokens of all ranks."""

    spread: Spread
    x_TD: Tensor
    weights_TK: Tensor
    ids_TK: Tensor
    weights: dict[str, Tensor]  # by the arguments of `experts`, one entry an expert on axis 0
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        spread: Spread,
        dtype: torch.dtype,
        w_format: str = "",
        x_format: str = "",
        width: int = 64,
    ) -> Whole:
        case = Case(name="shared", T=sum(spread.tokens), E=8, K=3, D=width, I=32)
        layer = make_layer(case, dtype)
        ids = layer.ids_TK.clone()
        if spread.choose == "first":
            ids[:, 0], ids[:, 1:] = 0, NO_EXPERT
        if spread.choose == "together":
            each = case.E // spread.ranks
            ids[:] = torch.arange(len(ids))[:, None] % spread.ranks * each + ids % each
        if spread.choose == "none":
            ids.fill_(NO_EXPERT)
        weights = {"w13_EFD": layer.w13_EFD, "w2_EDI": layer.w2_EDI}
        options = {}
        if w_format:
            for name, axes in (("w13", "FD"), ("w2", "DI")):
                done = packing.quantize(weights[f"{name}_E{axes}"], Format.of(w_format))
                weights[f"{name}_E{axes}"] = done.values
                weights[f"{name}_scale_E{axes[0]}G"] = done.scale
                if done.zero is not None:
                    weights[f"{name}_zero_E{axes[0]}G"] = done.zero
            options = {"w_format": w_format, "x_format": x_format}
        return cls(
            spread=spread, x_TD=layer.x_TD, weights_TK=layer.weights_TK, ids_TK=ids,
            weights=weights, options=options,
        )  # fmt: skip

    def want(self) -> Tensor:
        """What one process makes of all tokens."""
        return experts(self.x_TD, self.weights_TK, self.ids_TK, **self.weights, **self.options)

    def sends_codes(self) -> bool:
        """Whether tokens travel as codes."""
        tokens = (self.x_TD, self.weights_TK, self.ids_TK)
        return sends_codes(experts.call(*tokens, **self.weights, **self.options))

    def own(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens of a rank, their weights and their experts."""
        sizes = list(self.spread.tokens)
        return tuple(t.split(sizes)[rank] for t in (self.x_TD, self.weights_TK, self.ids_TK))

    def tables(self, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rank and slot of each expert: neighbours together, or dealt out in another order."""
        E = self.weights["w13_EFD"].shape[0]
        place = torch.arange(E) if order is None else order.argsort()
        each = E // self.spread.ranks
        return (place // each).to(torch.int32), (place % each).to(torch.int32)

    def held(self, rank: int, tables: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """The weights of a rank, by slot."""
        rank_of_P, slot_of_P = tables
        mine = (rank_of_P == rank).nonzero()[:, 0]
        mine = mine[slot_of_P[mine].argsort()]
        narrow = {n: t.view(torch.uint8) if t.dtype.itemsize == 1 else t
                  for n, t in self.weights.items()}  # fmt: skip
        return {n: t[mine].view(self.weights[n].dtype) for n, t in narrow.items()}


def run_share(
    rank: int, group: str, whole: Whole, collective: str, order: Tensor | None = None
) -> Tensor:
    """What a rank makes of its own tokens, with the others."""
    device = whole.x_TD.device
    ranks, slots = whole.tables(order)
    tables = (ranks.to(device), slots.to(device))
    held = whole.held(rank, tables)
    x, weights, ids = whole.own(rank)
    w13, w2 = held.pop("w13_EFD"), held.pop("w2_EDI")
    return experts_over_ranks(
        x, weights, ids, w13, w2, *tables, whole.spread.rows, group, collective,
        **held, **whole.options,
    )  # fmt: skip

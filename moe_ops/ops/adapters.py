"""Adapters of experts: what the ops of layers with them take, and which rows have which.

An adapter of rank r adds scale * B (A x) to the product of a weight and x, where A is [r, inputs]
and B is [outputs, r] for each expert. Weights themselves stay as they are, codes among them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from moe_ops.checks.shapes import DOUBLE, INDICES, check_devices, check_size, check_tensor, wide
from moe_ops.ops.expert_gemm import expert_gemm, row_experts
from moe_ops.ops.experts import ExpertsCall


@dataclass(slots=True)
class Adapter:
    """N adapters of the experts of a layer, which are its E groups each, G = N * E in all."""

    scale_N: Tensor
    a13_GrD: Tensor | None = None
    b13_GFr: Tensor | None = None
    a2_GrI: Tensor | None = None
    b2_GDr: Tensor | None = None
    adapter_T: Tensor | None = None

    @property
    def ranks(self) -> tuple[int, int]:
        """The ranks of the adapters of both weights; 0 where there is none."""
        a13, a2 = self.a13_GrD, self.a2_GrI
        return 0 if a13 is None else a13.shape[1], 0 if a2 is None else a2.shape[1]


ADAPTER = tuple(f.name for f in fields(Adapter))
OF_ADAPTER = ("a13_GrD", "b13_GFr", "a2_GrI", "b2_GDr")  # what of it is trained


def flat(layer: Iterable[str]) -> dict[str, str]:
    """The flat arguments of a layer, by its own, and its adapters: those come behind what every
    layer has."""
    paths = [(name, f"layer.{name}") for name in layer]
    adapter = [(name, f"adapter.{name}") for name in ADAPTER]
    return dict([*paths[:5], *adapter, *paths[5:]])


def check_adapter(adapter: Adapter, layer: ExpertsCall) -> None:
    """Raise ValueError or TypeError unless adapters fit a layer that was checked."""
    c, x_TD, (D, I) = adapter, layer.x_TD, layer.widths  # noqa: E741
    F, E, N = 2 * I if layer.gated else I, layer.w13_EFD.shape[0], c.scale_N.numel()
    floats = DOUBLE if x_TD.dtype is DOUBLE else torch.float32
    check_tensor("scale_N", c.scale_N, 1, (floats,), "give one factor for each adapter")
    if N < 1:
        raise ValueError("scale_N holds no adapter; give one factor for each, or call experts")
    if c.a13_GrD is c.b13_GFr is c.a2_GrI is c.b2_GDr is None:
        raise ValueError(
            "an adapter needs a13_GrD and b13_GFr, a2_GrI and b2_GDr, or all; got none"
        )
    for a_name, b_name, inputs, outputs in (
        ("a13_GrD", "b13_GFr", D, F),
        ("a2_GrI", "b2_GDr", I, D),
    ):
        a, b = getattr(c, a_name), getattr(c, b_name)
        if a is None and b is None:
            continue
        if a is None or b is None:
            given, left = (b_name, a_name) if a is None else (a_name, b_name)
            raise ValueError(f"{given} was given without {left}; an adapter of a weight has both")
        for name, t in ((a_name, a), (b_name, b)):
            check_tensor(name, t, 3, (x_TD.dtype,), "convert it to the dtype of x_TD")
            check_size(name, t, 0, N * E, f"{N} adapters in scale_N times {E} experts")
        if a.shape[1] < 1:
            raise ValueError(f"{a_name} has rank 0, got shape {tuple(a.shape)}; leave it out")
        check_size(a_name, a, 2, inputs, "the width of what the weight multiplies")
        check_size(b_name, b, 1, outputs, "the rows of one expert's weight")
        check_size(b_name, b, 2, a.shape[1], f"the rank of {a_name}")
    if c.adapter_T is not None:
        check_tensor("adapter_T", c.adapter_T, 1, INDICES)
        check_size("adapter_T", c.adapter_T, 0, x_TD.shape[0], "the tokens of x_TD")
    check_devices(x_TD, **{name: getattr(c, name) for name in ADAPTER})


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRows:
    """Which rows of a layer, in the order of its experts, have which adapter.

    ends_G     one past the last row of each group, where rows are in the order of groups
    order_R    the row in each place of that order; None: it is the order of experts, too
    place_R    the place of each row in it; None: its own
    has_R1     whether a row has an adapter; a row that no expert has, has none
    scale_R1   the factor of each row's adapter; no axis, where all have one
    """

    ends_G: Tensor
    order_R: Tensor | None
    place_R: Tensor | None
    has_R1: Tensor
    scale_R1: Tensor

    @classmethod
    def of(cls, adapter: Adapter, rows_R: Tensor, ends_E: Tensor, top_k: int) -> AdapterRows:
        """The adapters of rows in the order that `dispatch` gave."""
        scale_N, adapter_T = adapter.scale_N, adapter.adapter_T
        if adapter_T is None:
            has_R1 = (rows_R >= 0)[:, None]
            return cls(
                ends_G=ends_E, order_R=None, place_R=None, has_R1=has_R1, scale_R1=scale_N[0]
            )
        R, E, N = rows_R.shape[0], ends_E.shape[0], scale_N.shape[0]
        adapter_R = adapter_T[rows_R.clamp(min=0).long() // top_k].long()
        has_R = (rows_R >= 0) & (adapter_R >= 0) & (adapter_R < N)
        group_R = torch.where(has_R, adapter_R * E + row_experts(ends_E, R), N * E)
        sorted_R, order_R = group_R.sort(stable=True)
        groups_G = torch.arange(N * E, device=rows_R.device)
        ends_G = torch.searchsorted(sorted_R, groups_G, right=True).to(torch.int32)
        return cls(
            ends_G=ends_G,
            order_R=order_R,
            place_R=order_R.argsort(),
            has_R1=has_R[:, None],
            scale_R1=scale_N[adapter_R.clamp(0, N - 1)][:, None],
        )

    def product(self, x_RD: Tensor, w_GFD: Tensor, *, transposed: bool = False) -> Tensor:
        """Each row times the weight of its group; what rows without an adapter have is
        unspecified."""
        w_GFD = w_GFD[: self.ends_G.shape[0]]  # without indices those of the first adapter
        if self.order_R is None:
            return expert_gemm(x_RD, w_GFD, self.ends_G, transposed=transposed)
        y_RF = expert_gemm(x_RD[self.order_R], w_GFD, self.ends_G, transposed=transposed)
        return y_RF[self.place_R]

    def narrow(self, x_RD: Tensor, a_GrD: Tensor, *, transposed: bool = False) -> Tensor:
        """s A x of each row, rounded; 0 of a row without an adapter."""
        sum_Rr = wide(self.product(x_RD, a_GrD, transposed=transposed))
        # Ahead of the factor, of which no gradient may be made of what is unspecified.
        return (self.scale_R1 * torch.where(self.has_R1, sum_Rr, 0)).to(x_RD.dtype)

    def added(
        self, y_RF: Tensor, u_Rr: Tensor, b_GFr: Tensor, *, transposed: bool = False
    ) -> Tensor:
        """y + B u; a row without an adapter stays as it is, to the bit."""
        sum_RF = wide(y_RF) + wide(self.product(u_Rr, b_GFr, transposed=transposed))
        return torch.where(self.has_R1, sum_RF.to(y_RF.dtype), y_RF)

"""Expert layers as models write them, with grouped or gathered products; each can be changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

E, K, D, I = 4, 2, 16, 8  # noqa: E741 the legend's letter
Act = Callable[[Tensor], Tensor]


def gate(act: Act) -> Act:
    def halves(y: Tensor) -> Tensor:
        gate, up = y.chunk(2, dim=-1)
        return act(gate) * up

    return halves


def clamped(limit: float) -> Act:
    def halves(y: Tensor) -> Tensor:
        gate, up = y.chunk(2, dim=-1)
        return F.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)

    return halves


def shifted(interleaved: bool, limit: float, alpha: float, shift: float = 1) -> Act:
    def act(y: Tensor) -> Tensor:
        gate, up = (y[..., ::2], y[..., 1::2]) if interleaved else y.chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        return (up + shift) * (gate * torch.sigmoid(gate * alpha))

    return act


def in_float32(y: Tensor) -> Tensor:
    gate, up = y.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(y.dtype)


def same(y: Tensor) -> Tensor:
    return y


# Activations with the arguments of `activate` that compute the same.
ACTIVATIONS: dict[str, tuple[Act, dict[str, Any]]] = {
    "silu": (gate(F.silu), {}),
    "gelu": (gate(F.gelu), {"kind": "gelu"}),
    "gelu_tanh": (gate(lambda x: F.gelu(x, approximate="tanh")), {"kind": "gelu_tanh"}),
    "relu2": (gate(lambda x: F.relu(x).square()), {"kind": "relu2"}),
    "in_float32": (in_float32, {}),
    "clamped": (clamped(0.5), {"limit": 0.5}),
    "gpt_oss": (
        shifted(True, 0.75, 1.702),
        {"interleaved": True, "limit": 0.75, "alpha": 1.702, "up_shift": 1.0},
    ),
    "minimax": (
        shifted(False, 0.75, 1.5), {"limit": 0.75, "alpha": 1.5, "up_shift": 1.0},
    ),
    "ungated_relu2": (lambda y: F.relu(y).square(), {"kind": "relu2", "gated": False}),
    "ungated_silu": (F.silu, {"gated": False}),
}  # fmt: skip

# What is near to one of these and must stay as it is.
OTHER_ACTIVATIONS: dict[str, Act] = {
    "swapped": lambda y: F.silu(y.chunk(2, -1)[1]) * y.chunk(2, -1)[0],
    "quick_gelu": gate(lambda x: x * torch.sigmoid(1.702 * x)),
    "two_limits": lambda y: (
        F.silu(y.chunk(2, -1)[0].clamp(max=0.5)) * y.chunk(2, -1)[1].clamp(-0.75, 0.75)
    ),
    "gate_clamped_below": lambda y: (
        F.silu(y.chunk(2, -1)[0].clamp(-0.5, 0.5)) * y.chunk(2, -1)[1].clamp(-0.5, 0.5)
    ),
    "shifted_by_two": shifted(True, 0.75, 1.702, 2),
    "half": lambda y: gate(F.silu)(y) * 0.5,
    "softcapped": lambda y: gate(F.silu)(torch.tanh(y / 5) * 5),
    "normed": lambda y: F.rms_norm(gate(F.silu)(y), (I,)),
    "mixes_rows": lambda y: gate(F.silu)(y) + gate(F.silu)(y).flip(0),
    "uneven": lambda y: F.silu(y[:, : I + 1])[:, :I] * y[:, I:],
}


@dataclass(frozen=True, kw_only=True)
class Block:
    """An expert layer. The fields after `bias` are what near-misses change."""

    act: Act = ACTIVATIONS["silu"][0]
    transposed: bool = False
    bias: bool = False
    # What is near to the layer, but another.
    divisor: int = K  # of places in the sort, giving tokens
    descending: bool = False
    lowest: int = 0  # of the ids that are counted
    axis: int = 1  # of the sum
    other_order: bool = False  # of the weights
    twice: bool = False  # the inverse permutation applied a second time
    between: Act = same
    after: Act = same
    second_experts: int = E  # of the second weight
    summed_products: bool = False  # batched as Inductor spells it when it tunes
    returns: str = ""  # an inner tensor that is returned as well

    def grouped(
        self, x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, b13: Tensor,
        b2: Tensor,
    ) -> Any:  # fmt: skip
        inner = {}
        flat = ids.reshape(-1)
        inner["sorted"], order = torch.sort(flat, descending=self.descending)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=x.device)
        counts = torch.histc(inner["sorted"].float(), E, min=self.lowest, max=E - 1)
        inner["ends"] = counts.cumsum(0, dtype=torch.int32)
        inner["rows"] = x[order // self.divisor]
        y = self._grouped(inner["rows"], w13, inner["ends"], b13, inner["sorted"])
        inner["h"] = self.act(self.between(y))
        y = self.after(self._grouped(inner["h"], w2, inner["ends"], b2, inner["sorted"]))
        picked = weights.reshape(-1)[back if self.other_order else order]
        rows = (y * picked[:, None])[back]
        if self.twice:
            rows = rows[back]
        return self._sum(rows, x, inner)

    def batched(
        self, x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, b13: Tensor,
        b2: Tensor,
    ) -> Any:  # fmt: skip
        inner = {"sorted": ids.reshape(-1)}
        inner["rows"] = x.repeat_interleave(K, dim=0)
        y = self._batched(inner["rows"], w13, b13, inner["sorted"])
        inner["h"] = self.act(self.between(y))
        y = self.after(self._batched(inner["h"], w2, b2, inner["sorted"]))
        picked = weights.reshape(-1)
        rows = y * (picked.flip(0) if self.other_order else picked)[:, None]
        return self._sum(rows, x, inner)

    def _grouped(self, x: Tensor, w: Tensor, ends: Tensor, b: Tensor, ids: Tensor) -> Tensor:
        y = torch._grouped_mm(x, w if self.transposed else w.transpose(-2, -1), offs=ends)
        return y.add_(b[ids]) if self.bias else y

    def _batched(self, x: Tensor, w: Tensor, b: Tensor, ids: Tensor) -> Tensor:
        if self.summed_products:
            y = self._summed(x, w[ids])
        elif self.transposed:
            y = torch.bmm(x[:, None], w[ids]).squeeze(1)
        else:
            y = torch.bmm(w[ids], x[..., None]).squeeze(-1)
        return y.add_(b[ids]) if self.bias else y

    def _summed(self, x: Tensor, w: Tensor) -> Tensor:
        row = x[:, None] if self.transposed else x[..., None]
        left, right = (row, w) if self.transposed else (w, row)
        products = left.float().unsqueeze(-1) * right.float().unsqueeze(1)
        return products.sum(dim=2).to(x.dtype).squeeze(1 if self.transposed else -1)

    def summed(self, *tensors: Tensor) -> Any:
        return replace(self, summed_products=True).batched(*tensors)

    def _sum(self, rows: Tensor, x: Tensor, inner: dict[str, Tensor]) -> Any:
        shape = (len(x), K, D) if self.axis == 1 else (K, len(x), D)
        out = rows.view(shape).sum(self.axis).to(x.dtype)
        return (out, inner[self.returns]) if self.returns else out


LAYOUTS = {
    "plain": Block(),
    "bias": Block(bias=True),
    "transposed": Block(transposed=True),
    "transposed_bias": Block(transposed=True, bias=True),
}
BLOCKS = {
    **LAYOUTS,
    **{name: Block(act=act) for name, (act, _) in ACTIVATIONS.items()},
    "ungated_bias": Block(act=F.silu, bias=True),
}

GROUPED, BATCHED = ("grouped",), ("batched", "summed")
BOTH = (*GROUPED, *BATCHED)
# Layers near to a block: in which forms, and what of the reason must be said.
NEAR_MISSES: dict[str, tuple[Block, tuple[str, ...], str]] = {
    **{
        name: (Block(act=act), BOTH, "")
        for name, act in OTHER_ACTIVATIONS.items()
    },
    "another_k": (Block(divisor=K + 1), GROUPED, "not the elements of a [tokens, 3] tensor"),
    "descending": (Block(descending=True), GROUPED, "descending"),
    "counts_from_one": (Block(lowest=1), GROUPED, "bins (4, 1, 3)"),
    "sum_over_tokens": (Block(axis=0), BOTH, "summed as"),
    "other_weights": (Block(other_order=True), BOTH, "weights are"),
    "unsorted_twice": (Block(twice=True), GROUPED, "not aten.reshape"),
    "scaled_rows": (Block(after=lambda y: y * 2.0), BOTH, ""),
    "inserted_relu": (Block(between=F.relu), BOTH, "activation"),
    "inserted_bias": (Block(bias=True, between=lambda y: y + 1.0), BOTH, "activation"),
    "fewer_second_experts": (Block(second_experts=E - 1), BATCHED, "differ in their number"),
    "h_is_returned": (Block(returns="h"), BOTH, "also used by output"),
    "rows_are_returned": (Block(returns="rows"), BOTH, "also used by output"),
    "order_is_returned": (Block(returns="ends"), GROUPED, "also used by output"),
}  # fmt: skip


def operands(
    block: Block, T: int, dtype: torch.dtype = torch.float32, *, gated: bool = True
) -> tuple[Tensor, ...]:
    """Random tensors of a layer: x, weights, ids, w13, w2, b13, b2."""
    g = torch.Generator().manual_seed(T)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=g) * std).to(dtype)

    F13 = 2 * I if gated else I
    w13, w2 = normal(E, F13, D, std=D**-0.5), normal(block.second_experts, D, I, std=I**-0.5)
    if block.transposed:
        w13, w2 = w13.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous()
    weights, ids = torch.rand(T, block.second_experts, generator=g).topk(K)
    return normal(T, D), weights.to(dtype), ids, w13, w2, normal(E, F13), normal(E, D)


def is_gated(name: str) -> bool:
    return not name.startswith("ungated")


def with_weights_in_float32(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    x, weights, *rest = tensors
    return (x, weights.float(), *rest)

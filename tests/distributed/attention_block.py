"""A block of attention and experts over ranks, as models have it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_ops.layer import MoELayer
from moe_ops.parallel.config import ParallelConfig
from tests.layer.shards import randomize, take_share

SIZES: dict[str, Any] = {
    "num_experts": 6, "top_k": 3, "hidden_size": 64, "intermediate_size": 32,
}  # fmt: skip


class Block(nn.Module):
    """Attention within each sequence, then experts; each behind a norm and around a residual."""

    def __init__(self, experts: nn.Module, hidden: int = 64, heads: int = 4, **made: Any) -> None:
        super().__init__()
        self.heads, self.experts = heads, experts
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, **made) for _ in range(2))
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False, **made)
        self.out = nn.Linear(hidden, hidden, bias=False, **made)
        self.router = nn.Linear(hidden, 6, bias=False, **made)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        q, k, v = qkv.unbind(2)
        causal = attention_mask is None
        seen = v  # of no sequences torch 2.11 gives None on a GPU
        if len(x):
            seen = F.scaled_dot_product_attention(q, k, v, attention_mask, is_causal=causal)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        tokens = self.norms[1](x)
        found: Tensor = x + self.experts(tokens, self.router(tokens))
        return found


def whole_block(**options: Any) -> Block:
    """A block with all experts, the same on every rank."""
    torch.manual_seed(0)
    return Block(randomize(MoELayer(**SIZES, **options)))


def share_of_block(whole: Block, rank: int, ranks: int, group: str, **options: Any) -> Block:
    """The block of a rank, with its share of the experts."""
    options = dict(options)
    config = options.pop("config", {"dp": ranks, "expert_parallel": True})
    most = options.pop("max_num_tokens", 64)
    parallel = ParallelConfig.of(**config, dp_rank=rank)
    layer = MoELayer(
        **{**SIZES, **options}, parallel=parallel, tokens="own", group=group, max_num_tokens=most
    )
    mine = Block(take_share(whole.experts, layer))
    mine.load_state_dict(
        {n: t for n, t in whole.state_dict().items() if not n.startswith("experts.")}, strict=False
    )
    return mine

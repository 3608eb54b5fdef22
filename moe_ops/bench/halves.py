"""A block of attention and experts over the ranks of torchrun, as one batch and in two halves.

    torchrun --nproc-per-node 2 -m moe_ops.bench halves --layer mixtral_8x7b --tokens 1024,4096
    torchrun --nproc-per-node 2 -m moe_ops.bench halves --slower 1,8 --collective gather

"as planned" is what `plan_halves` says. Ways take turns, the slowest rank counts; on GPUs in CUDA
graphs, unless --eager. "sent" is the exchange alone, there and back, and its share of one batch.

--slower N simulates a link of an Nth of the rate: each collective carries N times the bytes, in all
ways alike, and what is reckoned is told of it. It is of this measurement alone. --blocks N runs N
blocks one after the other, of one's weights, and times are of one. --of-ranks N gives each rank as
many experts as one of N has; with --slower N - 1 ranks then compute and send as N would by gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe_ops.bench.step import ATTENTION, Attention
from moe_ops.bench.tables import aligned
from moe_ops.bench.timing import Run, capture, time_turns
from moe_ops.halves import HalvesPlan, plan_halves, two_halves
from moe_ops.layer import MoELayer
from moe_ops.ops import combine_tokens, dispatch_tokens
from moe_ops.parallel.config import ALLGATHER, AUTO, ParallelConfig
from moe_ops.ranks import groups
from moe_ops.ranks.links import LINKS
from moe_ops.ranks.transport import GATHER
from moe_ops.testing import LAYERS, Case

COLLECTIVES = {"auto": AUTO, "gather": ALLGATHER}
REPEATS = {"cuda": 40, "cpu": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Tokens of each rank in so many sequences through so many blocks, by a collective that carries
    `slower` times the bytes."""

    layer: str
    tokens: int
    sequences: int
    blocks: int
    of_ranks: int  # whose number of experts a rank has; 0: the ranks of this run
    slower: int
    collective: str
    captured: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Microseconds of a block on the slowest rank, medians; of an exchange alone; and what was
    planned."""

    cell: Cell
    whole_us: float
    halves_us: float
    planned_us: float
    sent_us: float
    splits: bool
    reason: str
    error: float  # of halves, by the largest value of one batch


class Block(nn.Module):
    """Grouped attention within each sequence and experts, each behind a norm."""

    def __init__(
        self, case: Case, sizes: Attention, experts: MoELayer, device: torch.device
    ) -> None:
        super().__init__()
        made: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
        self.sizes, self.experts = sizes, experts
        queries, keys = sizes.H * sizes.size, sizes.N * sizes.size
        self.norms = nn.ModuleList(nn.RMSNorm(case.D, **made) for _ in range(2))
        self.qkv = nn.Linear(case.D, queries + 2 * keys, bias=False, **made)
        self.out = nn.Linear(queries, case.D, bias=False, **made)
        self.router = nn.Linear(case.D, case.E, bias=False, **made)

    def forward(self, x: Tensor) -> Tensor:
        s = self.sizes
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (-1, s.size)).transpose(1, 2)
        q, k, v = qkv.split((s.H, s.N, s.N), 1)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=s.H != s.N)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        tokens = self.norms[1](x)
        out: Tensor = x + self.experts(tokens, self.router(tokens))
        return out


class Stretched:
    """torch's collectives, each of which carries so many times the bytes, in one launch; the rest
    is cut off when it was waited for."""

    def __init__(self, collectives: Any, times: int) -> None:
        self._collectives, self._times = collectives, times
        self._ranks: dict[int, int] = {}

    def all_gather_into_tensor(self, t: Tensor, ranks: int, group: str) -> Tensor:
        return self._noted(ranks, "all_gather_into_tensor", self._wider(t[None]), ranks, group)

    def all_to_all_single(
        self, t: Tensor, received: Sequence[int], sent: Sequence[int], group: str
    ) -> Tensor:
        if len({*received, *sent}) > 1:
            raise ValueError("a stretched all_to_all_single has as many rows for all ranks")
        each, ranks = [self._times * sent[0]] * len(sent), len(sent)
        wider = self._wider(t.unflatten(0, (ranks, -1)))
        return self._noted(ranks, "all_to_all_single", wider, each, each, group)

    def wait_tensor(self, t: Tensor) -> Tensor:
        done: Tensor = self._collectives.wait_tensor(t)
        ranks = self._ranks.pop(id(t))
        return done.unflatten(0, (ranks, self._times, -1))[:, 0].flatten(0, 1)

    def _wider(self, t_RTD: Tensor) -> Tensor:
        """Rows for each rank, with as many more behind as are to be sent for nothing."""
        R, T, *rest = t_RTD.shape
        wider = t_RTD.new_empty((R, self._times, T, *rest))
        wider[:, 0].copy_(t_RTD)
        return wider.flatten(0, 2)

    def _noted(self, ranks: int, name: str, *args: Any) -> Tensor:
        begun: Tensor = getattr(self._collectives, name)(*args)
        self._ranks[id(begun)] = ranks
        return begun


@contextmanager
def slower_link(times: int) -> Iterator[None]:
    """A context in which each collective carries so many times the bytes, and is reckoned so."""
    links = dict(LINKS)
    real: Any = groups._functional
    stretched: Any = Stretched(real, times)
    if times > 1:
        groups._functional = stretched
        for name, link in links.items():
            LINKS[name] = replace(link, bytes_per_second=link.bytes_per_second / times)
    try:
        yield
    finally:
        groups._functional = real
        LINKS.update(links)


@torch.inference_mode()
def measure(cells: Sequence[Cell], device: torch.device) -> Iterator[Spent]:
    """What a block takes, cell by cell. Weights are made once for cells of a layer in a row."""
    made: tuple[Any, Block] | None = None
    for cell in cells:
        key = (cell.layer, cell.of_ranks, cell.collective)
        if made is None or made[0] != key:
            made = None  # so that it is gone before another one is made
            most = max(c.tokens for c in cells if c.layer == cell.layer)
            made = key, _block(cell, most, device)
        with slower_link(cell.slower):
            yield _measured(cell, made[1], device)


def _block(cell: Cell, most: int, device: torch.device) -> Block:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    case = LAYERS[cell.layer]
    case = replace(case, E=case.E * ranks // (cell.of_ranks or ranks))
    assert dist.group.WORLD is not None
    layer = MoELayer(
        num_experts=case.E, top_k=case.K, hidden_size=case.D, intermediate_size=case.I,
        parallel=ParallelConfig.of(
            dp=ranks, dp_rank=rank, expert_parallel=True, collective=COLLECTIVES[cell.collective]
        ),
        tokens="own", group=dist.group.WORLD.group_name, max_num_tokens=most,
        dtype=torch.bfloat16, device=device,
    )  # fmt: skip
    block = Block(case, ATTENTION[cell.layer], layer, device)
    generator = torch.Generator(device)
    for name, p in block.named_parameters():
        # What is no expert is the same on every rank.
        generator.manual_seed(rank if name.startswith("experts.") else 0)
        if p.dim() > 1:
            p.normal_(std=0.02, generator=generator)
    return block.eval()


def _measured(cell: Cell, block: Block, device: torch.device) -> Spent:
    width = LAYERS[cell.layer].D
    shape = (cell.sequences, cell.tokens // cell.sequences, width)
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
    x = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    captured = cell.captured and device.type == "cuda"
    blocks = [block] * cell.blocks
    plans = [
        plan_halves(blocks, x, halves=halves, captured=captured) for halves in (False, True, None)
    ]
    calls: list[Callable[[], Tensor]] = [partial(two_halves, blocks, x, plan=p) for p in plans]
    want, got, _ = (call().float() for call in calls)
    error = float((got - want).abs().max() / want.abs().max())
    if not plans[2].split:
        calls.pop()  # it is the first one
    runs = [_run(call, captured, device) for call in (*calls, _exchange(cell, block, x))]
    timings = time_turns(runs, REPEATS[device.type], device)
    spans = torch.tensor([timing.us for timing in timings] + [error], device=device)
    dist.all_reduce(spans, dist.ReduceOp.MAX)
    *of_blocks, sent, error = spans.tolist()
    whole, halves, *planned = [span / cell.blocks for span in of_blocks]
    return Spent(
        cell=cell, whole_us=whole, halves_us=halves, planned_us=planned[0] if planned else whole,
        sent_us=sent, splits=plans[2].split, reason=_said(plans), error=error,
    )  # fmt: skip


def _said(plans: Sequence[HalvesPlan]) -> str:
    """What was planned, and if that was not halves, why they could not be."""
    return plans[2].reason if plans[1].split else plans[1].reason


def _exchange(cell: Cell, block: Block, x: Tensor) -> Callable[[], Tensor]:
    """The tokens of a block there and back by gather, without attention or experts."""
    layer, x_TD = block.experts, x.flatten(0, 1)
    assert layer.exchange is not None
    weights_TK, ids_TK = layer.route(x_TD, block.router(x_TD))
    tables, group, T = (layer.rank_of_P, layer.slot_of_P), layer.exchange.group, cell.tokens

    def there_and_back() -> Tensor:
        y_GD, _, _, _, *handle = dispatch_tokens(
            x_TD, weights_TK, ids_TK, *tables, T, group, collective=GATHER
        )
        return combine_tokens(y_GD, ids_TK, *tables, *handle, T, group, GATHER)

    return there_and_back


def _run(call: Callable[[], Tensor], captured: bool, device: torch.device) -> Run:
    if not captured:
        return call
    for _ in range(2):
        call()
    replay, _ = capture([call], 1)
    return replay


def table(found: Sequence[Spent]) -> str:
    """A table with one line for each cell. Ratios are the time of one batch over that of a way."""
    rows = [(
        "layer", "tokens", "blocks", "ranks", "link", "by", "one batch", "sent", "halves", "ratio",
        "as planned", "ratio", "error",
    )]  # fmt: skip
    for s in found:
        c = s.cell
        rows.append((
            c.layer, f"{c.tokens} in {c.sequences}", str(c.blocks), str(c.of_ranks or "-"),
            f"1/{c.slower}", c.collective + ("" if c.captured else ", eager"),
            f"{s.whole_us:.0f} us", f"{s.sent_us:.0f} ({s.sent_us / s.whole_us:.0%})",
            f"{s.halves_us:.0f}", f"{s.whole_us / s.halves_us:.3f}",
            "halves" if s.splits else "one batch", f"{s.whole_us / s.planned_us:.3f}",
            f"{s.error:.1e}",
        ))  # fmt: skip
    return aligned(rows)

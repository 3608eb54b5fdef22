"""Ranks on GPUs of one host, a process each: two, unless a test says how many."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch._dynamo.utils import counters

import moe_ops
from moe_ops.graphs.cuda_graph import Captured
from tests.distributed.test_transformers import generated

RANKS = 2


def needs(ranks: int) -> list[pytest.MarkDecorator]:
    """Marks of a test that needs so many GPUs."""
    found = torch.cuda.device_count()
    reason = f"needs {ranks} GPUs, there are {found}"
    return [pytest.mark.gpu, pytest.mark.skipif(found < ranks, reason=reason)]


NEEDS_TWO = needs(RANKS)


def main(
    rank: int, ranks: int, folder: Path, seconds: float, body: Callable[..., None], args: Any
) -> None:
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # as push needs it
    torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group(
        "nccl", store=store, rank=rank, world_size=ranks, device_id=torch.device("cuda", rank),
        timeout=timedelta(seconds=seconds),
    )  # fmt: skip
    with torch.no_grad():
        body(rank, dist.group.WORLD.group_name, *args)
    gc.collect()  # NCCL waits for graphs that hold its collectives, for ever
    torch.cuda.synchronize()
    dist.destroy_process_group()


def on_gpus(
    folder: Path, body: Callable[..., None], *args: Any, ranks: int = RANKS, seconds: float = 300
) -> None:
    mp.spawn(main, (ranks, folder, seconds, body, args), nprocs=ranks)


def replays_agree(
    graphs: Mapping[str, Captured],
    rank: int,
    replays: int,
    change: Callable[[torch.Generator, torch.Generator], None],
) -> None:
    """Replay two graphs side by side, whose outputs have the same bits each time. `change` writes
    other inputs before, given a generator of the device and one of the host; ranks are late by up
    to a millisecond."""
    generator = torch.Generator(device="cuda").manual_seed(rank)
    chance = torch.Generator().manual_seed(rank)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(replays):
        change(generator, chance)
        late = int(torch.randint(2**20, (), generator=chance))
        if late % 4 == 0:
            torch.cuda._sleep(late)  # cycles
        for graph in graphs.values():
            graph.replay()
        one, other = (graph.output for graph in graphs.values())
        wrong += (one != other).any()
    assert int(wrong) == 0, f"{int(wrong)} of {replays} replays differ"


def generates_by_steps(model: Any, ids: Tensor, tokens: Tensor) -> None:
    """A model that is compiled generates these tokens by captured steps, of layers in one graph
    each, or no pass sees the router and the experts together."""
    counters["graph_break"].clear()
    fast = moe_ops.compile(model)
    for _ in range(4):  # the third prompt of a size is captured
        assert torch.equal(generated(fast, ids), tokens)
    assert moe_ops.generation_report(fast), "it fell back to transformers' own"
    assert not counters["graph_break"]

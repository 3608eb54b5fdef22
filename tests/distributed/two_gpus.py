"""Ranks on two GPUs of one host, a process each."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2
NEEDS_TWO = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < RANKS,
        reason=f"needs {RANKS} GPUs, there are {torch.cuda.device_count()}",
    ),
]


def main(rank: int, folder: Path, seconds: float, body: Callable[..., None], args: Any) -> None:
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # as push needs it
    torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group(
        "nccl", store=store, rank=rank, world_size=RANKS, device_id=torch.device("cuda", rank),
        timeout=timedelta(seconds=seconds),
    )  # fmt: skip
    with torch.no_grad():
        body(rank, dist.group.WORLD.group_name, *args)
    torch.cuda.synchronize()
    dist.destroy_process_group()


def two_gpus(folder: Path, body: Callable[..., None], *args: Any, seconds: float = 300) -> None:
    mp.spawn(main, (folder, seconds, body, args), nprocs=RANKS)

"""Many ranks: as threads of this process, which takes milliseconds, or as processes with gloo."""

from __future__ import annotations

import multiprocessing
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing._internal.distributed import multi_threaded_pg

Body = Callable[..., Any]
LONG = 300.0  # seconds, after which ranks that hang are given up
# What ranks import is imported once, by the process that they are forked from: it has no threads.
multiprocessing.set_forkserver_preload(["tests.conftest", "torch.distributed", "moe_ops.passes"])


def threads(ranks: int, body: Body, *args: Any) -> list[Any]:
    """What body(rank, group, *args) gives on each rank, or the error that it raised there."""
    found: list[Any] = [None] * ranks
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    store = dist.HashStore()

    def run(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
        try:
            with torch.no_grad():
                found[rank] = body(rank, dist.group.WORLD.group_name, *args)
        except Exception as error:
            found[rank] = error
            if not isinstance(error, (ValueError, RuntimeError)):
                traceback.print_exc()

    try:
        every = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
        for thread in every:
            thread.start()
        end = time.monotonic() + LONG
        while any(thread.is_alive() for thread in every) and time.monotonic() < end:
            raised = [error for error in found if isinstance(error, Exception)]
            for thread in every:
                thread.join(5 if raised else 0.01)
            if raised:  # and those left wait for who will not come
                multi_threaded_pg.ProcessLocalGroup.exception_handle(raised[0])
        assert not any(thread.is_alive() for thread in every), "a rank hangs"
    finally:
        multi_threaded_pg.ProcessLocalGroup.reset()
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    return found


def results(ranks: int, body: Body, *args: Any) -> list[Any]:
    """The same; an error of a rank is raised here."""
    found = threads(ranks, body, *args)
    for rank, value in enumerate(found):
        if isinstance(value, Exception):
            raise AssertionError(f"rank {rank} of {ranks} raised {value!r}") from value
    return found


def _main(
    rank: int, ranks: int, folder: Path, seconds: float, backend: str | None, body: Body, args: Any
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    limit = timedelta(seconds=seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    meet("connected", rank, range(ranks))
    with torch.no_grad():
        body(rank, dist.group.WORLD.group_name, *args)
    dist.destroy_process_group()


def meet(name: str, rank: int, ranks: Iterable[int]) -> None:
    """Wait until these ranks are here, too. A rank has its group before the others do: if it ended
    then, they would not find it; and the last to see a fault would see the others end."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{name} {rank}", "")
    store.wait([f"{name} {other}" for other in ranks], timedelta(seconds=LONG))


def spawn(body: Body, args: tuple[Any, ...], ranks: int) -> None:
    """Run body(rank, *args) in as many processes."""
    mp.start_processes(body, args, nprocs=ranks, start_method="forkserver")


def processes(
    ranks: int,
    folder: Path,
    body: Body,
    *args: Any,
    seconds: float = LONG,
    backend: str | None = "gloo",
) -> None:
    """Run body(rank, group, *args) in as many processes; the group gives up after so long, also
    while it waits for processes to start."""
    spawn(_main, (ranks, folder, seconds, backend, body, args), ranks)


@contextmanager
def fake_group(ranks: int) -> Iterator[str]:
    """A group of many ranks of which this process is the first; the others send nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()

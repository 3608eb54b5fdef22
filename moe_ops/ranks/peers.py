"""Memory of this rank that the other ranks of a group can write to, for the transport `push`.

It needs GPUs of one host that reach each other. Whether they do is found out by all ranks together,
once for a group, so that all of them choose alike: `connect`. Memory is made by all ranks together
too, in the first eager call that needs more than there is; it is zeroed, and stays where it is as
long as the group does, for captured graphs. All dispatches and combines of a group share one, all
sums another one; calls that share it have to run one after the other on a device, as those of NCCL.

Kernels that wait in vain say so in a word that the host can read: `check`, ahead of each call and
replay, raises an error that names the rank. The group has to be made anew then.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ops.ranks.agree import compare
from moe_ops.ranks.groups import Group, resolve

MOST_RANKS = 16  # which kernels go through one by one
LEAST_BYTES = 2**20  # of a buffer: that of a decoding step serves others
# What shares memory: the ops of its phases.
TOKENS, SUMS = ("dispatch_tokens", "combine_tokens"), ("sum_ranks",)
UNKNOWN = (
    "is not known to reach the memory of the other ranks; call moe_ops.ranks.peers.connect(group, "
    "device) on every rank before, or eagerly experts over the ranks by 'auto' or 'push'"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """One allocation of this rank, and those of the others; `half` bytes a buffer."""

    words: Tensor  # int64
    table_R: Tensor  # int64: addresses of the ranks' allocations
    error: Tensor  # int64 [1], in pinned memory
    half: int
    ops: tuple[str, ...]  # of its phases
    handle: Any  # of torch's: keeps what the others allocated

    def failed(self) -> int:
        """What a kernel said went wrong; 0: nothing."""
        return ctypes.c_int64.from_address(self.error.data_ptr()).value


@dataclass(slots=True, kw_only=True)
class Peers:
    """What the ranks of a group know of each other: why they cannot reach each other's memory, or
    None; the fewest multiprocessors of a rank; and after how many nanoseconds one that does not
    come is given up."""

    group: Group
    made: Any  # torch's group: another one may get its name
    reason: str | None
    processors: int = 0
    limit: int = 0
    memories: list[Memory] = field(default_factory=list)


_known: dict[str, Peers] = {}


def connect(name: str, device: torch.device) -> Peers:
    """Find out whether the ranks of a group reach each other's memory. All of them call it, outside
    of any capture; once is enough."""
    found = _peers(name)
    if found is None:
        for other in list(_known):  # what groups held that are gone
            _peers(other)
        if device.index is None:
            device = torch.device(device.type, torch.cuda.current_device())
        said = _all_said(_self(device), name, device)
        reason = _apart(said)
        found = _known[name] = Peers(
            group=Group.of(name), made=resolve(name), reason=reason,
            processors=min(s["processors"] for s in said), limit=_limit(name, device),
        )  # fmt: skip
    return found


def refusal(name: str) -> str | None:
    """Why a group's ranks cannot store into each other's memory, or None; the same on all ranks."""
    found = _peers(name)
    return UNKNOWN if found is None else found.reason


def connected() -> tuple[tuple[str, str | None], ...]:
    """The groups that are known, and why they cannot; plans depend on it."""
    known = ((name, _peers(name)) for name in sorted(_known))
    return tuple((name, peers.reason) for name, peers in known if peers is not None)


def memory(name: str, nbytes: int, ops: tuple[str, ...] = TOKENS) -> Memory | None:
    """The smallest memory of a group for these ops whose buffers hold so many bytes, if any."""
    peers = _peers(name)
    every = [] if peers is None else peers.memories
    fit = [m for m in every if m.ops == ops and m.half >= nbytes]
    return min(fit, key=lambda m: m.half, default=None)


def reserve(
    name: str,
    nbytes: int,
    ops: tuple[str, ...],
    total: Callable[[int, int, int], int],
    device: torch.device,
) -> tuple[Peers, Memory]:
    """Memory for these ops whose buffers hold so many bytes; total(ranks, half, phases): the bytes
    of an allocation.

    Without any all ranks make it together. Raises RuntimeError if they cannot: GPUs that do not
    reach each other, ranks that differ, or a CUDA graph that is captured meanwhile.
    """
    check(name)
    found = memory(name, nbytes, ops)
    if found is None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"collective='push' has no memory of {nbytes} bytes that the ranks of the group "
                f"{name!r} share, and cannot make it while a CUDA graph is captured; run the call "
                "once on every rank before the capture"
            )
        peers = connect(name, device)
        if peers.reason is not None:
            raise RuntimeError(f"collective='push' {peers.reason}; take 'gather' on every rank")
        half = max(LEAST_BYTES, 1 << (nbytes - 1).bit_length())
        found = _allocate(name, half, ops, total, device)
        peers.memories.append(found)
    return _known[name], found


def check(name: str | None = None) -> None:
    """Raise RuntimeError if a rank of a group, or of any one, was waited for in vain, or was found
    in another call."""
    for group, peers in list(_known.items()):
        for held in peers.memories if name in (None, group) else ():
            # Every replay comes here, so that a group is looked up only if something is wrong.
            if held.failed() and _peers(group) is peers:
                raise RuntimeError(failure(held.failed(), peers.group, held.ops))


def forget(name: str) -> None:
    """Let go of a group that failed, so that others, and graphs of others, run on. What was
    captured over it must not be replayed any more."""
    _known.pop(name, None)


def failure(said: int, group: Group, ops: tuple[str, ...]) -> str:
    """What went wrong, as kernels say it: phase + 2 * (a rank exchanges something else) + 256 *
    rank + 2**24 * number of the exchange."""
    anew = f"make the group anew, and call moe_ops.ranks.peers.forget({group.name!r}) for this one"
    op, rank, number = ops[said & 1], (said >> 8) & 0xFFFF, said >> 24
    if said & 2:
        return (
            f"moe_ops.{op}: rank {rank} of the group {group.name!r} exchanges tokens of other "
            f"sizes than rank {group.rank} (exchange {number}); give every rank the same rows, "
            f"widths and dtypes, in the same order of calls; {anew}"
        )
    return (
        f"moe_ops.{op}: rank {rank} of the group {group.name!r} does not answer rank {group.rank}: "
        f"it ended, raised an error, or is stuck (exchange {number}); {anew}"
    )


def _peers(name: str) -> Peers | None:
    """What is known of the group of this name, not of one before it."""
    found = _known.get(name)
    if found is None:
        return None
    try:
        if found.made is resolve(name):
            return found
    except ValueError:  # there is none any more
        pass
    del _known[name]
    return None


def _self(device: torch.device) -> dict[str, Any]:
    """What a rank says of itself."""
    own = torch.cuda.get_device_properties(device)
    every = range(torch.cuda.device_count())
    reached = [i for i in every if i != device.index
               and torch.cuda.can_device_access_peer(device.index, i)]  # fmt: skip
    return {
        "host": platform.node(),
        "torch": torch.__version__,
        "processors": own.multi_processor_count,
        "gpu": str(own.uuid),
        "reaches": [str(torch.cuda.get_device_properties(i).uuid) for i in reached],
        "multicast": _has_multicast(device),
    }


def _has_multicast(device: torch.device) -> bool:
    """Whether torch makes memory of several ranks with NVLink multicast."""
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    found: bool = _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index)
    return found


def _apart(said: list[dict[str, Any]]) -> str | None:
    """Why ranks that say this do not reach each other's memory, or None."""
    if len(said) > MOST_RANKS:
        return f"stores to at most {MOST_RANKS} ranks, the group has {len(said)}"
    for what in ("host", "torch"):
        for rank, one in enumerate(said):
            if one[what] != said[0][what]:
                return (
                    f"needs ranks of one {what}: rank 0 has {said[0][what]}, rank {rank} "
                    f"{one[what]}"
                )
    for rank, one in enumerate(said):
        for other, theirs in enumerate(said):
            if other != rank and theirs["gpu"] not in one["reaches"]:
                return f"needs GPUs that reach each other: that of rank {rank} not rank {other}'s"
    with_it = [rank for rank, one in enumerate(said) if one["multicast"]]
    if with_it:
        return (
            f"needs memory without NVLink multicast, which rank {with_it[0]} would make; start "
            "every rank with TORCH_SYMM_MEM_DISABLE_MULTICAST=1"
        )
    return None


def _limit(name: str, device: torch.device) -> int:
    """Nanoseconds after which the group gives a rank up."""
    options = resolve(name)._get_backend(device).options
    return int(options._timeout.total_seconds() * 1e9)


def _all_said(mine: dict[str, Any], name: str, device: torch.device) -> list[dict[str, Any]]:
    """What every rank of the group says, and the host waits for all of it."""
    group = resolve(name)
    found: list[Any] = [None] * group.size()
    with torch.cuda.device(device), torch.inference_mode(False):
        dist.all_gather_object(found, mine, group=group)
    return found


def _allocate(
    name: str,
    half: int,
    ops: tuple[str, ...],
    total: Callable[[int, int, int], int],
    device: torch.device,
) -> Memory:
    from torch.distributed import _symmetric_memory as symmetric

    group = Group.of(name)
    said = {"op": f"push of {' and '.join(ops)}", "buffer": half}
    compare("push", _all_said(said, name, device))
    with torch.cuda.device(device), torch.inference_mode(False):
        size = total(group.size, half, len(ops)) // 8
        # With the addresses behind: memory of torch's own may belong to a graph's pool here.
        words = symmetric.empty(size + group.size, dtype=torch.int64, device=device)
        words.zero_()
        given: Any = name  # torch has a type of its own for names
        handle = symmetric.rendezvous(words, given)
        if handle.multicast_ptr:
            raise RuntimeError("torch made memory with NVLink multicast, though it is off")
        table_R = words[size:]
        table_R.copy_(torch.tensor(handle.buffer_ptrs, dtype=torch.int64))
        error = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        torch.cuda.synchronize(device)
    _all_said(said, name, device)  # nobody stores before all have zeroed theirs
    return Memory(words=words, table_R=table_R, error=error, half=half, ops=ops, handle=handle)

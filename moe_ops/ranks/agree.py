"""What all ranks must agree on before they exchange anything, compared by the host.

Ranks that differ, in the op that they are in, in a size or in a dtype, would wait for each other or
take one tensor's bytes for another's. On CPUs every eager call compares first: an error names the
ranks, and all of them raise it. On a GPU that would make the host wait for the device, so there the
ranks alike are the caller's to ensure, with `require_alike` before the first call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from moe_ops.interop.interrupts import let_through
from moe_ops.ranks.groups import Group, all_gather, resolve

HEADER = 1024  # bytes
MOST_REFUSAL = 800  # of them, as JSON, for why a rank refuses
TAG = 0x0E0  # of our messages among others between two ranks

CPU = torch.device("cpu")

Values = Mapping[str, int | float | str | bool | Sequence[int] | None]


def require_alike(what: str, values: Values, group: Group, tokens: int, rows: int) -> None:
    """Raise on every rank, naming ranks and values, unless all are in the same op (`what`) with the
    same values, and none has more than `rows` tokens.

    Raises RuntimeError for values that differ and for ranks that do not answer, ValueError for
    too many tokens. Every rank of the group has to call it.
    """
    every = said_by_all(what, {**values, "rows": rows, "tokens": tokens}, group, own=("tokens",))
    over = {rank: v["tokens"] for rank, v in enumerate(every) if v["tokens"] > rows}
    if over:
        said = ", ".join(f"rank {rank} has {count}" for rank, count in over.items())
        raise ValueError(
            f"moe_ops.{what}: more tokens than the agreed rows={rows}: {said}; agree on more rows "
            "(rows= of a layer's call, which is max_num_tokens where a compiled call has none), or "
            "give fewer tokens at once"
        )


def said_by_all(
    what: str, values: Values, group: Group, *, own: Sequence[str] = (), device: torch.device = CPU
) -> list[dict[str, Any]]:
    """What every rank of the group says of itself, in the order of ranks.

    own: the names of values that ranks may have of their own. device: where tensors of a group are
    that has no backend for CPUs. Raises RuntimeError, naming ranks, for other values that differ,
    ranks in another op than `what`, and ranks that do not answer. Every rank has to call it.
    """
    every = _said(what, values, group, device)
    compare(what, every, own)
    return every


def said_together(
    what: str,
    values: Values,
    group: Group,
    refusal: Exception | None,
    *,
    own: Sequence[str] = (),
    device: torch.device = CPU,
) -> list[dict[str, Any]]:
    """What `said_by_all` gives, unless a rank has a refusal: then every rank raises, that one its
    own error and the others a ValueError with its words. Nobody waits for a rank that raised."""
    said = values if refusal is None else {"refusal": _shortened(str(refusal))}
    every = _said(what, said, group, device)
    if refusal is not None:
        raise refusal
    for rank, theirs in enumerate(every):
        if "refusal" in theirs:
            raise ValueError(f"moe_ops.{what}: rank {rank} of {group.name!r}: {theirs['refusal']}")
    compare(what, every, own)
    return every


def _shortened(text: str) -> str:
    """The start of a text, at most MOST_REFUSAL bytes of it as JSON."""
    text = text.encode("ascii", "replace").decode()[:MOST_REFUSAL]
    while len(json.dumps(text)) > MOST_REFUSAL:  # quotes and ends of lines take two bytes
        text = text[: -max(1, (len(json.dumps(text)) - MOST_REFUSAL) // 2)]
    return text


def compare(what: str, every: Sequence[Values], own: Sequence[str] = ()) -> None:
    """Raise RuntimeError, naming ranks and values, unless all ranks say the same, but for the
    values of these names."""
    for name in dict.fromkeys(name for values in every for name in values):
        if name in own:
            continue
        found = [values.get(name) for values in every]
        if any(value != found[0] for value in found):
            said = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(found))
            raise RuntimeError(
                f"moe_ops.{what}: the ranks differ in {name} ({said}); give every rank of the "
                "group the same, in the same order of calls"
            )


def most_tokens(tokens: int, group: str, *, multiple: int = 1) -> int:
    """The most tokens that a rank of the group has, rounded up: the `rows` of their next call.

    Every rank calls it, with its own number and the same `multiple`, on the host; the group takes
    tensors on the CPU. Raises RuntimeError that names the ranks that differ or do not answer.
    """
    said = {"multiple": multiple, "tokens": tokens}
    every = said_by_all("most_tokens", said, Group.of(group), own=("tokens",))
    return -(-max(1, *(v["tokens"] for v in every)) // multiple) * multiple


def _said(what: str, values: Values, group: Group, device: torch.device) -> list[dict[str, Any]]:
    mine = {"op": what, **values}
    return [mine] if group.size == 1 else _exchanged(what, mine, group, device)


def _exchanged(
    what: str, mine: dict[str, Any], group: Group, device: torch.device
) -> list[dict[str, Any]]:
    """What every rank of the group says of itself."""
    text = json.dumps(mine).encode()
    assert len(text) <= HEADER, f"{what} says {len(text)} bytes of itself"
    header = torch.frombuffer(bytearray(text.ljust(HEADER)), dtype=torch.uint8)
    headers_RB = _headers(what, header, group, device)
    return [json.loads(bytes(row.tolist())) for row in headers_RB]


def _headers(what: str, header: Tensor, group: Group, device: torch.device) -> Tensor:
    """The headers of all ranks. Those of gloo go from each rank to each: a collective would not
    tell which rank it waits for. Raises RuntimeError that names the ranks that do not answer."""
    found = resolve(group.name)
    # A group may have a backend for each type of device.
    backends = torch.distributed.get_backend_config(found).split(",")
    if "cpu:gloo" not in backends:
        gathered = all_gather(header.to(device_for(backends, device)), group)
        return gathered.cpu().view(group.size, HEADER)
    headers_RB = header.repeat(group.size, 1)
    works: list[tuple[int, Any]] = []  # kept: what is dropped before it is done may never be sent
    faults: dict[int, RuntimeError] = {}
    for rank in range(group.size):  # after a fault, too: who is here waits for our header
        if rank != group.rank:
            with _noting(faults, rank):
                works.append((rank, found.recv([headers_RB[rank]], rank, TAG)))
                works.append((rank, found.send([header], rank, TAG)))
    for rank, work in works:
        with _noting(faults, rank):
            work.wait()
    if faults:
        first = next(iter(faults.values()))
        raise RuntimeError(
            f"moe_ops.{what}: rank {', '.join(map(str, sorted(faults)))} of the group "
            f"{group.name!r} does not answer rank {group.rank}: it ended, raised an error, or is "
            f"stuck; make the group anew ({str(first).strip().splitlines()[0]})"
        ) from first
    return headers_RB


def device_for(backends: Sequence[str], device: torch.device) -> torch.device:
    """Where a group with backends such as "cuda:nccl" takes a header of a rank whose tensors are on
    a device; a rank that has none, as it refuses, says the CPU."""
    types = [backend.partition(":")[0] for backend in backends]
    if "cpu" in types:
        return CPU
    return device if device.type in types else torch.device(types[0])


@contextmanager
def _noting(faults: dict[int, RuntimeError], rank: int) -> Iterator[None]:
    """Keep the first error of torch's about a rank."""
    try:
        yield
    except RuntimeError as error:
        let_through(error)
        faults.setdefault(rank, error)

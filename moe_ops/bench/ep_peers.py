"""Ways of torch's own to send tokens to their experts and back, beside the transports of `bench
ep`: collectives alone, of rows that are packed or sorted ahead.

    packed  an all-gather of packed rows, and a reduce-scatter
    pairs   all-to-all with splits that the host reads: a row for each choice of a token
    vdev2d  the same rows by `all_to_all_vdev_2d` and `all_to_all_vdev_2d_offset` of NVSHMEM, with
            splits that stay on the device: of each expert, or of some, as they take 16 of a rank

torch has one kind of shared memory in a process, so that vdev2d is not measured beside push.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ops.ranks.groups import Group, all_gather, all_to_all
from moe_ops.ranks.packed import pack

PACKED, PAIRS, VDEV2D = "packed", "pairs", "vdev2d"
MOST_CHUNKS = 16  # of a rank, whose splits one block of `all_to_all_vdev_2d` adds up


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """Tokens of a rank's own with their weights and experts, of which every rank has as many."""

    x_TD: Tensor
    weights_TK: Tensor
    ids_TK: Tensor
    experts: int
    group: Group

    @property
    def sorted_RD(self) -> Tensor:
        """A row for each choice of a token, by experts."""
        order_R = self.ids_TK.flatten().argsort(stable=True)
        return self.x_TD[order_R // self.ids_TK.shape[1]]

    @property
    def counts_E(self) -> Tensor:
        """How many rows go to each expert."""
        return torch.bincount(self.ids_TK.flatten().long(), minlength=self.experts)


def peer(mode: str, own: Own) -> Callable[[], Tensor]:
    """A call there and back, which gives its own rows. Raises RuntimeError where it cannot run."""
    return PEERS[mode](own)


def reduce_scatter(part_GD: Tensor, group: Group) -> Tensor:
    functional = torch.ops._c10d_functional
    begun = functional.reduce_scatter_tensor(part_GD, "sum", group.size, group.name)
    out_TD: Tensor = functional.wait_tensor(begun)
    return out_TD


def packed(own: Own) -> Callable[[], Tensor]:
    packed_TB = pack((own.x_TD, own.weights_TK, own.ids_TK))
    made_GD = own.x_TD.repeat(own.group.size, 1)

    def there_and_back() -> Tensor:
        all_gather(packed_TB, own.group)
        return reduce_scatter(made_GD, own.group)

    return there_and_back


def pairs(own: Own) -> Callable[[], Tensor]:
    rows_RD, group = own.sorted_RD, own.group
    counts_R = own.counts_E.view(group.size, -1).sum(1)
    each = [1] * group.size

    def there_and_back() -> Tensor:
        received_R = all_to_all(counts_R, each, each, group)
        to, of = torch.stack((counts_R, received_R)).tolist()
        return all_to_all(all_to_all(rows_RD, to, of, group), of, to, group)

    return there_and_back


def why_not_vdev2d(device: torch.device) -> str | None:
    """Why there is no vdev2d here, or None."""
    from torch.distributed import _symmetric_memory as symmetric

    if device.type != "cuda":
        return f"needs CUDA, got {device.type}"
    if not symmetric.is_nvshmem_available():
        return "needs NVSHMEM, which torch does not find here"
    if not hasattr(torch.ops.symm_mem, "all_to_all_vdev_2d_offset"):
        return (
            f"needs torch.ops.symm_mem.all_to_all_vdev_2d_offset, which {torch.__version__} lacks"
        )
    return None


def vdev2d(own: Own) -> Callable[[], Tensor]:
    from torch.distributed import _symmetric_memory as symmetric

    group, device = own.group, own.x_TD.device
    reason = why_not_vdev2d(device)
    if reason is not None:
        raise RuntimeError(reason)
    if symmetric.get_backend(device) != "NVSHMEM":
        symmetric.set_backend("NVSHMEM")
    rows_RD, name = own.sorted_RD, group.name
    R, D = rows_RD.shape

    def shared(*shape: int, dtype: torch.dtype) -> Tensor:
        t = symmetric.empty(*shape, dtype=dtype, device=device)
        given: Any = name  # torch has a type of its own for names
        symmetric.rendezvous(t, given)
        return t

    each = own.experts // group.size
    splits_C = own.counts_E.view(-1, chunk_of(each)).sum(1)
    C = splits_C.shape[0]
    # All rows of all ranks may meet on one, and a chunk without any takes a row.
    sent_RD, back_GD = (shared(n, D, dtype=rows_RD.dtype) for n in (R, R + C))
    came_GD = shared(R * group.size + C, D, dtype=rows_RD.dtype)
    given_C = shared(C, dtype=torch.int64)
    came_2C, back_2C = (shared(2, C, dtype=torch.int64) for _ in range(2))
    sent_RD.copy_(rows_RD)
    given_C.copy_(splits_C)
    ops = torch.ops.symm_mem

    def there_and_back() -> Tensor:
        ops.all_to_all_vdev_2d(sent_RD, came_GD, given_C, came_2C, name)
        ops.all_to_all_vdev_2d_offset(came_GD, back_GD, came_2C, back_2C, name)
        return back_GD

    there_and_back()
    splits, begins = back_2C.tolist()
    back = [back_GD[begin : begin + n] for n, begin in zip(splits, begins, strict=True)]
    if not torch.equal(torch.cat(back), rows_RD):
        raise RuntimeError("other rows came back than were sent")
    return there_and_back


def chunk_of(experts: int) -> int:
    """How many experts of a rank share a split, so that there are not too many."""
    return next(
        n for n in range(1, experts + 1) if experts % n == 0 and experts // n <= MOST_CHUNKS
    )


PEERS = {PACKED: packed, PAIRS: pairs, VDEV2D: vdev2d}

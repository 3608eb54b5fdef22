"""Sizes and ranks: which shard of an MoE layer a process holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_ops.checks.options import check_fields, check_flag, check_int, check_text
from moe_ops.checks.shapes import check_choice
from moe_ops.checks.signature import described

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ALLGATHER = "allgather_reducescatter"
HIGH_THROUGHPUT = "alltoall_high_throughput"
LOW_LATENCY = "alltoall_low_latency"
AUTO = "auto"
# How tokens reach the ranks that hold their experts, and come back summed; the cheaper way.
COLLECTIVES = (ALLGATHER, HIGH_THROUGHPUT, LOW_LATENCY, AUTO)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """The sizes of the groups that share an MoE layer, and this process's rank in each.

    Tensor parallelism is flattened over the data and prefill-context parallel ranks:

        size = dp * pcp * tp        rank = (dp_rank * pcp + pcp_rank) * tp + tp_rank

    The fields hold the result, which `of` and `from_mesh` compute. Without expert parallelism
    tp_size and tp_rank are those of the flattened group, which shards every expert, and ep is 1 of
    1; with it ep_size and ep_rank are, each rank owns whole experts, and tp is 1 of 1. dp and pcp
    are as given: they say whose tokens a rank starts with. sp_size is above 1 where the tensor
    parallel ranks of attention hand over a part of the tokens each, instead of all of them.

    Raises TypeError for sizes and ranks that are no ints, ValueError for those that no such group
    has, and for a collective that cannot serve: all-to-all needs ranks that own whole experts.
    """

    tp_size: int = 1
    tp_rank: int = 0
    dp_size: int = 1
    dp_rank: int = 0
    pcp_size: int = 1
    pcp_rank: int = 0
    sp_size: int = 1
    sp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    collective: str = ALLGATHER

    def __post_init__(self) -> None:
        check_fields(self)
        for group in ("tp", "dp", "pcp", "sp", "ep"):
            size, rank = getattr(self, f"{group}_size"), getattr(self, f"{group}_rank")
            _check_rank(f"{group}_size", size, f"{group}_rank", rank)
        check_choice("collective", self.collective, COLLECTIVES)
        if self.tp_size > 1 and self.ep_size > 1:
            raise ValueError(
                f"tp_size={self.tp_size} and ep_size={self.ep_size}: the flattened group either "
                "shards every expert or owns whole ones; use ParallelConfig.of to flatten"
            )
        if self.tp_size > 1 and self.collective not in (ALLGATHER, AUTO):
            raise ValueError(
                f"collective={self.collective!r} sends tokens to the ranks that own their experts, "
                f"but tp_size={self.tp_size} ranks hold a shard of each; ask for expert "
                f"parallelism or for {ALLGATHER!r}"
            )
        outer = self.dp_size * self.pcp_size
        inner, left = divmod(self.size, outer)
        if left or self.rank // inner != self.dp_rank * self.pcp_size + self.pcp_rank:
            raise ValueError(
                f"rank {self.rank} of {self.size} is not dp_rank={self.dp_rank} of "
                f"dp_size={self.dp_size}, pcp_rank={self.pcp_rank} of pcp_size={self.pcp_size}; "
                "use ParallelConfig.of to flatten"
            )
        if self.sp_size > 1 and (self.sp_size, self.sp_rank) != (inner, self.rank % inner):
            raise ValueError(
                f"sp_rank={self.sp_rank} of sp_size={self.sp_size} must be 0 of 1, or the tensor "
                f"parallel rank of attention, here {self.rank % inner} of {inner}"
            )

    @classmethod
    def of(
        cls,
        *,
        tp: int = 1,
        dp: int = 1,
        pcp: int = 1,
        tp_rank: int = 0,
        dp_rank: int = 0,
        pcp_rank: int = 0,
        sequence_parallel: bool = False,
        expert_parallel: bool = False,
        collective: str = ALLGATHER,
    ) -> ParallelConfig:
        """The flattened configuration of a rank, from the model's own sizes and ranks.

        expert_parallel asks for whole experts on each rank; in a group of one there is nothing to
        share, and the result is one rank of everything. Raises ValueError and TypeError as the
        class does.
        """
        check_flag("sequence_parallel", sequence_parallel)
        check_flag("expert_parallel", expert_parallel)
        _check_rank("tp", tp, "tp_rank", tp_rank)
        _check_rank("dp", dp, "dp_rank", dp_rank)
        _check_rank("pcp", pcp, "pcp_rank", pcp_rank)
        size, rank = dp * pcp * tp, (dp_rank * pcp + pcp_rank) * tp + tp_rank
        whole = expert_parallel and size > 1
        return cls(
            tp_size=1 if whole else size,
            tp_rank=0 if whole else rank,
            dp_size=dp,
            dp_rank=dp_rank,
            pcp_size=pcp,
            pcp_rank=pcp_rank,
            sp_size=tp if sequence_parallel else 1,
            sp_rank=tp_rank if sequence_parallel else 0,
            ep_size=size if whole else 1,
            ep_rank=rank if whole else 0,
            collective=collective,
        )

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        *,
        tp: str | None = None,
        dp: str | None = None,
        pcp: str | None = None,
        sequence_parallel: bool = False,
        expert_parallel: bool = False,
        collective: str = ALLGATHER,
    ) -> ParallelConfig:
        """The flattened configuration of this process, from the named dimensions of a DeviceMesh.

        tp, dp and pcp name dimensions; a group without a name has one rank, and dimensions that
        nobody names (pipeline stages, replicas) do not share the layer. Raises ValueError for a
        name that the mesh lacks, for one that is used twice, and as the class does.
        """
        if not hasattr(mesh, "mesh_dim_names"):
            raise TypeError(f"mesh must be a DeviceMesh, got {described(mesh)}")
        named = {"tp": tp, "dp": dp, "pcp": pcp}
        used = [name for name in named.values() if name is not None]
        has = mesh.mesh_dim_names or ()
        for group, name in named.items():
            if name is not None and name not in has:
                check_text(group, name)
                raise ValueError(
                    f"{group}={name!r}: the mesh has no dimension {name!r}; it has "
                    f"{', '.join(has) or 'no names'}"
                )
        if len(set(used)) < len(used):
            raise ValueError(f"one dimension of the mesh was named twice among {named}")
        places = {group: has.index(name) for group, name in named.items() if name is not None}
        sizes = {group: mesh.size(place) for group, place in places.items()}
        ranks = {f"{group}_rank": mesh.get_local_rank(place) for group, place in places.items()}
        return cls.of(
            **sizes,
            **ranks,
            sequence_parallel=sequence_parallel,
            expert_parallel=expert_parallel,
            collective=collective,
        )

    @property
    def size(self) -> int:
        """The ranks of the flattened group."""
        return self.tp_size * self.ep_size

    @property
    def rank(self) -> int:
        """This rank in the flattened group."""
        return self.tp_rank + self.ep_rank

    @property
    def attention_tp(self) -> int:
        """The tensor parallel ranks of attention: neighbours in the flattened group."""
        return self.size // (self.dp_size * self.pcp_size)

    @property
    def sharers(self) -> int:
        """How many neighbours in the flattened group start with the same tokens."""
        return 1 if self.sp_size > 1 else self.attention_tp

    @property
    def uses_ep(self) -> bool:
        """Whether each rank owns whole experts, instead of a shard of every one."""
        return self.ep_size > 1

    def describe(self) -> str:
        """What a log wants to know: `ep 5/8 = dp 1/2 x tp 1/4, allgather_reducescatter`."""
        if self.size == 1:
            return "one rank"
        inner = self.attention_tp
        groups = (
            ("dp", self.dp_rank, self.dp_size),
            ("pcp", self.pcp_rank, self.pcp_size),
            ("sp" if self.sp_size > 1 else "tp", self.rank % inner, inner),
        )
        parts = " x ".join(f"{name} {rank}/{size}" for name, rank, size in groups if size > 1)
        kind = "ep" if self.uses_ep else "tp"
        return f"{kind} {self.rank}/{self.size} = {parts}, {self.collective}"


def _check_rank(size_name: str, size: int, rank_name: str, rank: int) -> None:
    check_int(size_name, size, least=1)
    check_int(rank_name, rank)
    if not 0 <= rank < size:
        raise ValueError(f"{rank_name}={rank} must be from 0 to {size - 1}, as {size_name}={size}")

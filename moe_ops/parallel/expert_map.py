"""Which expert lies on which rank, and in which of its slots."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from moe_ops.checks.options import MOST_SIZE, check_fields, check_int, check_type
from moe_ops.checks.shapes import check_choice
from moe_ops.parallel.config import ALLGATHER, AUTO, LOW_LATENCY, ParallelConfig
from moe_ops.ranks.tables import EVERY, HOME

LINEAR = "linear"
ROUND_ROBIN = "round_robin"
PLACEMENTS = (LINEAR, ROUND_ROBIN)
CPU = torch.device("cpu")  # layers are also built where the default device is meta
KEPT = torch.inference_mode(False)  # around what stays, for callers in any mode to use
# The others derive the rank of an expert from its id alone, by ranges, where data parallel ranks
# send each other tokens.
ROUND_ROBIN_COLLECTIVES = (ALLGATHER, LOW_LATENCY, AUTO)


@dataclass(frozen=True)
class ExpertPlacement:
    """The experts of one rank among those of all; `place` makes one.

    There are num_physical = num_experts + redundant experts with global ids 0, 1, ...; what they
    compute is `ExpertReplicas`' business. Each lies in one slot of one rank. The first num_physical
    mod ep_size ranks hold one more than the others. Local slots are numbered 0 ... num_local - 1.

        linear        rank r holds the next num_local ids after those of rank r - 1
        round_robin   rank r holds r, r + ep_size, r + 2 * ep_size, ...

    Shared experts that are fused with the routed ones follow, on every rank: their global ids are
    num_physical + s, their slots num_local + s. So every rank can serve every token's shared
    experts; a caller that sums over ranks sends them to one rank a token.

    All tensors are on the CPU and shared between callers: copy them before writing.
    """

    num_experts: int
    config: ParallelConfig
    redundant: int = 0
    shared: int = 0
    placement: str = LINEAR
    num_groups: int = 1
    balanced: bool = False
    requested: str = LINEAR  # what to come back to when the group changes

    def __post_init__(self) -> None:
        check_fields(self)
        check_type("config", self.config, ParallelConfig, "a ParallelConfig")
        check_choice("placement", self.placement, PLACEMENTS)
        check_choice("requested", self.requested, PLACEMENTS)
        for name, least in (("num_experts", 1), ("redundant", 0), ("shared", 0), ("num_groups", 1)):
            check_int(name, getattr(self, name), least=least, most=MOST_SIZE)
        if self.num_physical < self.config.ep_size:
            raise ValueError(
                f"{self.config.ep_size} expert parallel ranks, but only {self.num_physical} "
                "experts: a rank would hold none; use fewer ranks (ep_size), more experts "
                "(num_experts) or redundant ones"
            )
        why = why_not_round_robin(self.config, self.redundant, self.num_groups, self.balanced)
        if self.placement == ROUND_ROBIN and why is not None:
            raise ValueError(f"placement='round_robin' cannot serve: {why}; use 'linear'")

    @property
    def num_physical(self) -> int:
        """Routed experts on all ranks, redundant ones included."""
        return self.num_experts + self.redundant

    @property
    def num_local(self) -> int:
        """Routed experts on this rank; fused shared experts come after them."""
        return self.sizes[self.config.ep_rank]

    @property
    def num_slots(self) -> int:
        """Experts whose weights lie on this rank, fused shared ones included."""
        return self.num_local + self.shared

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Routed experts of each rank."""
        return shares(self.num_physical, self.config.ep_size)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The routed experts on the ranks before each."""
        return tuple(sum(self.sizes[:rank]) for rank in range(self.config.ep_size))

    @cached_property
    def offset(self) -> int | None:
        """The global id of this rank's first expert, if all here follow each other and some are
        elsewhere."""
        apart = self.config.uses_ep and not self.shared
        return self.starts[self.config.ep_rank] if apart and self.placement == LINEAR else None

    def ids_of(self, rank: int) -> tuple[int, ...]:
        """The global ids of a rank's routed experts, in the order of its slots."""
        check_int("rank", rank)
        if not 0 <= rank < self.config.ep_size:
            raise ValueError(f"rank={rank} must be from 0 to {self.config.ep_size - 1}")
        return ids_by_rank(self.num_physical, self.config.ep_size, self.placement)[rank]

    def local_id(self, global_expert: int) -> int:
        """The slot of an expert on this rank, -1 if it lies on another one.

        Raises ValueError for an id that no routed or fused shared expert has.
        """
        check_int("global_expert", global_expert)
        known = self.num_physical + self.shared
        if not 0 <= global_expert < known:
            raise ValueError(f"global_expert={global_expert} must be from 0 to {known - 1}")
        if global_expert >= self.num_physical:
            return self.num_local + global_expert - self.num_physical
        return self._slots.get(global_expert, -1)

    @cached_property
    def _slots(self) -> dict[int, int]:
        return {e: slot for slot, e in enumerate(self.ids_of(self.config.ep_rank))}

    @cached_property
    @KEPT
    def expert_map(self) -> Tensor | None:
        """int32 [num_physical + shared]: the slot of each global id here, or -1; None if all
        experts are here.
        """
        if not self.config.uses_ep:
            return None
        ids = range(self.num_physical + self.shared)
        return torch.tensor([self.local_id(e) for e in ids], dtype=torch.int32, device=CPU)

    @cached_property
    @KEPT
    def mask(self) -> Tensor:
        """int32 [num_physical + shared + 1]: 1 where a global id lies here, else 0; the last entry
        is a sentinel, 0, for pairs that go nowhere.
        """
        ids = range(self.num_physical + self.shared)
        here = [int(self.local_id(e) >= 0) for e in ids]
        return torch.tensor([*here, 0], dtype=torch.int32, device=CPU)

    @cached_property
    @KEPT
    def serving(self) -> tuple[Tensor, Tensor]:
        """rank_of_P and slot_of_P, int32 [num_physical + shared], as `dispatch_tokens` takes them:
        every rank serves its shard of an expert, and fused shared ones are served at home.
        """
        ids = torch.arange(self.num_physical + self.shared, dtype=torch.int32, device=CPU)
        ranks, slots = torch.full_like(ids, EVERY), ids.clone()
        if self.config.uses_ep:
            for rank, size in enumerate(self.sizes):
                held = list(self.ids_of(rank))
                ranks[held], slots[held] = rank, ids[:size]
            ranks[self.num_physical :] = HOME
            slots[self.num_physical :] = self.num_local + ids[: self.shared]
        return ranks, slots

    @cached_property
    @KEPT
    def physical_to_global(self) -> Tensor:
        """int64 [num_physical]: the global id in each position, where positions count through the
        slots of rank 0, then rank 1, ...: what all-to-all kernels take for ids.
        """
        ranks = range(self.config.ep_size)
        return torch.tensor([e for rank in ranks for e in self.ids_of(rank)], device=CPU)

    @cached_property
    @KEPT
    def global_to_physical(self) -> Tensor:
        """int64 [num_physical]: the position of each global id; inverse of physical_to_global."""
        return self.physical_to_global.argsort()

    @cached_property
    @KEPT
    def local_to_global(self) -> Tensor:
        """int64 [num_local]: the global id in each routed slot of this rank."""
        return torch.tensor(self.ids_of(self.config.ep_rank), device=CPU)

    def resized(self, config: ParallelConfig) -> ExpertPlacement:
        """The placement after the group's size or this rank changed, decided anew as by `place`."""
        return place(
            self.num_experts,
            config,
            placement=self.requested,
            redundant=self.redundant,
            shared=self.shared,
            num_groups=self.num_groups,
            balanced=self.balanced,
        )

    def describe(self) -> str:
        """Who holds what, for logs: `rank 1/4 holds 2 of 8 experts, linear: 2-3`."""
        rank, size = self.config.ep_rank, self.config.ep_size
        extra = f" ({self.redundant} redundant)" if self.redundant else ""
        shared = f"; {self.shared} shared in every rank" if self.shared else ""
        if size == 1:
            where = "one rank" if self.config.size == 1 else "each rank, a shard of every one"
            return f"all {self.num_physical} experts{extra} on {where}{shared}"
        ids = self.ids_of(rank)
        step = size if self.placement == ROUND_ROBIN else 1
        text = f"{ids[0]}-{ids[-1]}" if len(ids) > 1 else f"{ids[0]}"
        text += f" by {step}" if step > 1 and len(ids) > 1 else ""
        return (
            f"rank {rank}/{size} holds {len(ids)} of {self.num_physical} experts{extra}, "
            f"{self.placement}: {text}{shared}"
        )


def shares(count: int, ranks: int) -> tuple[int, ...]:
    """So many things over ranks: the first `count mod ranks` ranks get one more."""
    each, more = divmod(count, ranks)
    return tuple(each + (rank < more) for rank in range(ranks))


def ids_by_rank(count: int, ranks: int, placement: str) -> tuple[tuple[int, ...], ...]:
    """The ids of so many experts on each rank, in the order of its slots."""
    if placement == ROUND_ROBIN:
        return tuple(tuple(range(rank, count, ranks)) for rank in range(ranks))
    ends = [*accumulate(shares(count, ranks))]
    return tuple(
        tuple(range(start, stop)) for start, stop in zip([0, *ends[:-1]], ends, strict=True)
    )


def why_not_round_robin(
    config: ParallelConfig, redundant: int, num_groups: int, balanced: bool
) -> str | None:
    """Why experts cannot be dealt out round-robin, or None.

    It spreads the groups of grouped routing, whose experts have neighbouring ids; without groups
    it gains nothing. Balancing gives ids to slots itself.
    """
    if num_groups < 2:
        return f"it spreads the groups of grouped routing, and num_groups={num_groups}"
    if redundant:
        return f"redundant={redundant} experts are placed by the balancer"
    if balanced:
        return "experts are placed by the balancer"
    apart = config.uses_ep and config.dp_size > 1
    if apart and config.collective not in ROUND_ROBIN_COLLECTIVES:
        return (
            f"{config.collective} between dp_size={config.dp_size} ranks takes a rank's experts to "
            "be neighbours"
        )
    return None


def place(
    num_experts: int,
    config: ParallelConfig,
    *,
    placement: str = LINEAR,
    redundant: int = 0,
    shared: int = 0,
    num_groups: int = 1,
    balanced: bool = False,
) -> ExpertPlacement:
    """Place experts on the ranks of a group; the experts of this rank are in the result.

    placement: "linear" or "round_robin"; the latter only for grouped routing (num_groups above 1)
    without redundant experts or balancing, and with a collective that can serve it, as any does
    with one data parallel rank. Otherwise experts are placed linearly, and a UserWarning says why.
    redundant: physical experts beyond the logical ones. shared: fused shared experts, held by every
    rank.

    Raises TypeError for arguments of other types, ValueError for an unknown placement, for counts
    below their least, and for a group with more ranks than experts.
    """
    check_choice("placement", placement, PLACEMENTS)
    linear = ExpertPlacement(
        num_experts, config, redundant, shared, LINEAR, num_groups, balanced, requested=placement
    )
    if placement == LINEAR:
        return linear
    why = why_not_round_robin(config, redundant, num_groups, balanced)
    if why is None:
        return replace(linear, placement=ROUND_ROBIN)
    warnings.warn(f"experts are placed linearly, not round-robin: {why}", stacklevel=2)
    return linear

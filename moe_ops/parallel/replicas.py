"""Physical experts: which logical expert each one computes, and which one serves a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops.checks.options import MOST_SIZE, check_int, check_type
from moe_ops.checks.shapes import INDICES, check_tensor

CPU = torch.device("cpu")  # layers are also built where the default device is meta


@dataclass(frozen=True, slots=True, eq=False)
class ExpertReplicas:
    """The physical experts of one layer: num_logical + redundant of them, each a copy of a logical
    one, and of each logical expert at least one.

        physical_to_logical[p] = e              the expert that p computes; int64 [P]
        logical_to_physical[e, i] = p           its replicas, ascending, then -1; int64 [E, W]
        counts[e]                               how many there are; int64 [E]

    W = P - E + 1 replicas is the most that one expert can have, so the shapes stay when replicas
    move, and `update_` writes new ones where a captured graph reads. `initial` and `of` make them.
    """

    physical_to_logical: Tensor
    logical_to_physical: Tensor
    counts: Tensor

    @classmethod
    def initial(cls, num_logical: int, redundant: int = 0) -> ExpertReplicas:
        """The replicas before any load is known: each expert once, in order, then the first ones
        again.

        Raises ValueError for less than one expert, or a negative number of redundant ones.
        """
        check_int("num_logical", num_logical, least=1, most=MOST_SIZE)
        check_int("redundant", redundant, least=0, most=MOST_SIZE)
        physical = torch.arange(num_logical + redundant, device=CPU)
        return cls.of(physical % num_logical, num_logical)

    @classmethod
    def of(cls, physical_to_logical: Tensor, num_logical: int) -> ExpertReplicas:
        """The replicas that physical_to_logical, int32 or int64 [P], says; a copy, on its device.

        Raises ValueError unless it names each of the num_logical experts and no other.
        """
        check_int("num_logical", num_logical, least=1, most=MOST_SIZE)
        check_type("physical_to_logical", physical_to_logical, Tensor, "a Tensor")
        check_tensor("physical_to_logical", physical_to_logical, 1, INDICES)
        logical_P = physical_to_logical.long().clone()
        if set(logical_P.tolist()) != set(range(num_logical)):
            raise ValueError(
                f"physical_to_logical must name each of the experts 0 to {num_logical - 1}, and no "
                f"other, got {sorted(set(logical_P.tolist()))}"
            )
        counts_E = torch.bincount(logical_P, minlength=num_logical)
        order_P = logical_P.argsort(stable=True)
        sorted_P = logical_P[order_P]
        before_E = counts_E.cumsum(0) - counts_E
        place_P = torch.arange(len(logical_P), device=logical_P.device) - before_E[sorted_P]
        table_EW = logical_P.new_full((num_logical, len(logical_P) - num_logical + 1), -1)
        table_EW[sorted_P, place_P] = order_P
        return cls(logical_P, table_EW, counts_E)

    def physical_of(self, logical: int) -> tuple[int, ...]:
        """The physical experts that compute a logical one: where its weights must be loaded."""
        check_int("logical", logical)
        if not 0 <= logical < len(self.counts):
            raise ValueError(f"logical={logical} must be from 0 to {len(self.counts) - 1}")
        return tuple(p for p in self.logical_to_physical[logical].tolist() if p >= 0)

    def update_(self, new: ExpertReplicas) -> None:
        """Take over other replicas of as many experts, in place: a captured graph sees them.

        Raises ValueError, and changes nothing, if the numbers of experts differ.
        """
        have, want = self.logical_to_physical.shape, new.logical_to_physical.shape
        if have != want:
            raise ValueError(
                f"the new replicas are of {want[0]} logical and {sum(want) - 1} physical experts, "
                f"these of {have[0]} and {sum(have) - 1}; make a layer of the new size"
            )
        self.physical_to_logical.copy_(new.physical_to_logical)
        self.logical_to_physical.copy_(new.logical_to_physical)
        self.counts.copy_(new.counts)


def choose_replicas(
    ids_TK: Tensor, logical_to_physical: Tensor, counts: Tensor, start: int = 0
) -> Tensor:
    """The physical expert that serves each pair: the replicas of an expert take turns over tokens.

        out[t, k] = logical_to_physical[e, (t + start) % counts[e]],    e = ids_TK[t, k]

    Of any run of tokens that all choose e, its replicas get the same number, give or take one. All
    ranks that are given the same tokens choose alike. start, such as the data parallel rank, lets
    ranks with tokens of their own begin elsewhere: else their first tokens would meet.

    ids_TK: int32 or int64 [T, K] logical ids; result of the same dtype. Ids below 0, or not
    below E, become -1: nowhere. Plain tensor code without host synchronisation, for any tracer.
    """
    E = counts.shape[0]
    known_TK = (ids_TK >= 0) & (ids_TK < E)
    logical_TK = ids_TK.long().clamp(0, E - 1)
    turn_T = torch.arange(ids_TK.shape[0], device=ids_TK.device) + start
    turn_TK = turn_T[:, None] % counts[logical_TK]
    physical_TK = logical_to_physical[logical_TK, turn_TK]
    return torch.where(known_TK, physical_TK, -1).to(ids_TK.dtype)

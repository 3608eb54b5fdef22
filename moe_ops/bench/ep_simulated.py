"""What ranks would send each other, and compute, by the skew of routing: no ranks are needed.

Tokens choose experts with the popularity of the n-th one falling as n^-a. Of each rank the rows
that come from others are counted, and the pairs that it computes. Times are those of the links in
`moe_ops/ranks/links.py`, measured for two GPUs and taken to hold inside a host of eight, and of a
slower link between hosts: they are a model's, not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops.bench.tables import aligned
from moe_ops.ops import expert_loads
from moe_ops.parallel.expert_map import shares
from moe_ops.parallel.load_balance import rebalance
from moe_ops.parallel.replicas import ExpertReplicas, choose_replicas
from moe_ops.ranks.links import LINKS
from moe_ops.ranks.packed import row_bytes
from moe_ops.ranks.tables import needed
from moe_ops.ranks.transport import EXCHANGE, GATHER, PUSH
from moe_ops.testing import Case

HOST = 8  # ranks
BETWEEN_HOSTS = 50e9  # bytes a second of a rank: a NIC of 400 Gbit/s each


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Rows that come to a rank for each token of its own, pairs over the mean, and microseconds of
    the transports there and back; None for that which does not leave a host."""

    ranks: int
    zipf: float
    redundant: int
    mean_rows: float
    most_rows: float
    most_pairs: float
    gather_us: float
    exchange_us: float
    push_us: float | None


def simulate(
    case: Case, ranks: Sequence[int], zipf: Sequence[float], redundant: Sequence[int], T: int
) -> list[Simulated]:
    """Every combination, with T tokens of each rank."""
    return [_one(case, R, a, more, T) for R in ranks for a in zipf for more in redundant]


def table(found: Sequence[Simulated]) -> str:
    head = ("ranks", "zipf", "redundant", "rows in", "most", "pairs most/mean", "gather us")
    rows: list[tuple[str, ...]] = [(*head, "exchange us", "push us")]
    for s in found:
        counted = (f"{s.mean_rows:.2f}", f"{s.most_rows:.2f}", f"{s.most_pairs:.2f}")
        pushed = "-" if s.push_us is None else f"{s.push_us:.0f}"
        times = (f"{s.gather_us:.0f}", f"{s.exchange_us:.0f}", pushed)
        rows.append((str(s.ranks), f"{s.zipf:g}", str(s.redundant), *counted, *times))
    return aligned(rows)


def _one(case: Case, R: int, zipf: float, redundant: int, T: int) -> Simulated:
    ids_TK = _routed(case, R * T, zipf)
    P = case.E + redundant
    rank_of_P = torch.repeat_interleave(torch.arange(R), torch.tensor(shares(P, R)))
    current = torch.arange(P) % case.E
    if redundant:  # balanced by the loads of other tokens with the same popularity
        loads_E = expert_loads(_routed(case, R * T, zipf, seed=1), case.E)
        current = rebalance(loads_E[None], current[None], ranks=R).physical_to_logical[0]
    replicas = ExpertReplicas.of(current, case.E)
    rows_R, pairs_R, apart_R = torch.zeros(R), torch.zeros(R), torch.zeros(R)
    hosts = torch.arange(R) // HOST
    for source, of_T in enumerate(ids_TK.split(T)):
        own_TK = choose_replicas(of_T, replicas.logical_to_physical, replicas.counts, source)
        needed_R = needed(own_TK, rank_of_P, R, source).sum(0)
        needed_R[source] = 0
        rows_R += needed_R
        apart_R += torch.where(hosts != hosts[source], needed_R, 0)
        pairs_R += torch.bincount(rank_of_P[own_TK.flatten()], minlength=R)
    link = LINKS["cuda"]
    there = row_bytes([(case.D, torch.bfloat16), (case.K, torch.float32), (case.K, torch.int32)])
    row = there + 2 * case.D

    def spent(rows: float, apart: float, transport: str) -> float:
        inside = max(0.0, rows - apart) * row / link.rate(transport)
        return link.fixed_us(transport) + 1e6 * max(inside, apart * row / BETWEEN_HOSTS)

    away = max(0, R - HOST)
    return Simulated(
        ranks=R, zipf=zipf, redundant=redundant, mean_rows=float(rows_R.mean()) / T,
        most_rows=float(rows_R.max()) / T, most_pairs=float(pairs_R.max() / pairs_R.mean()),
        gather_us=spent((R - 1) * T, away * T, GATHER),
        exchange_us=spent(float(rows_R.max()), float(apart_R.max()), EXCHANGE),
        push_us=spent(float(rows_R.max()), 0, PUSH) if R <= HOST else None,
    )  # fmt: skip


def _routed(case: Case, tokens: int, zipf: float, seed: int = 0) -> Tensor:
    """K different experts a token, by popularity; neighbours are not alike in it."""
    g = torch.Generator().manual_seed(seed)
    order_E = torch.randperm(case.E, generator=torch.Generator().manual_seed(0)) + 1.0
    noise_TE = -torch.rand(tokens, case.E, generator=g).clamp(1e-20, 1 - 2**-24).log().neg().log()
    return (noise_TE - zipf * order_E.log()).topk(case.K).indices

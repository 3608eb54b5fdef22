"""What a recorded routing, or loads that layers counted, tell of a model's experts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_ops.layer.loads import ModelLoads
from moe_ops.recorded.routing import FORMAT, VERSION, RecordedRouting, check_format

MOST_PAIRS = 16  # of experts that are chosen together, of each layer
TOKENS_AT_ONCE = 4096
COLUMNS = ("layer", "entropy", "max / mean", "busiest expert", "its share", "unused")


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Two experts of a layer, how many tokens chose both, and that over what it would be if the
    choice of one said nothing of the other."""

    first: int
    second: int
    tokens: int
    lift: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutingStatistics:
    """How often the experts of each layer are chosen, and which together.

    loads_LE: int64, the tokens that chose an expert. tokens: that each layer routed, 0 where only
    loads are known. together: of each layer the pairs of experts that most tokens chose, at most
    `MOST_PAIRS`; empty where only loads are known.
    """

    layers: tuple[str, ...]
    loads_LE: Tensor
    tokens: int = 0
    together: tuple[tuple[Together, ...], ...] = ()

    @property
    def num_experts(self) -> int:
        return self.loads_LE.shape[1]

    @property
    def shares_LE(self) -> Tensor:
        """Loads over their sum: float64, 0 for a layer without loads."""
        loads = self.loads_LE.double()
        return loads / loads.sum(1, keepdim=True).clamp(min=1.0)

    @property
    def imbalance_L(self) -> Tensor:
        """The highest load over the mean one: float64, 1 if all are alike, and without loads."""
        shares = self.shares_LE
        return torch.where(shares.sum(1) > 0, shares.amax(1) * self.num_experts, 1.0)

    @property
    def entropy_L(self) -> Tensor:
        """-Σ p log p / log E of the shares p: float64, 1 if all are alike, 0 if one has all."""
        p = self.shares_LE
        most = math.log(self.num_experts) if self.num_experts > 1 else 1.0
        return torch.special.entr(p).sum(1) / most

    @property
    def unused_L(self) -> Tensor:
        """How many experts nobody chose."""
        return (self.loads_LE == 0).sum(1)

    def as_json(self) -> dict[str, Any]:
        """What `json.dumps` takes, and `read` reads."""
        return {
            "format": FORMAT, "version": VERSION, "layers": list(self.layers),
            "tokens": self.tokens, "loads": self.loads_LE.tolist(),
            "together": [
                [[p.first, p.second, p.tokens, p.lift] for p in pairs] for pairs in self.together
            ],
            "entropy": self.entropy_L.tolist(), "imbalance": self.imbalance_L.tolist(),
            "unused": self.unused_L.tolist(),
        }  # fmt: skip

    def rows(self) -> list[tuple[str, ...]]:
        """A row for each layer of what `COLUMNS` names, as text."""
        found = zip(
            self.layers, self.entropy_L.tolist(), self.imbalance_L.tolist(), self.shares_LE,
            self.unused_L.tolist(), strict=True,
        )  # fmt: skip
        return [
            (
                name, f"{entropy:.3f}", f"{imbalance:.2f}", str(int(shares_E.argmax())),
                f"{float(shares_E.max()):.2%}", str(unused),
            )
            for name, entropy, imbalance, shares_E, unused in found
        ]  # fmt: skip

    def __str__(self) -> str:
        """A line for each layer."""
        rows = self.rows()
        widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in (COLUMNS, *rows)
        ]
        of = f"{self.tokens} tokens, " if self.tokens else ""
        return "\n".join([f"{of}{len(self.layers)} layers of {self.num_experts} experts", *lines])


def of_record(recorded: RecordedRouting) -> RoutingStatistics:
    """The statistics of a recorded routing."""
    E, T = recorded.num_experts, recorded.tokens
    loads, together = [], []
    for ids_TK in recorded.ids_TLK.unbind(1):
        known_TK = ids_TK[ids_TK[:, 0] >= 0].long()
        loads.append(torch.bincount(known_TK.flatten(), minlength=E))
        together.append(_together(known_TK, loads[-1]))
    loads_LE = torch.stack(loads) if loads else torch.zeros(0, E, dtype=torch.int64)
    return RoutingStatistics(
        layers=recorded.layers, loads_LE=loads_LE, tokens=T, together=tuple(together)
    )


def _together(ids_TK: Tensor, loads_E: Tensor) -> tuple[Together, ...]:
    """The pairs of experts that most tokens chose both of."""
    T, E = len(ids_TK), len(loads_E)
    pairs_EE = torch.zeros(E, E)
    for part in ids_TK.split(TOKENS_AT_ONCE):
        chosen = torch.zeros(len(part), E).scatter_(1, part, 1.0)
        pairs_EE += chosen.T @ chosen
    first, second = torch.triu_indices(E, E, 1)
    counts = pairs_EE[first, second].long()
    found = []
    for i in counts.argsort(descending=True, stable=True)[:MOST_PAIRS].tolist():
        a, b, n = int(first[i]), int(second[i]), int(counts[i])
        if n > 0:
            lift = n * T / (int(loads_E[a]) * int(loads_E[b]))
            found.append(Together(first=a, second=b, tokens=n, lift=lift))
    return tuple(found)


def of_loads(loads: ModelLoads) -> RoutingStatistics:
    """The statistics of loads that layers counted."""
    return RoutingStatistics(layers=loads.layers, loads_LE=loads.logical_LE)


def read(path: str | os.PathLike[str]) -> RoutingStatistics:
    """The statistics of a file: a recorded routing that was saved, statistics or loads as JSON (by
    their `as_json`), or the lines that a `LoadRecorder` wrote, which are added up.

    Raises OSError for a path that cannot be read, ValueError for another kind of file.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        return of_record(RecordedRouting.load(path))
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    try:
        parts = [json.loads(line) for line in lines if line.strip()]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not parts:
        raise ValueError(f"{path} is empty")
    return _added([_of_json(part, str(path)) for part in parts], str(path))


def _of_json(said: Any, where: str) -> RoutingStatistics:
    if isinstance(said, Mapping) and "logical" in said:  # of `ModelLoads`
        return RoutingStatistics(
            layers=tuple(said["layers"]), loads_LE=torch.tensor(said["logical"])
        )
    check_format(dict(said) if isinstance(said, Mapping) else {}, where)
    return RoutingStatistics(
        layers=tuple(said["layers"]),
        loads_LE=torch.tensor(said["loads"], dtype=torch.int64),
        tokens=said["tokens"],
        together=tuple(
            tuple(Together(first=a, second=b, tokens=n, lift=lift) for a, b, n, lift in pairs)
            for pairs in said["together"]
        ),
    )


def _added(parts: Sequence[RoutingStatistics], where: str) -> RoutingStatistics:
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts:
        if part.layers != first.layers or part.loads_LE.shape != first.loads_LE.shape:
            raise ValueError(f"the lines of {where} have other layers or experts each; split them")
    loads = torch.stack([part.loads_LE for part in parts]).sum(0)
    return RoutingStatistics(layers=first.layers, loads_LE=loads)

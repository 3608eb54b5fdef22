"""Loads as they fall: sampled every so many steps, written down, and evened out."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_ops.checks.options import check_fields, check_int, check_type, check_writable
from moe_ops.layer.loads import (
    Layers,
    ModelLoads,
    check_shared,
    count_anew,
    device_of,
    gathered,
    named_layers,
)
from moe_ops.layer.module import MoELayer
from moe_ops.layer.rebalance import agree_on, check_layers, rebalance_by
from moe_ops.parallel.load_balance import Rebalanced, check_threshold
from moe_ops.ranks.agree import said_by_all, said_together
from moe_ops.ranks.groups import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalancing:
    """When layers are rebalanced: after each `interval` steps those whose imbalance of these steps,
    the highest load of a rank over the mean one, is at least the threshold. It is taken as if
    replicas of an expert had shared its load evenly, which they do over many tokens: what
    `rebalance` calls `before`. nodes: see there.

    Raises TypeError or ValueError for numbers that cannot be.
    """

    interval: int
    threshold: float = 1.0
    nodes: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        check_int("interval", self.interval, least=1)
        check_int("nodes", self.nodes, least=1)
        check_threshold(self.threshold)


class LoadRecorder:
    """Sample the loads of a model's layers every so many steps, write them, and rebalance.

        recorder = LoadRecorder(
            model, group, every=100, path="loads.jsonl",
            rebalancing=Rebalancing(interval=1000, threshold=1.2),
        )
        for batch in batches:
            model(batch)
            recorder.step()

    Every rank of the group makes one, and calls `step` after each of the same steps. A step that is
    no sample does nothing but count. A sample is what was counted since the one before, the first
    also what was counted before the recorder was made: all ranks read their counters, which makes
    the host wait for the device, and set them to zero. It is `last`, and the first rank appends it
    to `path` as a line of JSON: that of `ModelLoads.as_json` with the first and the last step of
    it, and, where layers were rebalanced after it, their imbalance before and after and the number
    of experts that moved. A rebalancing decides by the sum of the samples since the one before, and
    takes a sample itself, so that in each an expert lies in one place.

    layers, group: as of `model_loads`, and, with rebalancing, of `rebalance_layers`. Raises
    ValueError or TypeError for arguments that do not fit and OSError for a path that cannot be
    written, on every rank; RuntimeError where ranks differ or do not answer.
    """

    def __init__(
        self,
        layers: Layers,
        group: str = "",
        *,
        every: int,
        path: str | os.PathLike[str] | None = None,
        rebalancing: Rebalancing | None = None,
    ) -> None:
        self.layers: dict[str, MoELayer] = {}
        self.last: ModelLoads | None = None
        self._group, self._every, self._rebalancing = Group.of(group), every, rebalancing
        self._step = self._sampled = 0
        self._path: Path | None = None
        self._window_LE: Tensor | None = None  # since the last rebalancing
        refusal: Exception | None = None
        try:
            self._take(layers, path)
        except (TypeError, ValueError, OSError) as error:
            refusal = error
        self._agree(refusal)

    def _take(self, layers: Layers, path: str | os.PathLike[str] | None) -> None:
        """Raise TypeError, ValueError or OSError unless this rank can do what it is asked for."""
        self.layers = named_layers(layers)
        check_int("every", self._every, least=1)
        how = self._rebalancing
        check_type("rebalancing", how, (Rebalancing, type(None)), "a Rebalancing or None")
        check_shared(self.layers, self._group)
        if how is not None:
            check_layers([*self.layers.values()], self._group.name, how.nodes)
        check_type("path", path, (str, os.PathLike, type(None)), "a path or None")
        self._path = None if path is None else Path(path)
        if self._path is not None and self._group.rank == 0:
            check_writable("path", self._path)

    def _agree(self, refusal: Exception | None) -> None:
        """Raise unless all ranks record alike, and none refuses."""
        how = self._rebalancing
        said = {} if refusal is not None else {
            "every": self._every, "interval": None if how is None else how.interval,
            "layers": len(self.layers),
        }  # fmt: skip
        said_together(
            "LoadRecorder", said, self._group, refusal, device=device_of([*self.layers.values()])
        )
        if how is not None:
            agree_on([*self.layers.values()], self._group.name, how.nodes, how.threshold)

    @torch.no_grad()
    def step(self) -> Rebalanced | None:
        """Count a step; sample and rebalance where it is time. Returns what was rebalanced, if it
        was time for that.

        Raises RuntimeError where ranks differ or do not answer; ValueError for layers that were
        given to another group since, which need a recorder of their own; and on the first rank
        OSError where the file cannot be written any more.
        """
        self._step += 1
        how = self._rebalancing
        now = how is not None and self._step % how.interval == 0
        if not now and self._step % self._every:
            return None
        check_shared(self.layers, self._group)
        steps = {"first_step": self._sampled + 1, "last_step": self._step}
        said_by_all(
            "LoadRecorder.step", steps, self._group, device=device_of([*self.layers.values()])
        )
        sample = self.last = gathered(self.layers, self._group)
        self._sampled = self._step
        before_LE = self._window_LE
        window_LE = sample.logical_LE if before_LE is None else before_LE + sample.logical_LE
        done = None
        if how is not None and now:
            done = rebalance_by(
                [*self.layers.values()], self._group.name, window_LE, sample.experts_LP,
                how.nodes, how.threshold,
            )  # fmt: skip
        self._window_LE = None if now else window_LE
        count_anew([*self.layers.values()])
        self._write({**steps, **sample.as_json(), "rebalanced": _said_of(done)})
        return done

    def _write(self, sample: dict[str, Any]) -> None:
        if self._path is not None and self._group.rank == 0:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(sample) + "\n")


def _said_of(done: Rebalanced | None) -> dict[str, Any] | None:
    if done is None:
        return None
    return {
        "before": done.before.tolist(), "after": done.after.tolist(),
        "moved": [len(moves.pairs) for moves in done.moves],
    }  # fmt: skip

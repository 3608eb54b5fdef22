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
from moe_ops.layer.loads import Layers, ModelLoads, count_anew, gathered, named_layers
from moe_ops.layer.rebalance import agree_on, check_layers, rebalance_by
from moe_ops.parallel.load_balance import Rebalanced, check_threshold
from moe_ops.ranks.agree import said_together
from moe_ops.ranks.groups import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalancing:
    """When layers are rebalanced: after each `interval` steps those whose imbalance of these steps,
    the highest load of a rank over the mean one, is at least the threshold. nodes: see `rebalance`.

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
    no sample does nothing but count. A sample is what was counted since the one before: all ranks
    read their counters, which makes the host wait for the device, and set them to zero. It is
    `last`, and the first rank appends it to `path` as a line of JSON: that of `ModelLoads.as_json`
    with the first and the last step of it, and, where layers were rebalanced after it, their
    imbalance before and after and the number of experts that moved. A rebalancing decides by the
    sum of the samples since the one before, and takes a sample itself, so that in each an expert
    lies in one place.

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
        check_int("every", every, least=1)
        self.layers = named_layers(layers)
        self.last: ModelLoads | None = None
        self._group, self._every, self._rebalancing = Group.of(group), every, rebalancing
        self._path = None if path is None else Path(path)
        self._step = self._sampled = 0
        self._window_LE: Tensor | None = None  # since the last rebalancing
        if rebalancing is not None:
            check_type("rebalancing", rebalancing, Rebalancing, "a Rebalancing or None")
            check_layers([*self.layers.values()], group, rebalancing.nodes)
        self._agree()

    def _agree(self) -> None:
        """Raise unless all ranks record alike, and the first one can write."""
        refusal: Exception | None = None
        if self._path is not None and self._group.rank == 0:
            try:
                check_writable("path", self._path)
            except (TypeError, OSError) as error:
                refusal = error
        how = self._rebalancing
        said = {
            "every": self._every, "interval": None if how is None else how.interval,
            "layers": len(self.layers),
        }  # fmt: skip
        device = next(iter(self.layers.values())).w13_weight.device
        said_together("LoadRecorder", said, self._group, refusal, device=device)
        if how is not None:
            agree_on([*self.layers.values()], self._group.name, how.nodes, how.threshold)

    @torch.no_grad()
    def step(self) -> Rebalanced | None:
        """Count a step; sample and rebalance where it is time. Returns what was rebalanced, if it
        was time for that. Raises RuntimeError where ranks differ or do not answer."""
        self._step += 1
        how = self._rebalancing
        now = how is not None and self._step % how.interval == 0
        if not now and self._step % self._every:
            return None
        steps = {"first_step": self._sampled + 1, "last_step": self._step}
        device = next(iter(self.layers.values())).w13_weight.device
        said_together("LoadRecorder.step", steps, self._group, None, device=device)
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

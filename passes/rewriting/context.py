"""What a pass is given besides the graph: the user's options, and where to write what it saw."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from moe_ops.checks.options import check_fields
from moe_ops.planning.plan import Choice
from moe_ops.planning.thresholds import check_thresholds

log = logging.getLogger("moe_ops")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How graphs are rewritten. Equal options give equal graphs.

    thresholds: the backend of `experts` (and `moe`) by token count, as pairs of the largest count
    and a backend, the last count None: ((64, "cpu"), (None, "aten")). None leaves the choice to the
    plan. tuned: a file that `moe_ops.tune` wrote, for the plan to go by. strict: raise instead of
    leaving a region to a slower way, experts in no form that a pass knows among them. linears: run
    other products of few rows with parameters, on a GPU, by kernels of ours. beside: run shared
    experts on a second stream of a GPU, beside routed ones; None: in order, and `explain` says so.
    batch_invariant: run ops by what gives a token the same bits in any batch, and raise where
    nothing does. stop_after: the name of the last pass to run. dump: label the graph before and
    after each pass for depyf and TORCH_LOGS.

    Lists in place of tuples, and a path in place of its string, are made into these. Raises
    TypeError for an option of another type, and ValueError for thresholds that are none.
    """

    thresholds: tuple[tuple[int | None, str], ...] | None = None
    tuned: str | None = None
    strict: bool = False
    linears: bool = True
    beside: bool | None = None
    batch_invariant: bool = False
    stop_after: str | None = None
    dump: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "thresholds", check_thresholds(self.thresholds))
        if isinstance(self.tuned, os.PathLike):
            object.__setattr__(self, "tuned", os.fspath(self.tuned))
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What a pass did or would not do at a node, in words."""

    rule: str
    node: str
    layer: str  # the module in the model, such as model.layers.0.mlp; empty if unknown
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One run of the passes over one graph. Inside `for_all_sizes` no more is known of its symbolic
    sizes than holds for each that it serves."""

    options: Options = Options()
    for_all_sizes: Callable[[], AbstractContextManager[None]] = nullcontext
    rewrites: list[Note] = field(default_factory=list)
    refusals: list[Note] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)

    def rewrote(self, rule: str, node: str, layer: str, text: str) -> None:
        """Record a rewrite."""
        self.rewrites.append(Note(rule=rule, node=node, layer=layer, text=text))

    def refuse(
        self, rule: str, node: str, layer: str, reason: str, level: int = logging.DEBUG
    ) -> None:
        """Record, and log, why a region that looked right was left alone."""
        self.refusals.append(Note(rule=rule, node=node, layer=layer, text=reason))
        log.log(level, "%s leaves %s (%s) alone: %s", rule, layer or "a region", node, reason)

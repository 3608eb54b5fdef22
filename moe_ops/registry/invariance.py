"""Batch invariance: the bits of a row depend on the row alone, not on how many there are, where it
lies among them, nor on what the others hold.

A backend says by an `Arithmetic` how it computes one row: in which order and groups it sums, what
it rounds, by which instructions. Backends of equal names give equal bits, so that one of them may
run few rows and another many. A name may depend on the layer, its formats and widths, and on the
device, but on nothing of the rows: neither their number nor their strides, addresses or values.
What cannot promise that gives the reason, as a `Refused`, and no invariant call gets it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, cast

import torch


class Refused(str):
    """Why the bits of a row depend on other rows, in words."""


Arithmetic = Callable[[Any], str]  # of a record; a str that is a Refused is no name

# Whether calls have to be invariant, as `using` and compiled graphs ask for it.
INVARIANT: ContextVar[bool] = ContextVar("moe_ops_batch_invariant", default=False)
# What the plan of a call that has to be invariant begins with; with nothing behind it backends are
# asked when it runs.
PLANNED = "invariant;"

DEFINITION = "definition"


def unknown(call: Any) -> str:
    """The arithmetic of a backend that says none."""
    return Refused("its sums may depend on the number of rows")


def by_parts(call: Any) -> str:
    """The arithmetic of a definition that computes nothing of a row but by other ops, each of which
    is asked in turn, and by copies."""
    return DEFINITION


@contextmanager
def invariant(wanted: bool = True) -> Iterator[None]:
    """Have the calls inside be invariant, or not; the inner of two nested blocks wins."""
    token = INVARIANT.set(wanted)
    try:
        yield
    finally:
        INVARIANT.reset(token)


def require_asked(compiled_so: bool) -> None:
    """Raise RuntimeError in a block of `invariant` for code that was not compiled to be so, which
    the block cannot change."""
    if INVARIANT.get() and not compiled_so:
        raise RuntimeError(
            "using(batch_invariant=True) does not reach into compiled code; give "
            "batch_invariant=True to moe_ops.compile, moe_ops.inductor_options or the layer"
        )


def as_planned(plan: str, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What runs a record as a plan says: `run`, in which every call is invariant if this one is.
    One that is not raises RuntimeError in a block of `invariant`."""

    def ran(call: Any) -> Any:
        with invariant():
            return run(call)

    def ran_as_ever(call: Any) -> Any:
        require_asked(False)
        return run(call)

    return ran if plan.startswith(PLANNED) else ran_as_ever


def invariant_if(wanted: bool, op: Any) -> Callable[..., Any]:
    """An `Op`, or, if wanted, what runs it batch invariant, in eager code and in what is traced, be
    it for a program.

    Raises NotImplementedError for what is traced with gradients, of which a plan has none.
    """
    if not wanted:
        return op
    exporting = torch.compiler._is_exporting_flag
    if not (torch.compiler.is_dynamo_compiling() or exporting):
        return _uncompiled(op) if "torch._dynamo" in sys.modules else invariant()(op)
    if torch.is_grad_enabled():
        raise NotImplementedError(NO_GRADIENTS_OF_PROGRAMS if exporting else NO_GRADIENTS_OF_GRAPHS)
    return partial(_planned, op)


NO_GRADIENTS_OF_GRAPHS = (
    "batch_invariant of a layer is not carried into a compiled graph with gradients; compile under "
    "torch.no_grad(), or give batch_invariant=True to moe_ops.compile alone"
)
NO_GRADIENTS_OF_PROGRAMS = (
    "batch_invariant of a layer is not carried into a program with gradients; call torch.export "
    "under torch.no_grad()"
)


@functools.cache
def _uncompiled(op: Any) -> Callable[..., Any]:
    """What runs an `Op` batch invariant where Dynamo compiles no part of it: behind code that it
    could not trace it begins anew, and of what it traces with gradients nothing is kept."""
    return cast("Callable[..., Any]", torch.compiler.disable(invariant()(op)))


def _planned(op: Any, *args: Any, **kwargs: Any) -> Any:
    out = op.planned(*args, **kwargs, plan=PLANNED)
    if op.keep is not None:
        op.keep(out)
    return out

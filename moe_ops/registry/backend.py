"""One way to run an op, and what it says before it is asked to."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from moe_ops.registry.invariance import INVARIANT, Arithmetic, Refused, unknown
from moe_ops.registry.layouts import Layout

LAYOUT = "layout"  # the argument of an op that names the layout of its weights
ONLY_INVARIANT = (
    "is for calls that have to be batch invariant, which using(batch_invariant=True) asks for"
)
ALIGNMENT = 16  # bytes, the most that a kernel reads at once
PLAIN = (Tensor, torch.nn.Parameter)  # tensors that have memory


def is_aligned(t: Tensor) -> bool:
    """Whether a tensor begins at a multiple of 16 bytes of its memory, as all memory does but what
    other libraries lend; of tensors of a graph nothing else is known."""
    if int(t.storage_offset()) * t.itemsize % ALIGNMENT != 0:
        return False
    return not t.is_cuda or type(t) not in PLAIN or t.data_ptr() % ALIGNMENT == 0


@dataclass(frozen=True, slots=True)
class Rows:
    """Limits of a backend on the rows of a call's first argument (tokens, or routed rows), or, of
    ops over ranks, on the `rows` that these agreed on.

    `preferred` gives the most rows for which the backend is the better choice, None for any number;
    with more, the backends after it are asked first. `possible` gives the most that it can run.
    """

    preferred: Callable[[Any], int | None] | None = None
    possible: Callable[[Any], int] | None = None


ANY_NUMBER = Rows()


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiples:
    """The multiples that widths of a layer are to be: `hidden` of the model's, `intermediate` of an
    expert's."""

    hidden: int = 1
    intermediate: int = 1

    def __or__(self, other: Multiples) -> Multiples:
        """The least multiples of both."""
        return Multiples(
            hidden=math.lcm(self.hidden, other.hidden),
            intermediate=math.lcm(self.intermediate, other.intermediate),
        )


# Of the names of the formats of weights and inputs, and the dtype of tokens; a str says why it does
# not multiply these.
Rounds = Callable[[str, str, torch.dtype], Multiples | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a backend needs of a machine, whatever the call: in words, why a device has it not
    (`missing` gives None where it has), and the package, if one has to be installed."""

    said: str
    missing: Callable[[torch.device], str | None]
    package: str = ""


Binds = Callable[[Any], Callable[..., Any] | None]
InPlan = Callable[[str], Callable[[Any], Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One way to run an op: `run` takes its record; `supports` says why it cannot run, or None.

    `reads` names the arguments with defaults that it reads. A call in which another one differs
    from its default is refused for it, so `supports` and `run` need not look at these. A `composed`
    backend runs the definition's stages one by one; a compiler does better with the definition.
    One with a `layout` runs prepared weights, and no others. `needs` says what of a machine it
    needs for any call, which is told before what is wrong with one. `emulates` says of a call that
    it runs whether it rounds inputs to what their codes stand for, and multiplies these as 16-bit
    floats, `waits` whether the host waits for the device in it, so that no graph can hold it.
    `asks` names the context variables that decide, with what `memo.py` compares of calls, whether
    it runs; None if anything else may. `alike` is then given a call that it ran, and gives a
    function of the op's arguments that runs those like it, or None, where `run` does. `aligned`
    says that where any tensor begins in its memory decides, too, not only one of bytes. `in_plan`
    gives what runs the calls of a compiled graph, in the place of `run`, for the text of the plan
    that says which backends do. `rounds` says of which multiples widths are to be, for layers that
    are made for it; None: of none. One that runs calls by several paths, which `Registration.path`
    registers, says in words by which of them a call would run, and why not by those asked before
    it: `told`. Of calls in float64, which `in_double` tells, it gets none, whatever it supports.
    `arithmetic` names how it computes a row, or says why that depends on other rows
    (`invariance.py`). One that is `only_invariant` is for calls that have to be batch invariant.
    """

    name: str
    run: Callable[[Any], Any]
    reads: tuple[str, ...] = ()
    supports: Callable[[Any], str | None] | None = None
    rows: Rows = ANY_NUMBER
    devices: frozenset[str] | None = None  # None: every device
    priority: int = 0
    composed: bool = False
    layout: Layout | None = None
    arithmetic: Arithmetic = field(default=unknown, compare=False)
    only_invariant: bool = field(default=False, compare=False)
    needs: Needs | None = None
    emulates: Callable[[Any], bool] = field(default=lambda call: False, compare=False)
    waits: Callable[[Any], bool] = field(default=lambda call: False, compare=False)
    asks: tuple[ContextVar[Any], ...] | None = field(default=None, compare=False)
    alike: Binds | None = field(default=None, compare=False)
    aligned: bool = field(default=False, compare=False)
    in_plan: InPlan | None = field(default=None, compare=False)
    told: Callable[[Any], str] | None = field(default=None, compare=False)
    rounds: Rounds | None = field(default=None, compare=False)
    in_double: Callable[[Any], bool] = field(default=lambda call: False, compare=False)
    # What of a record it does not read, by name; and whether there is any, which is quicker.
    unread: Callable[[Any], dict[str, Any]] = field(default=lambda call: {}, compare=False)
    ignores: Callable[[Any], bool] | None = field(default=None, compare=False)

    def changed(self, **values: Any) -> Backend:
        """The backend with other values of these fields. `dataclasses.replace` gives the same by
        more calls, 3000 of them in an import of the package."""
        return Backend(**dict(zip(FIELDS, values_of(self), strict=True)) | values)

    def refusal(self, device: str, rows: Any, call: Any) -> str | None:
        """Why the backend cannot run a call of so many rows, or None; nothing is said of a number
        that is no int, such as one that a compiler does not know."""
        if self.in_double(call):
            return "takes no float64, which the definition alone computes; convert to float32"
        if self.devices is not None and device not in self.devices:
            return f"needs a tensor on {' or '.join(sorted(self.devices))}, got {device}"
        if self.only_invariant and not INVARIANT.get():
            return ONLY_INVARIANT
        missing = None if self.needs is None else self.needs.missing(torch.device(device))
        if missing is not None:
            return missing
        if self.ignores is not None and self.ignores(call):
            return self._unread(self.unread(call))
        reason = None if self.supports is None else self.supports(call)
        if reason is None and self.rows.possible is not None and isinstance(rows, int):
            most = self.rows.possible(call)
            if rows > most:
                return f"takes at most {most} rows, got {rows}"
        if reason is None and INVARIANT.get():
            said = self.arithmetic(call)
            return f"is not batch invariant: {said}" if isinstance(said, Refused) else None
        return reason

    def _unread(self, unread: dict[str, Any]) -> str:
        """A refusal of what the backend does not read: options, or else tensors, as a format says
        enough of the scales that come with it."""
        if self.layout is not None and LAYOUT in unread:
            name, got = self.layout.name, unread[LAYOUT]
            return (
                f"reads weights prepared as {name!r}, got "
                f"{repr(got) if got else 'weights as they are loaded'}; "
                f"moe_ops.prepare(model, {name!r}) stores them so"
            )
        options = [f"{n}={value!r}" for n, value in unread.items() if not isinstance(value, Tensor)]
        return f"does not read {', '.join(options or unread)}"


FIELDS = tuple(field.name for field in fields(Backend))
values_of = attrgetter(*FIELDS)

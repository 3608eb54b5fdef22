"""Two calls that take turns: one computes while tokens of the other travel.

An exchange is given in steps, a generator that yields where it would wait for other ranks. The
first call comes to its exchange, starts to send, and runs the second call from there, which comes
to its own exchange and steps the first one's beside its own:

    first   compute | send          experts | send back          wait
    second            compute | send                   experts | send back | wait

So every rank has its exchanges in one order, one thread runs all of it, and what the calls do
around their exchange is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

Steps = Generator[None, None, Tensor]
# Of an exchange: its steps, given the most tokens of a rank; of none of its tokens, if asked so.
Begin = Callable[[int, bool], Steps]

HALVES = 2


class Turns:
    """The exchanges of two calls, of which the first one runs the second.

    rows: the most tokens that a rank has in each call. collective: the transport of both. second:
    runs the second call; None where it has no tokens here, and other ranks' are served.
    """

    def __init__(
        self, rows: tuple[int, int], collective: str, second: Callable[[], None] | None
    ) -> None:
        self.collective = collective
        self._rows, self._second = rows, second
        self._begun: list[Steps] = []

    def exchange(self, begin: Begin) -> Tensor:
        """The result of an exchange in its turn. Raises RuntimeError for a third one, and where the
        second call has none."""
        if len(self._begun) == HALVES:
            raise RuntimeError(
                "two_halves: the block exchanges tokens more than once in a call; call it without "
                "two_halves, or give parts of it with one exchange each"
            )
        mine = begin(self._rows[len(self._begun)], False)
        self._begun.append(mine)
        next(mine)
        if len(self._begun) == HALVES:
            return self._end_second()
        if self._second is None:
            absent = begin(self._rows[1], True)
            self._begun.append(absent)
            next(absent)
            self._end_second()
        else:
            with agreed_on(self._rows[1]):
                self._second()
            self.require_both()
        return _result(mine)

    def require_both(self) -> None:
        """Raise RuntimeError unless both calls came to an exchange."""
        if len(self._begun) < HALVES:
            raise RuntimeError(
                "two_halves: the block did not come to its exchange of tokens where its halves "
                "take turns: it calls no experts, or in compiled code; call it without two_halves"
            )

    def _end_second(self) -> Tensor:
        first, second = self._begun
        next(first)
        next(second)
        return _result(second)


def _result(steps: Steps) -> Tensor:
    """What steps give at their end."""
    try:
        next(steps)
    except StopIteration as ended:
        out: Tensor = ended.value
        return out
    raise AssertionError("an exchange waits twice: for tokens, and for their results")


_turns: ContextVar[Turns | None] = ContextVar("moe_ops_turns", default=None)
_agreed: ContextVar[int | None] = ContextVar("moe_ops_agreed_rows", default=None)


def turns() -> Turns | None:
    """Whose turns calls in this context take, if any; those of compiled code take none."""
    return None if torch.compiler.is_compiling() else _turns.get()


def agreed() -> int | None:
    """The most tokens of a rank, if ranks have agreed on it for calls in this context."""
    return None if torch.compiler.is_compiling() else _agreed.get()


@contextmanager
def taking(found: Turns) -> Iterator[None]:
    """A context in which exchanges take these turns."""
    token = _turns.set(found)
    try:
        yield
    finally:
        _turns.reset(token)


@contextmanager
def agreed_on(rows: int) -> Iterator[None]:
    """A context in which ranks need not ask for the most tokens of a rank."""
    token = _agreed.set(rows)
    try:
        yield
    finally:
        _agreed.reset(token)

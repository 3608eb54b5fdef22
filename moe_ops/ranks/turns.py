"""Two calls that take turns: one computes while tokens of the other travel.

An exchange is given in steps, a generator that yields where it would wait for other ranks. The
first call comes to its exchange, starts to send, and runs the second call from there, which comes
to its own exchange and steps the first one's beside its own:

    first   compute | send          experts | send back          wait
    second            compute | send                   experts | send back | wait

So every rank has its exchanges in one order, one thread runs all of it, and what the calls do
around their exchange is theirs. On a GPU each call has a stream. What they compute goes in the
order above, for which the streams wait for each other; but what the first one does behind its
exchange does not wait for what the second one gets back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

Steps = Generator[None, None, Tensor]
# Of an exchange: its steps, given the most tokens of a rank; of none of its tokens, if asked so.
Begin = Callable[[int, bool], Steps]

HALVES = 2


class Streams:
    """The streams on which both calls compute: the current one and another; on CPUs there are
    none."""

    def __init__(self, device: torch.device) -> None:
        self._pair: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if device.type == "cuda":
            self._pair = torch.cuda.current_stream(device), _second_stream(device)

    def on(self, half: int) -> AbstractContextManager[Any]:
        """A context on the stream of a call."""
        return nullcontext() if self._pair is None else torch.cuda.stream(self._pair[half])

    def hand_over(self, half: int, given: Iterable[Tensor] = ()) -> None:
        """Have the stream of a call wait for what the other one is to do until now. given: tensors
        of that one which it reads, whose memory is not to be given away before it has."""
        if self._pair is None:
            return
        self._pair[half].wait_stream(self._pair[1 - half])
        for t in given:
            t.record_stream(self._pair[half])


class Turns:
    """The exchanges of two calls, of which the first one runs the second.

    rows: the most tokens that a rank has in each call. collective: the transport of both. second:
    runs the second call; None where it has no tokens here, and other ranks' are served.
    """

    def __init__(
        self,
        rows: tuple[int, int],
        collective: str,
        second: Callable[[], None] | None,
        streams: Streams,
    ) -> None:
        self.collective = collective
        self._rows, self._second, self._streams = rows, second, streams
        self._begun: list[Steps] = []

    def exchange(self, begin: Begin) -> Tensor:
        """The result of an exchange in its turn. Raises RuntimeError for a third one, and where the
        second call has none."""
        if len(self._begun) == HALVES:
            raise RuntimeError(
                "two_halves: the block exchanges tokens more than once in a call; call it without "
                "two_halves, or give parts of it with one exchange each"
            )
        if self._begun:
            return self._in_second(begin(self._rows[1], False))
        mine = begin(self._rows[0], False)
        self._begun.append(mine)
        next(mine)
        self._streams.hand_over(1)
        with self._streams.on(1), agreed_on(self._rows[1]):
            if self._second is None:
                self._in_second(begin(self._rows[1], True))
            else:
                self._second()
        self.require_both()
        return _result(mine)

    def _in_second(self, mine: Steps) -> Tensor:
        """The result of the second call's exchange, beside whose steps the first one's go on."""
        self._begun.append(mine)
        next(mine)
        self._streams.hand_over(0)
        with self._streams.on(0):
            next(self._begun[0])
        self._streams.hand_over(1)
        next(mine)
        self._streams.hand_over(0)
        return _result(mine)

    def require_both(self) -> None:
        """Raise RuntimeError unless both calls came to an exchange."""
        if len(self._begun) < HALVES:
            raise RuntimeError(
                "two_halves: the block did not come to its exchange of tokens where its halves "
                "take turns: it calls no experts, or in compiled code; call it without two_halves"
            )


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


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)

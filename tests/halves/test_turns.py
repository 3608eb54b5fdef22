"""Two calls that take turns: the order of their steps, and which stream waits for which."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops.ranks.turns import Begin, Steps, Streams, Turns, agreed, agreed_on, taking, turns

ROWS = (10, 5)


class Noted(Streams):
    """Streams that note what they are told, and on which of them steps run."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.log: list[str] = []
        self.stream = 0

    def on(self, half: int) -> AbstractContextManager[Any]:
        return self._on(half)

    @contextmanager
    def _on(self, half: int) -> Iterator[None]:
        before, self.stream = self.stream, half
        yield
        self.stream = before

    def hand_over(self, half: int, given: Iterable[Tensor] = ()) -> None:
        self.log.append(f"{half} waits")

    def note(self, what: str) -> None:
        self.log.append(f"{what} on {self.stream}")


def steps_of(name: str, streams: Noted) -> Begin:
    def begin(rows: int, absent: bool) -> Steps:
        said = "absent" if absent else name
        streams.note(f"{said} sends {rows}")
        yield
        streams.note(f"{said} computes")
        yield
        streams.note(f"{said} ends")
        return torch.tensor(rows)

    return begin


def test_steps_alternate_and_streams_wait_for_what_was_computed_before() -> None:
    streams = Noted()

    def second() -> None:
        streams.note("second begins")
        assert agreed() == ROWS[1]
        assert taken.exchange(steps_of("second", streams)) == ROWS[1]
        streams.note("second returns")

    taken = Turns(ROWS, "gather", second, streams)
    with taking(taken), agreed_on(ROWS[0]):
        assert turns() is taken and agreed() == ROWS[0]
        assert taken.exchange(steps_of("first", streams)) == ROWS[0]
    assert turns() is None and agreed() is None
    assert streams.log == [
        "first sends 10 on 0",
        "1 waits",
        "second begins on 1",
        "second sends 5 on 1",
        "0 waits",
        "first computes on 0",
        "1 waits",
        "second computes on 1",
        # The first one goes on when the second one has computed, and before that has come back.
        "0 waits",
        "second ends on 1",
        "second returns on 1",
        "first ends on 0",
    ]


def test_a_second_call_without_tokens_takes_part() -> None:
    streams = Noted()
    taken = Turns(ROWS, "gather", None, streams)
    assert taken.exchange(steps_of("first", streams)) == ROWS[0]
    assert [line for line in streams.log if "waits" not in line] == [
        "first sends 10 on 0",
        "absent sends 5 on 1",
        "first computes on 0",
        "absent computes on 1",
        "absent ends on 1",
        "first ends on 0",
    ]


def test_each_call_exchanges_once() -> None:
    streams = Noted()
    never = Turns(ROWS, "gather", lambda: None, streams)
    with pytest.raises(RuntimeError, match="did not come to its exchange of tokens"):
        never.exchange(steps_of("first", streams))
    with pytest.raises(RuntimeError, match="did not come to its exchange of tokens"):
        Turns(ROWS, "gather", None, streams).require_both()
    absent = Turns(ROWS, "gather", None, streams)
    absent.exchange(steps_of("first", streams))
    absent.require_both()
    with pytest.raises(RuntimeError, match="exchanges tokens more than once in a call"):
        absent.exchange(steps_of("third", streams))


def test_contexts_end_with_an_error() -> None:
    taken = Turns(ROWS, "gather", None, Streams(torch.device("cpu")))

    def fails(context: Callable[..., AbstractContextManager[None]], given: Any) -> None:
        with context(given):
            raise KeyError

    for context, given in ((taking, taken), (agreed_on, 3)):
        with pytest.raises(KeyError):
            fails(context, given)
    assert turns() is None and agreed() is None


def test_what_is_compiled_takes_no_turns() -> None:
    seen = []

    @torch.compile(backend="eager")
    def look(x: Tensor) -> Tensor:
        seen.append((turns(), agreed()))
        return x + 1

    with taking(Turns(ROWS, "gather", None, Streams(torch.device("cpu")))), agreed_on(3):
        look(torch.ones(2))
    assert (None, None) in seen

"""Random calls by name: of each argument it is known what may stand for it, and what may not.

A call is right, or it is refused with ValueError or TypeError. One that was given something illegal
has to be refused with words that name an argument which is; legal arguments that do not go together
are refused with the name of any. `Attempt` prints the line that makes the same call again.
"""

from __future__ import annotations

import random
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

CALLS = 300
NAN, INF = float("nan"), float("inf")

# What may not stand for an argument, by what it is.
NO_INT: tuple[Any, ...] = (
    None, True, False, 2.0, NAN, INF, "2", "", [2], (2,), {}, b"2", 2**63, 2**70, -(2**70), 1j,
    torch.ones(2), torch.tensor(2.0), object(),
)  # fmt: skip
NO_COUNT = (*NO_INT, -1, -(2**31))
NO_SIZE = (*NO_COUNT, 0)
NO_LAYER_SIZE = (*NO_SIZE, 2**31, 2**40)
NO_FLAG: tuple[Any, ...] = (
    None, 0, 1, 1.0, NAN, "no", "True", "", [], (True,), torch.tensor(True), object(),
)  # fmt: skip
NO_NUMBER: tuple[Any, ...] = (
    None, True, "1", "nan", "", [1.0], (1,), 1j, torch.ones(2), torch.tensor(1.0), NAN, INF, -INF,
)  # fmt: skip
NO_TEXT: tuple[Any, ...] = (
    None, 3, True, 2.5, NAN, b"silu", ["silu"], ("silu",), {}, torch.float32, object(),
)  # fmt: skip
NO_NAME = (*NO_TEXT, "", "siluu", "Softmax", "none ", "\u00e9", "x" * 100, ":", "None")
NO_TENSOR: tuple[Any, ...] = (
    3, 2.5, "x", [1.0], (1,), True, NAN, {}, torch.float32, object(), torch.ones,
)  # fmt: skip
NO_OBJECT: tuple[Any, ...] = (None, 3, "x", "", [1], {}, True, NAN, torch.float32, object(), dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One argument: what may stand for it, what may not, and what else messages call it."""

    legal: tuple[Any, ...]
    illegal: tuple[Any, ...]
    words: tuple[str, ...] = ()


FLAG = Slot(legal=(True, False), illegal=NO_FLAG)


def optional(slot: Slot) -> Slot:
    """The same argument where None may stand for it."""
    illegal = tuple(value for value in slot.illegal if value is not None)
    return Slot(legal=(*slot.legal, None), illegal=illegal, words=slot.words)


def tensors(legal: tuple[Tensor, ...], *illegal: Any) -> Slot:
    """A tensor: these, and none of what is no tensor or has the wrong shape or dtype."""
    wrong = (torch.ones(()), torch.ones(3, dtype=torch.bool), torch.ones(2, 2, 2, 2))
    return Slot(legal=legal, illegal=(None, *NO_TENSOR, *wrong, *illegal))


def worded(slot: Slot, *words: str) -> Slot:
    """The same argument, which messages call by these words too."""
    return Slot(legal=slot.legal, illegal=slot.illegal, words=words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a user calls, with what it takes; `right` raises AssertionError for a wrong result.

    `base` are the arguments of every call that are not changed, one of which may be left out.
    """

    run: Callable[..., Any]
    slots: Mapping[str, Slot]
    base: Mapping[str, Any] = field(default_factory=dict)
    right: Callable[[Any, dict[str, Any]], None]

    @property
    def words(self) -> list[str]:
        """What messages call the arguments."""
        return [word for name, slot in self.slots.items() for word in (name, *slot.words)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One call of a target, and the words of which a refusal has to have one."""

    name: str
    number: int
    target: Target
    given: dict[str, Any]
    bad: dict[str, tuple[str, ...]]  # by an argument that may not be so, what messages call it
    module: str

    def run(self) -> Any:
        torch.manual_seed(self.number)  # for weights, and for what a right result is tried on
        return self.target.run(**self.given)

    def __str__(self) -> str:
        words = (f"{name}={_shown(value)}" for name, value in self.given.items())
        return (
            f"{self.name}({', '.join(words)})\n"
            f"illegal: {', '.join(self.bad) or 'nothing'}\n"
            f"again: from {self.module} import *; attempt({self.name!r}, {self.number}).run()"
        )


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_shown(v)}" for k, v in value.items()) + "}"
    return described(value)


def described(value: Any) -> str:
    """A value in a printed call; a tensor by shape, dtype, strides and device."""
    if not isinstance(value, Tensor):
        return repr(value)
    strides = "" if value.is_contiguous() else f" strides {value.stride()}"
    return f"<{list(value.shape)} {value.dtype} {value.device}{strides}>"


def attempt_of(
    targets: Mapping[str, Target], module: str, name: str, number: int, *, always_bad: bool = False
) -> Attempt:
    """The call of that number: up to three legal changes and, in three of four, illegal ones."""
    rng, target = random.Random(f"{name} {number}"), targets[name]
    given, bad = dict(target.base), dict[str, tuple[str, ...]]()
    slots = [name for name, slot in target.slots.items() if slot.legal]
    for slot in rng.sample(slots, min(rng.randint(0, 3), len(slots))):
        given[slot] = rng.choice(target.slots[slot].legal)
    for _ in range(rng.choice((1, 1, 1, 2)) if always_bad or number % 4 else 0):
        _spoil(rng, target, given, bad)
    return Attempt(name=name, number=number, target=target, given=given, bad=bad, module=module)


def _spoil(
    rng: random.Random, target: Target, given: dict[str, Any], bad: dict[str, tuple[str, ...]]
) -> None:
    """Make one argument illegal, leave out one that is needed, or give one that there is not."""
    what, needed = rng.random(), [name for name in target.base if name in given]
    if what < 0.04 and needed:
        name = rng.choice(needed)
        del given[name]
        bad[name] = (name,)
    elif what < 0.1:
        name = rng.choice(list(target.slots))
        wrong = rng.choice((f"{name}s", f"{name}_", "foo"))
        if wrong not in target.slots:
            given[wrong] = given.get(name, 1)
            bad[wrong] = (wrong,)
    if not bad:
        name = rng.choice([name for name, slot in target.slots.items() if slot.illegal])
        given[name] = rng.choice(target.slots[name].illegal)
        bad[name] = (name, *target.slots[name].words)


def outcome(attempt: Attempt) -> str:
    """Make a call: "right" or "refused". Raises AssertionError for anything else that it does."""
    words = [word for said in attempt.bad.values() for word in said] or attempt.target.words
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            got = attempt.run()
    except (ValueError, TypeError) as error:
        if names(error, words):
            return "refused"
        if attempt.bad and _refused_anyway(attempt, error):
            return "refused"
        raise AssertionError(
            f"{type(error).__name__}: {error}\nnames none of {', '.join(words)} in\n{attempt}"
        ) from error
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{attempt}") from error
    assert not attempt.bad, f"{got!r:.200}\nwas made of what is illegal in\n{attempt}"
    try:
        attempt.target.right(got, attempt.given)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{attempt}") from error
    return "right"


def _refused_anyway(attempt: Attempt, error: Exception) -> bool:
    """Whether it is the legal arguments of a call that were refused, and by the name of one."""
    given = {name: value for name, value in attempt.given.items() if name not in attempt.bad}
    given = {**attempt.target.base, **given}
    try:
        attempt.target.run(**given)
    except Exception as other:
        return str(other) == str(error) and names(error, attempt.target.words)
    return False


def names(error: Exception, words: list[str]) -> bool:
    """Whether a message has one of these words."""
    return any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", str(error)) for word in words)


def check_many(make: Callable[[int], Attempt], least: float, calls: int = CALLS) -> Counter[str]:
    """What so many calls did, each of which is right or refused; raises with all that are not, and
    unless this part of them at least is right, and as many refused.
    """
    found: Counter[str] = Counter()
    wrong = []
    for number in range(calls):
        try:
            found[outcome(make(number))] += 1
        except AssertionError as error:
            wrong.append(str(error))
    more = f"\n\nand {len(wrong) - 3} more" if len(wrong) > 3 else ""
    assert not wrong, "\n\n".join(wrong[:3]) + more
    assert min(found["right"], found["refused"]) >= least * calls, found
    return found


def kept(got: Any, given: Mapping[str, Any]) -> None:
    """Every argument is an attribute of the result, as it was given."""
    for name, value in given.items():
        held = getattr(got, name)
        same = held is value or (not isinstance(value, Tensor) and held == value)
        assert same and type(held) is type(value), f"{name} is {held!r}, given {value!r}"

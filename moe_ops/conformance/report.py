"""What a backend was asked, what it refused, and what it does wrong."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from textwrap import fill

PROGRAM = "python -m moe_ops conformance"
WIDTH = 100
WORDS = 6  # by which failures of a check are taken for alike
MOST_NAMED = 4  # samples that fail alike; the others are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A check that a backend does not pass: of which op, with which sample, written as
    CASE/DTYPE/NAME, what is wrong, and the command that runs it again."""

    op: str
    check: str
    sample: str
    said: str
    again: str

    @property
    def kind(self) -> tuple[str, ...]:
        """Alike for failures that have one cause, as far as words tell."""
        words = re.sub(r"\d+", "0", self.said).split()
        return self.op, self.check, *words[:WORDS]

    def __str__(self) -> str:
        return f"{self.op} {self.sample}: {self.check}\n{indented(self.said)}\n   {self.again}"


@dataclass(slots=True, kw_only=True)
class Report:
    """What came of the samples of one op, or of several, for one backend.

    `passed` counts the checks of each kind that passed, `refused` the samples that `supports`
    refused, by its reason. `notes` say what is no fault and may surprise.
    """

    backend: str
    ran: int = 0
    passed: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether something was checked, and nothing failed."""
        return bool(self.ran) and not self.failures

    def __str__(self) -> str:
        """All failures in words, one of each kind, with the samples that fail alike."""
        kinds: dict[tuple[str, ...], list[Failure]] = {}
        for failure in self.failures:
            kinds.setdefault(failure.kind, []).append(failure)
        shown = [str(first) + alike(others) for first, *others in kinds.values()]
        if not self.ran:
            shown.append(f"no sample was run: {said(self.refused)}")
        return "\n\n".join(shown) or f"{self.backend} passes: {counted(self)}"


def alike(others: Sequence[Failure]) -> str:
    """The samples of further failures, in a line of their own."""
    if not others:
        return ""
    named = ", ".join(f.sample for f in others[:MOST_NAMED])
    more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
    return f"\n{indented(f'alike: {named}{more}')}"


def indented(text: str) -> str:
    """A paragraph in lines of at most 100 columns."""
    return fill(
        text, WIDTH, initial_indent="   ", subsequent_indent="   ", break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


def said(refused: Counter[str]) -> str:
    """Reasons for refusals, the most frequent first."""
    return "; ".join(reason for reason, _ in refused.most_common(3)) or "there is none"


def counted(report: Report) -> str:
    """The checks that passed, in the order in which they are made."""
    return ", ".join(f"{n} {check}" for check, n in report.passed.items())

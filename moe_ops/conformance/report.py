"""What a backend was asked, what it refused, and what it does wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from textwrap import indent

PROGRAM = "python -m moe_ops conformance"
MOST_SHOWN = 20  # failures in words; the others are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A check that a backend does not pass: of which op, with which sample, written as
    CASE/DTYPE/NAME, what is wrong, and the command that runs it again."""

    op: str
    check: str
    sample: str
    said: str
    again: str

    def __str__(self) -> str:
        return f"{self.op} {self.sample}: {self.check}\n{indent(self.said, '   ')}\n   {self.again}"


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
        """All failures in words."""
        shown = [str(f) for f in self.failures[:MOST_SHOWN]]
        if len(self.failures) > MOST_SHOWN:
            shown.append(f"and {len(self.failures) - MOST_SHOWN} more")
        if not self.ran:
            shown.append(f"no sample was run: {said(self.refused)}")
        return "\n".join(shown) or f"{self.backend} passes: {counted(self)}"


def said(refused: Counter[str]) -> str:
    """Reasons for refusals, the most frequent first."""
    return "; ".join(reason for reason, _ in refused.most_common(3)) or "there is none"


def counted(report: Report) -> str:
    """The checks that passed, in the order in which they are made."""
    return ", ".join(f"{n} {check}" for check, n in report.passed.items())

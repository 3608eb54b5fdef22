"""The page of messages has every message of the code, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs import messages
from tests.docs.messages import Message
from tests.sources import ROOT

PAGE = ROOT / "docs" / "TROUBLESHOOTING.md"
SPAN = re.compile(r"`([^`]+)`")
# What a call is given in a variable, and what the page shows of it.
ELSEWHERE = {
    "moe_ops/__init__.py": ("which is another project, is installed in …",),
    "moe_ops/generation/linear_layers.py": ("ours is not known to compute the same",),
    "moe_ops/checks/renamed.py": ("… now; use that, for the old name goes in …",),
    "moe_ops/checks/signature.py": ("…: … is … now",),
    "passes/report/telling.py": (
        "MoE layers as they were, which is slower", "routers as they were",
        "… MoE layers and … of … routers", "no MoE layer was found",
    ),
}  # fmt: skip


def shown(page: str) -> set[str]:
    """What stands as code in the first cells of the page's tables."""
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("|")]
    return {span for cell in rows for span in SPAN.findall(cell)}


def missing(said: list[Message], fragments: set[str]) -> list[Message]:
    """Messages that no fragment shows: as a part of so many letters, or of half of the message."""
    return [
        one
        for one in said
        if not all(
            any(part in text and len(part) >= min(15, len(text) / 2) for part in fragments)
            for text in one.texts or ELSEWHERE[one.file]
        )
    ]


def test_every_message_is_on_the_page() -> None:
    said = messages.messages()
    assert len(said) > 60
    absent = missing(said, shown(PAGE.read_text()))
    assert not absent, "docs/TROUBLESHOOTING.md lacks:\n" + "\n".join(map(str, absent))


def test_every_reason_for_another_way_is_on_the_page() -> None:
    said = messages.reasons()
    assert len(said) > 60
    absent = missing(said, shown(PAGE.read_text()))
    assert not absent, "docs/TROUBLESHOOTING.md lacks:\n" + "\n".join(map(str, absent))


def test_the_page_shows_no_message_that_nothing_says() -> None:
    texts = messages.texts()
    old = [one for one in shown(PAGE.read_text()) if not any(one in text for text in texts)]
    assert not old, f"nothing says these any longer: {old}"


def test_the_table_of_other_places_has_no_row_too_many() -> None:
    unknown = {one.file for one in messages.messages() if not one.texts}
    assert unknown == set(ELSEWHERE)


@pytest.mark.parametrize(
    ("source", "kind", "text"),
    [
        ('log.warning("%s is %d", a, b)', "WARNING", "… is …"),
        ('log.info(f"{a} is" " here")', "INFO", "… is here"),
        ("warnings.warn(TEXT, stacklevel=2)", "warning of Python", "a constant"),
        ('logging.getLogger("a").warning("b %.1f c", 1)', "WARNING", "b … c"),
        ('warn_once(f"{a} runs")', "WARNING", "… runs"),
    ],
)
def test_a_message_is_read_off_its_call(source: str, kind: str, text: str) -> None:
    (found,) = messages.said("a.py", ast.parse(source), {"TEXT": "a constant"})
    assert (found.kind, found.texts) == (kind, (text,))


def test_a_message_that_is_not_on_the_page_is_found(tmp_path: Path) -> None:
    page = "| `… is here` | a |\n| b | `… is there` |\n"
    here, there = (Message("INFO", "a.py", 1, (text,)) for text in ("… is here, …", "… is there"))
    assert missing([here, there], shown(page)) == [there]

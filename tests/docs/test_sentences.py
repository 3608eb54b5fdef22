"""Hand-written pages have short sentences, and what counts them reads a page as a person does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import figures, sentences
from tests.docs.sentences import LONGEST, MEAN, Sentence
from tests.sources import ROOT

REMEDY = "`python -m tests.docs.sentences` lists them; say less, or in two sentences"


@pytest.mark.parametrize("page", sentences.hand_written(), ids=figures.label)
def test_no_sentence_of_a_page_is_long(page: Path) -> None:
    every = sentences.of([page])
    long = [str(one) for one in every if one.words > LONGEST]
    assert not long, f"over {LONGEST} words, {REMEDY}:\n" + "\n".join(long)
    assert sentences.mean(every) <= MEAN, REMEDY


def test_every_page_counts() -> None:
    pages = {figures.label(page) for page in sentences.hand_written()}
    assert {"README.md", "ARCHITECTURE.md", "docs/MODELS.md", "docs/performance/CPU.md"} <= pages


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("One is here. Two are there.", [3, 3]),
        ("# Not this\n\nBut this:\n\n    nor this\n", [2]),
        ("| no | table |\n|---|---|\n| a | b |\n", []),
        ("- an item\n- [a link](to.md#a-b) of four words\n", [2, 5]),
        ("`moe_ops.f(a, b)` is one. And `x.y`, too.", [3, 3]),
        ("It is 1.5 times as fast, e.g. here, by 3 % in `a.b`.", [12]),
        ("Wrapped\nover lines - **and** bold.", [5]),
        ("<!-- measured x -->\n\nA comment is none.\n\n<!-- end -->", [4]),
    ],
)
def test_words_of_sentences(text: str, found: list[int]) -> None:
    assert [one.words for one in sentences.sentences("a.md", text)] == found


def test_a_long_sentence_is_told_with_its_place() -> None:
    (one,) = sentences.sentences("a.md", "# A\n\n" + "word " * 31)
    assert one == Sentence("a.md", 3, ("word " * 31).strip())
    assert str(one).startswith("a.md:3: 31 words: word")


def test_the_command_fails_for_what_is_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ROOT / "docs" / "OPS.md"
    monkeypatch.setattr("sys.argv", ["sentences", str(page)])
    assert sentences.main() == 0
    assert "docs/OPS.md: " in capsys.readouterr().out
    monkeypatch.setattr(sentences, "LONGEST", 5)
    assert sentences.main() == 1
    monkeypatch.setattr(sentences, "LONGEST", 1000)
    monkeypatch.setattr(sentences, "MEAN", 1)
    assert sentences.main() == 1
    assert Path("docs/OPS.md").name in capsys.readouterr().out

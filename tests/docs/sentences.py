"""How long the sentences of hand-written pages are.

    python -m tests.docs.sentences [PAGE ...]

prints the mean and the longest of each page, and every sentence above `LONGEST` words. markdown-it
reads a page, sentencex splits its paragraphs. Headings, tables and blocks of code are no sentences.
A word is what stands between spaces and has a letter or a digit; code within a line is one word.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.docs.pages import PAGES
from tests.sources import ROOT

MEAN, LONGEST = 15, 30  # words a sentence, at most: the mean of a page, and one


@dataclass(frozen=True)
class Sentence:
    page: str
    line: int  # where its paragraph begins
    text: str

    @property
    def words(self) -> int:
        return sum(any(map(str.isalnum, word)) for word in self.text.split())

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.words} words: {self.text}"


def hand_written() -> list[Path]:
    """The pages whose sentences count."""
    return sorted(page for pattern in PAGES for page in ROOT.glob(pattern))


def sentences(page: str, text: str) -> Iterator[Sentence]:
    """The sentences of a page, in their order."""
    from markdown_it import MarkdownIt
    from sentencex import segment

    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type == "inline" and before is not None and before.type == "paragraph_open":
            for sentence in segment("en", _plain(token.children or [])):
                if sentence.strip():
                    yield Sentence(page, (token.map or [0])[0] + 1, sentence.strip())


def _plain(inline: list[Any]) -> str:
    """A paragraph as it is read: links are their words, a piece of code is one word."""
    words = {"text": lambda t: t.content, "softbreak": lambda _: " ", "hardbreak": lambda _: " "}
    words["code_inline"] = lambda t: "".join(t.content.split()).replace(".", "·")
    return "".join(words[token.type](token) for token in inline if token.type in words)


def of(pages: list[Path]) -> list[Sentence]:
    """All sentences of these pages."""
    return [
        one
        for page in pages
        for one in sentences(str(page.relative_to(ROOT)), page.read_text())
    ]  # fmt: skip


def mean(some: list[Sentence]) -> float:
    """Words a sentence."""
    return sum(one.words for one in some) / len(some)


def main() -> int:
    """Print them; 1 if the pages go beyond the limits."""
    pages = [Path(name).resolve() for name in sys.argv[1:]] or hand_written()
    by_page = [some for page in pages if (some := of([page]))]
    for some in by_page:
        longest = max(one.words for one in some)
        print(f"{some[0].page}: {len(some)} sentences, mean {mean(some):.1f}, longest {longest}")
    every = [one for some in by_page for one in some]
    long = [one for one in every if one.words > LONGEST]
    for one in long:
        print(one)
    print(f"{len(every)} sentences, mean {mean(every):.1f}, {len(long)} over {LONGEST} words")
    return int(bool(long) or any(mean(some) > MEAN for some in by_page))


if __name__ == "__main__":
    sys.exit(main())

"""The pages of reference: which names they document, and their examples."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

from tests.sources import ROOT

FOLDER = ROOT / "docs" / "reference"
DOCUMENTED = re.compile(
    r"^\.\. auto(?:function|class|data):: (moe_ops\.[\w.]+)\n((?:\n|   .*\n)*)", re.M
)


def pages() -> list[Path]:
    """Those with examples."""
    return sorted(page for page in FOLDER.glob("*.rst") if ">>>" in page.read_text())


def documented(page: Path) -> dict[str, str]:
    """What a page says of each name besides its docstring."""
    return dict(DOCUMENTED.findall(page.read_text()))


def examples(page: Path) -> doctest.DocTest:
    """The examples of a page, one after the other."""
    text = page.read_text()
    return doctest.DocTestParser().get_doctest(
        text, {"__name__": "__main__"}, page.name, str(page), 0
    )


def failures(test: doctest.DocTest) -> str:
    """What was expected, and what came, of each example that fails; empty if none does."""
    said: list[str] = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.FAIL_FAST
    doctest.DocTestRunner(verbose=False, optionflags=flags).run(test, out=said.append)
    return "".join(said)

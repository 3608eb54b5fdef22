"""How docstrings begin: each is read alone, by `help` or in an editor."""

from __future__ import annotations

import ast
import re

import pytest

from tests.sources import ROOT, modules

# What refers to a docstring above, or leaves out what it speaks of.
BEGINS_WITH_A_RIDDLE = re.compile(r"(The same|As|Those|Of)\b")


def riddles(source: str) -> list[str]:
    """Docstrings that say nothing to who reads them alone, by line and name."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    return [
        f"{getattr(node, 'lineno', 1)}: {getattr(node, 'name', 'module')}: {text.splitlines()[0]}"
        for node in found
        if (text := ast.get_docstring(node)) and BEGINS_WITH_A_RIDDLE.match(text)
    ]


def test_docstrings_stand_alone() -> None:
    paths = [m.path for m in modules()] + [*(ROOT / "examples").glob("*.py")]
    found = [f"{path}:{riddle}" for path in paths for riddle in riddles(path.read_text())]
    assert not found, "say what the function does or returns, in words of its own:\n" + "\n".join(
        found
    )


@pytest.mark.parametrize("words", ["The same", "As `f`", "Those", "Of a tile"])
@pytest.mark.parametrize(
    "template",
    [
        '"""{}."""',
        'class A:\n    """{}."""',
        'class A:\n    async def f():\n        """\n        {}."""',
    ],
)
def test_a_riddle_is_found(template: str, words: str) -> None:
    assert len(riddles(template.format(words))) == 1


def test_words_that_only_begin_alike_are_none() -> None:
    assert riddles('def f():\n    """Offsets, as `f` gives them: the same."""') == []

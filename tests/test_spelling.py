"""One spelling of quantize in code, which is the ops'; prose may have the other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.sources import ROOT, files

OTHER = re.compile("quantis", re.IGNORECASE)
# What is no name in C++: comments and texts.
NO_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"', re.DOTALL)


def python_names(source: str) -> Iterator[str]:
    """Every name that Python code defines, reads, imports or passes."""
    for node in ast.walk(ast.parse(source)):
        for field in ("id", "attr", "name", "asname", "arg", "module", "rest"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield name
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            yield from node.names


def names_in(file: str, source: str) -> Iterator[str]:
    yield file
    if file.endswith(".py"):
        yield from python_names(source)
    else:
        yield from re.findall(r"\w+", NO_CODE.sub(" ", source))


def misspelled(file: str, source: str) -> set[str]:
    return {name for name in names_in(file, source) if OTHER.search(name)}


def test_names_spell_quantize_as_the_ops_do() -> None:
    sources = [f for f in files() if f.endswith((".py", ".cpp", ".h")) and (ROOT / f).is_file()]
    assert len(sources) > 500
    found = {f: names for f in sources if (names := misspelled(f, (ROOT / f).read_text()))}
    assert not found, f"write quantize in names of code and of files, not quantise: {found}"


@pytest.mark.parametrize(
    "source",
    [
        "Quantised = 1", "def quantise(): ...", "def f(quantised): ...", "f(quantised=1)",
        "class UnquantisedLayer: ...", "import a.quantised", "from quantised import a",
        "from a import b as quantised", "a.quantise", "f'{quantised}'", "global quantised",
        "try: ...\nexcept E as quantised: ...",
    ],
)  # fmt: skip
def test_a_name_spelled_otherwise_is_found(source: str) -> None:
    assert len(misspelled("a.py", source)) == 1


def test_prose_has_either_spelling() -> None:
    assert not misspelled("a.py", '"""Quantised weights."""\nx = "quantised"  # to quantise')
    assert not misspelled("a.cpp", '// quantised\nf("quantised"); /* quantise */')


def test_names_of_files_and_of_cpp_count() -> None:
    assert misspelled("a/quantised.py", "") == {"a/quantised.py"}
    assert misspelled("a.h", "constexpr bool kQuantised = true;  // codes") == {"kQuantised"}

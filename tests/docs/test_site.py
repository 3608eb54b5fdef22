"""The site: every page is in one group of its navigation, and pages name what there is."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from moe_ops.generation import refusals
from moe_ops.passes import PIPELINE
from tests.sources import ROOT, files

SITE = ROOT / "docs" / "site"
INDEX = ROOT / "docs" / "index.rst"
TREE = re.compile(r"^\.\. toctree::\n((?:   .*\n|\n)+)", re.M)


def module(name: str) -> ModuleType:
    """One that Sphinx loads from the folder of its configuration."""
    spec = importlib.util.spec_from_file_location(name, SITE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def grouped(index: str) -> list[str]:
    """The pages of all groups, by their paths without a suffix."""
    lines = [line.strip() for tree in TREE.findall(index) for line in tree.splitlines()]
    names = [re.sub(r".*<(.*)>", r"\1", line) for line in lines if line and line[0] != ":"]
    return [name[1:] if name.startswith("/") else f"docs/{name}" for name in names]


def test_every_page_is_in_one_group() -> None:
    pages = {
        name.rsplit(".", 1)[0]
        for name in files()
        if name.endswith((".md", ".rst")) and ("/" not in name or name.startswith("docs/"))
    }
    found = Counter(grouped(INDEX.read_text()))
    assert pages - {"docs/index"} == found.keys(), "list each page in docs/index.rst"
    assert set(found.values()) == {1}


def test_groups_are_read_with_titles_and_from_the_root() -> None:
    index = "T\n=\n\n.. toctree::\n   :caption: A\n\n   Title </README>\n   OPS\n\nEnd\n"
    assert grouped(index) == ["README", "docs/OPS"]


def linked(page: Path) -> list[Path]:
    """The pages that one of reST links to, without their suffixes."""
    names = re.findall(r":doc:`(?:[^`<]*<)?([^`>]+)>?`", page.read_text())
    return [ROOT / name[1:] if name.startswith("/") else page.parent / name for name in names]


def test_links_between_pages_lead_somewhere() -> None:
    pages = [ROOT / name for name in files() if name.endswith(".rst")]
    links = [(page.name, link) for page in pages for link in linked(page)]
    assert len(links) > 10
    there = (".md", ".rst")
    assert not [link for link in links if not any(link[1].with_suffix(s).exists() for s in there)]


CONVERTED = {
    "Multiply x_ by `w`: w * x.": [r"Multiply x\_ by ``w``: w \* x.", ""],
    "`route`d rows": [r":py:obj:`route <moe_ops.route>`\ d rows", ""],
    "by `moe_ops.route`": ["by :py:obj:`moe_ops.route <moe_ops.route>`", ""],
    "arXiv:2002.05202": ["`arXiv:2002.05202 <https://arxiv.org/abs/2002.05202>`__", ""],
    "    y = f(x)": [".. code-block:: python", "", "    y = f(x)", ""],
    "So:\n\n    a  of x\n\n    b": [
        "So:", "", ".. code-block:: text", "", "    a  of x", "", "    b", "",
    ],
    "None: one\n  more\nTrue: two": ["| None: one", "  more", "| True: two", ""],
    "- one\n  more": ["- one", "  more", ""],
}  # fmt: skip


@pytest.mark.parametrize("docstring", CONVERTED)
def test_docstrings_become_rst(docstring: str) -> None:
    found = module("docstrings").to_rst(docstring.splitlines())
    assert found == CONVERTED[docstring]


def test_each_command_has_its_help() -> None:
    found = dict(module("helps").helps("moe_ops.__main__"))
    assert "usage: python -m moe_ops " in found["python -m moe_ops"]
    said = set(re.findall(r"^    ([\w-]+)", found["python -m moe_ops"], re.M))
    assert {f"python -m moe_ops {name}" for name in said} == found.keys() - {"python -m moe_ops"}
    assert all(text.startswith(f"usage: {name}") for name, text in found.items())


def test_the_page_of_options_has_what_generate_takes_by_steps() -> None:
    page = (ROOT / "docs" / "reference" / "options.rst").read_text()
    wanted = {mode.value for mode in refusals.MODES} | set(map(str, refusals.SERVED))
    assert not [name for name in {*wanted, *refusals.EXTRA_OUTPUTS} if f"``{name}``" not in page]


def test_the_explanation_names_the_passes_in_their_order() -> None:
    page = (ROOT / "docs" / "EXPLANATION.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", page, re.M)
    assert re.findall(r"`(\w+)`", " ".join(rows)) == [p.__name__ for p in PIPELINE]


def test_the_support_matrix_has_the_releases_of_the_package() -> None:
    page = (ROOT / "docs" / "SUPPORT.md").read_text()
    package = (ROOT / "pyproject.toml").read_text()
    rows = dict(re.findall(r"^\| (\w+) \| (.*?) \|$", page.split("## Devices")[0], re.M))
    for release in re.findall(r"Python :: (3\.\d+)", package):
        assert release in rows["Python"]
    torch = re.search(r'"torch>=([\d.]+)"', package)
    hf = re.search(r'"transformers>=([\d.]+)"', package)
    flashinfer = re.search(r'"flashinfer-python>=([\d.]+)"', package)
    assert torch and torch[1] in rows["torch"]
    assert hf and hf[1] in rows["transformers"]
    assert flashinfer and flashinfer[1] in rows["FlashInfer"]


@pytest.mark.slow
@pytest.mark.every
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    needed = ("sphinx", "furo", "myst_parser", "sphinx_copybutton")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; make docs installs them")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q"]
    folders = ["-c", str(SITE), "-d", str(tmp_path / "trees"), ".", str(tmp_path / "site")]
    done = subprocess.run([*command, *folders], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    front = (tmp_path / "site" / "index.html").read_text()
    assert (tmp_path / "site" / re.findall(r"url=([\w/.]+)", front)[0]).is_file()

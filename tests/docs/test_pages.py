"""Every Python block of the pages runs as pasted, links lead somewhere, and README is short."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import torch.distributed as dist

from moe_ops import experts
from moe_ops.planning import tune
from tests.distributed import ranks
from tests.docs import pages
from tests.docs.pages import Block
from tests.sources import ROOT, files

PAGES = pages.pages()
# On these a call of what `moe_ops.compile` made is more than tracing it.
COMPILED = (
    "README.md", "docs/LAYERS.md", "docs/MODELS.md", "docs/FIRST_MODEL.md",
    "docs/how_to/generate.md", "docs/how_to/train.md", "docs/how_to/capture.md",
)  # fmt: skip


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("hub")
    pages.make_hub(folder)
    return folder


@pytest.fixture
def here(hub: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the folder of the models, with a registry of backends and measurements of its own."""
    monkeypatch.chdir(hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", pages.on_disk)
    monkeypatch.setattr(tune, "SECONDS", 1e-3)
    for name in ("_backends", "_layouts"):
        monkeypatch.setattr(experts, name, dict(getattr(experts, name)))
    for name in ("_order", "_plans"):
        monkeypatch.setattr(experts, name, {})
    yield
    torch._dynamo.reset()


def run(page: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in PAGES[page]:
        if not block.ranks:
            block.run(names)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run_as_pasted(page: str, here: None, uncompiled: None) -> None:
    run(page)


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.parametrize("page", COMPILED)
def test_blocks_run_compiled(page: str, here: None) -> None:
    run(page)


def on_ranks(rank: int, ranks: int, folder: Path, blocks: list[Block]) -> None:
    """A rank of torchrun's, for one block after the other."""
    torch.set_num_threads(1)
    os.chdir(folder)
    torch.compiler.set_stance("force_eager")
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in told.items()})
    for i, block in enumerate(blocks):
        meeting = f"file://{folder / f'block {i}'}"
        initialise(meeting, rank, ranks)
        block.run({"__name__": "__main__"})
        dist.destroy_process_group()


def initialise(meeting: str, rank: int, ranks: int) -> None:
    """Have `init_process_group()` meet in a file, as no port is sure to be free."""
    whole = dist.distributed_c10d.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        whole(*args, **kwargs, init_method=meeting, rank=rank, world_size=ranks)

    dist.init_process_group = init_process_group


@pytest.mark.slow
def test_blocks_of_ranks_run_as_pasted(hub: Path) -> None:
    wanted = [block for some in PAGES.values() for block in some if block.ranks]
    (count,) = {block.ranks for block in wanted}
    assert len(wanted) >= 2
    ranks.spawn(on_ranks, (count, hub, wanted), count)


def test_blocks_are_found_with_their_lines_and_ranks() -> None:
    text = "# T\n\n```python\na = 1\n```\n\n    b = 2\n\n<!-- ranks 3 -->\n\n```python\nc\n```\n"
    plain, ranked = pages.blocks("page.md", text)
    assert plain == Block("page.md", 4, 0, "a = 1\n")
    assert ranked == Block("page.md", 12, 3, "c\n")
    with pytest.raises(NameError) as raised:
        ranked.run({})
    assert raised.traceback[-1].lineno == 11  # counted from 0
    assert str(raised.traceback[-1].path) == str(ROOT / "page.md")


def test_every_fenced_block_is_python_that_a_test_runs() -> None:
    for page in files():
        if page.endswith(".md"):
            fences = re.findall(r"^```(\w*)$", (ROOT / page).read_text(), re.M)
            assert fences == ["python", ""] * len(PAGES.get(page, []))


def test_the_readme_is_short_and_shows_python_first() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    first = PAGES["README.md"][0]
    assert len(lines) <= 120
    assert len(first.text.splitlines()) >= 10
    assert first.line + len(first.text.splitlines()) <= 25
    assert "```" not in "".join(lines[: first.line - 2])


def test_the_readme_says_what_no_gpu_has_run() -> None:
    said = "NVFP4 and TensorRT-LLM backends ran against a stand-in only, never on a Blackwell GPU"
    assert said in " ".join((ROOT / "README.md").read_text().split())


LINK = re.compile(r"\[[^\]]+\]\((?!https?://)([^)#]*)(?:#([^)]*))?\)")


def anchors(page: Path) -> set[str]:
    """What headings of a page can be linked by."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def dead_links(page: Path) -> list[str]:
    dead = []
    for name, anchor in LINK.findall(page.read_text()):
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(f"{page.name}: {name}#{anchor}")
    return dead


def test_links_between_pages_lead_somewhere() -> None:
    markdown = [ROOT / name for name in files() if name.endswith(".md")]
    assert sum(len(LINK.findall(page.read_text())) for page in markdown) > 20
    assert not [dead for page in markdown for dead in dead_links(page)]


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` c!\n[x](#a-b-c) [y](page.md#a) [z](no.md) [w](https://a.b/c)\n")
    assert dead_links(page) == ["page.md: page.md#a", "page.md: no.md#"]


COMMAND = re.compile(r"\bpython (?:-m ([\w.]+)|([\w/]+\.py))")


def test_commands_on_pages_are_there() -> None:
    found = {
        command
        for name in files()
        if name.endswith(".md")
        for command in COMMAND.findall((ROOT / name).read_text())
    }
    assert len(found) > 8
    there: dict[bool, Callable[[str], Any]] = {True: importlib.util.find_spec, False: exists}
    outside = {"pip", "build"}  # of Python's own, and of whoever builds an sdist
    missing = [
        command for command in found
        if command[0] not in outside and not there[bool(command[0])](command[0] or command[1])
    ]  # fmt: skip
    assert not missing


def exists(path: str) -> bool:
    return (ROOT / path).is_file()

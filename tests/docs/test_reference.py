"""Every public name has an example on a page of reference, and examples give what pages show."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import moe_ops
import moe_ops.layer
import moe_ops.weights
from moe_ops.backends.flashinfer.options import FlashInferOptions
from moe_ops.ops.activate import Activation
from moe_ops.parallel.config import ParallelConfig
from moe_ops.passes.rewriting.context import Options
from moe_ops.planning import tune
from tests.docs import reference

PAGES = reference.pages()
CHECKPOINT = "Qwen3-MoE-GPTQ-Int4"  # which an example loads


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder with the checkpoint; groups of ranks end with the page."""
    pytest.importorskip("transformers")
    from tests.hf.published import write
    from tests.weights.checkpoints import LAYOUTS

    write(tmp_path / CHECKPOINT, LAYOUTS["gptq_int4"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune, "SECONDS", 1e-3)
    yield
    torch._dynamo.reset()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_give_what_is_shown(page: Path, here: None, uncompiled: None) -> None:
    failed = reference.failures(reference.examples(page))
    assert not failed, failed


@pytest.mark.slow
@pytest.mark.every
def test_examples_of_models_give_it_compiled(here: None) -> None:
    failed = reference.failures(reference.examples(reference.FOLDER / "models.rst"))
    assert not failed, failed


def test_every_public_name_has_an_example() -> None:
    said = {}
    for page in PAGES:
        found = reference.documented(page)
        assert not said.keys() & found.keys(), "a name has one place"
        said |= found
    without = [name for name in moe_ops.__all__ if ">>>" not in said.get(f"moe_ops.{name}", "")]
    assert not without, f"give these an example on a page of docs/reference: {without}"


def test_records_and_options_of_public_names_are_documented() -> None:
    said = {name for page in reference.FOLDER.glob("*.rst") for name in reference.documented(page)}
    modules = (moe_ops.layer, moe_ops.weights)
    names = {
        f"{m.__name__}.{name}" for m in modules for name in m.__all__ if name not in moe_ops.__all__
    }
    options = (Options, FlashInferOptions, ParallelConfig, Activation)
    names |= {f"{kind.__module__}.{kind.__name__}" for kind in options}
    assert not sorted(names - said)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_documented_names_are_there(page: Path) -> None:
    for name in reference.documented(page):
        where, _, of = name.rpartition(".")
        assert hasattr(importlib.import_module(where), of), name


def test_names_are_found_with_what_is_said_of_them(tmp_path: Path) -> None:
    text = (
        ".. autofunction:: moe_ops.a\n\n   >>> a\n\n.. autoclass:: moe_ops.b.C\n   :members:\n\nx\n"
    )
    (page := tmp_path / "page.rst").write_text(text)
    assert reference.documented(page) == {
        "moe_ops.a": "\n   >>> a\n\n",
        "moe_ops.b.C": "   :members:\n\n",
    }


def test_an_example_that_gives_something_else_is_found() -> None:
    parser = doctest.DocTestParser()
    wrong = parser.get_doctest(">>> 1 + 1\n3\n", {}, "wrong", "wrong.rst", 0)
    assert "Expected:\n    3\nGot:\n    2" in reference.failures(wrong)
    assert not reference.failures(parser.get_doctest(">>> 1 + 1\n2\n", {}, "right", "", 0))

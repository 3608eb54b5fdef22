"""libmoe_ops in a process with Python: its kernels are used, and all else stays as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.library import Library

from moe_ops.kernels.cpu import loaded
from moe_ops.registry import definitions
from tests.library import built

IN_PYTHON = Path(__file__).with_name("in_python.py")
AFTER = """
import sys
import torch
import moe_ops
torch.ops.load_library(sys.argv[1])
x, ids = torch.arange(6.0).view(3, 2), torch.zeros(3, 1, dtype=torch.int32)
with torch.inference_mode():
    print(moe_ops.dispatch(x, ids, 1)[2].item(), torch.ops.moe_ops.dispatch(x, ids, 1)[2].item())
"""


@pytest.mark.slow
def test_its_kernels_are_used_and_nothing_is_compiled(library: Path) -> None:
    assert built.python(str(IN_PYTHON), str(library)).stdout == "ran\n"


@pytest.mark.slow
@pytest.mark.every
def test_its_kernels_pass_the_kit(whole_library: Path) -> None:
    assert built.python(str(IN_PYTHON), str(whole_library), "every").stdout == "ran\n"


@pytest.mark.slow
@pytest.mark.every
def test_loaded_after_moe_ops_it_defines_nothing_and_says_so(library: Path) -> None:
    done = built.python("-c", AFTER, str(library))
    assert done.stdout == "3 3\n"
    assert "libmoe_ops defines no op, as another definition is in use" in done.stderr
    assert "load it before import moe_ops" in done.stderr


OTHER = """
import sys
import torch
torch.ops.load_library(sys.argv[1])
try:
    import moe_ops
except ImportError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_library_of_other_sources_ends_the_import(library: Path, tmp_path: Path) -> None:
    other, mark = tmp_path / "libmoe_ops.so.1", loaded.built_from().encode()
    held = library.read_bytes()
    assert held.count(mark) == 1
    other.write_bytes(held.replace(mark, b"0" * len(mark)))
    said = built.python("-c", OTHER, str(other)).stdout
    assert said.startswith(f"{other} was built from other sources")


@pytest.fixture
def fresh() -> Iterator[None]:
    """No library was asked for yet; afterwards all is as the import left it."""
    loaded.library.cache_clear()
    yield
    loaded.library.cache_clear()
    loaded.library()


@pytest.fixture(params=["/b/libmoe_ops.so", "/b/libmoe_ops.so.1", "/b/mine.so"])
def stranger(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file of a library of ours from other sources, loaded beside one of others."""

    class Library:
        def __init__(self, file: str) -> None:
            if file == request.param:
                self.moe_ops_built_from = lambda: b"0123"

    monkeypatch.setattr(torch.ops, "loaded_libraries", {"/a/libother.so", request.param})
    monkeypatch.setattr(loaded.ctypes, "CDLL", Library)
    return str(request.param)


def test_a_library_is_known_by_any_name_and_refused_if_its_sources_differ(
    fresh: None, stranger: str
) -> None:
    with pytest.raises(ImportError, match=f"^{stranger} was built from other .*again: python"):
        loaded.library()


def test_a_library_that_is_loaded_after_the_import_is_not_used(stranger: str) -> None:
    assert loaded.path() == stranger and loaded.library() is None


def test_without_a_library_there_is_none(fresh: None) -> None:
    assert loaded.path() is None and loaded.library() is None


def test_sources_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    before = loaded.built_from()
    text_of = loaded.text_of
    monkeypatch.setattr(loaded, "text_of", lambda names: text_of(names) + " ")
    assert before != loaded.built_from()


SCHEMA = "(Tensor x, SymInt n=1) -> Tensor"


def one_more(x: Tensor, n: int = 1) -> Tensor:
    return x + 1


def two_more(x: Tensor, n: int = 1) -> Tensor:
    return x + 2


def test_a_schema_is_defined_once() -> None:
    with torch.library._scoped_library("moe_ops", "FRAGMENT") as library:
        definitions.define("test_of_definitions", SCHEMA, one_more, library)
        definitions.define("test_of_definitions.other", SCHEMA, two_more, library)
        packet = torch.ops.moe_ops.test_of_definitions
        assert torch.Tag.needs_exact_strides in packet.default.tags
        assert packet.overloads() == ["default", "other"]
        assert packet.default(torch.zeros(())).item() == 1
        assert packet.other(torch.zeros(())).item() == 2


def test_another_schema_is_refused() -> None:
    with torch.library._scoped_library("moe_ops", "FRAGMENT") as library:
        definitions.define("test_of_others", SCHEMA, one_more, library)
        changed = SCHEMA.replace("n=1", "n=2")
        with pytest.raises(
            ImportError, match=r"defines .*n=1.*but this moe_ops .*n=2.*build it ag"
        ):
            definitions.define("test_of_others", changed, one_more, library)


def test_a_kernel_is_taken_over_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    with torch.library._scoped_library("moe_ops", "FRAGMENT") as first:
        first.define(f"test_of_taking{SCHEMA}")
        first.impl("test_of_taking", one_more, "CPU")
        second = Library("moe_ops", "FRAGMENT")
        definitions.define("test_of_taking", SCHEMA, two_more, second)
        assert torch.ops.moe_ops.test_of_taking(torch.zeros(())).item() == 2
        second._destroy()
    assert not recwarn.list

"""The program in C++ of examples/ runs what AOTInductor made of models with our ops."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from moe_ops.testing import Tol, assert_close
from tests.library import built, model
from tests.sources import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.every]
TOL = Tol(1e-5, "float32 sums in another order through one layer")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """examples/aoti_main.cpp, built as its page says."""
    if shutil.which("cmake") is None:
        pytest.skip("there is no cmake, which examples/CMakeLists.txt is for")
    built.skip_without_compiler()
    folder = tmp_path_factory.mktemp("program")
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for words in (["-S", str(ROOT / "examples"), "-B", str(folder), prefix], ["--build", folder]):
        done = subprocess.run(["cmake", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return folder / "aoti_main"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built.skip_without_compiler()
    folder = tmp_path_factory.mktemp("packages")
    built.python("-m", "tests.library.model", str(folder))
    return folder


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", model.MODELS)
def test_logits_are_those_of_python(
    name: str, program: Path, packages: Path, whole_library: Path
) -> None:
    wanted = torch.load(packages / f"{name}.pt")
    for tokens, want in zip(model.TOKENS, wanted, strict=True):
        done = run(program, packages / f"{name}.pt2", whole_library, *tokens)
        assert done.returncode == 0, done.stderr
        assert_close(torch.tensor([*map(float, done.stdout.split())]), want, TOL)


def test_without_the_library_it_is_named(program: Path, packages: Path) -> None:
    done = run(program, packages / "floats.pt2", 1, 2)
    assert done.returncode == 1 and not done.stdout
    assert "schema for moe_ops::" in done.stderr
    assert "libmoe_ops.so" in done.stderr and "python -m moe_ops build-library" in done.stderr


@pytest.mark.parametrize("words", [(), ("model.pt2",), ("model.pt2", "libmoe_ops.so")])
def test_without_tokens_it_says_how_it_is_called(words: tuple[str, ...], program: Path) -> None:
    done = run(program, *words)
    assert done.returncode == 2 and done.stderr.startswith("usage: aoti_main MODEL.pt2")


def test_what_the_library_lacks_is_told(program: Path, packages: Path, library: Path) -> None:
    done = run(program, packages / "int4.pt2", library, 1, 2)
    assert done.returncode == 1 and not done.stdout
    assert "w_format='int4:1x32': this libmoe_ops was built without it" in done.stderr

"""libmoe_ops as tests have it, and what processes of their own make of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from moe_ops.library.build import build
from moe_ops.library.records import LIBRARY_OPS
from tests.sources import ROOT

CHILD = Path(__file__).with_name("child.py")


def skip_without_compiler() -> None:
    """Skip a test where Inductor finds no compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        pytest.skip(f"there is no C++ compiler: {error}")


def once(folder: Path, elements: Iterable[str] | None) -> Path:
    """The library, built by the first process that asks for it in this folder."""
    skip_without_compiler()
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        made = folder / "libmoe_ops.so"
        return made if made.exists() else build(folder, elements)


def ran(library: Path, calls: Sequence[tuple[str, tuple[Any, ...]]], folder: Path) -> Any:
    """What a process without moe_ops makes of calls of ops: see child.py."""
    given, made = folder / "calls.pt", folder / "results.pt"
    torch.save(list(calls), given)
    python(str(CHILD), str(library), str(given), str(made), *LIBRARY_OPS)
    return torch.load(made, weights_only=False)


def python(*words: str) -> subprocess.CompletedProcess[str]:
    """A Python that can import moe_ops, and has to end well."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done

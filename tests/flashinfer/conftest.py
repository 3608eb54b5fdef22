"""The stand-in of FlashInfer in place of the package, on a GPU that is said to be there."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from moe_ops import arena, experts, moe
from moe_ops.backends.flashinfer import b12x, cute_dsl, cutlass, fits, kept, package, trtllm
from tests.flashinfer.signatures import NEWEST, VERSIONS

STAND_IN = Path(__file__).parent / "stand_in"
METADATA = "Metadata-Version: 2.1\nName: flashinfer-python\nVersion: {}\n"
OPS = (experts, moe)  # that have backends there
CACHES = (package.version, package.module, package.parameters, package._refusal, fits._way)


def forget() -> None:
    for cached in CACHES:
        cached.cache_clear()
    for held in (
        b12x._LAYERS,
        b12x._WORKSPACES,
        cute_dsl._WRAPPERS,
        cutlass._LAUNCHES,
        kept._tuned,
        trtllm._RUNS,
    ):
        held.clear()
    arena.release()
    for op in OPS:
        op.memo.clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        del sys.modules[name]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Says which GPU is there."""

    def on(major: int, minor: int) -> None:
        for module in (package, fits):
            monkeypatch.setattr(module, "capability", lambda device: (major, minor))
        for cached in (package._refusal, fits._way):
            cached.cache_clear()
        for op in OPS:
            op.memo.clear()

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return on


@pytest.fixture
def version() -> str:
    """The version that is said to be installed. Modules that ask about others have their own."""
    return NEWEST


@pytest.fixture
def installed(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in is installed, and its backends take tensors on the CPU."""
    forget()
    about = tmp_path / f"flashinfer_python-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(METADATA.format(version))
    (about / "signatures.json").write_text(json.dumps(VERSIONS[version]))
    for folder in (STAND_IN, tmp_path):
        monkeypatch.syspath_prepend(str(folder))
    for op in OPS:
        backends = {
            name: replace(b, devices=None) if name.startswith("flashinfer") else b
            for name, b in op.backends.items()
        }
        monkeypatch.setattr(op, "_backends", backends)
        monkeypatch.setattr(op, "_order", {})
        monkeypatch.setattr(op, "_plans", {})
    yield
    forget()


@pytest.fixture
def fake(installed: None) -> ModuleType:
    """The stand-in, imported."""
    found: ModuleType = package.module("flashinfer")
    return found

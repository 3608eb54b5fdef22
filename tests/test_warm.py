"""Caches that are filled ahead, saved, and used again somewhere else."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from moe_ops.__main__ import main
from moe_ops.warm import archive, calls
from moe_ops.warm import caches as held
from moe_ops.warm.caches import Held
from moe_ops.warm.calls import Done
from tests.sources import ROOT

FOR = {"moe_ops": "0.1.0", "torch": "2.13.0", "triton": None}


@pytest.fixture
def caches(tmp_path: Path) -> dict[str, Path]:
    found = {name: tmp_path / name for name in ("Inductor", "Triton")}
    for name, file, size in (
        ("Inductor", "ab/graph", 10),
        ("Inductor", "ab/kernel.so", 20),
        ("Inductor", "locks/graph.lock", 0),
        ("Triton", "cd/kernel.cubin", 3_000_000),
    ):
        path = found[name] / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    return found


def test_what_was_saved_is_loaded_elsewhere(caches: dict[str, Path], tmp_path: Path) -> None:
    archive.save(tmp_path / "caches.tar", caches, FOR)
    others = {name: tmp_path / "other" / name for name in caches}
    archive.load(tmp_path / "caches.tar", others, FOR)
    for name, folder in caches.items():
        before = [p for p in held.files_in(folder) if p.suffix != ".lock"]
        after = list(held.files_in(others[name]))
        assert [p.relative_to(folder) for p in before] == [
            p.relative_to(others[name]) for p in after
        ]
        assert [p.read_bytes() for p in before] == [p.read_bytes() for p in after]


def test_what_was_saved_for_something_else_is_refused(
    caches: dict[str, Path], tmp_path: Path
) -> None:
    archive.save(tmp_path / "caches.tar", caches, FOR)
    others = {name: tmp_path / "other" / name for name in caches}
    with pytest.raises(
        ValueError, match=r"torch 2\.13\.0, triton missing, and this is torch 2\.14\.1"
    ):
        archive.load(tmp_path / "caches.tar", others, {**FOR, "torch": "2.14.1", "triton": "3.9"})
    assert not (tmp_path / "other").exists()


def test_a_tar_file_of_others_is_refused(caches: dict[str, Path], tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "other.tar", "w") as tar:
        tar.add(caches["Triton"], "Triton")
    with pytest.raises(ValueError, match="no file that warm --save wrote"):
        archive.load(tmp_path / "other.tar", caches, FOR)


def test_nothing_is_put_outside_the_folders(caches: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    saved = tmp_path / "caches.tar"
    archive.save(saved, {}, FOR)
    with tarfile.open(saved, "a") as tar:
        tar.add(caches["Triton"] / "cd" / "kernel.cubin", "Triton/../outside/kernel")
    with pytest.raises(tarfile.TarError):
        archive.load(saved, caches, FOR)
    assert not list((tmp_path / "outside").iterdir())


def test_tables_of_calls_and_caches(caches: dict[str, Path]) -> None:
    before = held.held_by(caches)
    assert before["Inductor"] == Held(files=3, bytes=30, libraries=1)
    assert before["Triton"] == Held(files=1, bytes=3_000_000, kernels=1)
    (caches["Triton"] / "more").write_bytes(b"x" * 1_500_000)
    cold = Done(name="forward of 1 x 8", seconds=12.34, compiled=3, cached=0, built=Held(kernels=2))
    found = Done(name="forward of 1 x 1", seconds=0.04, compiled=0, cached=3, built=Held())
    assert calls.text([cold, found], caches, before).splitlines() == [
        "                  seconds  graphs compiled  from caches  C++ built  Triton built",
        "forward of 1 x 8     12.3                3            0          0             2",
        "forward of 1 x 1      0.0                0            3          0             0",
        "",
        "cache     files   MB  new MB  folder",
        f"Inductor      3  0.0     0.0  {caches['Inductor']}",
        f"Triton        2  4.5     1.5  {caches['Triton']}",
        "",
        "what was compiled and built now comes from the caches next time",
    ]
    said = calls.text([found], caches, before)
    assert said.endswith("all of it came from the caches")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["warm"], "the following arguments are required: MODEL"),
        (["warm", "qwen3_moe", "--tokens", "0"], "must be an integer above 0, got '0'"),
        (["warm", "qwen3_moee"], "qwen3_moee: transformers has no such model type"),
        (["warm", "qwen3_moe", "--tiny", "--quant", "int9"], "qwen3_moe: "),
        (["warm", "qwen3_moe", "--tiny", "--head", "int9"], "head_format='int9' is no format"),
        (["warm", "qwen3_moe", "--load", "{folder}/none.tar"], "No such file"),
        (["warm", "qwen3_moe", "--load", "{folder}/empty.tar"], "empty.tar is no tar file"),
        (["warm", "qwen3_moe", "--save", "{folder}"], "--save='{folder}' is a folder"),
    ],
)
def test_bad_usage_exits_with_two(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.tar").touch()
    with pytest.raises(SystemExit) as exit:
        main([word.format(folder=tmp_path) for word in words])
    assert exit.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("python -m moe_ops") and said.format(folder=tmp_path) in last


def test_a_gpu_that_is_not_there_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(["warm", "qwen3_moe", "--tiny", "--device", "cuda"])
    assert "finds no CUDA GPU here; leave out --device" in capsys.readouterr().err


def warmed(folder: Path, *words: str) -> list[list[str]]:
    """The rows of the table of calls, and the last line, of a process whose caches are there."""
    env = {
        **{name: value for name, value in os.environ.items() if "DISABLE_CACHES" not in name},
        "PYTHONPATH": str(ROOT),
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TORCHINDUCTOR_FX_GRAPH_CACHE_DEFAULT": "1",
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    words = ("warm", "qwen3_moe", "--tiny", "--tokens", "4", "--dtype", "float32", *words)
    command = [sys.executable, "-m", "moe_ops", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "what is no terminal gets no progress"
    head, *lines = done.stdout.splitlines()
    assert "seconds" in head
    return [line.split() for line in lines[: lines.index("")]] + [lines[-1].split()]


@pytest.mark.every
@pytest.mark.slow
def test_another_process_finds_all_in_a_copy_even_for_more_layers(tmp_path: Path) -> None:
    saved = str(tmp_path / "caches.tar")
    *cold, said = warmed(tmp_path / "one", "--layers", "1", "--save", saved)
    assert said[:3] == ["what", "was", "compiled"]
    # A forward without a cache runs what one with it compiled.
    assert all((int(row[-4]) > 0) == ("no" not in row) for row in cold)  # graphs compiled
    assert sum(int(row[-2]) for row in cold) > 0  # C++ built
    *found, said = warmed(tmp_path / "two", "--layers", "2", "--load", saved)
    assert said == ["all", "of", "it", "came", "from", "the", "caches"]
    for before, row in zip(cold, found, strict=True):
        assert row[-4:] == ["0", before[-4], "0", "0"]

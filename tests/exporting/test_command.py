"""`python -m moe_ops export`: what it prints, and how it exits."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import ExportedProgram

from moe_ops.__main__ import main
from moe_ops.exporting import runtimes
from moe_ops.exporting.command import compared
from moe_ops.exporting.runtimes import RUNTIMES, Runtime

pytest.importorskip("transformers")
TINY = ("export", "qwen3_moe", "--tiny", "--layers", "1")


@dataclass
class StandIn:
    """A runtime that runs the program itself, off by a factor."""

    factor: float = 1.0
    program: ExportedProgram | None = None

    def write(self, program: ExportedProgram, file: Path) -> None:
        self.program = program
        file.write_bytes(b"a program")

    def load(self, file: Path) -> Callable[[Tensor], Tensor]:
        assert self.program is not None
        assert file.read_bytes() == b"a program"
        run = self.program.module()
        return lambda ids: run(ids) * self.factor


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """What stands for ONNX Runtime."""
    stand_in = StandIn()
    monkeypatch.setattr(Runtime, "code", lambda self: stand_in)
    monkeypatch.setitem(RUNTIMES, "onnx", replace(RUNTIMES["onnx"], packages={}))
    return stand_in


@pytest.mark.every
@pytest.mark.parametrize(
    ("factor", "code", "said"),
    [(1.001, 1, "NOT within 1e-05"), (1.0, 0, ", within 1e-05")],
    ids=["off", "close"],
)
def test_it_exits_by_the_tolerance(
    factor: float, code: int, said: str, stand_in: StandIn, tmp_path: Path, capsys: Any
) -> None:
    stand_in.factor = factor
    assert main([*TINY, "--to", "onnx", "-o", str(tmp_path / "a.onnx")]) == code
    wrote, *lines = capsys.readouterr().out.splitlines()
    assert wrote.startswith(f"wrote {tmp_path / 'a.onnx'}: ")
    assert [line.partition(" tokens: ")[0] for line in lines] == ["[2, 7]", "[3, 5]"]
    assert all(line.endswith(said) for line in lines)


@pytest.mark.parametrize(
    ("got", "said"),
    [
        (torch.full((1, 2, 3), float("nan")), "off by nan, NOT within 0.1"),
        (torch.ones(1, 2, 4), r"\[1, 2, 4\], not \[1, 2, 3\]"),
        (torch.ones(1, 2, 3) * 1.05, "off by 0.05, within 0.1"),
    ],
    ids=["nan", "shape", "close"],
)
def test_what_is_compared(got: Tensor, said: str) -> None:
    ids = torch.zeros(1, 2, dtype=torch.int64)
    line, is_close = compared(lambda ids: got, ids, torch.ones(1, 2, 3), 0.1)
    assert re.search(said, line)
    assert is_close == ("off by 0.05" in said)


@pytest.mark.parametrize("to", [name for name, r in RUNTIMES.items() if r.packages])
def test_without_the_runtime_it_names_the_package(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as exited:
        main([*TINY, "--to", to, "-o", str(tmp_path / f"a{RUNTIMES[to].suffix}")])
    assert exited.value.code == 2
    wanted = " ".join(dict.fromkeys(RUNTIMES[to].packages.values()))
    assert f"pip install {wanted}\n" in capsys.readouterr().err


WRONG: dict[str, tuple[list[str], str]] = {
    "runtime": (["--to", "tflite", "-o", "a.onnx"], "invalid choice: 'tflite'"),
    "suffix": (["--to", "onnx", "-o", "a.pte"], "files of onnx end in .onnx; name it so"),
    "folder": (["--to", "onnx", "-o", "no/a.onnx"], "there is no folder 'no'; make it first"),
    "a_folder": (["--to", "onnx", "-o", "../a.onnx"], "a.onnx' is a folder"),
    "layers": (["--to", "onnx", "-o", "a.onnx", "--layers", "0"], "integer above 0, got '0'"),
}


@pytest.mark.parametrize(("words", "said"), WRONG.values(), ids=WRONG)
def test_bad_usage(
    words: list[str], said: str, stand_in: StandIn, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    (tmp_path / "a.onnx").mkdir()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(SystemExit) as exited:
        main([*TINY, *words])
    assert exited.value.code == 2
    assert said in capsys.readouterr().err
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.every
def test_what_a_runtime_cannot_say(tmp_path: Path, stand_in: StandIn, capsys: Any) -> None:
    words = ["--to", "onnx", "-o", str(tmp_path / "a.onnx"), "--quant", "mxfp8"]
    with pytest.raises(SystemExit) as exited:
        main([*TINY, *words])
    assert exited.value.code == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert "x_format='mxfp8' rounds to codes" in told


@pytest.mark.every
def test_a_model_without_experts_is_not_written(
    tmp_path: Path, stand_in: StandIn, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["export", "llama", *TINY[2:], "--to", "onnx", "-o", str(tmp_path / "a.onnx")])
    assert exited.value.code == 2
    assert "llama: no layer has experts that moe_ops takes" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.every
@pytest.mark.parametrize("method", ["write", "load"])
def test_what_a_runtime_raises_is_a_line(
    method: str, tmp_path: Path, stand_in: StandIn, capsys: Any, monkeypatch: Any
) -> None:
    def fail(*args: Any) -> None:
        try:
            raise KeyError("view_as_complex")
        except KeyError as error:
            raise ValueError("see above") from error

    monkeypatch.setattr(stand_in, method, fail)
    with pytest.raises(SystemExit) as exited:
        main([*TINY, "--to", "onnx", "-o", str(tmp_path / "a.onnx")])
    assert exited.value.code == 2
    assert "qwen3_moe: onnx says KeyError: 'view_as_complex'" in capsys.readouterr().err


def test_runtimes_have_their_files() -> None:
    for runtime in RUNTIMES.values():
        assert (Path(runtimes.__file__).parent / f"{runtime.file}.py").is_file()

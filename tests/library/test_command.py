"""`python -m moe_ops build-library`, and what it builds from."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

from moe_ops.__main__ import main
from moe_ops.kernels.cpu import quantized
from moe_ops.library import build, records


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> list[build._Unit]:
    """What would have been compiled; files stand for objects and for the library."""
    found: list[build._Unit] = []

    def compiled(unit: build._Unit, scratch: Path, include: list[str]) -> Path:
        assert shlex.quote(str(scratch)) == str(scratch), "Inductor would split this path"
        found.append(unit)
        return scratch / unit.name

    def linked(objects: list[Path], scratch: Path) -> Path:
        (scratch / "libmoe_ops.so").write_text(" ".join(sorted(o.name for o in objects)))
        return scratch / "libmoe_ops.so"

    monkeypatch.setattr(build, "_compiled", compiled)
    monkeypatch.setattr(build, "_linked", linked)
    return found


def test_it_prints_the_path_and_leaves_nothing_else(
    units: list[build._Unit], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "some one's" / "new"
    assert main(["build-library", str(folder)]) == 0
    made = folder / "libmoe_ops.so"
    assert capsys.readouterr().out == f"{made}\n"
    assert list(made.parent.iterdir()) == [made]
    assert {"library", "plain"} < {*made.read_text().split()}


@pytest.mark.parametrize(
    ("elements", "pairs"),
    [
        (None, [*build.CODES]),
        ((), []),
        (("int4",), [("int4", ""), ("int4", "float8_e4m3fn")]),
        (("int8",), [("int8", ""), ("int8", "int8"), ("int8", "float8_e4m3fn")]),
    ],
    ids=["all", "none", "int4", "int8"],
)
def test_it_has_the_codes_that_are_asked_for(
    elements: tuple[str, ...] | None,
    pairs: list[tuple[str, str]],
    units: list[build._Unit],
    tmp_path: Path,
) -> None:
    build.build(tmp_path, elements)
    of_codes = [u.macros for u in units if u.name.startswith("codes")]
    wanted = [quantized.definitions(*pair) for pair in pairs]
    assert all(any(w.items() <= m.items() for m in of_codes) for w in wanted)
    assert len(of_codes) == len(pairs)
    (ops,) = (u for u in units if u.name == "library")
    assert ops.macros["MOE_VARIANTS"].count("MOE_VARIANT(") == len(pairs)


def test_every_element_of_the_backend_is_among_them() -> None:
    assert {element for element, _ in build.CODES} == {*quantized.ELEMENTS}
    assert {inputs for _, inputs in build.CODES} == {*quantized.INPUTS}


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (InvalidCxxCompiler(), "build-library needs a working C\\+\\+ compiler"),
        (
            CppCompileError(["g++", "a.cpp"], "In a.h\na.h:1: fatal error: no b.h\nend\n"),
            "build-library cannot compile by g\\+\\+: a.h:1: fatal error: no b.h\n$",
        ),
        (CppCompileError(["g++"], "ld: no space left\n\n"), r"by g\+\+: ld: no space left\n$"),
        (CppCompileError(["g++"], ""), r"by g\+\+: no reason\n$"),
        (OSError("no space left"), "no space left"),
    ],
    ids=["no_compiler", "failed", "linker", "silent", "disk"],
)
def test_what_cannot_be_built_exits_with_2(
    raised: Exception,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(*args: object) -> Path:
        raise raised

    monkeypatch.setattr(build, "_built", fails)
    exits_with(["build-library", str(tmp_path)], said, capsys)


def test_unknown_elements_and_files_exit_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["build-library", str(tmp_path), "--elements", "int4,int3"]
    exits_with(words, "elements has 'int3'; choose some of int8, .*e4m3fn, .*q6_k, or none", capsys)
    exits_with([*words[:-1], ""], "elements has ''; choose some of int8", capsys)
    file = tmp_path / "file"
    file.write_text("")
    exits_with(["build-library", str(file)], "file is a file; name a folder", capsys)


def exits_with(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    printed = capsys.readouterr()
    assert left.value.code == 2
    assert re.search(said, printed.err) and not printed.out


def test_records_have_the_arguments_of_ops_and_refuse_those_that_no_code_reads() -> None:
    text = records.header()
    record = text.partition("struct ExpertsCall {")[2].partition("\n};")[0]
    assert "  std::optional<double> limit;\n" in record
    assert "taken<std::optional<Tensor>>(stack[5])" in record
    assert 'if (!(layout == "")) refuse_argument(op, "layout", layout);' in record
    assert 'if (global_scale2_E) refuse_argument(op, "global_scale2_E", global_scale2_E);' in record
    assert 'refuse_argument(op, "alpha"' not in record
    of_moe = text.partition("struct MoeCall {")[2]
    assert "scale, weights_dtype}; }" in of_moe  # what `route` calls out_dtype
    assert 'expert_offset, std::nullopt, ""};' in of_moe  # of tokens that are codes


def test_versions_of_torch_that_an_older_one_does_not_know_are_asked_for() -> None:
    """Where there is no such macro it counts as 0, and every version is above it."""
    text = "".join(
        p.read_text() for p in sorted(build.HERE.iterdir()) if p.suffix in (".h", ".cpp")
    )
    versions = re.findall(r">= (TORCH_VERSION_\w+)", text)
    assert versions
    for version in versions:
        assert re.search(rf"#if defined\({version}\) && \w+ >= {version}\b", text)

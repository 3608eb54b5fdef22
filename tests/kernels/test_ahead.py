"""All variants that a plan may launch are compiled in its first call, at once."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are Triton's")
pytest.importorskip("triton.experimental.gluon", reason="some of them are Gluon's")

ROOT = Path(__file__).resolve().parents[2]
MODULE = "tests.kernels.offline_ahead"

# Calls of `offline_ahead.py`, with the rows of the first one.
FLOATS = ("qwen3_30b", "onto", "route", "route recorded", "route replayed")
ADAPTED = ("qwen3_30b adapted", "olmoe adapted apart", "qwen3_30b int4 adapted")
TRAINED = ("qwen3_30b trained", "qwen3_30b int4 trained")
CODES = ("qwen3_30b mxfp4", "dsv3_ep8 float8 with float8", "quantize by tensor")
OTHER_FLOATS = (
    "qwen3_next float16", "mixtral_8x7b", "dsv3_ep8 full", "gpt_oss_20b transposed",
    "olmoe float32",
)  # fmt: skip
OTHER_CODES = (
    "gpt_oss_20b mxfp4", "mixtral_8x7b int4", "qwen3_30b uint4", "qwen3_30b nvfp4",
    "qwen3_30b mxfp6", "qwen3_30b mxfp8", "qwen3_30b int8", "dsv3_ep8 float8",
    "qwen3_30b float8 by row", "qwen3_30b int8 by row", "qwen3_30b int8 by tensor",
    "qwen3_30b int8 static", "qwen3_30b emulated nvfp4", "gpt_oss_20b emulated mxfp8",
    "quantize by group", "quantize to mxfp4",
)  # fmt: skip
GROUPS = {
    "floats for Hopper": (90, 1, FLOATS),
    "codes for Hopper": (90, 600, CODES),
    "adapters for Hopper": (90, 1, ADAPTED),
    "training for Hopper": (90, 1, TRAINED),
    "floats for Hopper, many rows first": (90, 600, FLOATS),
    "other floats for Hopper": (90, 600, OTHER_FLOATS),
    "other codes for Hopper": (90, 1, OTHER_CODES),
    "floats for Ampere": (80, 600, FLOATS),
    "floats for Blackwell": (100, 600, FLOATS),
    "codes for Blackwell": (100, 600, CODES),
}
ALWAYS = [*GROUPS][:2]


@pytest.fixture(scope="module")
def process() -> Iterator[subprocess.Popen[str]]:
    """What runs each line in a process of its own, as Triton interprets kernels in this one."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-m", MODULE], env=environment, **pipes) as started:
        yield started


Run = Callable[..., list[str]]


@pytest.fixture
def run(process: Any) -> Run:
    """The lines that a program prints."""

    def lines_of(*words: Any) -> list[str]:
        print(json.dumps(words), file=process.stdin, flush=True)
        *lines, end = until(process.stdout, "ended with")
        assert end == "ended with 0", "its error is in what was written to stderr"
        return lines

    return lines_of


def until(lines: Iterable[str], end: str) -> Iterator[str]:
    for line in lines:
        yield line.rstrip("\n")
        if line.startswith(end):
            return


@pytest.mark.parametrize(
    "group",
    [pytest.param(g, marks=[] if g in ALWAYS else [pytest.mark.every]) for g in GROUPS],
)
def test_the_first_call_compiles_all_that_later_ones_launch(group: str, run: Run) -> None:
    capability, first, names = GROUPS[group]
    said = run("first", capability, first, *names)
    found: dict[str, Any] = dict(zip(names, map(json.loads, said), strict=True))
    assert {name: of["later"] for name, of in found.items() if of["later"]} == {}
    for name, of in found.items():
        assert all("moe_ops compiles" in thread for thread in of["threads"]), name
    if "qwen3_30b" in found:  # of every range of its plan
        of = found["qwen3_30b"]
        ranges = [part.partition(":")[2] for part in of["plan"].split(",")]
        assert ranges == ["triton.tiny", "triton.rows", "triton.grouped"]
        assert {"tiny_up", "rows_up", "_grouped", "sort_kernel", "place_kernel"} <= {*of["kernels"]}


def test_kernels_are_compiled_at_the_same_time(run: Run) -> None:
    run("together")


def test_what_was_begun_is_not_compiled_again(run: Run) -> None:
    assert run("begun") == ["True []"]


def test_what_does_not_compile_is_raised_where_it_is_launched(run: Run) -> None:
    assert run("failing") == ["4096 place_kernel fails"] * 2

"""The quickstart runs as a user runs it, prints each row when it is known, and what it promises."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.examples.loaded import load

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "quickstart.py"
NAMES = ["moe_ops", "grouped_mm", "batched_mm"]
SMALL = ("--layers", "1", "--batch", "2", "--prompt", "4", "--tokens", "6")


@pytest.fixture
def quickstart(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("transformers")
    return load(monkeypatch, "quickstart.py", "quickstart")


class Machine:
    """Contenders that only wait, by a clock of its own; `slower` is added to each run's factor."""

    def __init__(self, example: ModuleType, slower: float = 0.0) -> None:
        self.example, self.slower = example, slower
        self.now, self.factor = 0.0, 1.0
        self.calls: list[str] = []

    def perf_counter(self) -> float:
        return self.now

    def contender(
        self, name: str, prefill: float, step: float, before: Callable[[], None] = lambda: None
    ) -> object:
        def generate(clock) -> None:
            before()
            self.calls.append(name)
            self.factor += self.slower
            for seconds in (prefill, step, step):
                self.now += seconds * self.factor
                clock(None, torch.empty(0))

        return self.example.Contender(name, "", 4, generate)


@pytest.fixture
def machine(quickstart, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(quickstart)
    monkeypatch.setattr(quickstart, "time", made)
    return made


def figures(text: str) -> list[tuple[str, list[str]]]:
    """The rows of the tables in a text: the name, and the figures as they are printed."""
    found = [line.split() for line in text.splitlines()]
    return [(line[0], line[1:]) for line in found if line and line[0] in NAMES and len(line) == 4]


def test_a_row_is_printed_before_the_next_contender_compiles(
    quickstart, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[str]] = []
    text: list[str] = []

    def look() -> None:
        text.append(capsys.readouterr().out)
        seen.append([name for name, _ in figures("".join(text))])

    quickstart.measure([machine.contender(name, 0.2, 0.1, look) for name in NAMES])
    # Each compiles and runs; those that come in turns then find all rows.
    assert seen[:6] == [[], [], NAMES[:1], NAMES[:1], NAMES[:2], NAMES[:2]]
    assert seen[6:] == [NAMES] * (3 * quickstart.ROUNDS)
    assert "".join(text).startswith(f"{quickstart.FIRST}\n{quickstart.HEADER}\n")


def test_an_error_of_a_stock_contender_leaves_our_row(
    quickstart, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError("no such product")

    ours = machine.contender("moe_ops", 0.2, 0.1)
    with pytest.raises(RuntimeError, match="no such product"):
        quickstart.measure([ours, machine.contender("grouped_mm", 0.2, 0.1, fail)])
    assert figures(capsys.readouterr().out) == [("moe_ops", ["0.4", "200.0", "40.0"])]


def test_a_machine_that_gets_slower_favours_nobody(quickstart, machine: Machine) -> None:
    machine.slower = 0.1
    first, *others = quickstart.measure([machine.contender(name, 0.2, 0.1) for name in NAMES])
    assert machine.calls[6:12] == [*NAMES, *reversed(NAMES)]
    for other in others:
        assert other.prefill_ms == pytest.approx(first.prefill_ms)
        assert other.decode_tokens_per_s == pytest.approx(first.decode_tokens_per_s)


def test_speeds_are_those_of_the_runs_in_turns(quickstart, machine: Machine) -> None:
    def hurry() -> None:
        machine.factor = 1.0 if len(machine.calls) >= 4 else 9.0

    found = quickstart.measure(
        [machine.contender(n, p, s, hurry) for n, p, s in (("moe_ops", 1, 1), ("grouped_mm", 2, 4))]
    )
    assert [s.prefill_ms for s in found] == [1000, 2000]
    assert [s.decode_tokens_per_s for s in found] == [4, 1]
    assert [s.compile_s for s in found] == [27, 90]


@pytest.mark.parametrize(("factor", "warned"), [(1.4, []), (1.6, ["grouped_mm"])])
def test_runs_that_differ_too_much_are_told(
    quickstart,
    machine: Machine,
    capsys: pytest.CaptureFixture[str],
    factor: float,
    warned: list[str],
) -> None:
    def calm() -> None:
        machine.factor = 1.0

    def burst() -> None:
        machine.factor = factor if machine.calls.count("grouped_mm") == 4 else 1.0

    # The first two calls of each are not timed, so the fifth of grouped_mm is its third of four.
    ours = machine.contender("moe_ops", 0.2, 0.1, calm)
    quickstart.measure([ours, machine.contender("grouped_mm", 0.2, 0.1, burst)])
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert [line.split("run of ")[1].split()[0] for line in told] == warned
    assert all("1.6 times as long as its fastest" in line for line in told)


def test_ratios_are_against_the_best_of_each_column(quickstart) -> None:
    speeds = [
        quickstart.Speed("moe_ops", 3.0, 50.0, 400.0),
        quickstart.Speed("grouped_mm", 4.0, 75.0, 100.0),
        quickstart.Speed("batched_mm", 2.0, 150.0, 250.0),
    ]
    text = quickstart.table(speeds[0], speeds[1:])
    assert [name for name, _ in figures(text)] == ["grouped_mm", "batched_mm", "moe_ops"]
    assert text.splitlines()[0] == quickstart.HEADER
    assert text.splitlines()[-1].split() == ["ours", "/", "best", "stock", "1.50x", "1.60x"]


def test_quantized_experts_are_held_against_ours(quickstart) -> None:
    ours, stock = (quickstart.Speed(n, 3.0, 50.0, 400.0) for n in ("moe_ops", "grouped_mm"))
    text = quickstart.table(ours, [stock], [quickstart.Speed("int4", 3.0, 40.0, 600.0)])
    lines = [line.split() for line in text.splitlines()]
    assert lines[-2][0] == "int4" and lines[-1] == ["int4", "/", "ours", "1.25x", "1.50x"]
    assert lines[-3] == ["ours", "/", "best", "stock", "1.00x", "1.00x"]


def test_a_long_stage_is_said_again(quickstart, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    told = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        if "so far" in text:
            told.set()

    monkeypatch.setattr(quickstart, "say", say)
    monkeypatch.setattr(quickstart, "PATIENCE", 0.001)
    waiting = quickstart.Contender("moe_ops", "", 4, lambda clock: told.wait())
    waiting.compile()
    assert said[0] == "moe_ops: compiling for prompts"
    assert re.fullmatch(r"moe_ops: compiling for prompts \(\d+ s so far\)", said[1])


def test_the_first_line_comes_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch comes after')\n")
    process = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    first, second = process.stderr.splitlines()
    assert first.endswith("importing torch and transformers") and second == "torch comes after"


@pytest.mark.slow
@pytest.mark.every
def test_the_quickstart_quantizes_a_copy() -> None:
    process = start(str(EXAMPLE), *SMALL, "--quant", "int4", stderr=subprocess.STDOUT)
    text, _ = process.communicate(timeout=500)
    assert process.returncode == 0, text[-2000:]
    assert re.search(r"experts in int4:1x128:bfloat16 are \d\.\d% off", text)
    words = [line.split() for line in text.splitlines()[-3:]]
    assert [line[0] for line in words] == ["ours", "int4", "int4"] and words[2][-1].endswith("x")


def start(*arguments: str, stderr: int) -> subprocess.Popen[str]:
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)


# What is transformers' own is traced but not turned into C++, which is half of what there is.
COUNTED = f"""
import runpy, sys
import torch
from torch._dynamo.utils import counters
compiled = torch.compile
torch.compile = lambda *args, **options: compiled(*args, **{{"backend": "eager", **options}})
sys.argv = {[str(EXAMPLE)]!r} + sys.argv[1:]
sys.path.insert(0, {str(EXAMPLE.parent)!r})
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
print("graphs", counters["stats"]["unique_graphs"])
"""


@pytest.mark.every
@pytest.mark.slow
def test_the_quickstart_prints_a_table_and_writes_its_figures(tmp_path: Path) -> None:
    written = tmp_path / "figures.json"
    process = start("-c", COUNTED, *SMALL, "--json", str(written), stderr=subprocess.STDOUT)
    text, _ = process.communicate(timeout=500)
    assert process.returncode == 0, text[-2000:]
    assert re.match(r"\[ +\d+\.\d s\] importing torch and transformers\n", text)
    early, late = text.split("timing all 3 again in turns, round 1 of 4")
    assert [name for name, _ in figures(early)] == NAMES
    places = [re.search(rf"^{name} ", early, re.MULTILINE) for name in NAMES]
    begins = [early.index(f"{name}: compiling for prompts") for name in NAMES]
    ends = [place.start() for place in places if place]
    checked = early.index("float32 parity: same greedy tokens")
    assert begins[0] < ends[0] < checked < begins[1] < ends[1] < begins[2] < ends[2]
    rows = figures(late)
    assert [name for name, _ in rows] == ["grouped_mm", "batched_mm", "moe_ops"]
    found = json.loads(written.read_text())
    assert found["date"]
    speeds = found["speeds"]
    assert all(s["decode_tokens_per_s"] > 0 for s in speeds)
    assert rows == [
        (
            s["implementation"],
            [f"{s[key]:.1f}" for key in ("compile_s", "prefill_ms", "decode_tokens_per_s")],
        )
        for s in speeds
    ]
    *stock, ours = speeds
    prefill = min(s["prefill_ms"] for s in stock) / ours["prefill_ms"]
    decode = ours["decode_tokens_per_s"] / max(s["decode_tokens_per_s"] for s in stock)
    ratios = late.split("ours / best stock")[1].split("\n")[0]
    assert ratios.split() == [f"{prefill:.2f}x", f"{decode:.2f}x"]
    # A prompt and a token of each stock contender, and of ours and of the check two graphs for a
    # prompt (a layer, the last norm) and four for a token: none runs code of another.
    assert "graphs 16" in text.splitlines()


@pytest.mark.slow
@pytest.mark.every
def test_an_interrupted_run_leaves_the_rows_that_are_known() -> None:
    process = start(str(EXAMPLE), *SMALL, stderr=subprocess.PIPE)
    assert process.stdout is not None
    first = [process.stdout.readline() for _ in range(3)]
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=500)
    assert process.returncode == 130, said[-2000:]
    assert figures("".join(first))[0][0] == "moe_ops"
    assert not out
    assert said.splitlines()[-1].endswith(
        "interrupted; the rows printed so far are from one run each"
    )
    assert "Traceback" not in said

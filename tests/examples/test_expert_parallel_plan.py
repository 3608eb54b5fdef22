"""The plan of a small cluster: who holds what, in how many bytes, and how even it is."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "expert_parallel_plan.py"
SMALL = "--experts 10 --layers 3 --hidden 1024 --width 512 --top-k 2 --tp 2 --dp 2 --redundant 3"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture
def run(example, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    def printed(arguments: str) -> str:
        example["main"](arguments.split())
        return capsys.readouterr().out

    return printed


def rows(text: str) -> list[list[str]]:
    """The lines of the table, one a rank."""
    return [line.split() for line in text.splitlines() if line[:4].strip().isdigit()]


def test_the_table_says_who_holds_what(run: Callable[[str], str]) -> None:
    text = run(f"{SMALL} --nodes 2")
    assert "ep 0/4 = dp 0/2 x tp 0/2" in text
    found = rows(text)
    assert [row[:3] for row in found] == [
        ["0", "0", "4"], ["1", "0", "3"], ["2", "1", "3"], ["3", "1", "3"],
    ]  # fmt: skip
    # Three projections of 1024 x 512 in two bytes are 3 MiB, in three layers.
    assert [float(row[3]) for row in found] == [0.035, 0.026, 0.026, 0.026]
    assert [row[6] for row in found[:2]] == ["0-3", "4-6"]
    loads = [[float(row[column]) for row in found] for column in (4, 5)]
    assert [sum(column) for column in loads] == pytest.approx([4, 4], abs=0.02)
    assert max(loads[1]) < 1.1 < max(loads[0])
    assert "rebalancing writes" in text


def test_shards_of_all_experts_need_no_balancing(run: Callable[[str], str]) -> None:
    text = run(SMALL.replace("--redundant 3", "--shard-experts"))
    assert [row[2:] for row in rows(text)] == [
        ["10", "0.022", "1.00", "1.00", "0-9", "0-9"]
    ] * 4  # fmt: skip
    assert "writes 0 slots" in text


def test_a_plot_is_drawn(run: Callable[[str], str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = tmp_path / "plan.png"
    assert f"drawn in {drawn}" in run(f"{SMALL} --plot {drawn}")
    assert drawn.read_bytes().startswith(b"\x89PNG")


BAD = {
    "numbers": ("--experts 8 --tp 2", "give a --model, or also --layers, --hidden, --width"),
    "ranks": (SMALL.replace("--tp 2", "--tp 32"), "64 expert parallel ranks, but only 13 experts"),
    "model": ("--model NoConfig", "--model NoConfig: transformers has no such class"),
    "layer": (f"{SMALL} --layer 3", "--layer 3 must be from 0 to 2"),
    "shards": (f"{SMALL} --shard-experts", "leave out --redundant"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_arguments_end_in_one_line(
    run: Callable[[str], str], arguments: str, message: str
) -> None:
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        run(arguments)


FAMILIES = {
    "DeepseekV3Config": "58 layers of 256 experts and 1 shared, top 8, 7168 x 2048",
    "Qwen3MoeConfig": "24 layers of 128 experts, top 8, 2048 x 768",
    "Qwen2MoeConfig": "24 layers of 60 experts and 4 shared, top 4, 2048 x 1408",
    "MixtralConfig": "32 layers of 8 experts, top 2, 4096 x 14336",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_sizes_are_read_from_a_configuration(name: str, run: Callable[[str], str]) -> None:
    pytest.importorskip("transformers")
    assert run(f"--model {name} --tp 4").startswith(FAMILIES[name])


@pytest.mark.slow
def test_sizes_are_read_from_a_folder(run: Callable[[str], str], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.OlmoeConfig(num_hidden_layers=5).save_pretrained(tmp_path)
    assert run(f"--model {tmp_path} --dp 8 --top-k 2").startswith("5 layers of 64 experts, top 2,")

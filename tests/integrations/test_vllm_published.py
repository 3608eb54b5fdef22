"""The plugin in the installed vLLM, whose own classes make, load and run layers on a CPU, and
whose loader makes models of transformers, of which blocks with experts run. No model is served:
attention needs what vLLM compiles for CPUs, which its wheel for GPUs has not."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.vllm_layers import LAYERS
from tests.sources import ROOT

HERE = Path(__file__).parent
GATED = [name for name in LAYERS if not name.endswith("_no_mul")]  # vLLM has no others on a CPU
RUNS = {
    "one_rank": (1, "columns", GATED),
    "two_of_columns": (2, "columns", ["silu", "silu_bias", "oai_halves"]),
    "two_of_experts": (2, "experts", ["silu", "silu_bias", "gpt_oss"]),
}
FAMILIES = ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "qwen2_moe", "glm4_moe"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.every,
    pytest.mark.skipif(
        not list(importlib.metadata.distributions(name="vllm")), reason="vllm is not installed"
    ),
]


def port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def right(names: list[str], *commands: list[str]) -> None:
    """Run these scripts side by side, each of which has to find all names right."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    processes = [
        subprocess.Popen(
            [sys.executable, *command, *names], cwd=HERE, env=env, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for command in commands
    ]  # fmt: skip
    for process in processes:
        said, _ = process.communicate(timeout=900)
        assert process.returncode == 0 and f"right: {' '.join(names)}\n" in said, said


@pytest.mark.parametrize(("ranks", "split", "names"), RUNS.values(), ids=RUNS)
def test_layers_of_the_installed_vllm(ranks: int, split: str, names: list[str]) -> None:
    at = port()
    of_ranks = (["published_vllm.py", str(r), str(ranks), split, at] for r in range(ranks))
    right(names, *of_ranks)


def test_models_that_the_installed_vllm_loads(tmp_path: Path) -> None:
    right(FAMILIES, ["published_vllm_models.py", str(tmp_path), port()])

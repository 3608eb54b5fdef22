"""The plugin in the installed vLLM, whose own classes make, load and run layers on a CPU. No model
is served: attention needs what vLLM compiles for CPUs, which its wheel for GPUs has not."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_layers import LAYERS

from tests.sources import ROOT

SCRIPT = Path(__file__).parent / "published_vllm.py"
GATED = [name for name in LAYERS if not name.endswith("_no_mul")]  # vLLM has no others on a CPU
RUNS = {
    "one_rank": (1, "columns", GATED),
    "two_of_columns": (2, "columns", ["silu", "silu_bias", "oai_halves"]),
    "two_of_experts": (2, "experts", ["silu", "silu_bias", "gpt_oss"]),
}


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
@pytest.mark.parametrize(("ranks", "split", "names"), RUNS.values(), ids=RUNS)
def test_layers_of_the_installed_vllm(ranks: int, split: str, names: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(ranks), split, port, *names],
            cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    for process in processes:
        said, _ = process.communicate(timeout=600)
        assert process.returncode == 0 and f"right: {' '.join(names)}\n" in said, said

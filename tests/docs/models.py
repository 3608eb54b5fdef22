"""The table of README that says what `generate` of which model makes, from files of figures.

A block `<!-- models NAME NAME -->` ends with `<!-- end -->`. A row has a model on a device.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.docs import blocks

BLOCK = re.compile(r"<!-- models (\w+(?: \w+)*) -->\n.*?<!-- end -->", re.DOTALL)
# What examples/generate.py calls the sizes of a model, and who published these.
MODELS = {
    "qwen3-30b": "Qwen3-30B-A3B",
    "mixtral-8x7b": "Mixtral-8x7B",
    "gpt-oss-20b": "gpt-oss-20b",
    "qwen3.6-35b": "Qwen3.6-35B-A3B",
    "qwen3-next-80b": "Qwen3-Next-80B-A3B",
    "glm-4.7-flash": "GLM-4.7-Flash",
    "deepseek-v3-64": "DeepSeek-V3, 64 experts",
}
BATCHES = (1, 8, 32)
OURS, STOCK, CODES = "moe_ops", "default", ("moe_ops int4", "moe_ops mxfp4")
HEAD = [
    "your model", "on one", "tokens/s with 1, 8 and 32 sequences", "times transformers' own",
    "tokens/s with experts in 4 bits",
]  # fmt: skip

Key = tuple[str, str]
Speeds = dict[str, dict[int, float]]  # by the way it ran, then by batch


def fill(page: str, folder: Path) -> str:
    """The page with its `models` blocks made anew."""

    def filled(block: re.Match[str]) -> str:
        figures = [json.loads((folder / f"{name}.json").read_text()) for name in block[1].split()]
        return f"<!-- models {block[1]} -->\n\n{table(figures)}\n\n<!-- end -->"

    return BLOCK.sub(filled, page)


def table(figures: list[dict[str, Any]]) -> str:
    rows: dict[Key, Speeds] = defaultdict(lambda: defaultdict(dict))
    for one in figures:
        for speed in one["speeds"]:
            rows[key(one)][speed["way"]][speed["batch"]] = speed["tokens_per_s"]
    return blocks.table(HEAD, [[*of, *cells(speeds)] for of, speeds in rows.items()])


def key(figures: dict[str, Any]) -> Key:
    """A model, with how many layers were measured if not all, and a device."""
    command = figures["command"]
    name, layers = (re.search(rf"--{what} (\S+)", command) for what in ("model", "layers"))
    model = MODELS[name[1] if name else "qwen3-30b"]
    device = re.sub(r"NVIDIA (\w+).*", r"\1", figures["device"])
    return f"{model}, {layers[1]} layers" if layers else model, device


def cells(speeds: Speeds) -> list[str]:
    """What ours makes, that over what transformers' own made in the same run, and in four bits."""
    ours, stock = speeds.get(OURS, {}), speeds.get(STOCK, {})
    codes = next((of for way, of in speeds.items() if way.startswith(CODES)), {})
    ratios = {batch: ours[batch] / stock[batch] for batch in stock}
    return [in_order(ours, ".0f"), in_order(ratios, ".1f"), in_order(codes, ".0f")]


def in_order(by_batch: dict[int, float], digits: str) -> str:
    """Numbers by batch, with a dash where none was measured; nothing if none was."""
    found = [format(by_batch[b], digits) if b in by_batch else "–" for b in BATCHES]
    return ", ".join(found) if by_batch else ""

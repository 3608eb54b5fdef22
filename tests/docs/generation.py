"""The tables of docs/performance/ that are made from what examples/generate.py wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.docs import blocks

BLOCK = blocks.block("generation")
WAYS = {"default": "transformers", "max-autotune": "transformers, max-autotune"}


def fill(page: str, folder: Path) -> str:
    """The page with the tables of its `generation` blocks made anew."""
    return blocks.fill(page, folder, "generation", tables)


def tables(figures: dict[str, Any]) -> str:
    parts = [*blocks.heading(figures), speeds(figures)]
    if "quantising" in figures:
        parts.append(quantizing(figures))
    if figures["steps"]:
        intro = (
            "The ms of a step that the kernels of each part take. Launches that overlap count "
            "twice. In brackets stands\nthe least time to read their bytes, at the rate of a copy:"
        )
        parts += [intro, steps(figures)]
    return "\n\n".join(parts)


def speeds(figures: dict[str, Any]) -> str:
    lines = [
        "| batch | | first call, s | prompt, ms | a step, ms | tokens/s | memory, GB |",
        "|---|---|---|---|---|---|---|",
    ]
    floats = {s["batch"]: s["step_ms"] for s in figures["speeds"] if s["way"] == "moe_ops"}
    for s in sorted(figures["speeds"], key=lambda s: s["batch"]):
        beside = floats.get(s["batch"]) if s["way"].startswith("moe_ops ") else None
        ratio = "" if beside is None else f" ({beside / s['step_ms']:.2f})"
        cells = (
            s["batch"],
            WAYS.get(s["way"], s["way"]),
            f"{s['first_call_s']:.1f}",
            f"{s['prompt_ms']:.1f}",
            f"{s['step_ms']:.2f}",
            f"{s['tokens_per_s']:.0f}{ratio}",
            f"{s['extra_gb']:.2f}",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def quantizing(figures: dict[str, Any]) -> str:
    took = [
        f"{q['seconds']:.1f} s and {q['peak_gb']:.1f} GB at most (`{experts}`)"
        for experts, q in figures["quantising"].items()
    ]
    brackets = any(s["way"] == "moe_ops" for s in figures["speeds"])
    meaning = "In brackets: times as fast as bfloat16. " if brackets else ""
    return f"{meaning}Quantising the experts took {', '.join(took)}."


def steps(figures: dict[str, Any]) -> str:
    parts = list(next(iter(figures["steps"].values()))["ms"])
    lines = ["| batch | " + " | ".join(parts) + " |", "|---" * (len(parts) + 1) + "|"]
    for batch, step in figures["steps"].items():
        cells = [f"{step['ms'][p]:.2f} ({step['floor_ms'][p]:.2f})" for p in parts]
        lines.append(f"| {batch} | " + " | ".join(cells) + " |")
    return "\n".join(lines)

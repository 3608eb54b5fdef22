"""What the package ships of measured layers and of measured `generate`, from committed results.

    python -m tests.estimate.collect

writes moe_ops/estimate/measured.json from benchmarks/results.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from moe_ops.estimate.measured import OURS, SHIPPED, Formats
from moe_ops.estimate.sizes import FLOAT, Sizes, sizes_of
from moe_ops.testing import LAYERS
from tests.sources import ROOT

RESULTS = ROOT / "benchmarks" / "results"
# Of their data sheets. NVIDIA's gigabyte of an H100 is 2**30 bytes.
MEMORY = {"NVIDIA H100 80GB HBM3": 80 * 2**30, "NVIDIA H200": 141e9}
STOCK = "default"  # how examples/generate.py calls transformers' own
EXPERTS = re.compile(r"--format (\S+)")
TIME = dict[str, Any]


def collected() -> str:
    """The text of the file."""
    times: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(RESULTS.glob("layer_h[12]00_*.json")):
        for part in _parts(json.loads(path.read_text())):
            for name, value in part["rates"].items():
                if value:
                    rates[part["device"]][name].append(value * 1e12)
            for key, us in _cells(part):
                times[key].append(us)
    runs, sizes = _runs()
    return _text({
        "rates": [_rates(device, found) for device, found in sorted(rates.items())],
        "layers": _layers(times),
        "sizes": [asdict(s) for s in sizes],
        "runs": runs,
    })  # fmt: skip


def _text(found: dict[str, list[Any]]) -> str:
    """JSON with a line for each entry."""
    parts = (
        f'"{name}": [\n' + ",\n".join(json.dumps(entry) for entry in entries) + "\n]"
        for name, entries in found.items()
    )
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _parts(figures: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The cells of each format in a file, with the rates that were measured beside them."""
    of_file = {"device": figures["device"], "rates": {}}
    for format, part in figures.get("formats", {}).items():
        yield {**of_file, **part, "format": format}
    if "cells" in figures:
        named = EXPERTS.search(figures.get("command", ""))
        format = figures.get("format") or (named[1] if named else FLOAT)
        yield {**of_file, "rates": figures["rates"], "cells": figures["cells"], "format": format}


def _cells(part: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], float]]:
    """The time of each uniformly routed cell of ours."""
    if part["format"].endswith("+static"):
        return
    for cell in part["cells"]:
        ours = cell.get("contender", OURS) == OURS and cell.get("routing", "uniform") == "uniform"
        if ours and cell.get("us"):
            key = part["device"], part["format"], cell["layer"]
            yield (*key, cell["tokens"]), cell["us"]


def _layers(times: dict[tuple[Any, ...], list[float]]) -> list[TIME]:
    found: dict[tuple[Any, ...], TIME] = {}
    for (device, format, layer, tokens), all_us in sorted(times.items()):
        case = LAYERS[layer]
        sizes = {name: getattr(case, name) for name in ("E", "K", "D", "I")}
        entry = {"device": device, "format": format, **sizes, "times": []}
        us = round(statistics.median(all_us), 2)
        found.setdefault((device, format, layer), entry)["times"].append([tokens, us])
    return list(found.values())


def _rates(device: str, found: dict[str, list[float]]) -> dict[str, Any]:
    values = {name: statistics.median(v) for name, v in found.items()}
    return {
        "device": device,
        "bytes_per_second": round(values["copy_tbs"], -9),
        "flops": round(values["matmul_tflops"], -12),
        "flops_8_bit": round(values["matmul8_tflops"], -12),
        "memory": MEMORY[device],
    }


def _runs() -> tuple[list[dict[str, Any]], list[Sizes]]:
    """The runs of examples/generate.py, each with the number of its model's sizes."""
    runs, sizes = [], []
    for path in sorted(RESULTS.glob("generate_*.json")):
        figures = json.loads(path.read_text())
        if "examples/generate.py" not in figures.get("command", ""):
            continue  # of several ranks
        words = figures["command"].split()
        model = _option(words, "--model", "qwen3-30b")
        own = _sizes(model, _option(words, "--layers", ""))
        if own not in sizes:
            sizes.append(own)
        for speed in figures["speeds"]:
            run = _run(words, speed)
            if run is not None:
                named = {"file": path.stem, "name": model, "device": figures["device"]}
                runs.append({**named, **run, "sizes": sizes.index(own)})
    return runs, sizes


def _run(words: list[str], speed: dict[str, Any]) -> dict[str, Any] | None:
    """One row; None of one with adapters."""
    way, _, experts = speed["way"].partition(" ")
    if " r" in speed["way"]:
        return None
    formats = Formats(
        experts=experts or FLOAT,
        linears=_option(words, "--linears", FLOAT) if way == OURS else FLOAT,
        head=_option(words, "--head", FLOAT) if way == OURS else FLOAT,
    )
    prompt, at = int(_option(words, "--prompt", "128")), words.index
    few, many = words[at("--tokens") + 1 : at("--tokens") + 3] if "--tokens" in words else (64, 128)
    return {
        "way": OURS if way == OURS else "transformers" + ("" if way == STOCK else f" {way}"),
        "formats": asdict(formats),
        "batch": speed["batch"],
        "prompt": prompt,
        "length": prompt + (int(few) + int(many)) / 2,
        "step_ms": round(speed["step_ms"], 4),
        "prompt_ms": round(speed["prompt_ms"], 3),
    }


def _option(words: list[str], name: str, default: str) -> str:
    return words[words.index(name) + 1] if name in words else default


def _sizes(name: str, layers: str) -> Sizes:
    return sizes_of(of_example(name, int(layers) if layers else None))


def of_example(name: str, layers: int | None = None) -> Any:
    """A model of the examples, on the meta device."""
    folder = str(ROOT / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from models import CONFIGS

    with torch.device("meta"):
        auto = transformers.AutoModelForCausalLM
        return auto.from_config(CONFIGS[name](layers), dtype=torch.bfloat16)


if __name__ == "__main__":
    Path(SHIPPED).write_text(collected(), encoding="utf-8")

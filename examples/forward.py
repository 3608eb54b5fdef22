"""One forward of a real-size MoE model with random weights: compiled by torch alone, and by ours.

    python examples/forward.py --model qwen3-30b --sizes 1x128 8x512 1x4096

Prints for each size the time of a forward, of the first call that compiles, the memory beyond the
weights, and how far ours is from stock. `static` compiles stock anew for each size, `graphs` with
CUDA graphs besides, `marked` once with batch and length dynamic, as ours does. With `--random N`,
ours also runs N forwards of random sizes: what the first of a size costs beyond the next one, and
whether memory grows.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shlex
import statistics
import sys
from dataclasses import asdict, dataclass
from typing import Any

import needed  # noqa: F401
import torch
import transformers
from generate import say
from models import CONFIGS, build
from step_parts import seconds
from torch import Tensor

import moe_ops
from moe_ops.bench.when import when

REPEATS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """One way to run a forward at one size. `away`: the median token's distance to eager logits."""

    way: str
    size: str
    first_call_s: float
    ms: float
    low_ms: float
    high_ms: float
    extra_gb: float
    away: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Random:
    """Forwards of random sizes, from 1 x 1 to 8 x 2048: how many, of how many sizes; the most that
    the first of a size took beyond the next one; how many graphs Dynamo compiled; and the memory
    that is reserved after a fifth of them and after all."""

    calls: int
    sizes: int
    worst_first_s: float
    worst_size: str
    compiled: int
    gb_after_a_fifth: float
    gb_after_all: float


HEADER = f"{'way':<16}{'size':>8}{'first s':>9}{'ms':>9}{'low':>9}{'high':>9}{'GB':>7}{'away':>8}"


def row(f: Forward) -> str:
    return (
        f"{f.way:<16}{f.size:>8}{f.first_call_s:>9.1f}{f.ms:>9.2f}{f.low_ms:>9.2f}{f.high_ms:>9.2f}"
        f"{f.extra_gb:>7.2f}{f.away:>8.2%}"
    )


def compiled(way: str, model: Any) -> Any:
    if way == "moe_ops":
        return moe_ops.compile(model)
    if way == "eager":
        return model
    torch._dynamo.reset()
    if way == "stock graphs":
        return torch.compile(model, dynamic=False, mode="reduce-overhead")
    return torch.compile(model, dynamic=False if way == "stock static" else None)


def measure(way: str, model: Any, call: Any, ids: Tensor, want: Tensor) -> Forward:
    """Time a forward that returns the logits of the last token of each sequence."""

    def forward() -> Tensor:
        return call(input_ids=ids, use_cache=False, logits_to_keep=1).logits

    batch, length = ids.shape
    if way == "stock marked":
        torch._dynamo.maybe_mark_dynamic(ids, (0, 1))
    gpu = ids.is_cuda
    say(f"{way}, {batch} x {length}: first call")
    first = seconds(forward)
    for _ in range(3):
        seconds(forward)
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    got = forward().float()
    if not bool(torch.isfinite(got).all()):
        raise RuntimeError(f"{way} gives values that are not finite at {batch} x {length}")
    times = sorted(1e3 * seconds(forward) for _ in range(REPEATS))
    used = torch.cuda.max_memory_allocated() if gpu else 0
    weights = sum(p.nbytes for p in model.parameters())
    return Forward(
        way=way,
        size=f"{batch}x{length}",
        first_call_s=first,
        ms=statistics.median(times),
        low_ms=times[REPEATS // 10],
        high_ms=times[-1 - REPEATS // 10],
        extra_gb=max(0, used - weights) / 1e9,
        away=float(((got - want).norm(dim=-1) / want.norm(dim=-1)).median()),
    )


def run_random(call: Any, calls: int, device: str) -> Random:
    """Runs forwards of sizes that are drawn evenly by their logarithms."""
    draw = random.Random(0)
    ends = [(1, 1), (8, 2048)]
    drawn = [(round(8 ** draw.random()), round(2048 ** draw.random())) for _ in range(calls)]
    sizes = (ends + drawn)[:calls]
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    worst, seen, reserved = (0.0, ""), set(), []
    for shape in sizes:
        ids = torch.randint(3, 255, shape, device=device)

        def forward(ids: Tensor = ids) -> Tensor:
            return call(input_ids=ids, use_cache=False, logits_to_keep=1).logits

        took = seconds(forward)
        if shape not in seen:
            seen.add(shape)
            worst = max(worst, (took - seconds(forward), f"{shape[0]}x{shape[1]}"))
        reserved.append(torch.cuda.memory_reserved() / 1e9 if ids.is_cuda else 0.0)
    return Random(
        calls=calls,
        sizes=len(seen),
        worst_first_s=worst[0],
        worst_size=worst[1],
        compiled=torch._dynamo.utils.counters["stats"]["unique_graphs"] - before,
        gb_after_a_fifth=reserved[calls // 5],
        gb_after_all=reserved[-1],
    )


def size(text: str) -> tuple[int, int]:
    batch, length = text.split("x")
    return int(batch), int(length)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    ways = ["eager", "moe_ops", "stock marked", "stock static", "stock graphs"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=CONFIGS, default="qwen3-30b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--sizes", type=size, nargs="+", default=[(1, 128), (8, 512), (1, 4096)])
    parser.add_argument("--ways", choices=ways, nargs="+", default=ways)
    parser.add_argument(
        "--random", type=int, default=0, metavar="N", help="also N forwards of random sizes"
    )
    parser.add_argument("--json", help="also write the figures to this file")
    return parser.parse_args(arguments)


def write(figures: dict[str, Any], path: str | None) -> None:
    if path:
        with open(path, "w") as file:
            json.dump(figures, file, indent=2)


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    logging.basicConfig(format="           %(message)s")
    transformers.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    say(f"building {args.model} on {device}")
    model = build(args.model, args.layers, device)
    on = torch.cuda.get_device_name() if device == "cuda" else device
    figures: dict[str, Any] = {"command": f"python {shlex.join(sys.argv)}", "device": on}
    figures |= {"torch": torch.__version__, "transformers": transformers.__version__, **when()}
    figures["forwards"] = []
    prompts = [torch.randint(3, 255, shape, device=device) for shape in args.sizes]
    wants = [model(input_ids=i, use_cache=False, logits_to_keep=1).logits.float() for i in prompts]
    print(HEADER)
    for way in args.ways:
        call = compiled(way, model)
        for ids, want in zip(prompts, wants, strict=True):
            measured = measure(way, model, call, ids.clone(), want)
            print(row(measured), flush=True)
            figures["forwards"].append(asdict(measured))
            write(figures, args.json)
        if way == "moe_ops" and args.random:
            figures["random"] = asdict(run_random(call, args.random, device))
            print(figures["random"], flush=True)
            write(figures, args.json)


if __name__ == "__main__":
    main()

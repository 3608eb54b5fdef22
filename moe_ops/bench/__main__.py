"""python -m moe_ops.bench [overhead | layer] [options]: without a command, both with defaults."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict
from typing import Any

import torch

from moe_ops.bench import layer, overhead
from moe_ops.shapes import DTYPES
from moe_ops.testing import LAYERS


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m moe_ops.bench", description=__doc__)
    top.add_argument("command", nargs="?", choices=("overhead", "layer"))
    top.add_argument("--layer", default="qwen3_30b", choices=sorted(LAYERS))
    top.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    top.add_argument(
        "--part", default="experts", choices=("experts", "block"), help="block: with the router"
    )
    top.add_argument("--tokens", default="1,4,16,64,128,512", help="comma-separated token counts")
    top.add_argument("--against", default="grouped_mm,batched_mm", help="transformers' experts")
    top.add_argument("--repeats", type=int, default=60, help="calls at one token; fewer at more")
    top.add_argument("--threads", type=int, help="threads of torch")
    top.add_argument("--json", help="also write the figures to this file")
    return top


def main() -> None:
    args = parser().parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    figures: dict[str, Any] = {
        "command": " ".join(["python -m moe_ops.bench", *sys.argv[1:]]),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
    }
    if args.command in (None, "overhead"):
        found = overhead.measure()
        print(overhead.table(found), end="\n\n")
        figures["overhead"] = [asdict(o) | {"dispatch_us": o.dispatch_us} for o in found]
    if args.command in (None, "layer"):
        import transformers

        figures["transformers"] = transformers.__version__
        case, dtype = LAYERS[args.layer], DTYPES[args.dtype]
        tokens = [int(t) for t in args.tokens.split(",")]
        against = args.against.split(",")
        timings = layer.measure(case, dtype, tokens, against, args.repeats, args.part)
        print(f"{args.part}: ", end="")
        print(layer.table(case, dtype, timings))
        figures["layer"] = {"case": asdict(case), "dtype": args.dtype, "part": args.part}
        figures["timings"] = [asdict(t) for t in timings]
    if args.json:
        with open(args.json, "w") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()

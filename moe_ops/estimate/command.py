"""`python -m moe_ops estimate`: how fast a model would generate, from its config alone."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_ops import installed
from moe_ops.checks.options import check_writable
from moe_ops.checks.shapes import DTYPES

NAME = "estimate"
DEVICES = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}
THIS = "this"
ABOUT = """\
Reckons how fast a Hugging Face MoE model would generate, from its config: no weights are loaded.
For each batch size: the bytes of a step, the least time that they take, the time to be expected
with a range, what limits it, and the same of a prompt. Shares of the floor come from measured
layers and runs that are shipped; where something was never measured it says that it guesses.
--device this measures the machine that it runs on, for half a minute.
"""
EXAMPLES = """\
examples:
  python -m moe_ops estimate Qwen/Qwen3-30B-A3B --device h200
  python -m moe_ops estimate gpt_oss --device h100 --batch 1,8,32 --format mxfp4
  python -m moe_ops estimate folder/config.json --format int4:1x128:bfloat16 --json found.json
"""
FORMAT_HELP = "of experts: weights, weights+inputs or a scheme; bfloat16 by default"


def add(commands: Any, counts: Callable[[str], Any], positive: Callable[[str], int]) -> None:
    """Add the command to others."""
    options = commands.add_parser(
        NAME,
        help="how fast a model would generate",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = options.add_argument
    add("model", metavar="MODEL", help="a model type, a folder, a config.json or a hub id")
    add("--device", type=device, default=THIS, metavar="NAME", help="h100, h200, or this (default)")
    add("--batch", type=counts, default=[1, 8, 32], metavar="N,N", help="1,8,32 by default")
    add("--prompt", type=positive, default=128, help="tokens of each prompt, 128 by default")
    add("--tokens", type=positive, default=192, help="new tokens of each, 192 by default")
    add("--format", default="bfloat16", help=FORMAT_HELP)
    add("--linears", metavar="FORMAT", help="of linear layers")
    add("--head", metavar="FORMAT", help="of the head")
    add("--layers", type=positive, help="take this many layers only")
    add("--json", metavar="FILE", help="write all that was reckoned as JSON")
    options.set_defaults(tiny=False)


def device(text: str) -> str:
    """The name of a device whose runs are shipped, or "this"."""
    if text not in (*DEVICES, THIS):
        raise argparse.ArgumentTypeError(
            f"{text!r} was never measured; choose {', '.join(DEVICES)}, or run it with this on a "
            "machine that has one"
        )
    return text


def run(top: argparse.ArgumentParser, args: argparse.Namespace, build: Callable[[Any], Any]) -> int:
    """Run the command with what makes a model, whose tensors take no memory, of its arguments.
    Returns 0; what cannot be reckoned exits with 2 and a line on stderr."""
    try:
        installed.require_transformers(NAME)
    except ImportError as error:
        top.error(str(error))
    from moe_ops.estimate import text
    from moe_ops.estimate.formats import formats_of, require
    from moe_ops.estimate.here import measure
    from moe_ops.estimate.measured import shipped
    from moe_ops.estimate.reckon import Asked, estimate
    from moe_ops.estimate.sizes import sizes_of

    try:
        if args.json is not None:
            check_writable("--json", args.json)
        formats = formats_of(args.format, args.linears, args.head)
    except (OSError, ValueError) as error:
        top.error(_one_line(error))
    try:
        model = build(args)
        require(model, formats)
        sizes = sizes_of(model)
    except Exception as error:  # whatever transformers, its hub or a config's own checks raise
        top.error(f"{args.model}: {_one_line(error)}")
    asked = Asked(
        sizes=sizes, formats=formats, batches=tuple(args.batch), prompt=args.prompt,
        tokens=args.tokens,
    )  # fmt: skip
    here = None
    if args.device == THIS:
        print("measuring this machine for half a minute", file=sys.stderr, flush=True)
        here = measure(sizes, formats, _counts(args.batch, args.prompt))
    name = here.device if here is not None else DEVICES[args.device]
    found = estimate(asked, shipped(), name, here)
    print(text.text(found, _coded(model, args.format)))
    if args.json is not None:
        Path(args.json).write_text(json.dumps(text.as_json(found), indent=1) + "\n", "utf-8")
    return 0


def _coded(model: Any, format: str) -> str:
    """What a config says of codes in the checkpoint, if floats are reckoned; else nothing."""
    found = getattr(model.config, "quantization_config", None)
    method = found.get("quant_method") if isinstance(found, dict) else None
    if method is None or format not in DTYPES:
        return ""
    return f"the checkpoint is in codes ({method}); reckoned in {format}, or say its --format"


def _counts(batches: Sequence[int], prompt: int) -> list[int]:
    """The numbers of tokens in steps and in prompts."""
    return sorted({*batches, *(batch * prompt for batch in batches)})


def _one_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)

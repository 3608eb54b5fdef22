"""`python -m moe_ops routing`: what a recorded routing, or counted loads, tell of experts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from moe_ops.checks.options import check_writable
from moe_ops.recorded.page import page
from moe_ops.recorded.statistics import read

NAME = "routing"
ABOUT = """\
Shows how often the experts of each layer are chosen, how evenly, and which together, of a file: a
routing that moe_ops.record_routing recorded and that was saved, loads as JSON, or the lines that a
LoadRecorder wrote.
"""
EXAMPLES = """\
examples:
  python -m moe_ops routing routing.safetensors --html routing.html
  python -m moe_ops routing loads.jsonl --json routing.json
"""


def add(commands: Any) -> None:
    """Add the command to others."""
    options = commands.add_parser(
        NAME,
        help="what a recorded routing tells of a model's experts",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("file", metavar="FILE", help="of a routing, or of loads")
    options.add_argument("--html", metavar="FILE", help="write one self-contained page")
    options.add_argument("--json", metavar="FILE", help="write what is shown as JSON")


def run(top: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Run the command. Returns 0; files that cannot be read or written exit with 2 and a line on
    stderr."""
    if not Path(args.file).is_file():
        top.error(
            f"{args.file}: there is no such file; give one that RecordedRouting.save or a "
            "LoadRecorder wrote"
        )
    try:
        for name in ("html", "json"):
            if getattr(args, name) is not None:
                check_writable(f"--{name}", getattr(args, name))
        found = read(args.file)
    except (OSError, ValueError) as error:
        top.error(str(error).partition("\n")[0])
    print(found)
    if args.html is not None:
        Path(args.html).write_text(page(found, Path(args.file).name), encoding="utf-8")
    if args.json is not None:
        Path(args.json).write_text(json.dumps(found.as_json()) + "\n", encoding="utf-8")
    return 0

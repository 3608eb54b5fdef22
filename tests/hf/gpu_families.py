"""Every family at real widths on a GPU, one process for each of its checks.

    python -m tests.hf.gpu_families --jobs 6 --minutes 9

What a family gave is kept in a JSON file, so another call goes on where this one stopped: families
and checks that hold with the same versions on the same GPU are not run again. The twelve named
families are `make gpu`'s unless --all; --write puts the file's cells into docs/FAMILIES.md and runs
nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from . import families, page, real
from .real_checks import CHECKS, SIZES

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "families_gpu.json"
HOLDS = "holds"
Outcome = dict[str, Any]


def main() -> None:
    args = parse()
    if args.one:
        print(json.dumps(run_one(*args.one)))
    elif args.write:
        write(args.results)
    else:
        run(args)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--jobs", type=int, default=1, help="families side by side, four processes each"
    )
    parser.add_argument("--minutes", type=float, default=60, help="start none after so long")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a family may take")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--all", action="store_true", help="the twelve of `make gpu`, too")
    parser.add_argument("--family", nargs="+", default=[], help="these alone")
    parser.add_argument("--write", action="store_true", help="write docs/FAMILIES.md, run nothing")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def run(args: argparse.Namespace) -> None:
    """Run what does not hold yet, the results written as they come; exit 1 if one does not hold."""
    start, known = time.monotonic(), load(args.results)
    wanted = args.family or [f for f in families.discover() if args.all or f not in real.WIDTHS]
    left = [f for f in wanted if not holds(known.get(f))]
    print(f"{len(wanted) - len(left)} of {len(wanted)} families hold already", flush=True)

    def one(family: str) -> Outcome | None:
        if time.monotonic() - start > 60 * args.minutes:
            return None
        return in_process(family, args.limit, known.get(family))

    with ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(one, family): family for family in left}
        for future in as_completed(running):
            family, outcome = running[future], future.result()
            if outcome is None:
                continue
            known[family] = outcome
            args.results.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
            print(f"{family:<22}{outcome['seconds']:>6.0f} s  {outcome['outcome']}", flush=True)
    failed = [f for f in wanted if not holds(known.get(f))]
    print(f"{len(wanted) - len(failed)} of {len(wanted)} hold; not: {' '.join(failed) or 'none'}")
    sys.exit(bool(failed))


def in_process(family: str, limit: float, before: Outcome | None) -> Outcome:
    """What the family gives: each check that did not hold before in a process of its own, whatever
    happens to that."""
    start = time.monotonic()
    before = before if before is not None and same_place(before) else {}
    held = before.get("held", [])
    left = [check for check in CHECKS if check not in held]
    with ThreadPoolExecutor(len(left)) as pool:
        found = dict(zip(left, pool.map(lambda c: in_one(family, c, limit), left), strict=True))
    failed = [o["outcome"] for o in found.values() if o["outcome"] != HOLDS]
    counts = [o for o in (before, *found.values()) if "ours" in o]
    outcome: Outcome = {"outcome": failed[0] if failed else HOLDS}
    if counts:
        outcome |= {k: min(o[k] for o in counts) for k in ("layers", "ours")}
    if failed:
        outcome["held"] = [*held, *(c for c, o in found.items() if o["outcome"] == HOLDS)]
    return outcome | {"seconds": round(time.monotonic() - start, 1)} | place()


def in_one(family: str, check: str, limit: float) -> Outcome:
    command = [sys.executable, "-m", "tests.hf.gpu_families", "--one", family, check]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"outcome": f"{check}: not done after {limit:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"outcome": f"{check}: {last_words(done)}"}


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    words = [line for line in done.stderr.splitlines() if line.strip()]
    return f"died with {done.returncode}: {words[-1] if words else ''}"


def run_one(family: str, check: str) -> Outcome:
    """Run one check of a family; the outcome is `HOLDS`, or the error's first line."""
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        found = CHECKS[check](family, "cuda", SIZES)
    except Exception as error:
        why = str(error).strip().partition("\n")[0]
        return {"outcome": f"{check}: {type(error).__name__}: {why}"[:300]}
    return {"outcome": HOLDS} | (dataclasses.asdict(found) if found else {})


def place() -> dict[str, str]:
    """Where it ran: versions and GPU."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {"versions": page.versions(), "device": name}


def holds(outcome: Outcome | None) -> bool:
    """Whether the family held here: with these versions, on such a GPU."""
    return outcome is not None and outcome["outcome"] == HOLDS and same_place(outcome)


def same_place(outcome: Outcome) -> bool:
    return place().items() <= outcome.items()


def load(path: Path) -> dict[str, Outcome]:
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: Path) -> None:
    """Write a column for each place that the file knows into docs/FAMILIES.md."""
    for family, outcome in load(path).items():
        page.put({family: cell(outcome)}, column(outcome))


def column(outcome: Outcome) -> str:
    return f"real widths on {outcome['device']}, {outcome['versions']}"


def cell(outcome: Outcome) -> str:
    """Layers of experts that became ours, of all, where all holds; or why it does not."""
    if outcome["outcome"] == HOLDS:
        return f"{outcome['ours']} of {outcome['layers']}"
    return outcome["outcome"].replace("|", "/")


if __name__ == "__main__":
    main()

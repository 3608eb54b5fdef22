"""Every family at real widths on a GPU, one process for each of its checks.

    python -m tests.hf.gpu_families --jobs 6 --minutes 9

What a check gave is written to a JSON file at once, so another call goes on where this one stopped:
checks that hold with the same versions on the same GPU are not run again. The twelve named
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

from tests.hf import families, page, real
from tests.hf.real_checks import CHECKS, SIZES

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
    parser.add_argument("--jobs", type=int, default=1, help="checks side by side")
    parser.add_argument("--minutes", type=float, default=60, help="start none after so long")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a check may take")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--all", action="store_true", help="the twelve of `make gpu`, too")
    parser.add_argument("--family", nargs="+", default=[], help="these alone")
    parser.add_argument("--write", action="store_true", help="write docs/FAMILIES.md, run nothing")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def run(args: argparse.Namespace) -> None:
    """Run what does not hold yet; each result is written as it comes. Exit 1 if one fails."""
    start, known = time.monotonic(), load(args.results)
    wanted = args.family or [f for f in families.discover() if args.all or f not in real.WIDTHS]
    left = [(f, check) for f in wanted for check in CHECKS if check not in held(known.get(f))]
    print(f"{len(wanted) * len(CHECKS)} checks; to be run: {len(left)}", flush=True)

    def one(family: str, check: str) -> Outcome | None:
        late = time.monotonic() - start > 60 * args.minutes
        return None if late else in_one(family, check, args.limit)

    with ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(one, *each): each for each in left}
        for future in as_completed(running):
            (family, check), found = running[future], future.result()
            if found is None:
                continue
            known[family] = with_check(known.get(family), check, found)
            args.results.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
            said = f"{check}: {HOLDS}" if found["outcome"] == HOLDS else found["outcome"]
            print(f"{family:<22}{found['seconds']:>6.0f} s  {said}", flush=True)
    failed = [f for f in wanted if not holds(known.get(f))]
    print(f"{len(wanted) - len(failed)} of {len(wanted)} hold; not: {' '.join(failed) or 'none'}")
    sys.exit(bool(failed))


def held(outcome: Outcome | None) -> list[str]:
    """The checks of a family that held here before."""
    if outcome is None or not same_place(outcome):
        return []
    return list(CHECKS) if outcome["outcome"] == HOLDS else outcome["held"]


def with_check(before: Outcome | None, check: str, found: Outcome) -> Outcome:
    """What is known of a family after one more check; its seconds are those of all checks."""
    known = before if before is not None and same_place(before) else {"seconds": 0.0}
    done = [*held(before), *([check] if found["outcome"] == HOLDS else [])]
    left = [name for name in CHECKS if name not in done]
    counts = {k: v for each in (known, found) for k, v in each.items() if k in ("layers", "ours")}
    outcome = counts | {"outcome": HOLDS} if not left else counts | {"held": done}
    if left:
        told = [o["outcome"] for o in (found, known) if o.get("outcome", HOLDS) != HOLDS]
        failures = [words for words in told if words.partition(":")[0] in left]
        outcome["outcome"] = failures[0] if failures else f"not run yet: {', '.join(left)}"
    return outcome | {"seconds": round(known["seconds"] + found["seconds"], 1)} | place()


def in_one(family: str, check: str, limit: float) -> Outcome:
    """What a check gives in a process of its own, whatever happens to that."""
    command = [sys.executable, "-m", "tests.hf.gpu_families", "--one", family, check]
    start = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        found = json.loads(lines[-1]) if lines else {"outcome": f"{check}: {last_words(done)}"}
    except subprocess.TimeoutExpired:
        found = {"outcome": f"{check}: not done after {limit:.0f} s"}
    return found | {"seconds": round(time.monotonic() - start, 1)}


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

"""transformers' own tests of its MoE models, from a checkout, under `optimize` and `compile`.

    make peer-tests TRANSFORMERS=CHECKOUT

runs the test file of each family three times and compares: a test that passes on transformers' own
code must pass on ours. It exits with 1 if one does not, or if our ops never ran.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FAMILIES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe",
    "granitemoe",
)  # fmt: skip
MODES = ("stock", "optimize", "compile")
HERE = Path(__file__).parent

# Of each test its outcome, and how many of our ops ran in it.
Results = dict[str, tuple[str, int]]


def main() -> int:
    args = parsed()
    failed = False
    print(
        f"{'family':14}{'mode':10}{'tests':>7}{'passed':>8}{'with our ops':>14}  worse than stock"
    )
    for family in args.families:
        stock: Results = {}
        for mode in MODES:
            if mode != "stock" and mode not in args.modes:
                continue
            results = run(args, family, mode, args.k)
            if mode == "stock":
                stock = results
            worse = worse_than(stock, results)
            passed = [calls for outcome, calls in results.values() if outcome == "passed"]
            ours = sum(calls > 0 for calls in passed)
            failed |= bool(worse) or not passed or (mode != "stock" and ours == 0)
            shown = "" if mode == "stock" else ours
            print(
                f"{family:14}{mode:10}{len(results):>7}{len(passed):>8}{shown:>14}  "
                f"{', '.join(worse) or '-'}",
                flush=True,
            )
    return int(failed)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__)
    parser.add_argument("checkout", type=Path, help="of the transformers that is installed")
    parser.add_argument("--families", nargs="+", default=FAMILIES, metavar="FAMILY")
    parser.add_argument("--modes", nargs="+", choices=MODES[1:], default=MODES[1:])
    parser.add_argument("-k", default="", help="only the tests that match, as in pytest")
    parser.add_argument("--logs", type=Path, help="a folder for what pytest prints and reports")
    args = parser.parse_args()
    missing = [f for f in args.families if not (args.checkout / path_of(f)).is_file()]
    if missing:
        parser.error(
            f"{args.checkout} has no {path_of(missing[0])}; "
            "give the folder of a checkout of huggingface/transformers"
        )
    args.logs = args.logs or Path(tempfile.mkdtemp(prefix="peer-tests-"))
    args.logs.mkdir(parents=True, exist_ok=True)
    return args


def path_of(family: str) -> Path:
    return Path("tests", "models", family, f"test_modeling_{family}.py")


def run(args: argparse.Namespace, family: str, mode: str, matching: str) -> Results:
    """The results of a family's tests in one mode. What pytest prints goes to a log."""
    report, log = (args.logs / f"{family}-{mode}.{kind}" for kind in ("jsonl", "log"))
    report.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "moe_ops_peers", "-p", "no:cacheprovider",
        str(path_of(family)), f"--moe-ops={mode}", f"--moe-ops-report={report.resolve()}",
    ]  # fmt: skip
    found = [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, found)),
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("w") as file:
        subprocess.run(
            [*command, *(["-k", matching] if matching else [])],
            cwd=args.checkout, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    if not report.exists():
        raise SystemExit(f"pytest ran no test of {family}: read {log}")
    return read(report)


def read(report: Path) -> Results:
    """A test has failed if a subtest, its call or its teardown did, else what was said last."""
    found: Results = {}
    for line in map(json.loads, report.read_text().splitlines()):
        before, _ = found.get(line["test"], ("", 0))
        outcome = before if before == "failed" else line["outcome"]
        found[line["test"]] = (outcome, line["calls"])
    return found


def worse_than(stock: Results, results: Results) -> list[str]:
    """The tests that pass on transformers' own code, and fail or are skipped here."""
    return [
        test
        for test, (outcome, _) in results.items()
        if outcome != "passed" and stock.get(test, ("", 0))[0] == "passed"
    ]


if __name__ == "__main__":
    sys.exit(main())

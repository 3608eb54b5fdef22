"""`python -m moe_ops conformance`: a backend through the samples of each of its ops."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from textwrap import wrap
from typing import Any

import torch

from moe_ops.checks.signature import did_you_mean
from moe_ops.conformance.kit import Only, examine, labels
from moe_ops.conformance.report import Report, counted, said
from moe_ops.registry.spec import DECODE_OPS, OPS

ABOUT = """\
Runs a backend through the samples of each of its ops, and compares it with the definitions: dtypes,
formats, strides, rows that nobody uses, no tokens, memory filled with NaN, what it says of calls
that it cannot run, plans of compiled graphs, gradients, and, on a GPU, CUDA graphs.

Exits with 0 if it passes, with 1 and each failure, its sample and the command that runs it again if
it does not, and with 2 for a name that no backend has.
"""
EXAMPLES = """\
examples:
  python -m moe_ops conformance cpu
  python -m moe_ops conformance mine --op experts --every
  python -m moe_ops conformance mine --import my_kernels --op experts --sample odd/bfloat16/bias
"""
WIDTH, NO_BREAK = 100, "\u00a0"


def add(commands: Any) -> None:
    """Add the options of `conformance`."""
    options = commands.add_parser(
        "conformance",
        help="whether a backend does what its ops say",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = options.add_argument
    add("name", metavar="NAME", help="of the backend, or of one of its paths")
    add("--op", metavar="OP", help="this op alone")
    add("--sample", default="", metavar="CASE/DTYPE/NAME", help="this sample, or those of a case")
    add("--check", default="", metavar="CHECK", help="this check alone")
    add("--every", action="store_true", help="all sizes and dtypes, which takes minutes")
    add("--import", dest="module", metavar="MODULE", help="import this first, which registers it")
    add("--device", help="the device of the tensors: cuda if the backend needs it, else cpu")


def run(top: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Run the command. Returns 0 if the backend passes, 1 if it does not; bad usage exits with 2
    and a line on stderr."""
    try:
        if args.module is not None:
            importlib.import_module(args.module)
        only = Only(sample=args.sample, check=args.check, every=args.every)
        names, device = ops_of(args.name, args.op, only), device_of(args)
    except (ImportError, ValueError) as error:
        top.error(str(error))
    print(f"{args.name} on {device}, torch {torch.__version__}")
    reports = []
    for name in names:
        report = examine(name, args.name, only=only, device=device)
        reports.append(report)
        print("\n".join(lines(name, report)), flush=True)
    failed = sum(len(r.failures) for r in reports)
    for report in reports:
        if report.failures:
            print(f"\n{report}")
    ran = sum(r.ran for r in reports)
    if not ran:
        print("\nFAILED: no sample was run, so that nothing is known of the backend")
        return 1
    print(f"\n{f'FAILED: {failed} checks of' if failed else 'passed:'} {samples(ran)}")
    return 1 if failed else 0


def ops_of(backend: str, op: str | None, only: Only) -> list[str]:
    """The ops to look at. Raises ValueError for an op, a backend or a sample that there is not."""
    every = OPS | DECODE_OPS
    if op is not None and op not in every:
        raise ValueError(f"no op {op!r}; there are {', '.join(every)}{did_you_mean(op, every)}")
    having = {n: o for n, o in every.items() if op in (None, n)}
    found = [n for n, o in having.items() if o.named(backend) is not None]
    if not found:
        known = sorted({b for o in having.values() for b in o.backends})
        where = f" of {op}" if op else ""
        raise ValueError(
            f"no backend {backend!r}{where}; there are {', '.join(known)}"
            f"{did_you_mean(backend, known)}"
        )
    if only.label:
        names = {n: labels(every[n], only) for n in found}
        found = [n for n in found if only.label in names[n]]
        if not found:
            known = list(dict.fromkeys(label for of in names.values() for label in of))
            hint = did_you_mean(only.label, known)
            raise ValueError(f"no sample {only.label!r}; there are {', '.join(known)}{hint}")
    return found


def device_of(args: argparse.Namespace) -> str:
    """Where the tensors are: where the backend runs, unless it is said. Raises ValueError for a
    GPU that is not there."""
    backends = [b for o in (OPS | DECODE_OPS).values() if (b := o.named(args.name)) is not None]
    on_cpu = any(b.devices is None or "cpu" in b.devices for b in backends)
    wanted: str = args.device or ("cpu" if on_cpu else min(backends[0].devices or ["cuda"]))
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"{args.name} runs on {wanted}, and torch finds no CUDA GPU here")
    return wanted


def lines(name: str, report: Report) -> Iterator[str]:
    """What became of the samples of an op."""
    state = f"{len(report.failures)} FAILED" if report.failures else "passed" if report.ran else "-"
    yield f"\n{name:<20} {state}, {samples(report.ran)} run, {report.refused.total()} refused"
    passed = counted(report).replace(" ", NO_BREAK).replace(f",{NO_BREAK}", ", ")
    facts = {"passed": passed} if passed else {}
    if report.refused:
        facts["refused"] = said(report.refused)
    if report.notes:
        more = len(report.notes) - 1
        facts["note"] = report.notes[0] + (f" (and {more} more)" if more else "")
    for fact, text in facts.items():
        wrapped = wrap(
            text, WIDTH, initial_indent=f"   {fact:<9}", subsequent_indent=" " * 12,
            break_on_hyphens=False, break_long_words=False,
        )  # fmt: skip
        yield from (line.replace(NO_BREAK, " ") for line in wrapped)


def samples(n: int) -> str:
    return f"{n} sample{'s' * (n != 1)}"

"""Run a backend through the samples of an op."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from moe_ops.checks.options import check_text
from moe_ops.checks.shapes import DTYPES
from moe_ops.checks.signature import did_you_mean
from moe_ops.conformance import checks
from moe_ops.conformance.call import Call
from moe_ops.conformance.report import PROGRAM, Failure, Report
from moe_ops.conformance.samples import Sample, samples
from moe_ops.registry.backend import Backend
from moe_ops.registry.invariance import invariant
from moe_ops.registry.spec import DECODE_OPS, OPS, Op
from moe_ops.testing import CASES, Case

# Widths that every kernel and every format takes, of few tokens; many experts are left to `every`.
ALIGNED = Case(name="aligned", T=6, E=4, K=2, D=256, I=256)
# Above 512, from which on codes of four bits are multiplied with tokens of float8; with `every`.
WIDE = Case(name="wide", T=24, E=2, K=2, D=640, I=640)
BY_NAME = {case.name: case for case in (*CASES, ALIGNED, WIDE)}
QUICK = (
    ("odd", "float32"), ("odd", "bfloat16"), ("odd", "float16"), ("aligned", "bfloat16"),
    ("one_token", "float32"), ("one_token", "bfloat16"), ("no_tokens", "float32"),
    ("no_tokens", "bfloat16"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Only:
    """Which samples are run: `sample` is CASE, CASE/DTYPE or CASE/DTYPE/NAME, empty for those that
    a quick run has; with `every` it is all sizes and dtypes. `check` names one check.

    Raises TypeError for what is no string, ValueError for a case, a dtype or a check that there is
    not.
    """

    sample: str = ""
    check: str = ""
    every: bool = False

    def __post_init__(self) -> None:
        check_text("sample", self.sample)
        check_text("check", self.check)
        case, dtype, _ = self._parts
        given = (("case", case, BY_NAME), ("dtype", dtype, DTYPES), ("check", self.check, NAMES))
        for what, name, known in given:
            if name and name not in known:
                hint = did_you_mean(name, known)
                raise ValueError(f"no {what} {name!r}; there are {', '.join(known)}{hint}")

    @property
    def _parts(self) -> tuple[str, str, str]:
        case, _, rest = self.sample.partition("/")
        dtype, _, label = rest.partition("/")
        return case, dtype, label

    def sizes(self) -> Iterator[tuple[Case, torch.dtype]]:
        """The cases and dtypes to run."""
        case, dtype, _ = self._parts
        wide = self.every or self.sample
        pairs = ((c, d) for c in BY_NAME for d in FLOATS) if wide else QUICK
        for c, d in pairs:
            if case in ("", c) and dtype in ("", d):
                yield BY_NAME[c], DTYPES[d]

    @property
    def label(self) -> str:
        """The name of the one sample that is run; empty for all."""
        return self._parts[2]

    def takes(self, label: str) -> bool:
        return self.label in ("", label)


FLOATS = ("float32", "bfloat16", "float16")
NAMES = checks.NAMES


@dataclass(slots=True)
class Seen:
    """The kinds of samples that were looked at closely, and whether one had all checks."""

    labels: set[str] = field(default_factory=set)
    once: bool = False


def check_backend(
    op: Op | str, name: str, *, only: Only | None = None, device: str = "cpu"
) -> Report:
    """Run a backend of an op through the samples of the op, and check what it says and gives.

    Raises AssertionError with each failure, its sample and the command that runs it again, and if
    the backend refuses every sample; ValueError for an op, a backend or a sample that there is not.
    """
    report = examine(op, name, only=only, device=device)
    if not report.sound:
        raise AssertionError(f"backend {name!r}:\n{report}")
    return report


def examine(op: Op | str, name: str, *, only: Only | None = None, device: str = "cpu") -> Report:
    """`check_backend` that reports failures instead of raising them."""
    op, only = _op(op), only or Only()
    backend = op.named(name)
    if backend is None:
        hint = did_you_mean(name, op.backends)
        known = ", ".join(op.backends)
        raise ValueError(f"no backend {name!r} of {op.name}; there are {known}{hint}")
    _require_label(op, only)
    report, seen = Report(backend=name), Seen()
    within = invariant(backend.only_invariant)  # which runs no other calls
    with (
        within,
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        for case, dtype in only.sizes():
            for label, args in _made(op, case, dtype):
                if only.takes(label):
                    call = Call(
                        op=op, backend=backend, case=case, dtype=dtype, label=label, loaded=args,
                        device=torch.device(device),
                    )  # fmt: skip
                    _run(call, only, report, seen)
    return report


def labels(op: Op, only: Only) -> list[str]:
    """The names of the samples of an op, at the sizes that are run."""
    with torch.random.fork_rng(devices=[]):
        found = (s.name for case, dtype in only.sizes() for s in _made(op, case, dtype))
        return list(dict.fromkeys(found))


def _made(op: Op, case: Case, dtype: torch.dtype) -> list[Sample]:
    """The samples, with the same values whichever of them are asked for."""
    torch.default_generator.manual_seed(0)
    return samples(op.name, case, dtype)


def _require_label(op: Op, only: Only) -> None:
    known = labels(op, only) if only.label else []
    if only.label not in ("", *known):
        hint = did_you_mean(only.label, known)
        raise ValueError(
            f"no sample {only.label!r} of {op.name}; there are {', '.join(known)}{hint}"
        )


def _op(op: Op | str) -> Op:
    found = op if isinstance(op, Op) else (OPS.get(op) or DECODE_OPS.get(op))
    if found is None:
        known = [*OPS, *DECODE_OPS]
        raise ValueError(
            f"no op named {op}; the ops are {', '.join(known)}{did_you_mean(str(op), known)}"
        )
    return found


def _run(call: Call, only: Only, report: Report, seen: Seen) -> None:
    """The checks of one sample."""
    try:
        reason = call.refusal
    except Exception as error:  # of whatever kind, as the backend is code of others
        _fail(call, report, "supports", f"`supports` raised {_named(error)}")
        return
    if reason is not None and not (isinstance(reason, str) and reason):
        _fail(call, report, "supports", f"`supports` gave {reason!r}; give a reason, or None")
        return
    if reason is not None:
        report.refused[reason] += 1
        return
    report.ran += 1
    wrong = False
    for check in _wanted(call, only, seen):
        if wrong and check in checks.AFTER_NUMBERS:
            continue  # it would say the same again
        try:
            note = check(call)
        except Exception as error:
            wrong |= check is checks.numbers
            raised = f"it raised {_named(error)}, in a call that `supports` takes"
            said = str(error) if isinstance(error, AssertionError) else raised
            _fail(call, report, check.__name__, said)
        else:
            report.passed[check.__name__] += 1
            report.notes += [note] if note else []


def _wanted(call: Call, only: Only, seen: Seen) -> list[checks.Check]:
    if only.check:
        found = [c for c in checks.chain() if c.__name__ == only.check]
    else:
        found = list(checks.EVERY)
        if only.label or (call.case.T and call.label not in seen.labels):
            seen.labels.add(call.label)
            found += [*checks.EACH_KIND, checks.captured]
        if only.label or (call.case.T and not seen.once):
            seen.once = True
            found += checks.ONCE
    return [c for c in found if checks.applies(c, call)]


def _fail(call: Call, report: Report, check: str, said: str) -> None:
    words = [PROGRAM, call.backend.name, "--op", call.op.name, "--sample", call.sample]
    words += ["--check", check, *_import_of(call.backend)]
    words += [] if call.device.type == "cpu" else ["--device", call.device.type]
    failure = Failure(
        op=call.op.name, check=check, sample=call.sample, said=said, again=" ".join(words)
    )
    report.failures.append(failure)


def _import_of(backend: Backend) -> list[str]:
    """Which module of others has to be imported to have the backend."""
    module = getattr(backend.run, "__module__", "moe_ops")
    return [] if module.partition(".")[0] == "moe_ops" else ["--import", module]


def _named(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}{f': {lines[0]}' if lines else ''}"

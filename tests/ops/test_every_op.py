"""Every op, on every backend, over every case and dtype: found by discovery."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import OPS, expert_gemm, fake_impls, using
from moe_ops.checks.shapes import FLOATS
from moe_ops.conformance.memory import surrounded
from moe_ops.conformance.samples import INPUT_FORMATS, mutated, samples, specified
from moe_ops.ops.expert_gemm import ExpertGemmCall
from moe_ops.testing import CASES, TOL, Case, Tol, assert_close, reference_of, tolerance

BY_NAME = {case.name: case for case in CASES}
QUICK = ("one_token", "odd", "no_tokens")
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# The dtype in which a further case is not of `every`; with "odd", each dtype has one or more.
FURTHER = {"odd_unaligned": "bfloat16", "one_expert": "float32", "many_rows": "bfloat16"}


def marks_of(backend: str, case: str, dtype: str) -> list[pytest.MarkDecorator]:
    """The definition meets itself in float32, so that few cases serve it."""
    quick = case in QUICK and dtype != "float16"
    further = (case, dtype) == ("odd", "float16") or FURTHER.get(case) == dtype
    short = quick or (further and backend != "reference")
    return [pytest.mark.slow] * (not quick) + [pytest.mark.every] * (not short)


EXACT = Tol(0.0, "integers and 8-bit values are exact")
# The arguments lie on the CPU; tests/kernels and tests/gpu have the backends of other devices.
RUNS = [(name, b.name) for name, op in OPS.items() for b in op.candidates("cpu")]


@pytest.mark.parametrize(
    ("name", "backend", "case", "dtype"),
    [
        pytest.param(name, b, case, dtype, marks=marks_of(b, case, dtype))
        for name, b in RUNS for case in BY_NAME for dtype in DTYPES
    ],
)  # fmt: skip
def test_backend_agrees_with_the_float32_reference(
    name: str, backend: str, case: str, dtype: str
) -> None:
    refused = compare(name, backend, BY_NAME[case], DTYPES[dtype])
    if all(refused.values()):
        pytest.skip(f"{backend} refuses: {', '.join(sorted({r or '' for r in refused.values()}))}")


def compare(name: str, backend: str, case: Case, dtype: torch.dtype) -> dict[str, str | None]:
    """Hold a backend against the float32 reference. Returns the calls that it refuses, and why."""
    op = OPS[name]
    refused = {}
    for label, args in samples(name, case, dtype):
        refused[label] = op.refusals(*args)[backend]
        if refused[label]:
            continue
        given = copies(args)
        with using(backend, name):
            got = op(*given)
        with using("reference"):
            # Quantised activations depend on how they were rounded before.
            exact = not any(arg in INPUT_FORMATS for arg in args)
            want = reference_of(op.reference, *args) if exact else op.reference(*args)
        found = [*specified(name, args, got), *mutated(op, given)]
        wanted = [*specified(name, args, want), *mutated(op, args)]
        pairs = zip(found, wanted, strict=True)
        repro = f"samples({name!r}, {case.name}, {dtype}): {label!r} on {backend!r}"
        for i, (g, w) in enumerate(pairs):
            tol = tolerance(name, g.dtype, dtype) if g.dtype in FLOATS else EXACT
            assert_close(g, w, tol, f"result {i} of {name}", repro)
    return refused


def copies(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments that lie elsewhere, as far from multiples of 16 bytes."""
    return tuple(surrounded(a, torch.device("cpu")) for a in args)


def without_bias(call: ExpertGemmCall) -> Tensor:
    call.bias_EF = None
    return expert_gemm.body(call)


def test_a_backend_that_ignores_a_bias_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes something else if it says that it reads the bias, and is not asked if not."""
    monkeypatch.setattr(expert_gemm, "_backends", dict(expert_gemm.backends))
    monkeypatch.setattr(expert_gemm, "_order", {})
    case, others = BY_NAME["odd"], tuple(n for n in expert_gemm.optional if n != "bias_EF")
    expert_gemm.backend("honest", reads=others)(without_bias)
    expert_gemm.backend("lying", reads=expert_gemm.optional)(without_bias)
    refused = compare("expert_gemm", "honest", case, torch.float32)
    assert set(refused.values()) == {None, "does not read bias_EF"}
    with pytest.raises(AssertionError, match="result 0 of expert_gemm"):
        compare("expert_gemm", "lying", case, torch.float32)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("odd", "float32"),
        ("odd", "bfloat16"),
        pytest.param("no_tokens", "float32", marks=pytest.mark.slow),
        pytest.param("one_token", "float32", marks=[pytest.mark.slow, pytest.mark.every]),
        pytest.param("no_tokens", "bfloat16", marks=[pytest.mark.slow, pytest.mark.every]),
        pytest.param("one_token", "bfloat16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", OPS)
def test_schema_and_fake_are_true(name: str, case: str, dtype: str) -> None:
    for label, args in samples(name, BY_NAME[case], DTYPES[dtype]):
        # The schema test compares arguments by products, which float8 has not; for these, the test
        # that ops leave their arguments alone stands in.
        narrow = any(isinstance(a, Tensor) and a.dtype in FLOAT8 for a in args)
        report = torch.library.opcheck(
            OPS[name].overload,
            args,
            test_utils=("test_faketensor",) if narrow else ("test_schema", "test_faketensor"),
            raise_exception=False,
        )
        assert set(report.values()) == {"SUCCESS"}, f"{label}: {report}"


# Ops that leave what no expert has as it is in memory.
PRODUCTS = (
    "expert_gemm", "experts_saving", "experts_backward", "activate_backward",
    "experts_adapted_saving", "experts_adapted_backward",
)  # fmt: skip


def leaves_rows(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an op leaves rows of its results of this call unspecified."""
    got = OPS[name].reference(*copies(args))
    whole = [got] if isinstance(got, Tensor) else got or []
    return sum(t.numel() for t in specified(name, args, got)) < sum(t.numel() for t in whole)


@pytest.mark.slow
@pytest.mark.parametrize("rest", [False, pytest.param(True, marks=pytest.mark.every)])
@pytest.mark.parametrize("name", OPS)
def test_traces_with_dynamic_shapes(name: str, rest: bool) -> None:
    """A fifth of the samples of an op, or the others: what a trace does with sizes is the same."""
    for i, (label, args) in enumerate(samples(name, BY_NAME["odd"], torch.float32)):
        if bool(i % 5) != rest:
            continue
        if name in PRODUCTS and leaves_rows(name, args):
            continue  # opcheck would compare the unspecified rows
        if name == "dispatch_tokens" and "gather" in args and args[5] > args[0].shape[0]:
            continue  # the same
        report = torch.library.opcheck(
            OPS[name].overload,
            args,
            test_utils=("test_aot_dispatch_dynamic",),
            raise_exception=False,
        )
        assert set(report.values()) == {"SUCCESS"}, f"{label}: {report}"


@pytest.mark.parametrize("name", OPS)
def test_op_has_samples_a_fake_and_tolerances(name: str) -> None:
    for case in CASES:
        labels = [label for label, _ in samples(name, case, torch.float32)]
        assert labels, f"samples.py makes no arguments of {name} for {case.name}"
    assert OPS[name].fake_impl is getattr(fake_impls, name)
    missing = [str(dtype) for dtype in FLOATS if (name, dtype) not in TOL]
    assert not missing, f"testing.TOL lacks {name} for {missing}"


def test_memory_that_nobody_wrote_is_poisoned() -> None:
    assert bool(torch.empty(3).isnan().all())
    assert torch.empty(3, dtype=torch.int32).tolist() == [2**31 - 1] * 3


def bits(t: Tensor) -> Tensor:
    """The bytes of a tensor's values, for a comparison in which NaN equals itself."""
    return t.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


@pytest.mark.parametrize("name", OPS)
def test_op_leaves_its_arguments_alone(name: str) -> None:
    for label, args in samples(name, BY_NAME["odd"], torch.float32):
        before = [a.clone() if isinstance(a, Tensor) else a for a in args]
        OPS[name](*args)
        writes = mutated(OPS[name], args)
        for now, then in zip(args, before, strict=True):
            if isinstance(now, Tensor) and not any(now is t for t in writes):
                assert torch.equal(bits(now), bits(then)), f"{name} changed an argument of {label}"

"""Backends with one fault each: the kit names the check, the sample, and how to run it again."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from moe_ops import expert_gemm
from moe_ops.__main__ import main
from moe_ops.conformance import Only, check_backend, examine
from moe_ops.ops.expert_gemm import ExpertGemmCall

READS = ("bias_EF", "transposed", "out_dtype")
Run = Callable[[ExpertGemmCall], Tensor]
Says = Callable[[ExpertGemmCall], "str | None"]


def right(call: ExpertGemmCall) -> Tensor:
    """The definition, which reads no row that no expert has."""
    used_R1 = (torch.arange(call.x_RD.shape[0]) < call.ends_E[-1])[:, None]
    return expert_gemm.body(replace(call, x_RD=torch.where(used_R1, call.x_RD, 0)))


def drops_a_bias(call: ExpertGemmCall) -> Tensor:
    return right(replace(call, bias_EF=None))


def reads_the_tail(call: ExpertGemmCall) -> Tensor:
    return right(call) + 0 * call.x_RD.sum(0).max()


def ignores_strides(call: ExpertGemmCall) -> Tensor:
    x_RD = call.x_RD
    as_if = torch.empty(x_RD.shape).stride()
    return right(replace(call, x_RD=x_RD.as_strided(x_RD.shape, as_if)))


def fails_without_rows(call: ExpertGemmCall) -> Tensor:
    if call.x_RD.shape[0] == 0:
        raise RuntimeError("invalid configuration argument")
    return right(call)


def writes_its_input(call: ExpertGemmCall) -> Tensor:
    y_RF = right(call)
    call.x_RD.mul_(2)
    return y_RF


def writes_beside_its_input(call: ExpertGemmCall) -> Tensor:
    y_RF, x_RD = right(call), call.x_RD
    x_RD.as_strided((1,), (1,), x_RD.storage_offset() + x_RD.numel()).fill_(3.0)
    return y_RF


def cannot_run_bfloat16(call: ExpertGemmCall) -> Tensor:
    if call.x_RD.dtype == torch.bfloat16:
        raise TypeError("no kernel for bfloat16")
    return right(call)


def mixes_rows(call: ExpertGemmCall) -> Tensor:
    used_RD = call.x_RD[: int(call.ends_E[-1])]
    return right(call) + (1e-9 * used_RD.abs().sum() if used_RD.numel() else 0)


def leaves_rows_unwritten(call: ExpertGemmCall) -> Tensor:
    y_RF = torch.empty_like(right(call))
    y_RF[1:] = right(call)[1:]
    return y_RF


def gives_columns_first(call: ExpertGemmCall) -> Tensor:
    return right(call).T.contiguous().T


def drops_gradients(call: ExpertGemmCall) -> Tensor:
    with torch.no_grad():
        return right(call)


def looks_at_values(call: ExpertGemmCall) -> str | None:
    return None if int(call.ends_E.sum()) >= 0 else "needs ends that are not below zero"


def by_a_size(call: ExpertGemmCall) -> str | None:
    return None if call.x_RD.shape[0] % 13 == 0 else "needs a multiple of 13 rows"


@dataclass(frozen=True)
class Fault:
    """A backend, the check that finds its fault, in which sample, and words of what is said."""

    run: Run
    check: str
    sample: str
    said: str
    supports: Says | None = None


FAULTS = {
    "drops a bias": Fault(drops_a_bias, "numbers", "odd/float32/bias", "off by"),
    "reads the tail": Fault(reads_the_tail, "numbers", "odd/float32/tail", "are NaN"),
    "ignores strides": Fault(ignores_strides, "numbers", "odd/float32/strided", "result 0"),
    "fails at T = 0": Fault(
        fails_without_rows, "numbers", "no_tokens/float32/plain",
        "it raised RuntimeError: invalid configuration argument, in a call that `supports` takes",
    ),
    "writes its input": Fault(
        writes_its_input, "arguments", "odd/float32/plain", "it writes to x_RD"
    ),
    "writes beside it": Fault(
        writes_beside_its_input, "arguments", "odd/float32/plain", "or next to it"
    ),
    "lies in supports": Fault(
        cannot_run_bfloat16, "numbers", "odd/bfloat16/plain",
        "it raised TypeError: no kernel for bfloat16, in a call that `supports` takes",
    ),
    "asks for values": Fault(
        right, "supports", "odd/float32/plain", "it raised DataDependentOutputException",
        looks_at_values,
    ),
    "rows change rows": Fault(
        mixes_rows, "rows", "odd/float32/plain", "20 of 20 rows of result 0, row 0 first, change"
    ),
    "leaves a row unwritten": Fault(
        leaves_rows_unwritten, "numbers", "odd/float32/plain", "first at (0, 0)"
    ),
    "other strides": Fault(
        gives_columns_first, "shapes", "odd/float32/plain", "compiled graphs take it to be"
    ),
    "drops gradients": Fault(
        drops_gradients, "gradients", "odd/float32/plain", "and the result has none"
    ),
}  # fmt: skip
SEVEN = (
    "drops a bias", "reads the tail", "ignores strides", "fails at T = 0", "writes its input",
    "lies in supports", "rows change rows",
)  # fmt: skip


@pytest.fixture
def backend() -> Iterator[Callable[[Run, Says | None], None]]:
    """Register a function as the backend "theirs" of `expert_gemm`, which goes after the test."""

    def register(run: Run, supports: Says | None = None) -> None:
        expert_gemm.backend("theirs", reads=READS, supports=supports)(run)

    yield register
    if expert_gemm.named("theirs") is not None:
        expert_gemm.remove_backend("theirs")


def only(sample: str) -> Only:
    """The samples of the size and dtype in which a fault shows."""
    return Only(sample=sample.rpartition("/")[0])


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(
    name: str,
    backend: Callable[[Run, Says | None], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    fault = FAULTS[name]
    backend(fault.run, fault.supports)
    report = examine(expert_gemm, "theirs", only=only(fault.sample))
    found = [f for f in report.failures if (f.check, f.sample) == (fault.check, fault.sample)]
    assert len(found) == 1, f"{fault.check} of {fault.sample} is not among\n{report}"
    assert fault.said in found[0].said
    assert found[0].again == (
        f"python -m moe_ops conformance theirs --op expert_gemm --sample {fault.sample} "
        f"--check {fault.check} --import {right.__module__}"
    )
    if name in SEVEN:
        with pytest.raises(AssertionError) as error:
            check_backend("expert_gemm", "theirs", only=only(fault.sample))
        assert str(error.value).startswith("backend 'theirs':\nexpert_gemm ")
        words = shlex.split(found[0].again)[3:]
        assert main(words) == 1
        printed = capsys.readouterr().out
        assert found[0].again in printed and fault.said in printed


def test_what_is_right_passes(backend: Callable[[Run, Says | None], None]) -> None:
    backend(right, None)
    report = check_backend("expert_gemm", "theirs", only=Only(sample="odd/float32"))
    assert report.sound and all(r.startswith("does not read ") for r in report.refused)
    assert {"numbers", "rows", "plans", "choices", "compiled", "gradients"} <= set(report.passed)


def test_a_decision_by_a_size_is_noted(backend: Callable[[Run, Says | None], None]) -> None:
    backend(right, by_a_size)
    report = check_backend("expert_gemm", "theirs", only=Only(sample="odd/float32/plain"))
    (note,) = report.notes
    assert "decides by a size that is not known when compiling" in note


def test_one_that_refuses_all_does_not_pass(backend: Callable[[Run, Says | None], None]) -> None:
    backend(right, lambda call: "has no kernel here")
    with pytest.raises(AssertionError, match="no sample was run: has no kernel here"):
        check_backend("expert_gemm", "theirs", only=Only(sample="odd/float32/plain"))


@pytest.mark.parametrize(
    ("op", "name", "said"),
    [
        ("expert_gem", "cpu", "no op named expert_gem; .*did you mean 'expert_gemm'"),
        ("expert_gemm", "cup", "no backend 'cup' of expert_gemm; there are .*did you mean 'cpu'"),
    ],
)
def test_unknown_names_are_told(op: str, name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_backend(op, name)


def test_an_unknown_label_is_told() -> None:
    with pytest.raises(
        ValueError, match=r"no sample 'bia' of expert_gemm; there are .*mean 'bias'"
    ):
        check_backend("expert_gemm", "cpu", only=Only(sample="odd/float32/bia"))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"sample": "od/float32"}, "no case 'od'; there are .*did you mean 'odd'"),
        ({"sample": "odd/float23"}, "no dtype 'float23'; there are "),
        ({"check": "number"}, "no check 'number'; there are .*did you mean 'numbers'"),
    ],
)
def test_unknown_samples_are_told(wrong: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Only(**wrong)

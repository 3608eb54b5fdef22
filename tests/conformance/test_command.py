"""The command and the pytest plugin."""

from __future__ import annotations

import re

import pytest

from moe_ops import OPS
from moe_ops.__main__ import main

pytest_plugins = ["pytester"]


def test_what_passes_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["conformance", "aten", "--op", "expert_gemm", "--sample", "odd/float32/bias"]
    assert main(words) == 0
    first, _, op, passed, *_, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"aten on cpu, torch \S+", first)
    assert op == "expert_gemm          passed, 1 sample run, 0 refused"
    assert passed.split()[:3] == ["passed", "1", "supports,"]
    assert last == "passed: 1 sample"


def test_refusals_are_told_and_nothing_run_is_no_pass(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["conformance", "cpu", "--op", "expert_gemm", "--sample", "odd/float16/bias"]
    assert main(words) == 1
    printed = capsys.readouterr().out
    assert "refused  needs float32 or bfloat16, got torch.float16" in printed
    assert printed.endswith("FAILED: no sample was run, so that nothing is known of the backend\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cup"], "no backend 'cup'; there are .*aten, .*cpu, .*did you mean 'cpu'"),
        (["cpu", "--op", "rout"], "no op 'rout'; there are .*did you mean 'route'"),
        (["cpu", "--op", "moe"], "no backend 'cpu' of moe; there are flashinfer_trtllm, reference"),
        (["cpu", "--sample", "od"], "no case 'od'; there are .*did you mean 'odd'"),
        (["cpu", "--sample", "odd/float32/bia"], "no sample 'bia'; there are .*mean 'bias'"),
        (["cpu", "--check", "row"], "no check 'row'; there are .*did you mean 'rows'"),
        (["mine", "--import", "no_such_module"], "No module named 'no_such_module'"),
    ],
)
def test_bad_usage_exits_with_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["conformance", *words])
    assert left.value.code == 2
    printed = capsys.readouterr()
    assert re.search(said, printed.err) and not printed.out


def test_the_names_are_all_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["conformance", "nobody"])
    said = capsys.readouterr().err
    assert all(name in said for op in OPS.values() for name in op.backends)


@pytest.mark.gpu
def test_a_gpu_backend_runs_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "triton", "--op", "route"]) == 0
    assert "triton on cuda" in capsys.readouterr().out


CONFTEST = 'pytest_plugins = ["moe_ops.conformance.plugin"]\n'
TESTS = """
import pytest
from moe_ops import activate
from moe_ops.ops.activate import ActivateCall
from torch import Tensor

@activate.backend("theirs_plugged", supports=lambda c: None if c.y_RF.shape[0] else "wants rows")
def run(call: ActivateCall) -> Tensor:
    return activate.body(call) * (2 if call.y_RF.shape[0] == 2 else 1)

@pytest.mark.moe_ops_backend("theirs_plugged")
def test_conformance(conformance):
    conformance()

"""


def test_the_plugin_makes_a_test_of_each_size(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    try:
        done = pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider", "-p", "no:randomly")
    finally:
        OPS["activate"].remove_backend("theirs_plugged")
    done.assert_outcomes(passed=4, failed=2, skipped=2)
    done.stdout.fnmatch_lines(["*activate one_token/float32/silu: numbers*"])
    done.stdout.fnmatch_lines(["*python -m moe_ops conformance theirs_plugged --op activate*"])


@pytest.mark.parametrize(
    ("marked", "said"),
    [
        ("", "takes `conformance` without saying of which backend"),
        ('@pytest.mark.moe_ops_backend("cup")', "no backend 'cup'; there are "),
    ],
)
def test_the_plugin_tells_bad_usage(pytester: pytest.Pytester, marked: str, said: str) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(f"import pytest\n{marked}\ndef test_it(conformance): conformance()\n")
    done = pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider")
    done.stdout.fnmatch_lines([f"*{said}*"])
    assert done.ret != 0

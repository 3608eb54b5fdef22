"""Reading what Nsight Compute writes."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from moe_ops.bench import counters

LOG = """\
==WARNING== Note: Running with unmodified GPU clocks.
==PROF== Connected to process 1021 (/usr/bin/python3.12)
"ID","thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg","Kernel Name","Grid Size","gpu__time_duration.sum","dram__bytes_read.sum","dram__throughput.avg.pct_of_peak_sustained_elapsed","lts__throughput.avg.pct_of_peak_sustained_elapsed","sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed","sm__inst_issued.avg.pct_of_peak_sustained_elapsed","sm__cycles_elapsed.avg.per_second","launch__registers_per_thread"
"","","","","ns","byte","%","%","%","%","hz","register/thread"
"0","1021  ""<default domain>:qwen3_30b@1:none:none:none:none:none:none"" ","route_kernel","(1, 1, 1)","3,456","10,752","0.07","0.48","0","4.2","1,946,171,787.32","40"
"20","1021  ""<default domain>:qwen3_30b@4096:none:none:none:none:none:none"" ","_grouped","(132, 1, 1)","374,240","1,180,104,448","68.22","84.57","71.17","21.6","1,604,884,566.05","168"
"""  # noqa: E501


def test_kernels_are_read_from_the_log() -> None:
    first, second = counters.kernels_of(LOG)
    assert (first.layer, first.tokens, first.name) == ("qwen3_30b", 1, "route_kernel")
    assert (first.us, first.registers) == (3.456, 40)
    assert second.tokens == 4096 and second.ghz == pytest.approx(1.604884566)
    assert second.read_mb == pytest.approx(1180.104448)


def test_the_table() -> None:
    assert_expected_inline(
        counters.table(counters.kernels_of(LOG)).replace("µ", "u"),
        """\
layer      tokens        kernel         grid     us  MB read  memory %  L2 %  matrix units %  issue %   GHz  registers
qwen3_30b       1  route_kernel    (1, 1, 1)    3.5      0.0         0     0               0        4  1.95         40
qwen3_30b    4096      _grouped  (132, 1, 1)  374.2   1180.1        68    85              71       22  1.60        168""",  # noqa: E501
    )


def test_a_failed_run_says_what_ncu_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters.shutil, "which", lambda name: "/bin/false")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="ncu ended with 1"):
        counters.measure(["olmoe"], [1])


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="`ncu` on the PATH"):
        counters.measure(["olmoe"], [1])

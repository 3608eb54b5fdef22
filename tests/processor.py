"""What plans of tests say does not depend on the processor that runs them."""

import pytest
import torch


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows an expert up to which our kernels for CPUs run: those of a processor with AMX."""
    from moe_ops.backends import cpu

    for dtype, experts, gemm in ((torch.bfloat16, 10, 4), (torch.float32, 32, 32)):
        monkeypatch.setitem(cpu.EXPERTS_MAX_ROWS, dtype, experts)
        monkeypatch.setitem(cpu.GEMM_MAX_ROWS, dtype, gemm)

"""Every test: one seed, NaN in memory that nobody wrote, and a skip where a GPU is missing."""

import gc
import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch
import torch.utils.deterministic as deterministic
from hypothesis import settings

# Without a GPU, Triton kernels run in Triton's interpreter, which must be said before its import.
# Inductor's workers would compile Triton kernels for one.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["TORCH_WARM_POOL"] = "0"
    if importlib.util.find_spec("triton"):
        from tests import quick_interpreter

        quick_interpreter.patch_what_is_not()

# Test processes run side by side, and two spinning thread pools on one core take four times as long
# as one thread each, also of the processes that tests start. Tests of threads ask for them.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# The first call of an op compiles or imports, so no example has a deadline; and a run must not
# depend on the one before it.
settings.register_profile("repeatable", deadline=None, database=None, derandomize=True)
settings.load_profile("repeatable")

# Compilers make many objects and few cycles; by its defaults the garbage collector takes 7 % of the
# time of tests that compile.
gc.set_threshold(20_000, 20, 20)


def pytest_collection_finish() -> None:
    """Thousands of tests and all that they import outlive the run, so the garbage collector need
    not walk through them again and again."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or what they hold is reported as leaked


@pytest.fixture(autouse=True)
def clean_slate(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seed torch, forget what was decided for calls, as tests put other functions in the place of
    what decided, and fill uninitialised memory (NaN in floats, the largest value in integers)."""
    from moe_ops.spec import DECODE_OPS, OPS

    for op in (*OPS.values(), *DECODE_OPS.values()):
        op.memo.clear()
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU, and torch.cuda.is_available() is False")
    on = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(on, warn_only=warn_only)
    deterministic.fill_uninitialized_memory = fill


@pytest.fixture
def overlapping(clean_slate: None) -> None:
    """Leave uninitialised memory as it is: what fills it is launched between launches of ours,
    which then do not overlap."""
    deterministic.fill_uninitialized_memory = False

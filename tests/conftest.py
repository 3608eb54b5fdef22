"""Every test: one seed, NaN in memory that nobody wrote, and a skip where a GPU is missing."""

import gc
import importlib.util
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

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

        quick_interpreter.make_quick()

# Test processes run side by side, and two spinning thread pools on one core take four times as long
# as one thread each, also of the processes that tests start. Tests of threads ask for them.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# A graph that another test, process or run has left in Inductor's cache on the disk meets no pass.
# What passes did is asked in many tests, so graphs are kept by those alone that are of this cache.
os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE_DEFAULT"] = "0"

# The first call of an op compiles or imports, so no example has a deadline; and a run must not
# depend on the one before it.
settings.register_profile("repeatable", deadline=None, database=None, derandomize=True)
settings.load_profile("repeatable")

# Compilers make many objects and few cycles; by its defaults the garbage collector takes 7 % of the
# time of tests that compile.
gc.set_threshold(20_000, 20, 20)


def no_latency(guards: Any, scope: Any, times: int) -> float:
    return 0.0


# Dynamo measures how long the guards of each frame take, for which it flushes all caches of the
# processor, and writes it down: 40 ms a frame.
if hasattr(torch._C._dynamo.guards, "profile_guard_manager"):
    torch._C._dynamo.guards.profile_guard_manager = no_latency


_heard = 0


def hear_by_root() -> None:
    """Let torch's loggers propagate. To each that does not, pytest adds its handlers six times a
    test, and there are 80; and by a handler of its trace torch writes down all that it compiles."""
    global _heard
    loggers = logging.root.manager.loggerDict
    if len(loggers) != _heard:
        _heard = len(loggers)
        for name, logger in loggers.items():
            if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
                logger.propagate = True


hear_by_root()  # before pytest adds those that stay for a session


def gold_links(compiler: str) -> bool:
    """Whether this compiler finds its own library by gold, which does not read linker scripts that
    some compilers come with."""
    if not shutil.which("ld.gold"):
        return False
    with tempfile.TemporaryDirectory() as folder:
        out = ["-o", os.path.join(folder, "empty.so")]
        command = [compiler, "-fuse-ld=gold", "-shared", "-x", "c++", os.devnull, *out]
        return subprocess.run(command, capture_output=True).returncode == 0


def pytest_configure(config: pytest.Config) -> None:
    """Where not all tests are run, C++ is compiled in half the time, and linked by the linker that
    takes least to look through torch's libraries, if it is here: what it does is the same."""
    if config.option.markexpr:
        from torch._inductor import cpp_builder

        flags = cpp_builder._get_optimization_cflags
        linker = ["fuse-ld=gold"] if gold_links(cpp_builder.get_cpp_compiler()) else []

        def fewer(*args: Any, **kwargs: Any) -> Any:
            compiling, linking = flags(*args, **kwargs)
            return ["O1" if flag == "O3" else flag for flag in compiling], linking + linker

        cpp_builder._get_optimization_cflags = fewer


def pytest_collection_finish() -> None:
    """Thousands of tests and all that they import outlive the run, so the garbage collector need
    not walk through them again and again."""
    hear_by_root()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """What outlives a module of tests, as code that was compiled, is not walked through again."""
    yield
    new_objects = any(gc.get_count()[1:])
    if new_objects and (nextitem is None or nextitem.path != item.path):
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or what they hold is reported as leaked


@pytest.fixture(autouse=True)
def clean_slate(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seed torch, forget what was decided for calls, as tests put other functions in the place of
    what decided, and fill uninitialised memory (NaN in floats, the largest value in integers)."""
    from moe_ops.registry.spec import DECODE_OPS, OPS

    for op in (*OPS.values(), *DECODE_OPS.values()):
        op.memo.clear()
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU, and torch.cuda.is_available() is False")
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        torch.use_deterministic_algorithms(True, warn_only=True)
    fill = deterministic.fill_uninitialized_memory
    deterministic.fill_uninitialized_memory = True
    torch.default_generator.manual_seed(0)  # torch.manual_seed tells GPUs that are not there
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    hear_by_root()
    yield
    deterministic.fill_uninitialized_memory = fill


@pytest.fixture
def overlapping(clean_slate: None) -> None:
    """Leave uninitialised memory as it is: what fills it is launched between launches of ours,
    which then do not overlap."""
    deterministic.fill_uninitialized_memory = False

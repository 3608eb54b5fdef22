"""Inductor's code for a GPU that is not here: everything up to the compilation of its kernels.

    with absent_gpu() as codes:
        model = build_on("cuda")
        torch.compile(model)(x)  # fake tensors in, fake tensors out
    assert "triton" in codes[0]

Dynamo, AOTAutograd, the passes, Inductor's scheduler and its Triton code run as on the GPU, on fake
tensors. What asks the driver is answered for an H200. Kernels are neither compiled nor run: a
compiled graph gives what its operators say of their results.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config
from torch._inductor.fx_passes import fuse_attention, joint_graph, misc_patterns, pad_mm
from torch._inductor.graph import GraphLowering
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

NAME, CAPABILITY = "NVIDIA H200", (9, 0)
PROPERTIES = SimpleNamespace(
    name=NAME, major=9, minor=0, multi_processor_count=132, warp_size=32, uuid="0",
    total_memory=140 << 30, L2_cache_size=60 << 20, gcnArchName="",
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
    max_threads_per_block=1024, shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
)  # fmt: skip
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::DeviceGuardImplRegistrar guard(
    c10::DeviceType::CUDA, new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>());
"""


@contextlib.contextmanager
def absent_gpu() -> Iterator[list[str]]:
    """Inside, "cuda" is a GPU of fake tensors; gives the code of each compiled graph, as it comes.

    Nothing is cached. Raises RuntimeError where there is a GPU, which tells more.
    """
    if torch.cuda.is_available():
        raise RuntimeError("there is a GPU; compile and run on it instead")
    _allow_cuda()
    codes: list[str] = []
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in _stand_ins(codes):
            missing_on_cpus = owner is torch._C
            stack.enter_context(patch.object(owner, name, stand_in, create=missing_on_cpus))
        stack.enter_context(config.patch(force_disable_caches=True, compile_threads=1))
        stack.enter_context(_triton_for(CAPABILITY))
        # Graphs compiled before would be served without a look at the device.
        torch._dynamo.reset()
        stack.callback(torch._dynamo.reset)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield codes


def _stand_ins(codes: list[str]) -> Iterator[tuple[Any, str, Any]]:
    """What is asked of the driver, and the answers."""

    def answer(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    for owner in (torch.cuda, CudaInterface):
        for name, value in (
            ("is_available", True),
            ("device_count", 1),
            ("current_device", 0),
            ("get_device_properties", PROPERTIES),
            ("synchronize", None),
        ):
            yield owner, name, staticmethod(answer(value))
    for name, value in (
        ("is_initialized", True),
        ("_lazy_init", None),
        ("_exchange_device", -1),
        ("_maybe_exchange_device", -1),
        ("is_current_stream_capturing", False),
        ("get_device_capability", CAPABILITY),
        ("get_device_name", NAME),
        ("set_rng_state", None),
    ):
        yield torch.cuda, name, answer(value)
    yield torch.cuda, "get_rng_state", lambda *args: torch.zeros(16, dtype=torch.uint8)
    yield CudaInterface, "get_compute_capability", staticmethod(answer(90))
    yield CudaInterface, "get_raw_stream", staticmethod(answer(0))
    yield CudaInterface.Worker, "get_device_properties", staticmethod(answer(PROPERTIES))
    yield CudaInterface.Worker, "current_device", staticmethod(answer(0))
    yield torch._C, "_cuda_getCurrentStream", answer((0, 0, 1))
    yield torch._C, "_cuda_cudaCachingAllocator_is_enabled", answer(True)
    yield torch.accelerator, "is_available", answer(False)
    yield torch.version, "cuda", "13.0"
    yield fake_tensor, "init_gpu_context", answer(None)
    # Patterns of Inductor's that are traced on real tensors of the device.
    yield fuse_attention, "_sfdp_init", answer(None)
    yield pad_mm, "_pad_mm_init", answer(None)
    yield misc_patterns, "_misc_patterns_init", answer(None)
    folder = joint_graph.UniformValueConstantFolder
    yield folder, "_deduce_value", _on_cpu(folder._deduce_value)
    yield GraphLowering, "_compile_to_module", functools.partialmethod(_module, codes)


def _module(lowering: GraphLowering, codes: list[str]) -> Any:
    """What runs a graph: its code is kept, and its operators tell what it gives."""
    code, _ = lowering.codegen()
    codes.append(getattr(code, "value", code))
    graph = lowering.module
    lowering.cache_key, lowering.cache_path, lowering.cache_linemap = "absent", __file__, []

    def call(args: list[Any]) -> list[Any]:
        values = [*args]
        args.clear()  # as Inductor's code does, which frees its inputs
        return [*_Sized(graph).run(*values)]

    return SimpleNamespace(call=call, __file__=__file__)


class _Sized(fx.Interpreter):
    """Runs a graph with the sizes of the call where its arguments name symbols, as code does."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.sizes: dict[Any, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        value, traced = super().run_node(n), n.meta.get("val")
        if n.op == "placeholder" and isinstance(traced, torch.SymInt):
            self.sizes[traced.node.expr] = value
        return value

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        def size(x: torch.SymInt) -> int:
            return int(x.node.expr.xreplace(self.sizes))

        return tree_map_only(torch.SymInt, size, super().fetch_args_kwargs_from_env(n))


class _OnCpu(TorchDispatchMode):
    """Constants of one value are worked out on the CPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _OnCpu():
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def _triton_for(capability: tuple[int, int]) -> Iterator[None]:
    """Triton compiles for a GPU of that capability."""
    from torch.utils import _triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    major, minor = capability
    here = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 10 * major + minor, 32),
        get_current_device=lambda: 0,
        get_device_capability=lambda *args: capability,
    )
    with (
        patch.object(_triton, "triton_hash_with_backend", lambda: "absent"),
        patch.object(driver, "_active", here),
    ):
        _triton.has_triton.cache_clear()
        yield
    _triton.has_triton.cache_clear()


@functools.cache
def _allow_cuda() -> None:
    """Let operators on fake CUDA tensors find a device to switch to, as they do without a driver in
    a torch built for CUDA; one built for CPUs alone needs the same no-op guard put in."""
    if torch.version.cuda is not None:
        torch._C._ensureCUDADeviceGuardSet()
        return
    home = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "guard.so"
        subprocess.run(
            [
                *("g++", "-std=c++20", "-shared", "-fPIC", "-x", "c++", "-", "-o", library),
                *(f"-I{home / 'include'}", f"-L{home / 'lib'}", "-lc10"),
            ],
            input=GUARD.encode(),
            check=True,
            capture_output=True,
        )
        ctypes.CDLL(str(library))

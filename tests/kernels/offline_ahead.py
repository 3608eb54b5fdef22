"""What Triton is asked to compile for a GPU that is not here, ahead and later; run as a script.

Each line that it reads is one of PROGRAMS with its arguments as JSON, which a process of its own
runs. Launches go all the way through Triton, on tensors without memory, but what compiles, and what
would run, is a stand-in.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton.compiler
from torch import Tensor
from torch._inductor import config
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from moe_ops.backends.triton_ahead import of_plan
from moe_ops.decode_ops.experts_onto import ExpertsOntoCall, experts_onto
from moe_ops.kernels.triton import replay
from moe_ops.kernels.triton.shadows import Shadow, Shadows, shadow_of
from moe_ops.ops.experts import ExpertsCall, experts
from moe_ops.ops.experts_adapted import ExpertsAdaptedCall, experts_adapted
from moe_ops.ops.experts_saving import ExpertsSavingCall, experts_saving
from moe_ops.ops.quantize import QuantizeCall, quantize
from moe_ops.ops.route import RouteCall, route
from moe_ops.ops.route_recording import RouteRecordingCall, route_recording
from moe_ops.ops.route_replaying import RouteReplayingCall, route_replaying
from moe_ops.planning import choose
from moe_ops.planning.plan import written
from moe_ops.registry.invariance import PLANNED, invariant
from moe_ops.testing import LAYERS
from tests.kernels.offline import SHARED_MEMORY
from tests.kernels.offline_adapters import adapter_of
from tests.kernels.offline_codes import quantized_call
from tests.kernels.offline_floats import layer_call

GPU = torch.device("cuda", 0)

# Numbers that programs are likely to meet, and some that nobody thought of.
ROWS = (
    *range(1, 66), 200, 512, 513, 1000, 2048, 4096, 16384,
    *(int(2 ** random.Random(seed).uniform(6, 16)) for seed in range(60)),
)  # fmt: skip


def floats(layer: str, **more: Any) -> Callable[[int], ExpertsCall]:
    return lambda T: layer_call(LAYERS[layer], T, **{"full": False, **more})


def codes(layer: str, w_format: str, x_format: str = "", static: int = 0) -> Any:
    return lambda T: quantized_call(LAYERS[layer], T, w_format, x_format, static)


def _onto(T: int) -> ExpertsOntoCall:
    layer = layer_call(LAYERS["qwen3_30b"], T, True)
    return ExpertsOntoCall(residual_TD=torch.empty_like(layer.x_TD), layer=layer)


def _trained(of: Callable[[int], ExpertsCall]) -> Callable[[int], ExpertsSavingCall]:
    return lambda T: ExpertsSavingCall(of(T))


def _adapted(
    of: Callable[[int], ExpertsCall], rank: int, N: int
) -> Callable[[int], ExpertsAdaptedCall]:
    def call(T: int) -> ExpertsAdaptedCall:
        layer = of(T)
        return ExpertsAdaptedCall(layer=layer, adapter=adapter_of(layer, rank, N))

    return call


def _routed(T: int) -> RouteCall:
    logits_TE = torch.empty(T, 128, dtype=torch.bfloat16, device="meta")
    return route.call(logits_TE, 8, renormalize=True)


def _recorded(T: int) -> RouteRecordingCall:
    logits_TE = torch.empty(T, 128, dtype=torch.bfloat16, device="meta")
    ids = torch.empty(9999, 8, dtype=torch.int16, device="meta")
    at = torch.empty(1, dtype=torch.int64, device="meta")
    return route_recording.call(logits_TE, 8, ids, at, ring_weights_SK=ids.float())


def _replayed(T: int) -> RouteReplayingCall:
    logits_TE = torch.empty(T, 128, dtype=torch.bfloat16, device="meta")
    ids = torch.empty(9999, 8, dtype=torch.int16, device="meta")
    return route_replaying.call(logits_TE, 8, ids, renormalize=True)


def _quantized(format: str) -> Callable[[int], QuantizeCall]:
    def call(R: int) -> QuantizeCall:
        return quantize.call(torch.empty(R, 768, dtype=torch.bfloat16, device="meta"), format)

    return call


# An op, and its call of so many rows, by name.
CALLS: dict[str, tuple[Any, Callable[[int], Any]]] = {
    "qwen3_30b": (experts, floats("qwen3_30b")),
    "qwen3_next float16": (experts, floats("qwen3_next", dtype=torch.float16)),
    "mixtral_8x7b": (experts, floats("mixtral_8x7b")),
    "dsv3_ep8 full": (experts, floats("dsv3_ep8", full=True)),
    "gpt_oss_20b transposed": (experts, floats("gpt_oss_20b", full=True, transposed=True)),
    "olmoe float32": (experts, floats("olmoe", dtype=torch.float32)),
    "qwen3_30b mxfp4": (experts, codes("qwen3_30b", "mxfp4")),
    "gpt_oss_20b mxfp4": (experts, codes("gpt_oss_20b", "mxfp4")),
    "mixtral_8x7b int4": (experts, codes("mixtral_8x7b", "int4:1x128:bfloat16")),
    "qwen3_30b uint4": (experts, codes("qwen3_30b", "uint4:1x64:float16")),
    "qwen3_30b nvfp4": (experts, codes("qwen3_30b", "nvfp4")),
    "qwen3_30b mxfp6": (experts, codes("qwen3_30b", "mxfp6_e3m2")),
    "qwen3_30b mxfp8": (experts, codes("qwen3_30b", "mxfp8")),
    "qwen3_30b int8": (experts, codes("qwen3_30b", "int8:1x64")),
    "dsv3_ep8 float8": (experts, codes("dsv3_ep8", "float8_e4m3fn:128x128")),
    "dsv3_ep8 float8 with float8": (
        experts, codes("dsv3_ep8", "float8_e4m3fn:128x128", "float8_e4m3fn:1x128"),
    ),
    "qwen3_30b float8 by row": (
        experts, codes("qwen3_30b", "float8_e4m3fn:row", "float8_e4m3fn:row"),
    ),
    "qwen3_30b int8 by row": (experts, codes("qwen3_30b", "int8:row", "int8:row")),
    "qwen3_30b int8 by tensor": (experts, codes("qwen3_30b", "int8:tensor", "int8:tensor")),
    "qwen3_30b int8 static": (experts, codes("qwen3_30b", "int8:row", "int8:tensor", 1)),
    "qwen3_30b emulated nvfp4": (experts, codes("qwen3_30b", "nvfp4", "nvfp4")),
    "gpt_oss_20b emulated mxfp8": (experts, codes("gpt_oss_20b", "mxfp4", "mxfp8")),
    "onto": (experts_onto, _onto),
    "qwen3_30b trained": (experts_saving, _trained(floats("qwen3_30b"))),
    "qwen3_30b int4 trained": (
        experts_saving, _trained(codes("qwen3_30b", "int4:1x128:bfloat16")),
    ),
    "qwen3_30b adapted": (experts_adapted, _adapted(floats("qwen3_30b"), 16, 0)),
    "olmoe adapted apart": (experts_adapted, _adapted(floats("olmoe"), 64, 3)),
    "qwen3_30b int4 adapted": (
        experts_adapted, _adapted(codes("qwen3_30b", "int4:1x128:bfloat16"), 16, 2),
    ),
    "route": (route, _routed),
    "route recorded": (route_recording, _recorded), "route replayed": (route_replaying, _replayed),
    "quantize by group": (quantize, _quantized("float8_e4m3fn:1x128")),
    "quantize by tensor": (quantize, _quantized("int8:tensor")),
    "quantize to mxfp4": (quantize, _quantized("mxfp4")),
}  # fmt: skip
TRAINED = (experts_saving,)  # whose calls are batch invariant


@dataclass
class Compiler:
    """Stands for Triton's: keeps what is asked for, calls `meanwhile` with the name of the kernel,
    and gives what runs nothing."""

    meanwhile: Callable[[str], None] = lambda name: None
    asked: list[tuple[str, str]] = field(default_factory=list)  # a kernel, and the thread

    def __call__(self, src: Any, target: Any = None, options: Any = None, **more: Any) -> Any:
        self.asked.append((src.name, threading.current_thread().name))
        self.meanwhile(src.name)
        return SimpleNamespace(
            run=lambda *args: None, launch_metadata=lambda *args: None, function=None,
            packed_metadata=None,
        )  # fmt: skip


@contextmanager
def absent(capability: int, compiler: Compiler) -> Iterator[None]:
    """Inside, shadows lie on a GPU, for which the compiler compiles."""
    numbers = divmod(capability, 10)
    properties = SimpleNamespace(
        multi_processor_count=132, shared_memory_per_block_optin=SHARED_MEMORY[capability]
    )
    here = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    with ExitStack() as stack:
        for name, value in (
            ("_lazy_init", None), ("current_device", 0), ("get_device_capability", numbers),
            ("get_device_properties", properties), ("_exchange_device", 0),
            ("_maybe_exchange_device", 0),
        ):  # fmt: skip
            answer = lambda *args, value=value: value  # noqa: E731
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(patch.object(driver, "_active", here))
        stack.enter_context(patch.object(triton.compiler, "compile", compiler))
        # A kernel keeps the compiler that it met first, and what that made.
        for kernel in gc.get_objects():
            if issubclass(type(kernel), JITFunction):
                kernel.device_caches.clear()
        # Shadows are what runs here.
        stack.enter_context(patch.object(replay, "_repeats", lambda t: True))
        stack.enter_context(config.patch(compile_threads=2))
        stack.enter_context(Shadows())
        yield


def on_gpu(part: Any) -> Any:
    """A record whose tensors are shadows on the GPU."""
    found = {}
    for of in dataclasses.fields(part):
        value = getattr(part, of.name)
        if isinstance(value, Tensor):
            value = Shadow(shadow_of(value).behind, GPU)
        elif dataclasses.is_dataclass(value):
            value = on_gpu(value)
        found[of.name] = value
    return dataclasses.replace(part, **found)


def plan_of(op: Any, call: Any) -> str:
    """The plan for any number of rows that backends choose by their limits."""
    return written(choose._by_limits(choose._ask(op, call)))


@contextmanager
def called(capability: int, name: str, compiler: Compiler) -> Iterator[tuple[str, Any]]:
    """The plan of a call, and a function that runs it for so many rows."""
    op, call_of = CALLS[name]
    with absent(capability, compiler), invariant(op in TRAINED):
        plan = plan_of(op, on_gpu(call_of(1)))
        plan = plan if ":" in plan else f":{plan}"
        plan = f"{PLANNED}{plan}" if op in TRAINED else plan

        def call(rows: int) -> None:
            op._run_planned(*op.arguments.flat(on_gpu(call_of(rows))), plan=plan)

        yield plan, call


def variants(capability: int, first: int, name: str) -> dict[str, Any]:
    compiler, later = Compiler(), []
    with called(capability, name, compiler) as (plan, call):
        call(first)
        kernels, threads = zip(*compiler.asked, strict=True)
        for rows in ROWS:
            before = len(compiler.asked)
            call(rows)
            later += [f"{kernel} of {rows} rows" for kernel, _ in compiler.asked[before:]]
    return {"plan": plan, "kernels": kernels, "threads": sorted(set(threads)), "later": later}


def together() -> None:
    """Raises BrokenBarrierError unless two kernels are compiled at the same time."""
    both, begun = threading.Barrier(2, timeout=120), iter(range(2))
    compiler = Compiler(lambda name: next(begun, None) is not None and both.wait())
    with called(90, "qwen3_30b", compiler) as (_, call):
        call(1)


def begun() -> None:
    """Prints the kernels that are compiled after a plan was begun, and how many were before."""
    compiler, (_, call_of) = Compiler(), CALLS["qwen3_30b"]
    with called(90, "qwen3_30b", compiler) as (plan, call):
        of_plan(experts, plan).begin(on_gpu(call_of(2)), GPU)
        for thread in threading.enumerate():
            if thread.name == "moe_ops begins":
                thread.join()
        before = len(compiler.asked)
        for rows in (1, 600, 4096):
            call(rows)
        print(before > 20, compiler.asked[before:])


def failing() -> None:
    """Prints what is raised for 1 and for 4096 rows, where a kernel of many rows fails."""

    def fail(name: str) -> None:
        if name == "place_kernel":
            raise ValueError(f"{name} fails")

    with called(90, "qwen3_30b", Compiler(fail)) as (_, call):
        for rows in (1, 4096, 4096):
            try:
                call(rows)
            except ValueError as error:
                print(rows, error)


def first(capability: int, rows: int, *names: str) -> None:
    """Calls the op of each name (see CALLS) in a plan for any number of rows, with so many of them
    and then with others. Prints one JSON line for each: the plan, the kernels that were compiled in
    the first call, the threads that did, and the kernels that were compiled later."""
    for name in names:
        print(json.dumps(variants(capability, rows, name)), flush=True)


PROGRAMS = {program.__name__: program for program in (first, together, begun, failing)}


def main() -> None:
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        child = os.fork()
        if not child:
            PROGRAMS[name](*arguments)
            sys.exit()
        print("ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()

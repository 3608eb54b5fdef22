"""Compile for GPUs that are not here every kernel that a call would launch; run as a script.

    python offline.py CAPABILITY PART

prints one JSON line for each variant of a part (see PARTS): the kernel, its registers, its bytes of
shared memory and those that it spills, how it divides floats, how many bytes it copies at once, and
how many zeros of float8 it takes for NaN.
Launches are caught where Triton would compile and run them, so that what is compiled is what the
host code asks for.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from moe_ops.backends import triton_hopper, triton_linears, triton_tiles
from moe_ops.backends.triton import run_experts
from moe_ops.backends.triton_inputs import inputs_of
from moe_ops.kernels.triton import (
    TINY_PAIRS,
    TINY_TOKENS,
    push,
    push_sum,
    quantize_blocks,
    routing,
    static_factors,
    wgrad,
)
from moe_ops.kernels.triton import quantize as quantize_kernels
from moe_ops.kernels.triton.decode import (
    latents,
    linears,
    norm,
    one_query,
    quantized_linears,
    quantized_row,
    quantized_stream,
    quantized_tiles,
    rope,
    rope_attention,
)
from moe_ops.kernels.triton.experts.operands import (
    beside_sort,
    dequantized_weights,
    fake_quantized,
    group_scales,
    permuted,
    row_scales,
)
from moe_ops.kernels.triton.experts.products import grouped_plain, register_stream, rows, tiny
from moe_ops.kernels.triton.experts.schedule import combine, sort
from moe_ops.testing import ACTIVATIONS, LAYERS
from tests.kernels.cubins import nans_of_zeros, usage
from tests.kernels.offline_adapters import calls_with_adapters
from tests.kernels.offline_codes import PATHS, calls_by_row, calls_decoded, quantized_layer
from tests.kernels.offline_floats import layer_call
from tests.kernels.offline_invariant import calls_invariant
from tests.kernels.offline_latents import calls_over_latents
from tests.kernels.offline_linears import calls_of_linears
from tests.kernels.offline_ranks import experts_in_batches, in_batches, over_ranks, pushed, summed
from tests.kernels.offline_routers import many_routed, recorded, routed
from tests.kernels.offline_states import WITH_STATES, with_states
from tests.kernels.offline_training import WITH_TRAINING, calls_of_training
from tests.kernels.offline_types import TYPES, type_of
from tests.published_routers import ROUTERS

# Between the GPUs every dtype that router logits may have.
DTYPE_OF = {80: torch.float16, 89: torch.float16, 90: torch.bfloat16, 100: torch.float32}
COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x\w+|\d+)")  # the bytes of one
SHARED_MEMORY = {80: 166912, 89: 101376, 90: 232448, 100: 232448}  # bytes that a block may use

# Sequences, heads of the cache, queries for each, slots, head size, sinks: every kind of plan.
ATTENTION = [
    (batch, heads, group, slots, size, sinks)
    for heads, group, size, sinks in ((4, 8, 128, False), (8, 4, 128, False), (8, 8, 64, True))
    for batch in (1, 8, 32) for slots in (256, 1024, 4096)
] + [
    (1, 16, 1, 512, 128, False), (2, 1, 64, 1024, 128, False), (1, 1, 128, 1024, 256, False),
    (1, 2, 8, 256, 256, False), (1, 2, 8, 4096, 256, True), (1, 1, 16, 32768, 128, False),
    (40, 8, 4, 8192, 128, True), (1, 4, 8, 256, 16, True), (300, 1, 8, 256, 16, False),
]  # fmt: skip

# Rows of weights, columns, biases.
LINEARS = [
    ((4096, 512, 512), 2048, False), ((2048,), 4096, False), ((4096, 512, 512), 2880, True),
    ((128,), 2048, False), ((2880,), 4096, True), ((4096, 1024, 1024), 4096, False),
    ((151936,), 2048, False), ((33, 7), 33, True), ((5, 6, 7, 8, 9), 200, False),
]  # fmt: skip

# Weights, inputs, capability: every way to load codes, and to scale them.
FORMATS = [
    ("int4:1x128:bfloat16", "", 80), ("mxfp4", "", 80),
    ("float8_e4m3fn:128x128", "float8_e4m3fn:1x128", 89),
    ("uint4:1x128:bfloat16", "", 80), ("int4:1x32:bfloat16", "", 80),
    ("uint4:1x64:float16", "", 80), ("uint4:1x32:float16", "", 80),
    ("mxfp8", "", 89), ("float8_e4m3fn:128x128", "", 89), ("int8:1x64", "", 80),
    ("uint8:1x128:bfloat16", "", 80),
    ("nvfp4", "", 80), ("mxfp6_e3m2", "", 80), ("mxfp6_e2m3", "", 80), ("mxfp8_e5m2", "", 80),
    ("nvfp4", "nvfp4", 80), ("mxfp4", "mxfp8", 80), ("mxfp6_e3m2", "float8_e4m3fn:row", 80),
    ("mxfp4", "float8_e4m3fn:tensor", 80), ("int8:row", "", 80),
]  # fmt: skip


def source_of(
    kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ASTSource | GluonASTSource:
    """What Triton would compile for a launch: integers of 1 are constants, and those that 16
    divides are known to be, as are the addresses of tensors."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature, constants, attributes = {}, {}, {}
    for index, param in enumerate(kernel.params):
        value = given[param.name]
        plain = param.do_not_specialize
        one = isinstance(value, int) and value == 1 and not plain
        if param.is_constexpr or value is None or one:
            signature[param.name] = "constexpr"
            constants[(index,)] = value
            continue
        if isinstance(value, TensorDescriptor):
            signature[param.name] = type_of(value)
            continue
        whole = isinstance(value, Tensor) or (value % 16 == 0 and not plain)
        scalar = "fp32" if isinstance(value, float) else "i32"
        signature[param.name] = TYPES[value.dtype] if isinstance(value, Tensor) else scalar
        if whole:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    return source(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def used(made: Any) -> dict[str, Any]:
    """What a compiled kernel needs and does, as the module says."""
    found = {"shared": made.metadata.shared, **usage(made.asm["cubin"])}
    found["divides"] = sorted(set(re.findall(r"\bdiv\.(\w+)\.f32", made.asm["ptx"])))
    found["copies"] = sorted({int(size, 0) for size in COPY.findall(made.asm["ptx"])})
    found["nans"] = (
        nans_of_zeros(made.asm["cubin"]) if "cvt.rn.f16x2.e4m3x2" in made.asm["ptx"] else 0
    )
    return found


def compile_launches(
    call: Callable[[], Any],
    capability: int,
    known: set[tuple[Any, ...]],
    tell: Callable[[Any], dict[str, Any]] = used,
    one_of_each: bool = False,
) -> list[dict[str, Any]]:
    """Compile what a call launches, instead of launching it; but not what is known. `tell` says
    what is wanted of a compiled kernel. `one_of_each`: a kernel is known by any of its variants."""
    found: list[dict[str, Any]] = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = {p.name for p in self.params}
        options = {k: v for k, v in kwargs.items() if k not in names}
        source = source_of(self, args, {k: v for k, v in kwargs.items() if k in names})
        key = (self.__name__,) if one_of_each else (source.hash(), *sorted(options.items()))
        if key not in known:
            known.add(key)
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            found.append({"kernel": self.__name__, "memory": memory, **tell(made)})

    memory = SHARED_MEMORY[capability]
    pdl = {"PDL": True, "launch_pdl": True} if capability >= 90 else {"PDL": False}
    with ExitStack() as patched:
        patched.enter_context(patch.object(JITFunction, "run", run))
        for module in (
            *WITH_TRAINING, beside_sort, combine, dequantized_weights, fake_quantized, group_scales,
            latents, linears, norm, one_query, permuted, push, push_sum, quantized_linears,
            quantized_row, quantized_stream, quantized_tiles, register_stream, rope, rope_attention,
            routing, row_scales, rows, sort, *WITH_STATES, tiny, quantize_kernels, quantize_blocks,
            static_factors,
        ):  # fmt: skip
            patched.enter_context(patch.object(module, "pdl_options", lambda _: pdl))
        for module in (
            grouped_plain, latents, linears, quantized_linears, rope_attention, triton_tiles, wgrad,
        ):  # fmt: skip
            patched.enter_context(patch.object(module, "shared_memory", lambda _: memory))
        for module in (latents, linears, rope_attention):
            patched.enter_context(patch.object(module, "is_hopper", lambda _: capability == 90))
        for module in (push, push_sum):
            patched.enter_context(patch.object(module, "polls_by_asm", lambda _: True))
        said = None if capability == 90 else "needs another GPU"
        for module in (triton_hopper, triton_linears):
            patched.enter_context(patch.object(module, "refuse_hopper", lambda _: said))
        # It asks of GPUs alone.
        bits = triton_hopper.refuse_eight_bits
        of_8 = patch.object(triton_hopper, "refuse_eight_bits", lambda c: bits(c) or said)
        patched.enter_context(of_8)
        call()
    return found


BOTH = ("qwen3_next", "gpt_oss_20b")  # take every tile between them


def of_floats_or_latents(capability: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Between them they launch every kernel of both, and of training."""
    yield from itertools.islice(calls(capability, all=False), 3, None, 5)
    for T in (8, 16):
        norms = functools.partial(projected, T, (128,), 2048, False, True, True, 1.0)
        yield f"norms of {T} rows", norms
    yield from calls_over_latents(capability)
    yield from calls_of_training(capability)


def calls(capability: int, all: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls that between them launch every tile, every router and, if `all` are wanted, every
    activation; of the six layers for which tiles were tuned all, or two that take every tile and a
    third of what else there is."""
    layers = LAYERS if all else {n: LAYERS[n] for n in BOTH}
    step = 1 if all else 3
    for name, router in ROUTERS.items():
        yield f"{name} route", lambda r=router: routed(r, DTYPE_OF[capability])
    for backend, T in (("tiny", 4), ("rows", 64), ("grouped", 4096)):
        case = LAYERS["gpt_oss_20b"]
        others = [{"dtype": torch.float16}, {"transposed": True}][::step]
        for more in [*others, *[{"dtype": torch.float32}] * (backend == "grouped")]:
            call = functools.partial(layer, case, backend, T, False, **more)
            yield f"gpt_oss_20b {backend} {more}", call
    for name, case in layers.items():
        yield f"{name} route", lambda c=case: many_routed(c)
        most_tiny = min(TINY_TOKENS, TINY_PAIRS // case.K)
        tokens_of = {"tiny": (1, 4, most_tiny), "rows": (8, 64, 256, 1024), "grouped": (256, 4096)}
        for backend, counts in tokens_of.items():
            for T in counts:
                for full in (False, True) if name in BOTH else (False,):
                    call = functools.partial(layer, case, backend, T, full)
                    yield f"{name} {backend} {T}{' full' if full else ''}", call
    for shape in ATTENTION[::step]:
        yield f"one query {shape}", lambda s=shape: attended(*s)
        yield f"rope attention {shape}", lambda s=shape: turned(*s)
    for sizes, K, biases in LINEARS[::step]:
        for T in (1, 8, 32, 64):
            call = functools.partial(projected, T, sizes, K, biases)
            yield f"linears {T} {sizes} {K}", call
        for T, *kind in ((1, False, None), (1, True, None), (1, True, 1.0), (8, True, 1.0)):
            call = functools.partial(projected, T, sizes, K, biases, True, *kind)
            yield f"normed linears {T} {sizes} {K} {kind}", call
    yield from with_states()
    for name, args in [*ACTIVATIONS.items()][::step]:
        for backend in ("tiny", "rows", "grouped"):
            call = functools.partial(layer, LAYERS["olmoe"], backend, 4, False, **args)
            yield f"{name} {backend}", call
    for shape in ATTENTION[::step]:
        yield f"eight queries {shape}", lambda s=shape: attended(*s, queries=8)
    for name, router in ROUTERS.items():
        yield f"{name} recorded", lambda r=router: recorded(r, DTYPE_OF[capability])


def calls_over_ranks(capability: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What one of several ranks launches."""
    for name in BOTH:
        yield f"{name} over ranks", lambda c=LAYERS[name]: over_ranks(c)
        yield f"{name} in batches", lambda c=LAYERS[name]: in_batches(c)
        for count, *formats in IN_BATCHES:
            if capability >= 89 or not formats[1]:
                call = functools.partial(experts_in_batches, LAYERS[name], count, *formats)
                yield f"{name} in batches of {count} {formats[0]}", call
        for ranks_ in (2, 8):
            yield f"{name} pushed to {ranks_}", lambda c=LAYERS[name], R=ranks_: pushed(c, R)
    for ranks_ in (2, 8, 16):
        yield f"sums of {ranks_}", lambda R=ranks_: summed(R)


def calls_of_codes(
    capability: int, formats: list[tuple[str, str, int]]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls on quantised weights that between them launch every tile, for widths that fill none."""
    case, most = LAYERS["gpt_oss_20b"], LAYERS["qwen3_next"]
    for w_format, x_format, least in formats:
        if capability < least:
            continue
        rows = [("rows", n) for n in (2, 16, 64, 256, 1024, 4096)]
        emulates = inputs_of(w_format, x_format) is not None
        for backend, T in (("tiny", 1), ("tiny", 4), *rows, ("grouped", 4096)):
            unused = "tiny" if emulates else "grouped" if x_format else None
            if backend == unused:
                continue
            for full in (False, True) if T <= 16 else (False,):
                args = (case, backend, T, w_format, x_format)
                call = functools.partial(quantized_layer, *args, full=full)
                yield f"{backend} {T} {w_format} {x_format}{' full' if full else ''}", call
        if emulates:
            continue
        if w_format == "mxfp4" and not x_format:  # whose tiles of wide experts are others
            for backend, T in (("tiny", 1), ("rows", 64)):
                wide = (LAYERS["mixtral_8x7b"], backend, T, w_format, x_format)
                yield f"wide {backend} {T}", functools.partial(quantized_layer, *wide)
        # More choices than one round of `one_down` takes.
        call = functools.partial(quantized_layer, most, "tiny", 1, w_format, x_format)
        yield f"{most.K} choices {w_format} {x_format}", call


# Of experts in batches, whose programs take several units of work.
IN_BATCHES = (
    (2, "", ""), (12, "", ""),
    (2, "float8_e4m3fn:128x128", "float8_e4m3fn:1x128"),
    (12, "float8_e4m3fn:128x128", "float8_e4m3fn:1x128"),
    (2, "int4:1x128:bfloat16", ""), (5, "int4:1x128:bfloat16", ""),
)  # fmt: skip
ONE_OF_EACH = "one_of_each"  # kernel of floats, of latents and of training
PARTS: dict[str, Callable[[int], Iterator[tuple[str, Callable[[], Any]]]]] = {
    ONE_OF_EACH: of_floats_or_latents,
    "floats": functools.partial(calls, all=False),
    "all_floats": functools.partial(calls, all=True),
    "codes": lambda capability: calls_of_codes(capability, FORMATS[:3]),
    "by_row": calls_by_row,
    "decoded": calls_decoded,
    "latents": calls_over_latents,
    "quantized_linears": calls_of_linears,
    "ranks": calls_over_ranks,
    "training": calls_of_training,
    "invariant": calls_invariant,
    "adapters": calls_with_adapters,
    "more_codes": lambda capability: calls_of_codes(capability, FORMATS[3:11]),
    "other_codes": lambda capability: calls_of_codes(capability, FORMATS[11:]),
}


def attended(
    batch: int, heads: int, group: int, slots: int, size: int, sinks: bool, queries: int = 1
) -> None:
    dtype = torch.bfloat16
    q = torch.empty(batch * queries, heads * group, size, dtype=dtype, device="meta")
    k = torch.empty(batch, heads, slots, size, dtype=dtype, device="meta")
    # What adds to scores comes with sinks, and the other way round.
    mask = torch.empty(len(q), slots, dtype=dtype if sinks else torch.bool, device="meta")
    sinks_H = torch.empty(heads * group, dtype=dtype, device="meta") if sinks else None
    one_query.attend(q, k, k, mask, 0.088, sinks_H)


def turned(batch: int, heads: int, group: int, slots: int, size: int, sinks: bool) -> None:
    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    gain = None if sinks else empty(size)
    angles = empty(1, size // 2) if sinks else empty(batch, size)
    k, cache = empty(batch, heads, size), empty(batch, heads, slots, size)
    slot = torch.empty(1, dtype=torch.int64, device="meta")
    q = empty(batch, heads * group, size)
    mask = torch.empty(batch, slots, dtype=torch.bfloat16 if sinks else torch.bool, device="meta")
    rest = (gain, gain, 1e-6, empty(heads * group) if sinks else None)
    rope_attention.run(q, k, k, angles, angles, slot, cache, cache, mask, 0.088, *rest)


def projected(
    T: int, sizes: tuple[int, ...], K: int, biases: bool,
    norm: bool = False, residual: bool = False, shift: float | None = None,
) -> None:  # fmt: skip
    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    given = [empty(n) if biases else None for n in sizes]
    weights = [empty(n, K) for n in sizes]
    if norm:
        added = empty(T, K) if residual else None
        linears.run_normed(empty(T, K), added, empty(K), 1e-6, weights, given, shift)
    else:
        linears.run(empty(T, K), weights, given)


def layer(case: Any, backend: str, T: int, full: bool, **more: Any) -> None:
    """`full`: with a residual, and as `layer_call` says."""
    call = layer_call(case, T, full, **more)
    residual_TD = torch.empty_like(call.x_TD) if full else None
    run_experts(PATHS.get(backend, backend), call, residual_TD)


def main() -> None:
    capability, part = int(sys.argv[1]), sys.argv[2]
    known: set[tuple[Any, ...]] = set()
    for name, call in PARTS[part](capability):
        for found in compile_launches(call, capability, known, one_of_each=part == ONE_OF_EACH):
            print(json.dumps({"call": name, **found}), flush=True)


if __name__ == "__main__":
    main()

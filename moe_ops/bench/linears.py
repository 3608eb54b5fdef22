"""Linear layers of one input by each backend of codes and number of rows, beside PyTorch's product
of floats.

Calls go over as many sets of weights as a GPU's caches do not hold, from a CUDA graph where there
is a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

from moe_ops.bench import progress
from moe_ops.bench.tables import aligned
from moe_ops.bench.timing import time_calls
from moe_ops.decode_ops.quantized_linears import QuantizedLinearsCall, quantized_linears
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.registry.backend import Backend
from moe_ops.registry.registration import REFERENCE

SEED, BYTES = 0, {"cuda": 2e8, "cpu": 4e7}  # of codes, that calls go over
FLOATS = "floats"  # of the input's dtype, by PyTorch's product
FORMATS = ("float8_e4m3fn:row", "int4:1x128:bfloat16")
ROWS = (1, 8, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Linear layers of one input of K columns: the rows of their weights."""

    name: str
    sizes: tuple[int, ...]
    K: int


LAYERS = {
    layers.name: layers
    for layers in (
        Layers(name="qwen3_30b_qkv", sizes=(4096, 512, 512), K=2048),
        Layers(name="qwen3_30b_o", sizes=(2048,), K=4096),
        Layers(name="mixtral_qkv", sizes=(4096, 1024, 1024), K=4096),
        Layers(name="qwen3_30b_head", sizes=(151936,), K=2048),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """Median microseconds of layers with so many rows of input, by a backend or FLOATS."""

    layers: str
    format: str
    rows: int
    by: str
    us: float


def measure(
    layers: Sequence[Layers], names: Sequence[str], rows: Sequence[int], device: torch.device
) -> Iterator[Time]:
    """Each backend of the device that takes a call, but the definition; then PyTorch's product."""
    for of in layers:
        g = torch.Generator(device).manual_seed(SEED)
        for name in names:
            calls = [*_calls(of, name, max(rows), device, g)]
            for T in rows:
                progress.tell(f"{of.name} {name} {T} rows")
                found = _times(calls, T, device)
                yield from (
                    Time(layers=of.name, format=name, rows=T, by=by, us=us) for by, us in found
                )
    progress.done()


def _calls(
    of: Layers, name: str, rows: int, device: torch.device, g: torch.Generator
) -> Iterator[QuantizedLinearsCall]:
    """Calls of equal sizes, each with weights of its own."""
    format, codes = Format.of(name), sum(of.sizes) * of.K * Format.of(name).bits / 8
    x_TK = torch.randn(rows, of.K, device=device, generator=g).bfloat16()
    for _ in range(max(1, min(32, int(BYTES[device.type] // codes)))):
        parts = []
        for n in of.sizes:
            w_NK = torch.randn(n, of.K, device=device, generator=g) * of.K**-0.5
            common = packing.global_scale_of(w_NK, format) if format.has_global_scale else None
            done = packing.quantize(w_NK, format, global_scale=common)
            parts.append((done.values, done.scale, done.zero, common, None))
        lists = map(list, zip(*parts, strict=True))
        yield quantized_linears.call(x_TK, *lists, name)


@torch.inference_mode()
def _times(
    calls: Sequence[QuantizedLinearsCall], T: int, device: torch.device
) -> Iterator[tuple[str, float]]:
    few = [replace(call, x_TK=call.x_TK[:T]) for call in calls]
    for backend in quantized_linears.candidates(device.type):
        if _takes(backend, few[0], T):
            yield backend.name, time_calls([partial(backend.run, call) for call in few], device)
    x_TK, rows = few[0].x_TK, sum(w_NK.shape[0] for w_NK in few[0].weights)
    # As many bytes as those of codes, or more.
    floats = [x_TK.new_empty(rows, x_TK.shape[1]).normal_() for _ in few[::2]]
    yield FLOATS, time_calls([partial(linear, x_TK, w_NK) for w_NK in floats], device)


def _takes(backend: Backend, call: QuantizedLinearsCall, T: int) -> bool:
    """Whether a backend, which is not the definition, runs a call of T rows."""
    if backend.name == REFERENCE or (backend.ignores is not None and backend.ignores(call)):
        return False
    most = None if backend.rows.possible is None else backend.rows.possible(call)
    refused = backend.supports is not None and backend.supports(call) is not None
    return not refused and (most is None or most >= T)


def table(found: Sequence[Time]) -> str:
    """A row for each number of rows, microseconds of each backend that took it."""
    every = list(dict.fromkeys(t.by for t in found))
    rows = [("layers", "format", "rows", *every)]
    cells = {(t.layers, t.format, t.rows, t.by): f"{t.us:.1f}" for t in found}
    for at in dict.fromkeys((t.layers, t.format, t.rows) for t in found):
        rows.append((at[0], at[1], str(at[2]), *(cells.get((*at, by), "") for by in every)))
    return aligned(rows)


def add(options: argparse.ArgumentParser) -> None:
    """Add the options of `bench linears`."""
    options.add_argument("--layers", nargs="+", choices=sorted(LAYERS), default=[*LAYERS])
    options.add_argument("--formats", nargs="+", default=[*FORMATS])
    options.add_argument("--rows", nargs="+", type=int, default=[*ROWS], help="of the input")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    options.add_argument("--device", default=default, choices=("cuda", "cpu"))


def measure_linears(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(args.device)
    layers = [LAYERS[name] for name in args.layers]
    found = [*measure(layers, args.formats, args.rows, device)]
    print(table(found))
    on = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return {"device": on, "linears": [asdict(time) for time in found]}

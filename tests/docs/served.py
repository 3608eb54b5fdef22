"""Who serves a call: asked of the registry, for machines that need not be here.

A call is the arguments of an op with every tensor described, not made. Ops run it on meta tensors;
backends are shown fake tensors on the device in question. What they ask of the machine itself,
`machine` answers.
"""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ops import OPS, Op, fake_impls
from moe_ops.backends import triton_device
from moe_ops.kernels import cpu as kernels
from moe_ops.kernels.cpu import quantized
from moe_ops.ops.quantize import QuantizeCall
from moe_ops.quant.formats import Format
from moe_ops.registry.spec import REFERENCE

CAPABILITY = (9, 0)  # of the CUDA device
DEVICES = {"CPU": "cpu", f"CUDA (sm_{CAPABILITY[0]}{CAPABILITY[1]})": "cuda"}

# Backends that make floats of the codes before they multiply; all others multiply the codes.
DECODING = (REFERENCE, "dequantize")

REFUSED = "refused: "

# Sizes that every format divides.
T, E, WIDTH = 4, 2, 256

FAKE = FakeTensorMode()

Call = tuple[Any, ...]  # every argument of an op in order, tensors as Shaped


class Shaped(NamedTuple):
    """What is known of a tensor without its device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@contextmanager
def machine() -> Iterator[None]:
    """Pretend that this machine has a C++ compiler, Triton and a GPU."""
    with (
        patch.object(kernels, "unavailable", lambda: None),
        patch.object(quantized, "unavailable", lambda element, inputs: None),
        patch.object(triton_device, "unavailable", lambda: None),
        patch.object(torch.cuda, "get_device_capability", lambda device=None: CAPABILITY),
    ):
        yield


def calls(weights: str, inputs: str) -> dict[str, Call]:
    """A call of every op that takes formats, by op name; of `quantize` if inputs are quantised.

    bfloat16 activations. Raises ValueError for what is no format.
    """
    with torch.device("meta"):
        made = _arguments(weights, inputs)
    return {name: _call(OPS[name], **kwargs) for name, kwargs in made.items()}


def _arguments(weights: str, inputs: str) -> dict[str, dict[str, Any]]:
    x = torch.empty(T, WIDTH, dtype=torch.bfloat16)
    formats = {"w_format": weights, "x_format": inputs}
    product = {"x_RD": x, "ends_E": torch.empty(E, dtype=torch.int32)}
    if inputs:
        codes, scale = fake_impls.quantize(QuantizeCall(x, inputs))
        product |= {"x_RD": codes, "x_scale_RG": scale, "out_dtype": "bfloat16"}
    product |= {**_weight("w", "FD", WIDTH, weights), **formats}
    layer = {"x_TD": x, **_weight("w13", "FD", 2 * WIDTH, weights)}
    layer |= {**_weight("w2", "DI", WIDTH, weights), **formats}
    routing = {"weights_TK": torch.empty(T, 1), "ids_TK": torch.empty(T, 1, dtype=torch.int32)}
    found = {
        "expert_gemm": product,
        "experts": {**layer, **routing},
        "moe": {**layer, "logits_TE": torch.empty(T, E), "top_k": 1},
    }
    return {**found, "quantize": {"x_RD": x, "format": inputs}} if inputs else found


def _weight(name: str, axes: str, rows: int, format: str) -> dict[str, Tensor]:
    """A stacked weight and what belongs to it, by argument name."""
    if not format:
        return {f"{name}_E{axes}": torch.empty(E, rows, WIDTH, dtype=torch.bfloat16)}
    of = Format.of(format)
    packed, scales = of.parsed.packed(WIDTH), (E, *of.parsed.scale_shape(rows, WIDTH))
    found = {
        f"{name}_E{axes}": torch.empty(E, rows, packed, dtype=of.parsed.storage.dtype),
        f"{name}_scale_E{axes[0]}G": torch.empty(scales, dtype=of.parsed.scale_dtype),
    }
    if of.has_zero:
        found[f"{name}_zero_E{axes[0]}G"] = torch.empty(scales, dtype=torch.uint8)
    if of.has_global_scale:
        found[f"global_scale{name.removeprefix('w')}_E"] = torch.empty(E)
    return found


def _call(op: Op, *args: Any, **kwargs: Any) -> Call:
    given = inspect.signature(op).bind(*args, **kwargs)
    given.apply_defaults()
    return tuple(
        Shaped(tuple(a.shape), a.stride(), a.dtype) if isinstance(a, Tensor) else a
        for a in given.args
    )


def _made(call: Call, device: str) -> tuple[Any, ...]:
    return tuple(
        torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device=device)
        if isinstance(a, Shaped)
        else a
        for a in call
    )


def how(op: Op, call: Call, device: str) -> str:
    """How a call is served on a type of device, or the error that refuses it."""
    try:
        op.check(op.call(*_made(call, "meta")))
    except (TypeError, ValueError) as error:
        return f"{REFUSED}{error}"
    return ", ".join(dict.fromkeys(_served(op, call, device)))


def refusals(op: Op, call: Call, device: str) -> dict[str, str | None]:
    """Why each backend cannot run a call on a type of device (None: it can), by backend name; of a
    call that the op refuses no backend is asked."""
    if how(op, call, device).startswith(REFUSED):
        return {}
    with FAKE:
        args = _made(call, device)
    return op.refusals(*args)


def _served(op: Op, call: Call, device: str) -> Iterator[str]:
    """How each product of a call is served; a definition made of products is served by theirs."""
    with FAKE:
        args = _made(call, device)
    backend = op.pick(op.call(*args))
    products = _products(op, call) if backend.name == REFERENCE else ()
    for product in products:
        yield from _served(*product, device)
    if not products:
        quantized = inspect.signature(op).bind(*args).arguments.get("x_format")
        floats = "emulated" if quantized else "reference"
        decodes = backend.name in DECODING or backend.emulates(op.call(*args))
        word = floats if decodes else "native"
        yield f"{word}: {'definition' if backend.name == REFERENCE else f'`{backend.name}`'}"


@functools.cache
def _products(op: Op, call: Call) -> tuple[tuple[Op, Call], ...]:
    """The ops with weights that an op's definition calls."""
    with _Products() as inside:
        op.reference(*_made(call, "meta"))
    return tuple(inside.calls)


class _Products(TorchDispatchMode):
    """Keeps the calls of ops with weights that are made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Op, Call]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for op in OPS.values():
            if op.overload is func and "w_format" in inspect.signature(op).parameters:
                self.calls.append((op, _call(op, *args, **(kwargs or {}))))
        return func(*args, **(kwargs or {}))

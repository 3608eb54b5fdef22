"""The Gluon kernels of codes that stream through registers, by torch where there is no GPU: what
they compute, and every address that they load from or store to. Layouts, and so what a thread
holds, are not looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.experimental.gluon import language as gluon_language

from moe_ops.kernels.triton import activation, quantize
from moe_ops.kernels.triton import launch as launches
from moe_ops.kernels.triton.decode import (
    blocks,
    linears_gluon,
    norm,
    one_query,
    quantized_row_gluon,
    quantized_stream_gluon,
    rope,
    rope_attention_gluon,
    rows_gluon,
)
from moe_ops.kernels.triton.experts.formats import (
    codes,
    eight_bits_gluon,
    float8,
    four_bits,
    halves,
    scales,
    six_bits,
)
from moe_ops.kernels.triton.experts.operands import rounded_gluon
from moe_ops.kernels.triton.experts.products import (
    register_stream_adapters,
    register_stream_gluon,
    register_stream_steps,
)
from moe_ops.kernels.triton.experts.schedule import sort

STREAMS = (
    register_stream_gluon,
    quantized_stream_gluon,
    quantized_row_gluon,
    linears_gluon,
    rope_attention_gluon,
)
DECODERS = (codes, halves, scales, four_bits, six_bits, eight_bits_gluon)


class Value(Tensor):
    """A tensor with what those of Gluon have besides; no operation changes one in place."""

    @classmethod
    def __torch_function__(cls, f: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As torch has it for a million calls, in half the time."""
        with torch._C.DisableTorchFunctionSubclass():
            found = f(*args, **(kwargs or {}))
        if type(found) is Tensor:
            return found.as_subclass(cls)
        return tuple(map(value, found)) if type(found) is tuple else found

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Any:
        return self.view(dtype) if bitcast else super().to(dtype)

    def split(self) -> Any:  # type: ignore[override]
        return self.unbind(-1)

    def __iadd__(self, other: Any) -> Any:
        return self + other

    def __imul__(self, other: Any) -> Any:
        return self * other

    @property
    def type(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(layout=gluon_language.BlockedLayout([1], [32], [1], [0]))


def value(t: Any) -> Any:
    return torch.as_tensor(t).as_subclass(Value)


class Pointer:
    """Places in the memory of a tensor."""

    def __init__(self, memory: Tensor, at: Any) -> None:
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    @property
    def shape(self) -> Any:
        return self.at.shape

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + offset)

    def __sub__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at - offset)

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.memory, self.at[index])

    def inside(self, mask: Any) -> Any:
        """(places, mask), of one shape; what the mask has must be in the tensor."""
        at, mask = torch.broadcast_tensors(value(self.at), value(mask))
        outside = mask & ((at < 0) | (at >= self.memory.numel()))
        assert not outside.any(), f"{at[outside][:4].tolist()} of {self.memory.numel()} elements"
        return at, mask


def pointer(t: Tensor) -> Pointer:
    elements = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return Pointer(t.as_strided((elements,), (1,)), value(0))


def load(pointer: Pointer, mask: Any = True, other: Any = 0, **_: Any) -> Any:
    at, mask = pointer.inside(mask)
    found = pointer.memory[torch.where(mask, at, 0).long()]
    return value(torch.where(mask, found, torch.tensor(other, dtype=found.dtype)))


def store(pointer: Pointer, what: Any, mask: Any = True) -> None:
    at, mask = pointer.inside(mask)
    places = at[mask].long()
    assert places.unique().numel() == places.numel(), "two values for one place"
    pointer.memory[places] = what.expand(at.shape)[mask]


class Shared:
    """A tensor in shared memory, NaN until something is stored to it."""

    def __init__(self, dtype: torch.dtype, shape: Any, layout: Any) -> None:
        self.held = value(torch.zeros(list(shape), dtype=dtype))
        if dtype.is_floating_point:
            self.held.fill_(float("nan"))
        self.dtype, self.shape = dtype, self.held.shape

    def store(self, what: Any) -> None:
        assert what.dtype == self.dtype, f"{what.dtype} into {self.dtype}"
        self.held.copy_(what)

    def load(self, layout: Any) -> Any:
        return value(self.held.clone())


def copy(held: Shared, pointer: Pointer, mask: Any = True, **_: Any) -> None:
    """As `cp_async`, but at once."""
    held.store(load(pointer, mask))


def where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        a = torch.tensor(a, dtype=torch.int32)
    return value(torch.where(condition, a, b))


def of_float8(words: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """As `eight_bits_gluon.of_float8`, which is PTX."""
    codes = words.contiguous().unsqueeze(-1).view(torch.float8_e4m3fn)
    pairs = codes.to(dtype).contiguous().view(torch.int32)
    return pairs[..., 0], pairs[..., 1]


def of_int8(words: Any) -> tuple[Any, Any]:
    """As `eight_bits_gluon.of_int8`, which is PTX."""
    codes = words.contiguous().unsqueeze(-1).view(torch.int8)
    pairs = codes.to(torch.float16).contiguous().view(torch.int32)
    return pairs[..., 0], pairs[..., 1]


def pairs_of_bytes(words: Any) -> tuple[Any, Any]:
    """As `eight_bits_gluon.pairs_of_bytes`, which is PTX."""
    codes = words.contiguous().unsqueeze(-1).view(torch.uint8)
    pairs = codes.to(torch.int16).contiguous().view(torch.int32)
    return pairs[..., 0], pairs[..., 1]


def from_lane(words: Any, lane: Any) -> Any:
    """As `register_stream_steps.from_lane`, which is PTX."""
    return words.flatten(1).gather(1, lane.flatten(1).long()).view(words.shape)


def magnitude(x: Any) -> Any:
    """As `quantize.magnitude`."""
    return value(x).view(torch.int32) & 0x7FFFFFFF


def fma(a: Any, b: Any, c: Any) -> Any:
    return (a.double() * value(b).double() + value(c).double()).float()


def of_two(f: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    def of_both(a: Any, b: Any, **_: Any) -> Any:
        if isinstance(b, int) and not isinstance(a, int):  # has the dtype of the other
            return f(value(a), torch.tensor(b, dtype=a.dtype))
        return f(value(a), value(b))

    return of_both


PROGRAM, PROGRAMS = [0], [1]
LANGUAGE = SimpleNamespace(
    **{n: getattr(torch, n) for n in ("int16", "int32", "int64", "float16", "float32", "bfloat16")},
    **{n: getattr(gluon_language, n) for n in dir(gluon_language) if n.endswith("Layout")},
    int8=torch.int8,
    float8e4nv=torch.float8_e4m3fn,
    constexpr=int,
    program_id=lambda axis: value(0 if axis else PROGRAM[0]),
    num_programs=lambda axis: 1 if axis else PROGRAMS[0],
    num_warps=lambda: 1,
    static_range=range,
    static_assert=lambda *_: None,
    arange=lambda begin, end, *_: value(torch.arange(begin, end, dtype=torch.int32)),
    zeros=lambda shape, dtype, *_: value(torch.zeros(shape, dtype=dtype)),
    zeros_like=torch.zeros_like,
    full_like=torch.full_like,
    convert_layout=lambda t, *_, **__: t,
    allocate_shared_memory=Shared,
    broadcast=lambda a, b: tuple(map(value, torch.broadcast_tensors(a, b))),
    join=lambda a, b: torch.stack(torch.broadcast_tensors(a, b), -1),
    cdiv=lambda a, b: -(-a // b),
    load=load,
    store=store,
    where=where,
    minimum=of_two(torch.minimum),
    maximum=of_two(torch.maximum),
    sum=lambda t, axis: t.sum(axis),
    max=lambda t, axis: t.amax(axis),
    cumsum=lambda t, axis: t.cumsum(axis),
    exp=torch.exp,
    rsqrt=torch.rsqrt,
    erf=torch.erf,
    abs=torch.abs,
    fma=fma,
    div_rn=torch.div,
    PropagateNan=SimpleNamespace(ALL=None),  # torch's minimum and maximum do so
    extra=SimpleNamespace(
        cuda=SimpleNamespace(gdc_wait=lambda: None, gdc_launch_dependents=lambda: None)
    ),
)


def functions_of(modules: Iterable[ModuleType], **given: Any) -> dict[str, Any]:
    """The functions of kernels' modules as Python has them, the later of one name, with torch for
    the language, and what else they are given."""
    names: dict[str, Any] = {"tl": LANGUAGE, "gl": LANGUAGE, "INTERPRETED": True, **given}
    for module in modules:
        for name, f in vars(module).items():
            python = getattr(f, "fn", f)
            if getattr(python, "__module__", None) != module.__name__:
                continue
            if isinstance(python, FunctionType) and python.__closure__ is None:
                names[name] = FunctionType(python.__code__, names, name, python.__defaults__)
    return names


@functools.cache
def functions() -> dict[str, Any]:
    """Those of the kernels for few rows."""
    products = (register_stream_steps, register_stream_adapters, rows_gluon, *STREAMS)
    made = (blocks, norm, one_query, rope, rounded_gluon, *DECODERS)
    names = functions_of(
        (activation, launches, sort, *made, *products),
        COLUMNS_OF_STEP=register_stream_steps.STEP,
        STEP=register_stream_steps.STEP,
        SMALLEST_SCALE=float8.SMALLEST_SCALE.value,
        TO_INTEGER=quantize.TO_INTEGER.value,
        SHARES=rope_attention_gluon.SHARES.value,
        ROWS=rope_attention_gluon.ROWS.value,
    )
    names |= {"most_of": quantize.most_of.fn, "magnitude": magnitude, "from_lane": from_lane}
    names |= {"of_float8": of_float8, "of_int8": of_int8, "pairs_of_bytes": pairs_of_bytes}
    names |= {"cp_async": copy, "commit": lambda: None, "wait": lambda _: None}
    names["mma_v2"] = lambda a, b, acc: a.float() @ b.float() + acc
    return names


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """In the place of `replay.launch`; any other kernel is left to Triton's interpreter."""
    if kernel.fn.__module__ not in [module.__name__ for module in STREAMS]:
        kernel[grid](*args, **options)
        return
    given = dict(zip(kernel.arg_names, args, strict=False))
    given |= {n: v for n, v in options.items() if n in kernel.arg_names}
    given = {n: pointer(v) if isinstance(v, Tensor) else v for n, v in given.items()}
    if "DTYPE" in given:
        given["DTYPE"] = {"bf16": torch.bfloat16, "fp16": torch.float16}[str(given["DTYPE"])]
    PROGRAMS[0] = grid[0]
    for program in range(grid[0]):
        PROGRAM[0] = program
        functions()[kernel.fn.__name__](**given)


def take_over(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the launches of a module run by torch during a test; the names of kernels as they are
    launched."""
    launched: list[str] = []

    def noted(kernel: Any, *args: Any, **options: Any) -> None:
        launched.append(kernel.fn.__name__)
        launch(kernel, *args, **options)

    monkeypatch.setattr(module, "launch", noted)
    return launched

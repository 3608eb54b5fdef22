"""What an op must read, write and compute, and the least time that takes on a device.

Experts are taken to be chosen evenly and independently: of E experts, T tokens with K choices each
touch E * (1 - (1 - K / E)**T). Every expert that is touched is read once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_ops.checks.shapes import DTYPES
from moe_ops.kernels import gpus
from moe_ops.ops.activate import ActivateCall
from moe_ops.ops.activate_backward import ActivateBackwardCall
from moe_ops.ops.adapters import OF_ADAPTER, Adapter
from moe_ops.ops.combine import CombineCall
from moe_ops.ops.combine_tokens import CombineTokensCall
from moe_ops.ops.dispatch import DispatchCall
from moe_ops.ops.dispatch_tokens import DispatchTokensCall
from moe_ops.ops.expert_gemm import ExpertGemmCall
from moe_ops.ops.expert_loads import ExpertLoadsCall
from moe_ops.ops.expert_wgrad import ExpertWgradCall
from moe_ops.ops.expert_wgrad_onto import ExpertWgradOntoCall
from moe_ops.ops.experts import ExpertsCall
from moe_ops.ops.experts_accumulating import ExpertsAccumulatingCall
from moe_ops.ops.experts_adapted import ExpertsAdaptedCall
from moe_ops.ops.experts_adapted_backward import ExpertsAdaptedBackwardCall
from moe_ops.ops.experts_adapted_saving import ExpertsAdaptedSavingCall
from moe_ops.ops.experts_backward import ExpertsBackwardCall
from moe_ops.ops.experts_batched import ExpertsBatchedCall
from moe_ops.ops.experts_over_ranks import ExpertsOverRanksCall, traffic
from moe_ops.ops.experts_saving import ExpertsSavingCall
from moe_ops.ops.moe import MoeCall
from moe_ops.ops.quantize import QuantizeCall
from moe_ops.ops.route import RouteCall
from moe_ops.ops.sum_ranks import SumRanksCall
from moe_ops.quant.formats import Format
from moe_ops.ranks.groups import Group
from moe_ops.ranks.links import LINKS, widened
from moe_ops.ranks.peers import refusal
from moe_ops.ranks.transport import AUTO, PUSH, TRANSPORTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Bytes that cross the memory's bus, operations of matrix products in a dtype, and microseconds
    between ranks."""

    bytes: float
    flops: float = 0.0
    dtype: str = "float32"
    link_us: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a device reaches: a key of `flops_per_second` is a dtype, or an element of a format."""

    name: str
    bytes_per_second: float
    flops_per_second: dict[str, float]
    launch_us: float  # of one op that does nothing

    def microseconds(self, cost: Cost) -> float:
        """The least time that a cost takes."""
        rates = self.flops_per_second
        rate = rates.get(cost.dtype) or rates.get("bfloat16") or rates["float32"]
        here = max(cost.bytes / self.bytes_per_second, cost.flops / rate) * 1e6
        return here + cost.link_us + self.launch_us


def _hopper(name: str, bytes_per_second: float, bf16: float, fp8: float) -> Device:
    rates = {"bfloat16": bf16, "float16": bf16, "float8_e4m3fn": fp8, "float8_e5m2": fp8}
    rates |= {"int8": fp8, "float32": 50e12}
    return Device(
        name=name, bytes_per_second=bytes_per_second, flops_per_second=rates, launch_us=2.0
    )


# Measured with torch 2.11: a device copy, and products of 8192**3.
DEVICES = {
    d.name: d
    for d in (
        _hopper("NVIDIA H200", 4.26e12, 780e12, 1430e12),
        _hopper("NVIDIA H100 80GB HBM3", 3.03e12, 790e12, 1395e12),
    )
}
# Of other GPUs: bfloat16 operations of a multiprocessor in a cycle, by compute capability, and the
# share of its data sheet that a device reaches.
FLOPS_A_CYCLE = {(8, 0): 2048, (8, 6): 512, (8, 9): 512, (9, 0): 4096, (10, 0): 8192}
REACHED = 0.8
# Of a thread of a CPU: two threads of the machines in docs/performance/CPU.md read 27 to 32 GB/s.
CPU_BYTES, CPU_FLOPS = 15e9, {"float32": 50e9, "bfloat16": 100e9}


def device_of(device: torch.device) -> Device:
    """What is known of a device: an entry of DEVICES, else a guess from what it says of itself."""
    if device.type == "cuda" and torch.cuda.is_available():
        found = DEVICES.get(torch.cuda.get_device_name(device))
        return found or _from_properties(device)
    name = device.type
    threads = torch.get_num_threads()
    if device.type == "cpu":
        name = (
            f"{processor() or 'cpu'}, {torch.backends.cpu.get_cpu_capability()}, {threads} threads"
        )
    return DEVICES.get(name) or Device(
        name=name,
        bytes_per_second=CPU_BYTES * threads,
        flops_per_second={dtype: rate * threads for dtype, rate in CPU_FLOPS.items()},
        launch_us=5.0,
    )


def _from_properties(device: torch.device) -> Device:
    is_ = torch.cuda.get_device_properties(device)
    cycles = is_.multi_processor_count * is_.clock_rate * 1e3
    matrix = FLOPS_A_CYCLE.get(gpus.capability(device), 512) * cycles * REACHED
    return Device(
        name=is_.name,
        bytes_per_second=2 * is_.memory_clock_rate * 1e3 * is_.memory_bus_width / 8 * REACHED,
        flops_per_second={"bfloat16": matrix, "float16": matrix, "float32": 256 * cycles * REACHED},
        launch_us=3.0,
    )


def processor() -> str | None:
    """The processor's model as the system calls it, or None."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), None)


def distinct(E: int, K: float, T: int) -> float:
    """The number of experts that T tokens with K different choices each are expected to touch."""
    return E * (1 - (1 - min(K, E) / E) ** T)


def cost(op: str, call: Any, rows: int) -> Cost | None:
    """The cost of an op's record with so many rows in its first argument; None if a size is not
    known.

    Tensors may be fake, and their number of rows symbolic.
    """
    try:
        return COSTS[op](call, rows)
    except _Unknown:
        return None


class _Unknown(Exception):
    """Raised for a size that is symbolic."""


def _sizes(t: Tensor) -> tuple[int, ...]:
    """The sizes behind the first axis."""
    if any(not isinstance(n, int) for n in t.shape[1:]):
        raise _Unknown
    return tuple(t.shape[1:])


def _row(t: Tensor) -> int:
    """The bytes of one index of the first axis."""
    return math.prod(_sizes(t)) * t.element_size()


def _experts_in(w: Tensor) -> int:
    if not isinstance(w.shape[0], int):
        raise _Unknown
    return w.shape[0]


def _element(x_format: str, x: Tensor, w_format: str) -> str:
    """What the matrix products are computed in."""
    if x_format:
        return Format.of(x_format).element
    return "bfloat16" if w_format else str(x.dtype).removeprefix("torch.")


def _route(a: RouteCall, T: int, more: int = 0) -> Cost:
    return Cost(bytes=T * (_row(a.logits_TE) + (8 + more) * a.top_k))


def _quantize(a: QuantizeCall, R: int) -> Cost:
    (width,) = _sizes(a.x_RD)
    bits = Format.of(a.format).bits
    return Cost(bytes=R * (_row(a.x_RD) + width * bits / 8))


def _dispatch(a: DispatchCall, T: int) -> Cost:
    (K,) = _sizes(a.ids_TK)
    x = _row(a.x_TD)
    return Cost(bytes=T * (x + K * (x + 4) + _row(a.ids_TK)))


def _expert_loads(a: ExpertLoadsCall, T: int) -> Cost:
    return Cost(bytes=T * _row(a.ids_TK) + 8 * a.num_experts)


def _expert_gemm(a: ExpertGemmCall, R: int) -> Cost:
    x, w = a.x_RD, a.w_EFD
    E, (rows, cols) = _experts_in(w), _sizes(w)
    F = cols if a.transposed else rows
    (D,) = _sizes(x)
    if a.x_format:
        D = Format.of(a.x_format).parsed.unpacked(D)
    names = ("w_EFD", "w_scale_EFG", "w_zero_EFG", "bias_EF")
    expert = sum(_row(getattr(a, name)) for name in names if getattr(a, name) is not None)
    out = DTYPES[a.out_dtype].itemsize if a.out_dtype else x.element_size()
    return Cost(
        bytes=distinct(E, 1, R) * expert + R * (_row(x) + F * out),
        flops=2.0 * R * F * D,
        dtype=_element(a.x_format, x, a.w_format),
    )


def _activate(a: ActivateCall, R: int) -> Cost:
    return Cost(bytes=R * _row(a.y_RF) * (1.5 if a.gated else 2))


def _combine(a: CombineCall, R: int) -> Cost:
    (K,) = _sizes(a.weights_TK)
    return Cost(bytes=R * (_row(a.y_RD) * (1 + 1 / K) + 4 + a.weights_TK.element_size()))


EXPERT_TENSORS = (
    "w13_EFD", "w2_EDI", "b13_EF", "b2_ED",
    "w13_scale_EFG", "w2_scale_EDG", "w13_zero_EFG", "w2_zero_EDG",
)  # fmt: skip


def _experts(a: ExpertsCall, T: int) -> Cost:
    (K,) = _sizes(a.ids_TK)
    return _layer(a, T, K, T * (_row(a.ids_TK) + _row(a.weights_TK)))


def _moe(a: MoeCall, T: int) -> Cost:
    return _layer(a.layer, T, a.routing.top_k, T * _row(a.routing.logits_TE))


def _layer(a: ExpertsCall, T: int, K: float, routing: float) -> Cost:
    x, w13 = a.x_TD, a.w13_EFD
    E, F = _experts_in(w13), _sizes(w13)[1 if a.transposed else 0]
    (D,) = _sizes(x)
    expert = sum(_row(getattr(a, name)) for name in EXPERT_TENSORS if getattr(a, name) is not None)
    return Cost(
        bytes=distinct(E, K, T) * expert + 2 * T * _row(x) + routing,
        flops=2.0 * T * K * D * (F + (F // 2 if a.gated else F)),
        dtype=_element(a.x_format, x, a.w_format),
    )


def _experts_batched(a: ExpertsBatchedCall, E: int) -> Cost:
    """The cost of `experts_batched`, of as many rows as are expected; of all if that is not
    said."""
    M, _ = _sizes(a.batches.x_EMD)
    layer = replace(a.layer, x_TD=a.batches.x_EMD.flatten(0, 1))
    return _layer(layer, E * (a.batches.expected or M), 1, 4 * E)


def _dispatch_tokens(a: DispatchTokensCall, rows: int) -> Cost:
    """The cost of `dispatch_tokens`: it reads its rows once, and writes at most one for each
    rank."""
    scales = 0 if a.scale_TS is None else _row(a.scale_TS)
    row = _row(a.x_TD) + scales + _row(a.weights_TK) + 4 * _sizes(a.ids_TK)[0]
    return Cost(bytes=(1 + Group.of(a.group).size) * rows * row)


def _combine_tokens(a: CombineTokensCall, rows: int) -> Cost:
    row = a.y_GD.shape[-1] * a.y_GD.dtype.itemsize
    return Cost(bytes=(1 + Group.of(a.group).size) * rows * row)


def _sum_ranks(a: SumRanksCall, T: int) -> Cost:
    """The cost of `sum_ranks`, by the cheaper one of the ways that the ranks have."""
    device, row = a.part_TD.device.type, _row(a.part_TD)
    link, ranks = LINKS.get(device, LINKS["cuda"]), Group.of(a.group).size
    ways = (True, False) if refusal(a.group) is None else (False,)
    wide = widened(ranks, a.part_TD.dtype.itemsize) if device == "cuda" else 1
    taken = min(link.sum_us(p, ranks, int(T * row), wide) for p in ways)
    return Cost(bytes=3 * T * row, link_us=taken)


def _experts_over_ranks(a: ExpertsOverRanksCall, rows: int) -> Cost:
    """The cost of this rank: it serves as many pairs of all ranks' tokens as even routing
    brings."""
    layer, (K,) = a.layer, _sizes(a.layer.ids_TK)
    sent = traffic(a)
    T = rows * sent.ranks
    here = _layer(layer, T, K / sent.ranks, T * (_row(layer.ids_TK) + _row(layer.weights_TK)))
    link = LINKS.get(layer.x_TD.device.type, LINKS["cuda"])
    asked = [a.ranks.collective]
    if a.ranks.collective == AUTO:
        pushes = refusal(a.ranks.group) is None
        asked = [t for t in TRANSPORTS if t != PUSH or pushes]
    return replace(here, link_us=min(sent.microseconds(t, rows, link) for t in asked))


def _expert_wgrad(a: ExpertWgradCall, R: int) -> Cost:
    """The cost of `expert_wgrad`: it writes a weight for every expert, with rows or without."""
    (M,), (N,), E = _sizes(a.a_RM), _sizes(a.b_RN), _experts_in(a.ends_E)
    return Cost(
        bytes=R * (_row(a.a_RM) + _row(a.b_RN)) + E * M * N * a.dtype.itemsize,
        flops=2.0 * R * M * N,
        dtype=_element("", a.a_RM, ""),
    )


def _expert_wgrad_onto(a: ExpertWgradOntoCall, R: int) -> Cost:
    """The cost of `expert_wgrad_onto`: it reads and writes a float32 weight for every expert."""
    c = a.wgrad
    (M,), (N,), E = _sizes(c.a_RM), _sizes(c.b_RN), _experts_in(c.ends_E)
    float32 = replace(c, out_dtype="float32")
    whole = _expert_wgrad(float32, R)
    return replace(whole, bytes=whole.bytes + E * M * N * float32.dtype.itemsize)


def _activate_backward(a: ActivateBackwardCall, R: int) -> Cost:
    dh, y = _row(a.dh_RI), _row(a.y_RF)
    return Cost(bytes=R * (2 * y + dh + (dh if a.for_weights else 0) + 8))


def _experts_saving(a: ExpertsSavingCall | ExpertsAdaptedSavingCall, T: int) -> Cost:
    c, (K,) = a.layer, _sizes(a.layer.ids_TK)
    whole = _experts(c, T)
    F = _sizes(c.w13_EFD)[1 if c.transposed else 0]
    return replace(whole, bytes=whole.bytes + T * K * F * c.x_TD.element_size())


def _experts_accumulating(a: ExpertsAccumulatingCall, T: int) -> Cost:
    return _experts(a.layer, T)


def _experts_backward(a: ExpertsBackwardCall | ExpertsAdaptedBackwardCall, T: int) -> Cost:
    """The cost of `experts_backward`: as the forward, and it reads and writes rows."""
    c, (K,) = a.layer, _sizes(a.layer.ids_TK)
    whole, (D, I) = _experts(c, T), c.widths  # noqa: E741
    rows = T * K * (2 * _row(a.y_RF) + (I * c.x_TD.element_size() if a.for_weights else 0))
    flops = whole.flops if a.for_tokens else 2.0 * T * K * D * I
    return replace(whole, bytes=whole.bytes + rows, flops=flops)


def _with_adapter(whole: Cost, adapter: Adapter, layer: ExpertsCall, T: int) -> Cost:
    """A layer's cost with that of one adapter of its experts, of those that are touched."""
    (K,), E = _sizes(layer.ids_TK), _experts_in(layer.w13_EFD)
    given = [t for n in OF_ADAPTER if (t := getattr(adapter, n)) is not None]
    read, values = sum(map(_row, given)), sum(math.prod(_sizes(t)) for t in given)
    return replace(
        whole,
        bytes=whole.bytes + distinct(E, K, T) * read,
        flops=whole.flops + 2.0 * T * K * values,
    )


def _experts_adapted(a: ExpertsAdaptedCall, T: int) -> Cost:
    return _with_adapter(_experts(a.layer, T), a.adapter, a.layer, T)


def _experts_adapted_saving(a: ExpertsAdaptedSavingCall, T: int) -> Cost:
    return _with_adapter(_experts_saving(a, T), a.adapter, a.layer, T)


def _experts_adapted_backward(a: ExpertsAdaptedBackwardCall, T: int) -> Cost:
    return _with_adapter(_experts_backward(a, T), a.adapter, a.layer, T)


COSTS: dict[str, Callable[[Any, int], Cost]] = {
    "route": _route,
    "route_recording": lambda a, T: _route(a.routing, T, 2 if a.ring_weights_SK is None else 6),
    "route_replaying": lambda a, T: _route(a.routing, T, 2),
    "quantize": _quantize,
    "dispatch": _dispatch,
    "expert_gemm": _expert_gemm,
    "expert_loads": _expert_loads,
    "activate": _activate,
    "combine": _combine,
    "experts": _experts,
    "moe": _moe,
    "experts_batched": _experts_batched,
    "expert_wgrad": _expert_wgrad,
    "expert_wgrad_onto": _expert_wgrad_onto,
    "activate_backward": _activate_backward,
    "experts_saving": _experts_saving,
    "experts_accumulating": _experts_accumulating,
    "experts_backward": _experts_backward,
    "experts_adapted": _experts_adapted,
    "experts_adapted_saving": _experts_adapted_saving,
    "experts_adapted_backward": _experts_adapted_backward,
    "dispatch_tokens": _dispatch_tokens,
    "combine_tokens": _combine_tokens,
    "experts_over_ranks": _experts_over_ranks,
    "sum_ranks": _sum_ranks,
}

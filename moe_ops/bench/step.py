"""A token of each sequence through layers of a model, by the launches that a step of `generate` is
made of.

A model takes minutes to build and to compile, and its step has launches of others beside ours; what
a change of a kernel does to a step shows here in seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ops.bench.formats import spelled
from moe_ops.bench.inputs import Weights, free_bytes, make_weights
from moe_ops.bench.tables import aligned
from moe_ops.bench.timing import Run, Timing, capture, time_replays
from moe_ops.decode_ops import (
    linears,
    normed_linears,
    normed_quantized_linears,
    quantized_linears,
)
from moe_ops.decode_ops.experts_onto import experts_onto
from moe_ops.decode_ops.rope_attention import rope_attention
from moe_ops.ops import route
from moe_ops.quant import packing
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.formats import Format
from moe_ops.testing import GPT_OSS, LAYERS, Case

EPS = 1e-6
REST = 0.8  # of free memory, for weights
# The first launches of experts, of which a layer has one.
FIRST = ("tiny_up", "one_up", "few_up", "rows_up")


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """How experts are quantised, and the format of linear layers; of floats neither."""

    experts: QuantConfig | None = None
    linears: str = ""


FLOATS = Formats()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Heads of queries and of the cache, their size, and whether they are normed. `biased`: linear
    layers, the router and the experts have biases, attention has sinks, and experts have the
    activation of GPT-OSS."""

    H: int
    N: int
    size: int
    normed: bool
    biased: bool = False


ATTENTION = {
    "qwen3_30b": Attention(H=32, N=4, size=128, normed=True),
    "mixtral_8x7b": Attention(H=32, N=8, size=128, normed=False),
    "gpt_oss_20b": Attention(H=64, N=8, size=64, normed=False, biased=True),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Linears:
    """Linear layers of one input: weights and biases, and where the former are codes their scales
    and zero points, and their format."""

    weights: list[Tensor]
    biases: list[Tensor | None]
    scales: list[Tensor]
    zeros: list[Tensor | None]
    format: str

    def __call__(self, x_1K: Tensor) -> list[Tensor]:
        if not self.format:
            return linears(x_1K, self.weights, self.biases)
        none = [None] * len(self.weights)
        return quantized_linears(
            x_1K, self.weights, self.scales, self.zeros, none, self.biases, self.format
        )

    def of_normed(self, x_1K: Tensor, residual: Tensor | None, gain_K: Tensor) -> list[Tensor]:
        """What `normed_linears` gives."""
        given, none = (x_1K, residual, gain_K, EPS, self.weights), [None] * len(self.weights)
        if not self.format:
            return normed_linears(*given, self.biases)
        return normed_quantized_linears(
            *given, self.scales, self.zeros, none, self.biases, self.format
        )


def linears_of(weights: list[Tensor], format: str, biased: bool = False) -> Linears:
    """Linear layers whose weights are codes of a format, or floats without one."""
    biases: list[Tensor | None] = [w[:, 0].contiguous() if biased else None for w in weights]
    if not format:
        return Linears(weights=weights, biases=biases, scales=[], zeros=[], format="")
    done = [packing.quantize(w, Format.of(format)) for w in weights]
    return Linears(
        weights=[d.values for d in done], biases=biases, scales=[d.scale for d in done],
        zeros=[d.zero for d in done], format=format,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepLayer:
    """What one layer reads: weights, and a cache [B, N, slots, size] of keys and of values."""

    gain_D: Tensor
    qkv: Linears
    head_gains: tuple[Tensor | None, Tensor | None]
    keys: Tensor
    values: Tensor
    out: Linears
    experts_gain_D: Tensor
    router: Linears
    experts: Weights
    sinks_H: Tensor | None
    more: dict[str, Any]  # that `experts_onto` takes: biases, and what is not the usual activation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """The place of tokens in their sequences."""

    cos: Tensor
    sin: Tensor
    slot: Tensor
    mask_BS: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A kernel of a layer in the midst of the others: when it begins and ends, in microseconds
    after the first kernel of the experts has begun. In between it also waits for the one before."""

    name: str
    begin_us: float
    end_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a layer takes in a step of `layers` such layers: microseconds, and on a GPU its
    launches; which of its weights are codes, in words."""

    layer: str
    layers: int
    slots: int
    sequences: int
    formats: str
    timing: Timing
    launches: list[Launch]


def make_layer(
    case: Case,
    attention: Attention,
    slots: int,
    g: torch.Generator,
    formats: Formats = FLOATS,
    sequences: int = 1,
) -> StepLayer:
    """A layer with weights in these formats, and a cache of so many sequences."""

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        made = torch.empty(*shape, dtype=torch.bfloat16, device=g.device)
        return made.normal_(std=std, generator=g)

    a, D = attention, case.D
    sizes = [n * a.size for n in (a.H, a.N, a.N)]
    cache = (sequences, a.N, slots, a.size)
    more: dict[str, Any] = {}
    if a.biased:
        biases = {"b13_EF": normal(case.E, 2 * case.I), "b2_ED": normal(case.E, D)}
        more = {**biases, **GPT_OSS}
    return StepLayer(
        gain_D=normal(D),
        qkv=linears_of([normal(n, D, std=D**-0.5) for n in sizes], formats.linears, a.biased),
        head_gains=(normal(a.size), normal(a.size)) if a.normed else (None, None),
        keys=normal(*cache),
        values=normal(*cache),
        out=linears_of([normal(D, sizes[0], std=sizes[0] ** -0.5)], formats.linears, a.biased),
        experts_gain_D=normal(D),
        router=linears_of([normal(case.E, D, std=D**-0.5)], "", a.biased),
        experts=make_weights(case, torch.bfloat16, g, formats.experts),
        sinks_H=normal(a.H) if a.biased else None,
        more=more,
    )


def make_place(attention: Attention, slots: int, device: torch.device, sequences: int = 1) -> Place:
    """A place with a little over half of the slots in use, the same in so many sequences."""
    at = slots // 2 + slots // 16
    angles = torch.arange(attention.size // 2, device=device).repeat(2)[None] / attention.size
    return Place(
        cos=(at * angles).cos().bfloat16(),
        sin=(at * angles).sin().bfloat16(),
        slot=torch.tensor([at], device=device),
        mask_BS=(torch.arange(slots, device=device) <= at).repeat(sequences, 1),
    )


def forward(
    x_BD: Tensor, layer: StepLayer, case: Case, attention: Attention, place: Place
) -> Tensor:
    """What passes make of a layer for a token of each sequence, called op by op."""
    a, B = attention, len(x_BD)
    _, q, k, v = layer.qkv.of_normed(x_BD, None, layer.gain_D)
    heads = rope_attention(
        q.view(B, a.H, a.size), k.view(B, a.N, a.size), v.view(B, a.N, a.size),
        place.cos, place.sin, place.slot, layer.keys, layer.values, place.mask_BS,
        a.size**-0.5, *layer.head_gains, EPS, layer.sinks_H,
    )  # fmt: skip
    (out_BD,) = layer.out(heads.view(B, -1))
    total_BD, n_BD, logits_BE = layer.router.of_normed(out_BD, x_BD, layer.experts_gain_D)
    weights_BK, ids_BK = route(logits_BE, case.K, renormalize=True)
    w = layer.experts
    given = (total_BD, n_BD, weights_BK, ids_BK, w.w13_EFD, w.w2_EDI)
    return experts_onto(*given, **w.keywords, **layer.more)


@torch.inference_mode()
def measure(
    name: str,
    layers: int,
    slots: int,
    device: torch.device,
    formats: Formats = FLOATS,
    sequences: int = 1,
) -> Step:
    """Time a step of so many sequences through so many layers of the named model, as many as memory
    holds if those are fewer. Raises AssertionError if launches that overlap give another result
    than one by one."""
    case, attention = LAYERS[name], ATTENTION[name]
    g = torch.Generator(device=device).manual_seed(0)
    x_BD = torch.empty(sequences, case.D, dtype=torch.bfloat16, device=device).normal_(generator=g)
    place = make_place(attention, slots, device, sequences)
    kind = (case, attention, slots, g, formats, sequences)
    made = [make_layer(*kind)]
    fit = 1 + int(REST * free_bytes(device) // made[0].experts.nbytes)
    made += [make_layer(*kind) for _ in range(min(layers, fit) - 1)]

    def run(wait: bool = False) -> Tensor:
        x = x_BD
        for layer in made:
            x = forward(x, layer, case, attention, place)
            if wait:
                torch.cuda.synchronize()
        return x

    if device.type != "cuda":
        return _step(name, made, time_replays(run, len(made), device), [])
    want = run(wait=True)
    replay, (got,) = capture([run], rounds=1)
    replay()
    assert torch.equal(got, want), "launches that overlap give another result than one by one"
    timing = time_replays(replay, len(made), device)
    return _step(name, made, timing, _launches(replay, len(made)))


def _step(name: str, made: Sequence[StepLayer], timing: Timing, launches: list[Launch]) -> Step:
    sequences, _, slots, _ = made[0].keys.shape
    coded = {"experts": spelled(made[0].experts.quant), "linear layers": made[0].qkv.format}
    return Step(
        layer=name, layers=len(made), slots=slots, sequences=sequences,
        formats=", ".join(f"{what} in {format}" for what, format in coded.items() if format),
        timing=timing, launches=launches,
    )  # fmt: skip


def _launches(replay: Run, layers: int) -> list[Launch]:
    """The launches of the layer in the middle of a step, as the profiler sees them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        replay()
        torch.cuda.synchronize()
    kernels = [e for e in profiler.events() if e.device_type.name == "CUDA"]
    return launches_of([(e.name, e.time_range.start, e.time_range.end) for e in kernels], layers)


def launches_of(kernels: Sequence[tuple[str, float, float]], layers: int) -> list[Launch]:
    """The launches from the experts of the layer in the middle to those of the next one, of kernels
    with their names, begins and ends."""
    ordered = sorted(kernels, key=lambda kernel: kernel[1])
    firsts = [i for i, (name, *_) in enumerate(ordered) if name.startswith(FIRST)]
    middle = (layers - 1) // 2
    if len(firsts) < middle + 2:
        return []
    first, last = firsts[middle], firsts[middle + 1]
    zero = ordered[first][1]
    return [
        Launch(name=name, begin_us=begin - zero, end_us=end - zero)
        for name, begin, end in ordered[first:last]
    ]


def table(step: Step) -> str:
    of = step.timing
    sizes = f"{step.sequences} tokens, {step.layers} layers, {step.slots} slots"
    what = ", ".join(filter(None, (step.layer, sizes, step.formats)))
    lines = [f"{what}: {of.us:.2f} µs a layer ({of.low_us:.2f} to {of.high_us:.2f})"]
    if step.launches:
        rows = [["launch", "begins, µs", "ends, µs", "after the one before"]]
        after = [""]  # nobody knows when the one before the first has ended
        after += [f"{b.end_us - a.end_us:.2f}" for a, b in itertools.pairwise(step.launches)]
        for launch, gap in zip(step.launches, after, strict=True):
            name = launch.name.split("(")[0]
            rows.append([name, f"{launch.begin_us:.2f}", f"{launch.end_us:.2f}", gap])
        lines.append(aligned(rows))
    return "\n".join(lines)

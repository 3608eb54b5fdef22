"""One token through layers of a model, by the launches that a step of `generate` is made of.

A model takes minutes to build and to compile, and its step has launches of others beside ours; what
a change of a kernel does to a step shows here in seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops.bench.inputs import Weights, free_bytes, make_weights
from moe_ops.bench.tables import aligned
from moe_ops.bench.timing import Run, Timing, capture, time_replays
from moe_ops.decode_ops import linears, normed_linears
from moe_ops.decode_ops.experts_onto import experts_onto
from moe_ops.decode_ops.rope_attention import rope_attention
from moe_ops.ops import route
from moe_ops.testing import LAYERS, Case

EPS = 1e-6
REST = 0.8  # of free memory, for weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Heads of queries and of the cache, their size, and whether they are normed."""

    H: int
    N: int
    size: int
    normed: bool


ATTENTION = {
    "qwen3_30b": Attention(H=32, N=4, size=128, normed=True),
    "mixtral_8x7b": Attention(H=32, N=8, size=128, normed=False),
    "gpt_oss_20b": Attention(H=64, N=8, size=64, normed=False),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepLayer:
    """What one layer reads: weights, and a cache [1, N, slots, size] of keys and of values."""

    gain_D: Tensor
    qkv: list[Tensor]
    head_gains: tuple[Tensor | None, Tensor | None]
    keys: Tensor
    values: Tensor
    out_DH: Tensor
    experts_gain_D: Tensor
    router_ED: Tensor
    experts: Weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """The place of a token in its sequence."""

    cos: Tensor
    sin: Tensor
    slot: Tensor
    mask_1S: Tensor


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
    launches."""

    layer: str
    layers: int
    slots: int
    us: float
    low_us: float
    high_us: float
    launches: list[Launch]


def make_layer(case: Case, attention: Attention, slots: int, g: torch.Generator) -> StepLayer:
    def normal(*shape: int, std: float = 1.0) -> Tensor:
        made = torch.empty(*shape, dtype=torch.bfloat16, device=g.device)
        return made.normal_(std=std, generator=g)

    a, D = attention, case.D
    sizes = [n * a.size for n in (a.H, a.N, a.N)]
    cache = (1, a.N, slots, a.size)
    return StepLayer(
        gain_D=normal(D),
        qkv=[normal(n, D, std=D**-0.5) for n in sizes],
        head_gains=(normal(a.size), normal(a.size)) if a.normed else (None, None),
        keys=normal(*cache),
        values=normal(*cache),
        out_DH=normal(D, sizes[0], std=sizes[0] ** -0.5),
        experts_gain_D=normal(D),
        router_ED=normal(case.E, D, std=D**-0.5),
        experts=make_weights(case, torch.bfloat16, g),
    )


def make_place(attention: Attention, slots: int, device: torch.device) -> Place:
    """A place with a little over half of the slots in use."""
    at = slots // 2 + slots // 16
    angles = torch.arange(attention.size // 2, device=device).repeat(2)[None] / attention.size
    return Place(
        cos=(at * angles).cos().bfloat16(),
        sin=(at * angles).sin().bfloat16(),
        slot=torch.tensor([at], device=device),
        mask_1S=torch.arange(slots, device=device)[None] <= at,
    )


def forward(
    x_1D: Tensor, layer: StepLayer, case: Case, attention: Attention, place: Place
) -> Tensor:
    """What passes make of a layer for one token, called op by op."""
    a = attention
    _, q, k, v = normed_linears(x_1D, None, layer.gain_D, EPS, layer.qkv, [None] * 3)
    heads = rope_attention(
        q.view(1, a.H, a.size), k.view(1, a.N, a.size), v.view(1, a.N, a.size),
        place.cos, place.sin, place.slot, layer.keys, layer.values, place.mask_1S,
        a.size**-0.5, *layer.head_gains, EPS,
    )  # fmt: skip
    (out_1D,) = linears(heads.view(1, -1), [layer.out_DH], [None])
    total_1D, n_1D, logits_1E = normed_linears(
        out_1D, x_1D, layer.experts_gain_D, EPS, [layer.router_ED], [None]
    )
    weights_1K, ids_1K = route(logits_1E, case.K, renormalize=True)
    w = layer.experts
    return experts_onto(total_1D, n_1D, weights_1K, ids_1K, w.w13_EFD, w.w2_EDI)


@torch.inference_mode()
def measure(name: str, layers: int, slots: int, device: torch.device) -> Step:
    """Time a step of so many layers of the named model; as many as memory holds, if those are
    fewer. Raises AssertionError if launches that overlap give another result than one by one."""
    case, attention = LAYERS[name], ATTENTION[name]
    g = torch.Generator(device=device).manual_seed(0)
    x_1D = torch.empty(1, case.D, dtype=torch.bfloat16, device=device).normal_(generator=g)
    place = make_place(attention, slots, device)
    made = [make_layer(case, attention, slots, g)]
    fit = 1 + int(REST * free_bytes(device) // made[0].experts.nbytes)
    made += [make_layer(case, attention, slots, g) for _ in range(min(layers, fit) - 1)]

    def run(wait: bool = False) -> Tensor:
        x = x_1D
        for layer in made:
            x = forward(x, layer, case, attention, place)
            if wait:
                torch.cuda.synchronize()
        return x

    if device.type != "cuda":
        return _step(name, slots, made, time_replays(run, len(made), device), [])
    want = run(wait=True)
    replay, (got,) = capture([run], rounds=1)
    replay()
    assert torch.equal(got, want), "launches that overlap give another result than one by one"
    timing = time_replays(replay, len(made), device)
    return _step(name, slots, made, timing, _launches(replay, len(made)))


def _step(
    name: str, slots: int, made: Sequence[StepLayer], timing: Timing, launches: list[Launch]
) -> Step:
    return Step(
        layer=name, layers=len(made), slots=slots, us=timing.us, low_us=timing.low_us,
        high_us=timing.high_us, launches=launches,
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
    firsts = [i for i, (name, *_) in enumerate(ordered) if name.startswith("tiny_up")]
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
    lines = [
        f"{step.layer}, one token, {step.layers} layers, {step.slots} slots: "
        f"{step.us:.2f} µs a layer ({step.low_us:.2f} to {step.high_us:.2f})"
    ]
    if step.launches:
        rows = [["launch", "begins, µs", "ends, µs", "after the one before"]]
        after = [""]  # nobody knows when the one before the first has ended
        after += [f"{b.end_us - a.end_us:.2f}" for a, b in itertools.pairwise(step.launches)]
        for launch, gap in zip(step.launches, after, strict=True):
            name = launch.name.split("(")[0]
            rows.append([name, f"{launch.begin_us:.2f}", f"{launch.end_us:.2f}", gap])
        lines.append(aligned(rows))
    return "\n".join(lines)

"""What there is to tell of captured calls: graphs, sizes, memory, and why others have none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moe_ops.graphs.runner import Size


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketReport:
    """One bucket: the calls that it served, the memory of its graph, or why it has none."""

    tokens: int
    hits: int
    bytes: int
    refusal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeReport:
    """Calls of one size: the shapes of what is copied for a graph, how often it came, how many
    calls a graph served, the memory of the graph, and why there is none if it cannot be captured.
    """

    shapes: tuple[tuple[int, ...], ...]
    calls: int
    replays: int
    bytes: int
    refusal: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardReport:
    """Forwards, or prompts of `generate`, of one size, [sequences, tokens]: how often it came, how
    many calls a graph served, the memory of the graph, and why there is none where one could not be
    captured."""

    batch: int
    tokens: int
    masked: bool
    calls: int
    replays: int
    bytes: int
    refusal: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WideReport:
    """Steps of up to so many tokens, which check candidates: how many there were, the memory of
    their graph, and why there is none where one could not be captured."""

    tokens: int
    steps: int
    captured: bool
    bytes: int
    refusal: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsReport:
    """The buffers and the graphs for one size of `generate`: its steps so far, its cache, the
    memory of the graph of a step or why there is none, its graphs of prompts and how many these
    served, each size of prompts, and of steps of several tokens."""

    rows: int
    slots: int
    steps: int
    captured: bool
    cache_bytes: int
    prompt_graphs: int
    prompts_replayed: int
    bytes: int = 0
    refusal: str | None = None
    prompts: tuple[ForwardReport, ...] = ()
    wide: tuple[WideReport, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Calls for which nothing is captured, of whatever size, and why."""

    what: str  # such as "forward"
    calls: int
    reason: str


@dataclass(frozen=True, slots=True)
class GraphReport:
    """The CUDA graphs of a compiled model, and why others are missing: sizes of its forwards, and
    the buffers of `generate` with their steps and prompts; of a backend its calls, of a function
    its buckets. Those used last are at the end."""

    forwards: tuple[ForwardReport, ...] = ()
    generation: tuple[StepsReport, ...] = ()
    calls: tuple[SizeReport, ...] = ()
    buckets: tuple[BucketReport, ...] = ()
    refusals: tuple[Refusal, ...] = ()

    def __str__(self) -> str:
        lines = [_forward("forward", f) for f in self.forwards]
        for steps in self.generation:
            lines.append(_steps(steps))
            lines += [f"  {_forward('prompt', p)}" for p in steps.prompts]
            lines += [f"  {_wide(w)}" for w in steps.wide]
        lines += [
            f"call of {_shapes(s.shapes)}: {s.calls} calls, {_graph(s.replays, s.bytes, s.refusal)}"
            for s in self.calls
        ]
        lines += [
            f"bucket of {b.tokens} tokens: {_graph(b.hits, b.bytes, b.refusal)}"
            for b in self.buckets
        ]
        lines += [f"{r.what}: {r.calls} calls, no graph, {r.reason}" for r in self.refusals]
        return "\n".join(lines or ["no graphs yet"])


def of_sizes(sizes: Iterable[tuple[Any, Size]]) -> tuple[ForwardReport, ...]:
    """The reports of sizes, whose keys have sequences, tokens and whether there is a mask behind
    the name of the attention."""
    return tuple(
        ForwardReport(
            batch=key[1],
            tokens=key[2],
            masked=key[3],
            calls=size.seen,
            replays=size.replays,
            bytes=size.bytes,
            refusal=size.refusal,
        )
        for key, size in sizes
    )


def refusals(what: str, counted: Iterable[tuple[str, int]]) -> tuple[Refusal, ...]:
    """What was refused, from reasons and the number of calls of each."""
    return tuple(Refusal(what=what, calls=n, reason=reason) for reason, n in counted)


def _forward(what: str, f: ForwardReport) -> str:
    size = f"{f.batch} x {f.tokens}{', masked' if f.masked else ''}"
    return f"{what} {size}: {f.calls} calls, {_graph(f.replays, f.bytes, f.refusal)}"


def _steps(s: StepsReport) -> str:
    step = "captured" if s.captured else "uncaptured"
    if s.bytes:
        step = f"{step} in {_mib(s.bytes)}"
    if s.refusal:
        step = f"{step}, {s.refusal}"
    return (
        f"generate, {s.rows} rows of {s.slots} slots: {s.steps} steps, {step}; "
        f"{s.prompt_graphs} graphs of prompts served {s.prompts_replayed}; "
        f"cache of {_mib(s.cache_bytes)}"
    )


def _wide(w: WideReport) -> str:
    step = f"captured in {_mib(w.bytes)}" if w.captured else "uncaptured"
    step = f"{step}, {w.refusal}" if w.refusal else step
    return f"steps of up to {w.tokens} tokens: {w.steps}, {step}"


def _graph(replays: int, nbytes: int, refusal: str | None) -> str:
    found = f"{replays} by a graph of {_mib(nbytes)}" if replays or nbytes else "no graph"
    return f"{found}, {refusal}" if refusal else found


def _shapes(shapes: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join(" x ".join(map(str, shape)) or "()" for shape in shapes) or "nothing"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"

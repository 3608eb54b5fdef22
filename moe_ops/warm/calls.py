"""Calls of a model that fill the caches of compiled code, and what they left there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from moe_ops.compiler import compile
from moe_ops.warm.caches import Held, held_by, total


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a model that compiles what later ones of its like need."""

    name: str
    run: Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a call took, the graphs that it compiled and had from a cache, and what it built."""

    name: str
    seconds: float
    compiled: int
    cached: int
    built: Held

    @property
    def is_warm(self) -> bool:
        return not self.compiled and not self.built.libraries and not self.built.kernels


def calls_of(model: nn.Module, batch: int, tokens: Sequence[int], more: int | None) -> list[Call]:
    """Forwards of sequences of these lengths and of one token, with a cache and without, and, for
    `more` tokens after each, `generate`."""
    fast: Any = compile(model)
    device = next(model.parameters()).device
    calls = []
    for length in dict.fromkeys((*tokens, 1)):
        ids = torch.ones(batch, length, dtype=torch.int64, device=device)
        of = f"{batch} x {length}"
        for use_cache, with_cache in ((True, ""), (False, ", no cache")):
            run = _forward(fast, ids, use_cache)
            calls.append(Call(name=f"forward of {of}{with_cache}", run=run))
        if more is not None and length in tokens:
            calls.append(Call(name=f"{more} tokens after {of}", run=_steps(fast, ids, more)))
    return calls


def _forward(fast: Any, ids: torch.Tensor, use_cache: bool) -> Callable[[], object]:
    return lambda: fast(input_ids=ids, use_cache=use_cache)


def _steps(fast: Any, ids: torch.Tensor, more: int) -> Callable[[], object]:
    return lambda: fast.generate(ids, max_new_tokens=more, min_new_tokens=more, do_sample=False)


def do(call: Call, caches: Mapping[str, Path]) -> Done:
    """Run a call, and say what came of it."""
    before, graphs = total(held_by(caches)), _graphs()
    start = time.perf_counter()
    with torch.inference_mode():
        call.run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    compiled, cached = (now - then for now, then in zip(_graphs(), graphs, strict=True))
    built = total(held_by(caches)).since(before)
    return Done(name=call.name, seconds=seconds, compiled=compiled, cached=cached, built=built)


def _graphs() -> tuple[int, int]:
    """How many graphs Inductor compiled so far, and how many it took from its caches."""
    of = counters["inductor"]
    return of["fxgraph_cache_miss"] + of["fxgraph_cache_bypass"], of["fxgraph_cache_hit"]


def text(done: Sequence[Done], caches: Mapping[str, Path], before: Mapping[str, Held]) -> str:
    """A table of calls, one of caches, and whether all came from these."""
    rows: list[tuple[str, ...]] = [
        ("", "seconds", "graphs compiled", "from caches", "C++ built", "Triton built")
    ]
    for one in done:
        counts = (one.compiled, one.cached, one.built.libraries, one.built.kernels)
        rows.append((one.name, f"{one.seconds:.1f}", *map(str, counts)))
    now = held_by(caches)
    places: list[tuple[str, ...]] = [("cache", "files", "MB", "new MB", "folder")]
    for name, folder in caches.items():
        new = now[name].since(before[name]).bytes
        sizes = f"{now[name].files}", f"{now[name].bytes / 1e6:.1f}", f"{new / 1e6:.1f}"
        places.append((name, *sizes, str(folder)))
    last = (
        "all of it came from the caches"
        if all(one.is_warm for one in done)
        else "what was compiled and built now comes from the caches next time"
    )
    return "\n".join([*_aligned(rows), "", *_aligned(places), "", last])


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines: the first column to the left, numbers to the right, the last as it is if it
    is a folder."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if rows[0][-1] == "folder":
        widths[-1] = 0
    cells = [
        [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]  # both to a width
        for row in rows
    ]
    return ["  ".join(line).rstrip() for line in cells]

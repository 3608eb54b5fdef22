"""An estimate as a short text for a terminal, and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from moe_ops.estimate.fit import BESIDE, LAYERS, ONCE, ROWS, STATES, WAITS
from moe_ops.estimate.measured import Rates
from moe_ops.estimate.reckon import Duration, Estimate, Row
from moe_ops.estimate.work import CACHE, EXPERTS, HEAD, LINEARS, Work

WIDTH = 80
SMALL = 0.01  # a part of a smaller share is left out
# What a step waits for, in the words of the last column.
LIMITS = {
    EXPERTS: "experts", LINEARS: "linears", HEAD: "head", CACHE: "cache", WAITS: "launches",
    BESIDE: "host", LAYERS: "layers", STATES: "states", ROWS: "rows", ONCE: "host",
}  # fmt: skip


def text(found: Estimate, note: str = "") -> str:
    """Some twenty lines, with a note of the caller's at their end."""
    return "\n".join([*_lines(found), *_wrapped(note)])


def as_json(found: Estimate) -> dict[str, Any]:
    """All that was reckoned."""
    figures = asdict(found)
    for row, own in zip(found.rows, figures["rows"], strict=True):
        own["tokens_per_s"] = row.tokens_per_s(row.step.ms)
        own["low_tokens_per_s"] = row.tokens_per_s(row.step.high_ms)
        own["high_tokens_per_s"] = row.tokens_per_s(row.step.low_ms)
        own["limit"] = row.step.limit[0]
    return figures


def _lines(found: Estimate) -> Iterator[str]:
    asked, sizes = found.asked, found.asked.sizes
    yield f"{sizes.model}, {sizes.depth} layers, on one {found.device}"
    yield from _wrapped(_ours(found))
    yield from _wrapped(_memory(found))
    yield ""
    yield f"a step, {asked.prompt + asked.tokens // 2} tokens in the cache"
    known = any(row.measured or row.stock for row in found.rows)
    head = f"{'batch':>6}{'ms':>9}{'floor':>9}{'tokens/s':>10}{'range':>16}"
    yield head + (f"{'measured':>10}{'stock':>7}" if known else "") + "  limited by"
    for row in found.rows:
        yield _step(row, known)
    yield ""
    yield f"a prompt of {asked.prompt} tokens, until its first new token"
    yield f"{'batch':>6}{'ms':>9}{'floor':>9}{'tokens/s':>10}{'range, ms':>16}  limited by"
    for row in found.rows:
        yield _prompt(row, asked.prompt)
    yield ""
    yield f"of a step, ms (the least that it takes), without parts below {SMALL:.0%}"
    for row in found.rows:
        yield from _wrapped(f"batch {row.batch}: {_parts(row.step, found.rates)}")
    yield ""
    yield from _wrapped(_range(found))
    for guess in found.guesses:
        yield from _wrapped(f"guess: {guess}")


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(
        line, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _ours(found: Estimate) -> str:
    """What runs on ops of ours, and in which formats."""
    sizes, formats = found.asked.sizes, found.asked.formats
    moe = [x for x in sizes.layers if x.experts is not None]
    layers = sum(x.count for x in moe)
    ours = sum(x.count for x in moe if x.experts and not x.experts.refusal)
    routers = sum(x.count for x in moe if x.experts and x.experts.routed)
    steps = "not " if sizes.refusal else ""
    return (
        f"on our ops: experts of {ours} of {layers} MoE layers, {routers} routers; generate is "
        f"{steps}run by our steps; experts in {formats.experts}, linear layers in "
        f"{formats.linears}, head in {formats.head}"
    )


def _memory(found: Estimate) -> str:
    most = max(found.rows, key=lambda row: row.cache_bytes)
    weights, room = found.weight_bytes, found.rates.memory
    line = (
        f"weights {weights / 1e9:.1f} GB, cache at batch {most.batch} {most.cache_bytes / 1e9:.2f} "
        f"GB, memory {room / 1e9:.0f} GB"
    )
    if weights + most.cache_bytes <= room:
        return line
    return f"{line}: IT DOES NOT FIT; reckoned as if it did"


def _step(row: Row, known: bool) -> str:
    step = row.step
    low, high = row.tokens_per_s(step.high_ms), row.tokens_per_s(step.low_ms)
    line = (
        f"{row.batch:>6} {_n(step.ms):>8} {_n(step.floor_ms):>8}"
        f" {_n(row.tokens_per_s(step.ms)):>9} {f'{_n(low)} to {_n(high)}':>15}"
    )
    if known:
        line += "".join(
            f" {'-' if value is None else _n(value):>{width}}"
            for value, width in ((row.measured, 9), (row.stock, 6))
        )
    return f"{line}  {_limit(step)}"


def _prompt(row: Row, length: int) -> str:
    prompt = row.prompt
    return (
        f"{row.batch:>6} {_n(prompt.ms):>8} {_n(prompt.floor_ms):>8}"
        f" {_n(row.batch * length / prompt.ms * 1e3):>9}"
        f" {f'{_n(prompt.low_ms)} to {_n(prompt.high_ms)}':>15}  {_limit(prompt)}"
    )


def _limit(duration: Duration) -> str:
    part, share = duration.limit
    return f"{LIMITS[part]} {share:.0%}"


def _parts(duration: Duration, rates: Rates) -> str:
    work = {own.part: own for own in duration.work}
    return ", ".join(
        f"{part} {ms:.2f}" + (f" ({_least(work[part], rates)})" if part in work else "")
        for part, ms in duration.parts.items()
        if ms >= SMALL * duration.ms
    )


def _least(work: Work, rates: Rates) -> str:
    by_bytes = work.bytes / rates.bytes_per_second * 1e3 >= 0.99 * work.floor_ms
    return f"{work.floor_ms:.2f} by {'bytes' if by_bytes else 'operations'}"


def _range(found: Estimate) -> str:
    wider = " Each guess widens it." if found.guesses else ""
    if not found.runs:
        return (
            "range: a guess of -30 to +40 % of the time, as no runs on such a device are shipped. "
            f"The experts were measured here.{wider}"
        )
    return (
        f"range: that in which nine of ten of {found.runs} measured runs of {found.models} models "
        f"lay, each reckoned without its own model's figures.{wider}"
    )


def _n(value: float) -> str:
    """A number in three digits or more."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}".removesuffix(".")

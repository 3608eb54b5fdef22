"""Tiles of the expert kernels for a layer: from those of the tables, changed one size at a time.

The tables of `triton_tiles.py` and `triton_streams.py`, both in `moe_ops/backends/`, hold what this
finds on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from moe_ops.backends import triton_paths
from moe_ops.backends.triton import run_experts, tiles_of
from moe_ops.backends.triton_support import weight_of
from moe_ops.bench import progress
from moe_ops.bench.cells import SEED, Grid, fill, make_turns, untimed
from moe_ops.bench.contenders import Contender
from moe_ops.bench.formats import spelled
from moe_ops.bench.inputs import Routed, Weights
from moe_ops.bench.rates import Rates
from moe_ops.kernels.triton import Weight
from moe_ops.ops import experts
from moe_ops.ops.experts import ExpertsCall
from moe_ops.testing import Case

KERNELS = ("tiny", "rows", "grouped")
# The sizes of each product's tile, with what may be tried of them.
WARPS, STAGES = (4, 8), (2, 3, 4, 5, 6)
ROWS_SIZES: dict[str, tuple[int, ...]] = {
    "rows": (16, 32, 64, 128, 256), "step": (32, 64, 128, 256), "BN": (16, 32, 64, 128, 256),
    "stages": STAGES, "warps": WARPS,
}  # fmt: skip
TINY_SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "up": {"BI": (8, 16, 32, 64), "BD": (64, 128, 256), "up_stages": STAGES},
    "down": {"BG": (1, 2, 4, 8, 16), "BR": (4, 8, 16, 32), "BH": (64, 128, 256),
             "down_stages": STAGES},
}  # fmt: skip
# Of codes that stream through registers, of either product; parts only where they are no shares,
# and only of one token whether it is rounded where it is loaded, and the most registers.
STREAM_SIZES: dict[str, tuple[int, ...]] = {
    "S": (1, 2, 4, 8, 16), "MW": (1, 2, 4, 8), "MT": (1, 2, 4), "NT": (1, 2, 4),
    "C": (1, 2, 4, 8, 16), "ahead": (1, 2, 3, 4, 6, 8), "tokens_ahead": (1, 2, 3),
    "late": (False, True), "rounds": (False, True), "registers": (0, 128),
}  # fmt: skip
# Of codes that many rows an expert decode in registers, of both products.
CODES_SIZES: dict[str, tuple[int, ...]] = {
    "tokens": (16, 32, 64, 128, 256), "blocks": (1, 2),
}  # fmt: skip
Tiles = TypeVar("Tiles")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One choice of tiles: microseconds of a layer, or why there are none."""

    tiles: Any
    us: float | None
    wrong: str = ""


def around(kernel: str, product: str, tiles: Any) -> Iterator[Any]:
    """The tiles in which one size of a product is the next smaller or larger one."""
    of_product = hasattr(tiles, product)
    part = getattr(tiles, product) if of_product else tiles
    sizes = ROWS_SIZES if kernel == "rows" else TINY_SIZES[product]
    if hasattr(part, "ahead"):
        one = kernel == "tiny"
        of = {"C": one and product == "down", "rounds": one, "registers": one}
        sizes = {n: values for n, values in STREAM_SIZES.items() if of.get(n, True)}
    for name, values in sizes.items():
        now = getattr(part, name)
        below, above = [v for v in values if v < now], [v for v in values if v > now]
        for value in (*below[-1:], *above[:1]):
            changed = replace(part, **_fitting(part, name, value))
            yield replace(tiles, **{product: changed}) if of_product else changed


def _fitting(part: Any, name: str, value: int) -> dict[str, int]:
    """A size, and the steps ahead that tokens and codes are loaded as far as they go with it."""
    found = {name: value}
    if name == "ahead":
        found["tokens_ahead"] = min(part.tokens_ahead, value)
    elif name == "rounds" and value:
        found["tokens_ahead"] = 1
    elif name == "tokens_ahead" and part.rounds:
        found[name] = 1
    elif name == "tokens_ahead":
        found["ahead"] = max(part.ahead, value)
    return found


def around_codes(weight: Weight, tile: Any) -> Iterator[Any]:
    """The tiles of codes in which one size is the next smaller or larger one, with as many
    stages as fit: two or more, as a stage is given back when the next one has come."""
    from moe_ops.backends.triton_tiles import codes_tile

    for name, values in CODES_SIZES.items():
        at = values.index(getattr(tile, name))
        for value in (*values[:at][-1:], *values[at + 1 :][:1]):
            changed = codes_tile(replace(tile, **{name: value}), weight)
            if changed != tile and changed.stages > 1:
                yield changed


def others_of_float8(tile: Any) -> Iterator[Any]:
    """The other tiles of codes that are decoded to float8."""
    from moe_ops.backends.triton_tiles import FLOAT8_TILES, float8_tile

    return (other for sizes in FLOAT8_TILES if (other := float8_tile(*sizes)) != tile)


def climb(
    start: Tiles,
    neighbours: Callable[[Tiles], Iterator[Tiles]],
    measure: Callable[[Tiles], Tried],
    most: int,
) -> list[Tried]:
    """All that was tried, the fastest first: neighbours of the fastest so far, until none of them
    is faster or so many were tried. What is wrong or does not compile has no time.
    """
    found = {start: measure(start)}

    def rank(tried: Tried) -> float:
        return float("inf") if tried.us is None else tried.us

    while True:
        best = min(found.values(), key=rank)
        new = [tiles for tiles in neighbours(best.tiles) if tiles not in found]
        for tiles in new[: most - len(found)]:
            found[tiles] = measure(tiles)
        if min(found.values(), key=rank) is best or len(found) >= most:
            return sorted(found.values(), key=rank)


@torch.inference_mode()
def measure(
    grid: Grid, rates: Rates, case: Case, tokens: int, kernel: str, product: str, most: int
) -> list[Tried]:
    """Tiles of one product of a layer, which are checked before they are timed, as cells are."""
    g = torch.Generator(device=grid.device).manual_seed(SEED)
    turns = make_turns(grid, case, (tokens, grid.routings[0]), [], g)

    def time(tiles: Any) -> Tried:
        progress.tell(f"{case.name}, {tokens} tokens: {tiles}")
        contender = _contender(kernel, tiles)
        key = (case.name, tokens, grid.routings[0], contender.name)
        cell = fill(untimed(key, turns, rates), contender, turns, grid)
        return Tried(tiles=tiles, us=cell.us, wrong=cell.wrong)

    start = _start(kernel, turns.inputs[0])
    neighbours: Callable[[Any], Iterator[Any]] = functools.partial(around, kernel, product)
    if hasattr(start, "fold"):
        neighbours = others_of_float8
    elif kernel == "grouped":
        neighbours = functools.partial(around_codes, weight_of(_record(*turns.inputs[0])))
    found = climb(start, neighbours, time, most)
    progress.done()
    return found


def _contender(kernel: str, tiles: Any) -> Contender:
    def call(weights: Weights, routed: Routed) -> torch.Tensor:
        return run_experts(kernel, _record(weights, routed), tiles=tiles)

    return Contender(name=str(tiles), call=call)


def _record(weights: Weights, routed: Routed) -> ExpertsCall:
    given = (routed.x_TD, routed.weights_TK, routed.ids_TK, weights.w13_EFD, weights.w2_EDI)
    record: ExpertsCall = experts.call(*given, **weights.keywords)
    return record


def _start(kernel: str, inputs: tuple[Weights, Routed]) -> Any:
    """The tiles that a call takes by the tables. Raises ValueError if the kernel refuses it."""
    record = _record(*inputs)
    first = record.x_TD
    refusal = experts.backends[f"triton.{kernel}"].refusal("cuda", first.shape[0], record)
    if refusal is not None:
        raise ValueError(f"triton.{kernel} does not run this layer: it {refusal}")
    path = triton_paths.pick(kernel, record).path
    if not path.tiles:
        raise ValueError(f"triton.{path.name}, which runs this layer, takes no tiles")
    return tiles_of(kernel, record)


def table(case: Case, tokens: int, grid: Grid, found: list[Tried]) -> str:
    """A table of the tiles that were tried: the fastest first, and last what was wrong, with its
    reason."""
    lines = [f"{case.name}, {tokens} tokens {spelled(grid.quant)}".rstrip()]
    for tried in found:
        said = f"{tried.us:9.2f} us" if tried.us is not None else f"{'-':>9}   "
        lines.append(f"  {said}  {tried.tiles}{f'  {tried.wrong[:100]}' if tried.wrong else ''}")
    return "\n".join(lines)

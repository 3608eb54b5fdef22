"""The ten ways in which the Triton backends run a layer of experts, one row each.

A backend takes the first of its paths that does not refuse a call. `using` and the tables of `tune`
name a path behind its backend, such as "triton.grouped/wgmma"; `tiny` and `rows`, which are named
as their backends, "triton.tiny/tiny" and "triton.rows/rows".
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moe_ops.backends import triton_arithmetic as arithmetic
from moe_ops.backends.triton_device import refuse_all_but_hopper, refuse_gpu, unavailable
from moe_ops.backends.triton_hopper import (
    refuse_blocks,
    refuse_decoded,
    refuse_float8,
    refuse_many,
    refuse_registers,
    refuse_row_scales,
    refuse_stream,
    refuse_wgmma,
    refused_products,
)
from moe_ops.backends.triton_limits import least_of_float8, most_of_float8, tokens_of
from moe_ops.backends.triton_support import weight_of
from moe_ops.kernels.triton import most_streamed
from moe_ops.ops.experts import ExpertsCall
from moe_ops.registry.invariance import INVARIANT, Refused

log = logging.getLogger("moe_ops")
WITHOUT_ADAPTERS = ("grouped/row_scales", "grouped/blocks", "grouped/float8", "grouped/registers")
NO_ADAPTERS = "adds no adapters"
OTHER = "computes rows otherwise than the paths for any number of them"
# Of invariant calls, of paths whose tiles are others then.
TILES_APART = {
    "tiny/stream": "streams:of_one_in_values", "rows/stream": "streams:of_few_in_values",
    "rows": "tiles:of_rows_in_values",
}  # fmt: skip
PRODUCTS, TABLES = "moe_ops.kernels.triton.experts.products.", "moe_ops.backends.triton_"


def _takes_all(call: ExpertsCall) -> str | None:
    return None


def _no_options(call: ExpertsCall) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """One way to run a layer: why it does not run a call that its backend supports, or None; what
    of `products/` runs it, as "module:function"; what gives the tiles that this takes, if it takes
    any, "tiles:function" of `triton_tiles.py` or "streams:function" of `triton_streams.py`; its
    other options; the most tokens that it runs, None for any number; and whether it runs one
    product of a call that it refuses, of which the plain kernel then runs the other."""

    name: str
    run: str
    refusal: Callable[[ExpertsCall], str | None] = _takes_all
    tiles: str = ""
    options: Callable[[ExpertsCall], dict[str, Any]] = _no_options
    most: Callable[[ExpertsCall], int | None] = lambda call: None
    runs_one_product: Callable[[ExpertsCall], bool] = lambda call: False
    device: Callable[[torch.device], str | None] = refuse_all_but_hopper

    @property
    def backend(self) -> str:
        return f"triton.{self.kernel}"

    @property
    def kernel(self) -> str:
        return self.name.partition("/")[0]

    @property
    def forced(self) -> str:
        """Its name for `using`."""
        return f"triton.{self.name}" if "/" in self.name else f"triton.{self.name}/{self.name}"

    @property
    def adapts(self) -> bool:
        """Whether its products add what adapters of their weights do."""
        return self.name not in WITHOUT_ADAPTERS

    def computes(self, call: ExpertsCall) -> str:
        """How it computes a row, as `triton_arithmetic.py` names it."""
        return arithmetic.ARITHMETIC[self.name](call)

    def tiles_of(self, *, invariant: bool) -> Callable[..., Any] | None:
        """What gives the tiles that it takes, if it takes any; of an invariant call others may."""
        of = TILES_APART.get(self.name, self.tiles) if invariant else self.tiles
        return _found(TABLES, of) if of else None

    def refuses(self, call: ExpertsCall, *, adapted: bool = False) -> str | None:
        """The refusal of a call of so many tokens, or None."""
        if adapted and not self.adapts:
            return NO_ADAPTERS
        refusal, most = self.refusal(call), self.most(call)
        if refusal is None and most is not None and call.x_TD.shape[0] > most:
            return f"takes at most {most} rows"
        return refusal

    def is_slower(self, call: ExpertsCall) -> str | None:
        """Why others are asked for a call of so many tokens that it runs, or None."""
        least = least_of(self, call)
        if least == math.inf:
            return "is no faster with small experts"
        return None if call.x_TD.shape[0] >= least else f"is for {least} rows or more"

    def missing(self, device: torch.device) -> str | None:
        """Why it runs no call on a GPU, or None."""
        return unavailable() or self.device(device)

    def launcher(self) -> Callable[..., Any]:
        """What runs it."""
        return _found(PRODUCTS, self.run)


@functools.cache
def _found(package: str, of: str) -> Callable[..., Any]:
    """A function by its name, "module:function"."""
    module, _, name = of.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(package + module), name)
    return found


def _one(call: ExpertsCall) -> int:
    return 1


def _most_streamed(call: ExpertsCall) -> int | None:
    """The most tokens, for the most rows an expert on average as `of_few` counts them."""
    weight = weight_of(call)
    return None if weight is None else tokens_of(most_streamed(weight), call)


def _one_by_wgmma(call: ExpertsCall) -> bool:
    return None in refused_products(call)


def _wgmma_of(call: ExpertsCall) -> dict[str, Any]:
    up, down = refused_products(call)
    return {"wgmma": (up is None, down is None)}


# In the order in which a backend asks its paths.
PATHS = (
    Path(
        name="tiny/stream", run="register_stream:run_one", refusal=refuse_stream,
        tiles="streams:of_one", most=_one,
    ),
    Path(
        name="tiny", run="tiny:run", tiles="tiles:of_tiny", device=refuse_gpu,
        most=lambda call: 1 if INVARIANT.get() else None,
    ),
    Path(
        name="rows/stream", run="register_stream:run", refusal=refuse_stream,
        tiles="streams:of_few", most=_most_streamed,
    ),
    Path(name="rows", run="rows:run", tiles="tiles:of_rows", device=refuse_gpu),
    Path(name="grouped/row_scales", run="grouped_row_scales:run", refusal=refuse_row_scales),
    Path(name="grouped/blocks", run="grouped_blocks:run", refusal=refuse_blocks),
    Path(
        name="grouped/float8", run="grouped_float8_tokens:run", refusal=refuse_float8,
        tiles="tiles:of_float8", most=most_of_float8,
    ),
    Path(
        name="grouped/registers", run="grouped_registers:run", refusal=refuse_registers,
        tiles="tiles:of_registers",
    ),
    Path(
        name="grouped/wgmma", run="grouped:run", refusal=refuse_wgmma, options=_wgmma_of,
        runs_one_product=_one_by_wgmma,
    ),
    Path(
        name="grouped/plain", run="grouped:run", refusal=refuse_decoded, device=refuse_gpu,
    ),
)  # fmt: skip
BY_FORCED = {path.forced: path for path in PATHS}


def least_of(path: Path, call: ExpertsCall) -> float:
    """The fewest tokens for which a backend takes a path, though it runs fewer."""
    return least_of_float8(call) if path.name == "grouped/float8" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The path of a call, and why those before it did not take the call."""

    path: Path
    refusals: dict[str, str]

    def __str__(self) -> str:
        return _with_reasons(self.path.name, self.refusals)


@functools.cache
def paths_of(kernel: str) -> tuple[Path, ...]:
    """The paths of a backend, by its name behind "triton."."""
    return tuple(path for path in PATHS if path.kernel == kernel)


def pick(kernel: str, call: ExpertsCall, *, adapted: bool = False) -> Taken:
    """The first path of a backend that does not refuse a call. A layer of which the kernel of
    `grouped/wgmma` runs one product takes that path, and the plain kernel runs the other one, for
    the reason that is given. Of an invariant call only paths of its arithmetic are asked. Raises
    NotImplementedError if all refuse."""
    refusals: dict[str, str] = {}
    others = other_arithmetics(kernel, call)
    for path in paths_of(kernel):
        refusal = others.get(path.name) or path.refuses(call, adapted=adapted)
        refusal = refusal or path.is_slower(call)
        if refusal is not None:
            refusals[path.name] = refusal
        takes = path.name not in others and (not adapted or path.adapts)
        if refusal is None or (takes and path.runs_one_product(call)):
            return Taken(path=path, refusals=refusals)
    left = [path for path in paths_of(kernel) if path.name not in others]
    if others and left and kernel == "rows" and left[-1].refusal(call) is None:
        return Taken(path=left[-1], refusals=refusals)  # of more rows than are best for it
    whys = "\n".join(f"  {name}: {reason}" for name, reason in refusals.items())
    raise NotImplementedError(f"no path of triton.{kernel} runs this call:\n{whys}")


def arithmetic_of(call: ExpertsCall) -> str:
    """The arithmetic by which a layer is computed, whatever the number of rows: that of the first
    path for many that does not refuse it. Codes that this would decode first are those of few rows,
    whose paths run any number."""
    why = arithmetic.refuse_dynamic(call)
    if why is not None:
        return Refused(why)
    call = arithmetic.in_place(call)
    if not _is_grouped(call):
        return arithmetic.of_rows(call)
    for path in paths_of("grouped"):
        name = path.computes(call)
        if path.refusal(call) is None and not isinstance(name, Refused):
            return name
    return Refused("no path for any number of rows runs it")


def _is_grouped(call: ExpertsCall) -> bool:
    """Whether the arithmetic is that of triton.grouped."""
    if not call.w_format:
        return True
    if call.x_format and refuse_many(call) is not None:
        return False
    return weight_of(call).inputs_8 or refuse_registers(call) is None


def arithmetic_of_backend(kernel: str, call: ExpertsCall) -> str:
    """The arithmetic of a backend, named without "triton.": that of the layer, if any of its paths
    computes so."""
    name = arithmetic_of(call)
    if isinstance(name, Refused) or paths_by(name, kernel, call):
        return name
    said = (path.computes(call) for path in paths_of(kernel))
    refused = next((one for one in said if isinstance(one, Refused)), None)
    return refused or Refused(f"computes rows otherwise than for any number of them ({name})")


def paths_by(name: str, kernel: str, call: ExpertsCall) -> list[Path]:
    """The paths of a backend that run a call by this arithmetic, of any number of rows or few."""
    call = arithmetic.in_place(call)
    found = (path for path in paths_of(kernel) if path.computes(call) == name)
    return [path for path in found if path.refusal(call) is None or path.runs_one_product(call)]


def other_arithmetics(kernel: str, call: ExpertsCall) -> dict[str, str]:
    """Why paths of a backend do not compute rows of a call as it is to be, if it is invariant."""
    if not INVARIANT.get():
        return {}
    wanted = arithmetic_of(call)
    return {
        path.name: f"is not batch invariant: {name}" if isinstance(name, Refused) else OTHER
        for path in paths_of(kernel)
        if (name := path.computes(call)) != wanted or isinstance(name, Refused)
    }


def told(kernel: str, call: ExpertsCall, *, adapted: bool = False) -> str:
    """In words, by which paths a backend runs a call, whose number of tokens may be unknown, and
    why not by those asked before them."""
    rows, ways, refusals = call.x_TD.shape[0], [], {}
    others = other_arithmetics(kernel, call)
    for path in paths_of(kernel):
        if path.name in others:
            refusals[path.name] = others[path.name]
            continue
        if adapted and not path.adapts:
            refusals[path.name] = NO_ADAPTERS
            continue
        most = path.most(call)
        known = isinstance(rows, int) and most is not None
        refusal = path.refuses(call) if known or most is None else path.refusal(call)
        if refusal is None and (isinstance(rows, int) or least_of(path, call) == math.inf):
            refusal = path.is_slower(call)
        if refusal is None and not isinstance(rows, int) and least_of(path, call) > 0:
            end = "rows on" if most is None else f"to {most} rows"
            ways.append(f"{path.name} from {least_of(path, call)} {end}")
            continue
        partly = refusal is not None and path.runs_one_product(call)
        if refusal is not None:
            refusals[path.name] = refusal
        if refusal is None or partly:
            ways.append(path.name if known or most is None else f"{path.name} up to {most} rows")
            if known or most is None:
                break
    return _with_reasons(", then ".join(ways), refusals)


def _with_reasons(ways: str, refusals: dict[str, str]) -> str:
    return "; ".join([ways, *(f"{name} {reason}" for name, reason in refusals.items())])


def of_tiles(kernel: str, tiles: Any) -> Path:
    """The path of a backend that takes these tiles."""
    from moe_ops.kernels.triton.experts.products.float8_tile import Float8Tile
    from moe_ops.kernels.triton.experts.products.grouped_tile import CodesTile
    from moe_ops.kernels.triton.experts.products.register_stream import Streams

    if isinstance(tiles, Float8Tile):
        return BY_FORCED["triton.grouped/float8"]
    if isinstance(tiles, CodesTile):
        return BY_FORCED["triton.grouped/registers"]
    stream, other = paths_of(kernel)
    return stream if isinstance(tiles, Streams) else other


@functools.cache
def tell(kernel: str, taken: str) -> None:
    """Log once which path a backend took, and why no other."""
    log.info("triton.%s runs by %s", kernel, taken)

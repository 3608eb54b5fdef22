"""A run of `bench layer` or `bench train` that goes on in the file of earlier ones, on a device of
the same name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from moe_ops.bench.cells import Key
from moe_ops.bench.contenders import OURS
from moe_ops.bench.results import Results, load
from moe_ops.planning.layers import ROUTINGS
from moe_ops.testing import Case

REMEDY = "choose another file for --json"


class Named(Protocol):
    """A layer, of which a file holds one of each name."""

    @property
    def name(self) -> str: ...


class Held(Protocol):
    """What files hold."""

    @property
    def layers(self) -> Mapping[str, Any]: ...


Found = TypeVar("Found", bound=Held)
Value = TypeVar("Value")


def before(path: Path, same: Mapping[str, Any], layers: Iterable[Case]) -> Results | None:
    """What a file of `bench layer` holds, as `held` says."""
    return held(path, load, same, layers)


def held(
    path: Path, load: Callable[[Path], Found], same: Mapping[str, Any], layers: Iterable[Named]
) -> Found | None:
    """What a file of layers holds, as `alike` says; its layers are those of the run, too."""
    found = alike(path, load, same)
    if found is None:
        return None
    for layer in layers:
        was = found.layers.get(layer.name, layer)
        if was != layer:
            raise ValueError(f"{path} holds results of {was}, this run is of {layer}; {REMEDY}")
    return found


def alike(path: Path, load: Callable[[Path], Value], same: Mapping[str, Any]) -> Value | None:
    """What a file holds; None if there is none. Raises ValueError, naming both, unless what is in
    `same` (fields of what `load` gives) is what the file has.
    """
    if not path.exists():
        return None
    try:
        found = load(path)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no results to add to: {error}; {REMEDY}") from None
    for name, now in same.items():
        was = getattr(found, name)
        if not _agree(was, now):
            raise ValueError(
                f"{path} holds results of {name} {_spelled(was)}, this run is of {name} "
                f"{_spelled(now)}; {REMEDY}"
            )
    return found


def _agree(held: Any, now: Any) -> bool:
    """Whether two runs agree on a field. Of versions only those of packages that both runs used
    must be equal."""
    if isinstance(held, dict):
        return all(held[package] == now[package] for package in held.keys() & now.keys())
    return bool(held == now)


def _spelled(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{package} {version}" for package, version in value.items())
    return str(value) if value else "(none)"


def timed(results: Results) -> frozenset[Key]:
    """The cells that need not be measured again."""
    return frozenset(cell.key for cell in results.cells if cell.us is not None)


def joined(earlier: Results, now: Results, missing: Set[Key]) -> Results:
    """A run that has measured nothing yet, with what a file holds but for the cells that it will
    measure. One that misses nothing adds only peers.
    """
    peers = earlier.peers | now.peers
    peer_floors = earlier.peer_floors | now.peer_floors
    if not missing:
        return replace(earlier, peers=peers, peer_floors=peer_floors)
    return replace(
        now,
        command=joined_commands(earlier.command, now.command),
        versions=earlier.versions | now.versions,
        earlier_rates=[*earlier.earlier_rates, earlier.rates],
        layers=earlier.layers | now.layers,
        cells=[c for c in earlier.cells if c.key not in missing],
        peers=peers,
        peer_floors=peer_floors,
    )


def joined_commands(earlier: str, now: str) -> str:
    """The commands of two runs, one a line. A command that was stopped and given again stands there
    once."""
    return "\n".join(dict.fromkeys([*earlier.splitlines(), now]))


def sort(results: Results) -> None:
    """The cells as one run would have measured them."""
    layers = list(results.layers)
    results.cells.sort(
        key=lambda c: (
            layers.index(c.layer), c.tokens, ROUTINGS.index(c.routing), c.contender != OURS,
        )
    )  # fmt: skip

"""What adapters of experts cost: the experts with one beside the same experts without.

In inference both run on several copies of the weights in turn, from CUDA graphs on a GPU. In
training both are called forward and backward with weights that are frozen, the one without adapters
for the gradients of tokens and routing weights, the other for those of A and B, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ops.bench import formats, progress
from moe_ops.bench.inputs import (
    MEMORY_SHARE,
    Routed,
    Weights,
    free_bytes,
    make_routed,
    make_weights,
)
from moe_ops.bench.tables import aligned
from moe_ops.bench.timing import time_calls, time_replays
from moe_ops.ops import experts, experts_adapted
from moe_ops.testing import TOL, Case, assert_close

SEED, MOST_COPIES = 0, 6
PLAIN = "floats"
Call = Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A layer to measure, and the rank of its adapter."""

    case: Case
    dtype: torch.dtype
    device: torch.device
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Microseconds of one layer with an adapter and without; and the backends that were picked."""

    format: str
    tokens: int
    trains: bool
    adapted_us: float
    plain_us: float
    backends: tuple[str, str]


def measure(
    asked: Asked, names: Sequence[str], tokens: Sequence[int], of_training: Sequence[int]
) -> Iterator[Beside]:
    """Each format at each number of tokens, in inference and then in training. Raises
    AssertionError if a result with adapters is not that of the definition."""
    for name in names:
        g = torch.Generator(device=asked.device).manual_seed(SEED)
        quant = None if name == PLAIN else formats.parse(name)
        one = make_weights(asked.case, asked.dtype, g, quant)
        most = int(MEMORY_SHARE * free_bytes(asked.device) // one.nbytes)
        layers = [one]
        for _ in range(max(0, min(MOST_COPIES - 1, most))):
            layers.append(make_weights(asked.case, asked.dtype, g, quant))
        adapters = [make_adapter(asked, g) for _ in layers]
        for trains, counts in ((False, tokens), (True, of_training)):
            for T in counts:
                progress.tell(f"{name}, {T} tokens{', trained' if trains else ''}")
                routed = make_routed(asked.case, T, "uniform", asked.dtype, g)
                place = (name, T, trains)
                yield (
                    _trained(place, routed, one, adapters[0])
                    if trains
                    else _inferred(place, routed, layers, adapters)
                )
    progress.done()


def make_adapter(asked: Asked, g: torch.Generator) -> dict[str, Tensor]:
    """An adapter of both weights, which adds about a tenth of what they give."""
    case, rank = asked.case, asked.rank

    def normal(rows: int, cols: int, std: float) -> Tensor:
        t = torch.empty(case.E, rows, cols, dtype=asked.dtype, device=asked.device)
        return t.normal_(std=std, generator=g)

    return {
        "scale_N": torch.full((1,), 0.1, device=asked.device),
        "a13_GrD": normal(rank, case.D, case.D**-0.5),
        "b13_GFr": normal(2 * case.I, rank, rank**-0.5),
        "a2_GrI": normal(rank, case.I, case.I**-0.5),
        "b2_GDr": normal(case.D, rank, rank**-0.5),
    }


def _arguments(weights: Weights, routed: Routed) -> dict[str, Any]:
    given = {"x_TD": routed.x_TD, "weights_TK": routed.weights_TK, "ids_TK": routed.ids_TK}
    return {**given, "w13_EFD": weights.w13_EFD, "w2_EDI": weights.w2_EDI, **weights.keywords}


def _backends(arguments: dict[str, Any], adapter: dict[str, Tensor]) -> tuple[str, str]:
    with_adapter = experts_adapted.call(**arguments, **adapter)
    return (
        experts_adapted.pick(with_adapter).name,
        experts.pick(experts.call(**arguments)).name,
    )


@torch.inference_mode()
def _inferred(
    place: tuple[str, int, bool],
    routed: Routed,
    layers: Sequence[Weights],
    adapters: Sequence[dict[str, Tensor]],
) -> Beside:
    given = [_arguments(weights, routed) for weights in layers]
    _check(given[0], adapters[0])
    adapted = [
        lambda a=a, of=of: experts_adapted(**a, **of) for a, of in zip(given, adapters, strict=True)
    ]
    plain = [lambda a=a: experts(**a) for a in given]
    times = [time_calls(calls, routed.x_TD.device) for calls in (adapted, plain)]
    return _beside(place, times, _backends(given[0], adapters[0]))


def _check(arguments: dict[str, Any], adapter: dict[str, Tensor]) -> None:
    """A few tokens by what is timed, and by the definition."""
    few = {n: t[:4] if n in ("x_TD", "weights_TK", "ids_TK") else t for n, t in arguments.items()}
    got, want = experts_adapted(**few, **adapter), experts_adapted.reference(**few, **adapter)
    assert_close(got, want, TOL["experts_adapted", got.dtype], "experts_adapted")


def _trained(
    place: tuple[str, int, bool], routed: Routed, weights: Weights, adapter: dict[str, Tensor]
) -> Beside:
    given = _arguments(weights, routed)
    leaves = {
        n: t.detach().clone().requires_grad_()
        for n, t in {**{n: given[n] for n in ("x_TD", "weights_TK")}, **adapter}.items()
        if isinstance(t, Tensor) and n != "scale_N"
    }
    grad_TD = torch.randn_like(routed.x_TD)
    of_layer = {n: leaves[n] for n in ("x_TD", "weights_TK")}

    def adapted() -> object:
        out = experts_adapted(**{**given, **adapter, **leaves})
        return torch.autograd.grad(out, [*leaves.values()], grad_TD)

    def plain() -> object:
        out = experts(**{**given, **of_layer})
        return torch.autograd.grad(out, [*of_layer.values()], grad_TD)

    times = [time_replays(run, 1, grad_TD.device).us for run in (adapted, plain)]
    return _beside(place, times, ("", ""))


def _beside(
    place: tuple[str, int, bool], times: Sequence[float], backends: tuple[str, str]
) -> Beside:
    name, T, trains = place
    adapted_us, plain_us = times
    return Beside(
        format=name, tokens=T, trains=trains, adapted_us=adapted_us, plain_us=plain_us,
        backends=backends,
    )  # fmt: skip


def table(asked: Asked, found: Sequence[Beside]) -> str:
    """A line for each number of tokens and format."""
    case = asked.case
    head = ["weights", "tokens", "step", "with µs", "without µs", "times", "backends"]
    rows = [head]
    for one in found:
        row = [one.format, str(one.tokens), "trained" if one.trains else "inferred"]
        row += [f"{one.adapted_us:.1f}", f"{one.plain_us:.1f}"]
        row += [f"{one.adapted_us / one.plain_us:.3f}", " / ".join(filter(None, one.backends))]
        rows.append(row)
    title = f"{case.name}: E={case.E} K={case.K} D={case.D} I={case.I}, rank {asked.rank}"
    return "\n".join([title, aligned(rows)])

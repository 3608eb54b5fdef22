"""Shared experts on a second stream of a GPU, beside routed ones, against the same in order."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops.bench.ep_shared import SharedExpert
from moe_ops.bench.tables import aligned
from moe_ops.bench.timing import Run, capture, time_turns
from moe_ops.layer import MoELayer
from moe_ops.passes.inductor.compiled import inductor_options
from moe_ops.testing import LAYERS, Case

BF16 = torch.bfloat16
LAYER_COUNT = 3  # one after the other: weights of one leave the cache before they are read again
COUNT = 400  # of runs, in turns
EAGER, CAPTURED = "eager", "captured"
COMPILED, BOTH = "compiled", "compiled, captured"
WAYS = (CAPTURED, EAGER, BOTH, COMPILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Median microseconds of a layer, its shared expert behind the routed ones and beside them."""

    layer: str
    shared: int  # the width of the shared expert
    mib: float  # of its weights
    tokens: int
    way: str
    in_order_us: float
    beside_us: float

    @property
    def ratio(self) -> float:
        """How many times the rate of the layer in order."""
        return self.in_order_us / self.beside_us


class Layers(nn.Module):
    """Equal layers of the same tokens, each with weights of its own."""

    def __init__(self, case: Case, width: int, device: torch.device) -> None:
        super().__init__()
        wide = Case(name=case.name, T=1, E=case.E, K=case.K, D=case.D, I=width)
        self.layers = nn.ModuleList(
            MoELayer(
                case.E, case.K, case.D, case.I, internal_gate=True,
                shared_experts=SharedExpert(wide, device), dtype=BF16, device=device,
            )
            for _ in range(LAYER_COUNT)
        )  # fmt: skip
        self.requires_grad_(False)

    def forward(self, x_TD: Tensor) -> list[Tensor]:
        return [layer(x_TD) for layer in self.layers]

    def asked(self, beside: bool) -> Callable[[Tensor], list[Tensor]]:
        """A call of the layers with their shared experts so, on the same weights."""
        layers: list[MoELayer] = [copy.copy(layer) for layer in self.layers]  # type: ignore[misc]
        for layer in layers:
            layer.beside = beside
        return lambda x_TD: [layer(x_TD) for layer in layers]


def measure_beside(args: argparse.Namespace) -> dict[str, Any]:
    """Time what the command line names, tell it as it comes, and return the figures."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    for spent in measure(args.layer, args.shared, args.tokens, args.ways, device):
        print(table([spent]), flush=True)
        found.append(spent)
    print(table(found))
    on = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return {"device": on, "beside": [asdict(s) | {"ratio": s.ratio} for s in found]}


def measure(
    names: Sequence[str], widths: Sequence[int], tokens: Sequence[int], ways: Sequence[str],
    device: torch.device,
) -> Iterator[Spent]:  # fmt: skip
    """Time layers by name, each with shared experts of these multiples of an expert's width."""
    for name in names:
        for times in widths:
            case, width = LAYERS[name], times * LAYERS[name].I
            layers = Layers(case, width, device)
            nbytes = 3 * case.D * width * BF16.itemsize
            for T in tokens:
                x_TD = torch.randn(T, case.D, device=device).to(BF16)
                for way in ways:
                    us = _times(layers, x_TD, way)
                    yield Spent(
                        layer=name, shared=width, mib=nbytes / 2**20, tokens=T, way=way,
                        in_order_us=us[0], beside_us=us[1],
                    )  # fmt: skip


@torch.inference_mode()
def _times(layers: Layers, x_TD: Tensor, way: str) -> list[float]:
    """Microseconds of a layer, in order and beside."""
    device, runs = x_TD.device, []
    for beside in (False, True):
        call = _call(layers, x_TD, way, beside)
        for _ in range(3):
            call()
        if way in (CAPTURED, BOTH) and device.type == "cuda":
            call, _ = capture([call], 1)
        runs.append(call)
    count = COUNT if device.type == "cuda" else 1
    return [found.us / LAYER_COUNT for found in time_turns(runs, count, device)]


def _call(layers: Layers, x_TD: Tensor, way: str, beside: bool) -> Run:
    if way in (EAGER, CAPTURED):
        asked = layers.asked(beside)
        return lambda: asked(x_TD)
    torch._dynamo.reset()
    options: dict[str, Any] = inductor_options(beside=beside)
    run: Callable[[Tensor], Any] = torch.compile(layers, options=options, dynamic=False)
    return lambda: run(x_TD)


def table(found: Sequence[Spent]) -> str:
    """A line for each way of each layer."""
    cells = [("layer", "shared", "MiB", "tokens", "way", "in order", "beside", "ratio")]
    cells += [
        (
            s.layer, str(s.shared), f"{s.mib:.0f}", str(s.tokens), s.way,
            f"{s.in_order_us:.1f} us", f"{s.beside_us:.1f} us", f"{s.ratio:.3f}",
        )
        for s in found
    ]  # fmt: skip
    return aligned(cells)

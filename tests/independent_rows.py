"""What becomes of a row depends on that row alone: the property, for any way to run `experts`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from moe_ops.ops.experts import ExpertsCall
from moe_ops.quant import packing
from moe_ops.quant.formats import TENSOR, Format
from moe_ops.quant.schemes import SCHEMES
from moe_ops.testing import Case, make_layer

# Every pair of formats of weights and inputs of which there is a scheme.
PAIRS = [pair for scheme in SCHEMES.values() for pair in scheme.pairs() if pair[1]]
CASE = Case(name="mates", T=6, E=4, K=2, D=128, I=128)
KEPT = 2  # rows that stay as they are, the first ones


def call_of(
    weights: str, inputs: str, dtype: torch.dtype, case: Case = CASE, device: str = "cpu"
) -> ExpertsCall:
    """A layer in a pair of formats; scales of inputs are static where one serves the tensor."""
    layer, format = make_layer(case, dtype), Format.of(weights)
    parts: dict[str, Tensor] = {}
    for name, axes, w_EFD in (("w13", "FD", layer.w13_EFD), ("w2", "DI", layer.w2_EDI)):
        common_E = None
        if format.has_global_scale:
            common_E = torch.stack([packing.global_scale_of(w, format) for w in w_EFD])
            parts[f"global_scale{name[1:]}_E"] = common_E.to(device)
        done = packing.quantize(w_EFD, format, global_scale=common_E)
        parts[f"{name}_E{axes}"] = done.values.to(device)
        parts[f"{name}_scale_E{axes[0]}G"] = done.scale.to(device)
        if done.zero is not None:
            parts[f"{name}_zero_E{axes[0]}G"] = done.zero.to(device)
    if Format.of(inputs).group == TENSOR:
        parts |= {name: torch.full((1,), 0.02, device=device) for name in ("x_scale", "h_scale")}
    x_TD, weights_TK, ids_TK = (t.to(device) for t in (layer.x_TD, layer.weights_TK, layer.ids_TK))
    return ExpertsCall(x_TD, weights_TK, ids_TK, **parts, w_format=weights, x_format=inputs)


def beside_others(call: ExpertsCall) -> Iterator[tuple[str, ExpertsCall, slice]]:
    """The call with other rows in place of those that are not kept, and where the kept ones are."""
    x_TD, first = call.x_TD, slice(None, KEPT)

    def others(x_RD: Tensor | float) -> ExpertsCall:
        changed_TD = x_TD.clone()
        changed_TD[KEPT:] = x_RD
        return replace(call, x_TD=changed_TD)

    yield "replaced", others(torch.randn_like(x_TD[KEPT:])), first
    yield "scaled", others(x_TD[KEPT:] * 1000), first
    yield "zero", others(0.0), first
    for name in ("nan", "inf"):
        poisoned = replace(call, x_TD=x_TD.clone())
        poisoned.x_TD[-1, 3] = float(name)
        yield name, poisoned, first
    flip = {"x_TD": x_TD, "weights_TK": call.weights_TK, "ids_TK": call.ids_TK}
    flipped = replace(call, **{name: t.flip(0) for name, t in flip.items()})
    yield "in another order", flipped, slice(None, -KEPT - 1, -1)


def rows_of(t: Tensor, rows: slice) -> Tensor:
    """The bytes of rows, which a slice may take backwards."""
    index = torch.arange(t.shape[0], device=t.device).cpu().tolist()[rows]
    return t[index].contiguous().view(torch.uint8)


def assert_independent(run: Callable[[ExpertsCall], Tensor], call: ExpertsCall) -> None:
    """Raise unless the results of the kept rows have the same bits whatever stands beside them."""
    want = rows_of(run(call), slice(None, KEPT))
    for name, changed, rows in beside_others(call):
        assert torch.equal(rows_of(run(changed), rows), want), name

"""What FlashInfer's backends ask of a call before they say that they can run it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moe_ops.backends.flashinfer.package import Capability, Machine, capability
from moe_ops.ops.experts import ExpertsCall
from moe_ops.registry.backend import Multiples, is_aligned
from moe_ops.registry.gradients import needs_grad

READS = (
    "b13_EF", "b2_ED", "expert_map", "expert_offset", "kind", "gated",
    "w13_scale_EFG", "w2_scale_EDG", "global_scale13_E", "global_scale2_E",
    "x_scale", "h_scale", "w_format", "x_format",
)  # fmt: skip

# FlashInfer's names of activations, by ours and whether there is a gate.
ACTIVATIONS = {
    ("silu", True): "Swiglu",
    ("gelu_tanh", True): "GegluTanh",
    ("relu2", False): "Relu2",
}
BFLOAT16 = (torch.bfloat16,)
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One pair of formats that a backend multiplies: where, and which calls."""

    capabilities: tuple[Capability, ...]
    dtypes: tuple[torch.dtype, ...] = BFLOAT16
    hidden: int = 8  # of which the model's width must be a multiple
    width: int = 8  # and the expert's
    static_inputs: bool = False
    one_scale: bool = False  # for all experts, of the tokens
    biases: bool = False
    kinds: tuple[str, ...] = ("Swiglu", "GegluTanh", "Relu2")


Formats = tuple[str, str]  # of weights and inputs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fits:
    """What fits a backend: the machine, and the ways by formats. It is looked up by its
    identity."""

    machine: Machine
    ways: Mapping[Formats, Way]

    def multiples(self, w_format: str, x_format: str, dtype: torch.dtype) -> Multiples | str:
        """The multiples that widths of a layer are to be, or why its formats are not run."""
        way = self.ways.get((w_format, x_format))
        if way is None:
            return self._formats(w_format, x_format)
        return Multiples(hidden=way.hidden, intermediate=way.width)

    def _formats(self, w_format: str, x_format: str) -> str:
        return f"runs {'; '.join(map(_said, self.ways))}; got {_said((w_format, x_format))}"

    def refusal(self, call: ExpertsCall) -> str | None:
        """Why a call cannot run: by the device, the package, the formats and the sizes, in this
        order; None if it can."""
        way = _way(self, call.w_format, call.x_format, call.x_TD.device)
        return way if isinstance(way, str) else _arguments(call, way) or _sizes(call, way)


@functools.cache
def _way(of: Fits, w_format: str, x_format: str, device: torch.device) -> Way | str:
    """The way of these formats on a device, or why there is none. Kept, as every call asks."""
    reason, formats = of.machine.refusal(device), (w_format, x_format)
    if reason is not None:
        return reason
    way, got = of.ways.get(formats), capability(device)
    if way is None:
        return of._formats(w_format, x_format)
    if got not in way.capabilities:
        wanted = " or ".join(f"{major}.{minor}" for major, minor in way.capabilities)
        assert got is not None
        return f"runs {_said(formats)} on compute capability {wanted}, got {got[0]}.{got[1]}"
    return way


def activation(call: ExpertsCall) -> str:
    """FlashInfer's name of the activation of a call that was not refused."""
    return ACTIVATIONS[call.kind, call.gated]


def _arguments(call: ExpertsCall, way: Way) -> str | None:
    c = call
    if torch.is_grad_enabled() and needs_grad(
        c.x_TD, c.weights_TK, c.w13_EFD, c.w2_EDI, c.b13_EF, c.b2_ED
    ):
        return "is not differentiable, and an argument requires grad"
    if c.x_TD.dtype not in way.dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in way.dtypes)
        return f"needs {wanted} tokens, got {c.x_TD.dtype}"
    if ACTIVATIONS.get((c.kind, c.gated)) not in way.kinds:
        known = (f"{kind}{'' if gated else ' without a gate'}"
                 for (kind, gated), name in ACTIVATIONS.items() if name in way.kinds)  # fmt: skip
        gate = "" if c.gated else " without a gate"
        return f"computes {', '.join(known)}; got {c.kind}{gate}"
    if not way.biases and not (c.b13_EF is c.b2_ED is None):
        return "has no biases in these formats"
    if (c.b13_EF is None) != (c.b2_ED is None):
        return "takes both biases or none"
    if way.static_inputs:
        if c.x_scale is None or c.h_scale is None:
            return "needs static scales of both inputs (x_scale, h_scale)"
        if way.one_scale and c.x_scale.numel() > 1:
            return "takes one x_scale for all experts, got one for each"
        global_scales = (c.global_scale13_E, c.global_scale2_E)
        if c.global_scale13_E is not None and c.global_scale13_E.dim() == 2:
            return "takes one global scale of gate and up, got one for each"
        if c.x_format == "nvfp4" and any(scale_E is None for scale_E in global_scales):
            return "needs the global scales of both products"
    return _memory(call)


def _memory(call: ExpertsCall) -> str | None:
    """Why kernels cannot read tensors as they lie in memory, or None. FlashInfer checks neither
    strides nor where a tensor begins: it would read something else, or end the process. Tokens
    that begin between two words are copied (`arguments.aligned`)."""
    c = call
    biases = [t for t in (c.b13_EF, c.b2_ED) if t is not None]
    stored = [t for t in (c.w13_EFD, c.w2_EDI, c.w13_scale_EFG, c.w2_scale_EDG) if t is not None]
    stored += biases
    for bias in biases:
        if bias.dtype != c.x_TD.dtype:
            return f"takes biases of the tokens' dtype, {c.x_TD.dtype}, got {bias.dtype}"
    if not all(t.is_contiguous() for t in (c.x_TD, *stored)):
        return "needs contiguous tokens, weights, scales and biases"
    if not all(map(is_aligned, stored)):
        return "needs weights, scales and biases that begin at a multiple of 16 bytes"
    return None


def _sizes(call: ExpertsCall, way: Way) -> str | None:
    D, I = call.x_TD.shape[1], call.widths[1]  # noqa: E741
    if D % way.hidden:
        return f"needs widths of the model that are multiples of {way.hidden}, got {D}"
    if I % way.width:
        return f"needs widths of the expert that are multiples of {way.width}, got {I}"
    return None


def _said(formats: Formats) -> str:
    weights, inputs = (name or "16-bit" for name in formats)
    return f"{weights} weights with {inputs} inputs"

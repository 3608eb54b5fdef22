"""`experts` by FlashInfer's b12x kernels: nvfp4 on the Blackwells of workstations."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_ops import arena
from moe_ops.backends.flashinfer import arguments, cutlass, fits, kept, orders, package
from moe_ops.backends.flashinfer.fits import READS, Way
from moe_ops.backends.flashinfer.options import CURRENT, current
from moe_ops.backends.flashinfer.stored import UP_GATE
from moe_ops.ops.experts import ExpertsCall, experts
from moe_ops.registry.backend import Rows
from moe_ops.registry.derived import Derived, alias

NAME = "flashinfer_b12x"
CAPABILITIES = ((12, 0), (12, 1))
WAYS = {
    ("nvfp4", "nvfp4"): Way(
        capabilities=CAPABILITIES, hidden=128, width=128, static_inputs=True,
        kinds=("Swiglu", "GegluTanh", "Relu2"),
    )
}  # fmt: skip
MACHINE = package.Machine(capabilities=CAPABILITIES, packages=(package.CUTE_DSL,), cuda=13)
FITS = fits.Fits(machine=MACHINE, ways=WAYS)
KINDS = {"Swiglu": "silu", "GegluTanh": "gelu_tanh", "Relu2": "relu2"}
FOLDED = "_folded_w1_alpha"  # of the wrapper: what it made of the first two factors
THRESHOLD = "cutlass_prefill_threshold"  # of the wrapper, where FlashInfer decides


def supports(call: ExpertsCall) -> str | None:
    reason = FITS.refusal(call)
    if reason is None and call.expert_map is not None:
        return "has no expert parallelism in nvfp4: every expert must be here"
    return reason


def preferred(call: ExpertsCall) -> int | None:
    """Below the threshold, unless the wrapper itself decides."""
    threshold = current().b12x_prefill_threshold
    return threshold - 1 if threshold and not current().upstream_prefill else None


@experts.backend(
    NAME,
    reads=READS,
    supports=supports,
    rows=Rows(preferred=preferred),
    devices=("cuda",),
    layout=UP_GATE,
)
def run(call: ExpertsCall) -> Tensor:
    """`experts` by a wrapper of the layer's own, as it keeps views of weights."""
    c = call
    if c.x_TD.shape[0] == 0:
        return c.x_TD.new_empty(c.x_TD.shape)
    with package.on(c.x_TD.device):
        return _run(c, _layer(c), arguments.routed(c))


def _run(call: ExpertsCall, layer: Layer, routed: arguments.Routed) -> Tensor:
    """A call of the wrapper, which has room for one at a time."""
    c = call
    with layer.lock:
        assert c.x_scale is not None and c.global_scale13_E is not None
        assert c.h_scale is not None and c.global_scale2_E is not None
        layer.factors.follow(c.x_scale, c.h_scale, c.global_scale13_E, c.global_scale2_E)
        w13_EFD, w2_EDI, w13_scale_EFG, w2_scale_EDG = layer.held
        with layer.runs.around(c.x_TD.shape[0], kept.tuning((NAME, layer.key))):
            out: Tensor = package.call(
                layer.wrapper.run,
                x=arguments.aligned(c.x_TD),
                w1_weight=w13_EFD,
                w1_weight_sf=orders.mma_view(w13_scale_EFG),
                w2_weight=w2_EDI,
                w2_weight_sf=orders.mma_view(w2_scale_EDG),
                token_selected_experts=arguments.only_here(routed.ids_TK, c.w13_EFD.shape[0]),
                token_final_scales=routed.weights_TK,
                w1_alpha=layer.scales.w13_global_scale_E,
                w2_alpha=layer.scales.w2_global_scale_E,
                fc2_input_scale=layer.scales.one,
                input_global_scale=layer.scales.x,
            )
        return out.clone()  # the buffer of all wrappers, which the next call overwrites


@dataclass(frozen=True, slots=True)
class Scales:
    """Factors of one layer at addresses that stay, made anew after the live ones were written to.
    The wrapper remembers what it made of them by address and version: it is written to where it is,
    as graphs read it, and no version tells of that."""

    w13_global_scale_E: Tensor
    w2_global_scale_E: Tensor
    x: Tensor
    one: Tensor
    prefill: tuple[Tensor, ...]  # the six of CUTLASS, if the wrapper hands it long prompts

    @staticmethod
    def of(call: ExpertsCall, prefill: bool) -> Scales:
        """Space for the scales of a layer."""
        E, device = call.w13_EFD.shape[0], call.x_TD.device
        w13_global_scale_E, w2_global_scale_E, x = (
            torch.empty(n, device=device) for n in (E, E, 1)
        )
        six = cutlass.nvfp4_scales(call) if prefill else []
        own = tuple(t.clone() if t.is_floating_point() else t for t in six)
        return Scales(w13_global_scale_E, w2_global_scale_E, x, torch.ones(1, device=device), own)

    def write(self, wrapper: Any, blocks: tuple[Tensor, Tensor], *live: Tensor) -> None:
        """Write the factors of live scales: those of both inputs and of both products. A calibrated
        scale of the second input would saturate its codes, so 1 stands for it."""
        x_scale, h_scale, global_scale13_E, global_scale2_E = live
        self.x.data.copy_(x_scale.max())
        self.w13_global_scale_E.data.copy_(global_scale13_E / x_scale)
        self.w2_global_scale_E.data.copy_(global_scale2_E / h_scale)
        folded_E = getattr(wrapper, FOLDED)
        if folded_E is not None:
            folded_E.copy_(self.w13_global_scale_E * self.x)
        six = cutlass.six_scales(live, blocks) if self.prefill else []
        for held, made in zip(self.prefill, six, strict=True):
            if held.data_ptr() != made.data_ptr():
                held.copy_(made)


@dataclass(frozen=True, slots=True)
class Layer:
    """A wrapper, and what it is given: aliases of weights and block scales (`held`), as it keeps
    views of them, which would keep a model alive that nobody uses any more. `factors`: what writes
    its scales. `lock`: of the stream whose buffers it has. `runs`: how it ran."""

    key: Hashable
    lock: threading.RLock
    wrapper: Any
    scales: Scales
    factors: Derived
    held: tuple[Tensor, ...]
    runs: kept.Runs = field(default_factory=kept.Runs)


def _weights(call: ExpertsCall) -> tuple[Tensor, ...]:
    assert call.w13_scale_EFG is not None and call.w2_scale_EDG is not None
    return call.w13_EFD, call.w2_EDI, call.w13_scale_EFG, call.w2_scale_EDG


_LAYERS: kept.Kept[Layer] = kept.Kept("a wrapper of FlashInfer's b12x")
_WORKSPACES: kept.Kept[dict[str, Any]] = kept.Kept("a workspace of FlashInfer's b12x")
PARTS = ("static_workspace", "dynamic_workspace")  # that a wrapper makes, and another one can share


def _layer(call: ExpertsCall) -> Layer:
    """The wrapper of a layer for the tokens of a call or more, made at its first call. All layers
    of the same sizes on a stream share one workspace, and layers of any size the output.

    A capture may run on a stream of its own, where no wrapper was made and none can be: its graph
    then has the buffers of a stream where the layer was called, beside whose calls it must not run.
    """
    c, options = call, current()
    D, I = c.widths  # noqa: E741
    device, threshold, tokens = c.x_TD.device, 0, kept.tokens_of(c.x_TD.shape[0], options)
    if options.upstream_prefill:
        threshold = options.b12x_prefill_threshold
    given = {
        "num_experts": c.w13_EFD.shape[0],
        "top_k": c.ids_TK.shape[1],
        "hidden_size": D,
        "intermediate_size": I,
        "use_cuda_graph": True,
        "max_num_tokens": tokens,
        "device": str(device),
        "activation": KINDS[fits.activation(c)],
        "quant_mode": "nvfp4",
    }
    alike = (arena.current_stream(device), threshold, *given.items())
    weights = _weights(c)
    key = (*alike, *(t.data_ptr() for t in weights))

    def make() -> Layer:
        wrapper = package.found("flashinfer.fused_moe", "B12xMoEWrapper")
        shared = _WORKSPACES.get(alike, dict)
        buffer = arena.take("FlashInfer b12x", tokens * D * 2, device)
        output = buffer.view((tokens, D), torch.bfloat16)
        all_given = {**given, **shared, "shared_output": output}
        if threshold:
            require_threshold(wrapper, threshold)
            all_given[THRESHOLD] = threshold
        held = w13_EFD, w2_EDI, w13_scale_EFG, w2_scale_EDG = tuple(map(alias, weights))
        own = replace(c, w13_scale_EFG=w13_scale_EFG, w2_scale_EDG=w2_scale_EDG)
        made = package.call(wrapper, **all_given)
        scales = Scales.of(own, prefill=bool(threshold))
        for part in PARTS:
            shared.setdefault(f"shared_{part}", getattr(made, f"_{part}"))
        if threshold:
            made.register_cutlass_prefill_weights(
                w1_q=w13_EFD, w2_q=w2_EDI, quant_scales=[*scales.prefill]
            )
        factors = Derived(partial(scales.write, made, (w13_scale_EFG, w2_scale_EDG)))
        return Layer(key, buffer.lock, made, scales, factors, held)

    found = _LAYERS.found(key)
    if found is None and kept.capturing():
        found = _LAYERS.similar(key)
    return found or _LAYERS.get(key, make, of=weights)


def require_threshold(wrapper: Any, threshold: int) -> None:
    """Raise RuntimeError unless the installed wrapper can hand long prompts to CUTLASS itself."""
    lacking = not package.takes(wrapper.__init__, THRESHOLD)
    if lacking or not hasattr(wrapper, "register_cutlass_prefill_weights"):
        raise RuntimeError(
            f"b12x_prefill_threshold={threshold} with upstream_prefill=True needs the keyword "
            f"{THRESHOLD} of B12xMoEWrapper and its register_cutlass_prefill_weights, which "
            f"{package.DISTRIBUTION} {package.version()} has not; install a later version that has "
            "them, or leave out upstream_prefill, and two backends share the calls"
        )


experts.needs(NAME, MACHINE.needs)
experts.rounds(NAME, FITS.multiples)
experts.remembers(NAME, CURRENT, aligned=True)

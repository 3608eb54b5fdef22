"""`experts` by FlashInfer's CuTe DSL kernels: 16-bit floats on Hopper, nvfp4 on Blackwell."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from moe_ops.backends.flashinfer import arguments, fits, kept, orders, package
from moe_ops.backends.flashinfer.fits import READS, Way
from moe_ops.backends.flashinfer.options import current
from moe_ops.backends.flashinfer.stored import CHUNKED
from moe_ops.ops.experts import ExpertsCall, experts
from moe_ops.quant.scales import one_input_scale

NAME = "flashinfer_cute_dsl"
HOPPER, BLACKWELL = ((9, 0),), ((10, 0), (10, 3))
WAYS = {
    ("", ""): Way(capabilities=HOPPER, dtypes=fits.HALVES, hidden=8, width=32),
    ("nvfp4", "nvfp4"): Way(capabilities=BLACKWELL, hidden=128, width=128, static_inputs=True),
}
MACHINE = package.Machine(capabilities=HOPPER + BLACKWELL, packages=(package.CUTE_DSL,))
FITS = fits.Fits(machine=MACHINE, ways=WAYS)
# What its kernels that sort tokens by experts are compiled for.
MOST_CHOICES, MOST_EXPERTS = 32, 2048


def supports(call: ExpertsCall) -> str | None:
    reason = FITS.refusal(call)
    if reason is not None:
        return reason
    K, share = call.ids_TK.shape[1], call.w13_EFD if call.expert_map is None else call.expert_map
    if K <= MOST_CHOICES and share.shape[0] <= MOST_EXPERTS:
        return None
    most = f"{MOST_CHOICES} choices of a token among {MOST_EXPERTS} experts"
    return f"sorts at most {most}, got {K} among {share.shape[0]}"


@experts.backend(
    NAME,
    reads=READS,
    supports=supports,
    devices=("cuda",),
    priority=-1,
    layout=CHUNKED,
)
def run(call: ExpertsCall) -> Tensor:
    """`experts` by the wrapper of its formats. It is given global ids and an offset."""
    if call.x_TD.shape[0] == 0:
        return call.x_TD.new_empty(call.x_TD.shape)
    tokens = kept.tokens_of(call.x_TD.shape[0], current())
    with package.on(call.x_TD.device):
        routed = arguments.routed(call)
        made = _wrapper(call, routed)
        measuring = kept.tuning((NAME, made.key, tokens))
        with made.runs.around(call.x_TD.shape[0], measuring):
            return (_run_nvfp4 if call.w_format else _run_floats)(call, routed, made.wrapper)


@dataclass(frozen=True, slots=True)
class Made:
    """A wrapper of layers alike, and how it ran."""

    key: Hashable
    wrapper: Any
    runs: kept.Runs = field(default_factory=kept.Runs)


_WRAPPERS: kept.Kept[Made] = kept.Kept("a wrapper of FlashInfer's CuTe DSL")


def _wrapper(call: ExpertsCall, routed: arguments.Routed) -> Made:
    """The wrapper of layers alike, made at their first call."""
    D, I = call.widths  # noqa: E741
    given = {
        "num_experts": routed.experts,
        "top_k": routed.ids_TK.shape[1],
        "hidden_size": D,
        "intermediate_size": I,
        "num_local_experts": call.w13_EFD.shape[0],
        "local_expert_offset": routed.offset,
        "output_dtype": call.x_TD.dtype,
        "activation_type": int(arguments.activation_type(call)),
        "use_fused_finalize": current().other_bits,
    }
    if call.w_format:
        given |= {"quant_mode": "w4a4", "use_cuda_graph": True, "device": str(call.x_TD.device)}
    name = "CuteDslMoEWrapper" if call.w_format else "CuteDslBf16MoEWrapper"

    key = (name, call.x_TD.device, *given.items())

    def make() -> Made:
        wrapper = package.found("flashinfer.fused_moe", name)
        return Made(key, package.call(wrapper, **given))

    return _WRAPPERS.get(key, make)


def _run_floats(call: ExpertsCall, routed: arguments.Routed, wrapper: Any) -> Tensor:
    out: Tensor = package.call(
        wrapper.run,
        x=arguments.aligned(call.x_TD),
        token_selected_experts=routed.ids_TK,
        token_final_scales=routed.weights_TK,
        w1_weight=call.w13_EFD,
        w2_weight=call.w2_EDI,
    )
    return out


def _run_nvfp4(call: ExpertsCall, routed: arguments.Routed, wrapper: Any) -> Tensor:
    c = call
    assert c.w13_scale_EFG is not None and c.w2_scale_EDG is not None
    assert c.x_scale is not None and c.global_scale13_E is not None
    assert c.h_scale is not None and c.global_scale2_E is not None
    x_scale, factors13_E = one_input_scale(c.x_scale, c.global_scale13_E)
    h_scale, factors2_E = one_input_scale(c.h_scale, c.global_scale2_E)
    codes, x_sf = arguments.nvfp4(c.x_TD, x_scale)
    out: Tensor = package.call(
        wrapper.run,
        x=codes,
        x_sf=x_sf,
        token_selected_experts=routed.ids_TK,
        token_final_scales=routed.weights_TK,
        w1_weight=c.w13_EFD,
        w1_weight_sf=orders.mma_view(c.w13_scale_EFG),
        w1_alpha=factors13_E,
        fc2_input_scale=h_scale.reciprocal(),
        w2_weight=c.w2_EDI,
        w2_weight_sf=orders.mma_view(c.w2_scale_EDG),
        w2_alpha=factors2_E,
    )
    return out


experts.needs(NAME, MACHINE.needs)
experts.rounds(NAME, FITS.multiples)
experts.remembers(NAME, aligned=True)

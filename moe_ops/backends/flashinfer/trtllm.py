"""`experts` and `moe` by TensorRT-LLM's generated kernels in FlashInfer: 16-bit floats, float8 in
blocks, mxfp8, mxfp4 and nvfp4 on Blackwell.

Each family of kernels is two functions: one takes ids and weights, the other logits, of which it
makes these itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_ops.backends.flashinfer import arguments, fits, kept, orders, package, routers
from moe_ops.backends.flashinfer.fits import READS, Way
from moe_ops.backends.flashinfer.options import current
from moe_ops.backends.flashinfer.stored import SHUFFLED
from moe_ops.ops.experts import ExpertsCall, experts
from moe_ops.ops.moe import MoeCall, moe
from moe_ops.ops.quantize import quantize
from moe_ops.quant.scales import one_input_scale

NAME = "flashinfer_trtllm"
BLOCKS, GROUPS = "float8_e4m3fn:128x128", "float8_e4m3fn:1x128"
CAPABILITIES = ((10, 0), (10, 3))
TILES = Way(capabilities=CAPABILITIES, hidden=128, width=128, kinds=("Swiglu", "Relu2"))
# Of these formats the first product goes by 256 columns at a time: of a last half of so many
# FlashInfer refuses mxfp8, and makes other numbers of nvfp4.
LONG_TILES = replace(TILES, hidden=256)
STATIC = replace(LONG_TILES, static_inputs=True)
WAYS = {
    ("", ""): TILES,
    (BLOCKS, GROUPS): TILES,
    ("mxfp8", "mxfp8"): LONG_TILES,
    ("mxfp4", ""): TILES,
    ("mxfp4", "mxfp8"): TILES,
    ("nvfp4", "nvfp4"): STATIC,
}
MACHINE = package.Machine(capabilities=CAPABILITIES)
FITS = fits.Fits(machine=MACHINE, ways=WAYS)
FLOAT8_EXPERTS = 4  # of which the experts must be a multiple for kernels of float8 in blocks


def supports(call: ExpertsCall) -> str | None:
    return FITS.refusal(call) or _too_odd(call, _experts(call), call.ids_TK.shape[1])


def _experts(call: ExpertsCall) -> int:
    """How many experts ids are among: all of the layer. Slots are ids among so many, too."""
    return (call.w13_EFD if call.expert_map is None else call.expert_map).shape[0]


def _too_odd(call: ExpertsCall, E: int, K: int) -> str | None:
    """Why the sorting of tokens, as it is in kernels of float8, cannot be done, or None."""
    if _entry(call).name != FLOAT8 or (E % FLOAT8_EXPERTS == 0 and E > K):
        return None
    return (
        f"needs experts of which there are a multiple of {FLOAT8_EXPERTS}, and more than choices "
        f"of a token, in {call.w_format}; got {E} and {K}"
    )


@experts.backend(
    NAME,
    reads=READS,
    supports=supports,
    devices=("cuda",),
    priority=-1,
    layout=SHUFFLED,
)
def run(call: ExpertsCall) -> Tensor:
    """`experts` in one call of a `..._routed_moe`, with global ids and an offset."""
    if call.x_TD.shape[0] == 0:
        return call.x_TD.new_empty(call.x_TD.shape)
    routed = arguments.routed(call)
    given = {
        "topk_ids": (routed.ids_TK, routed.weights_TK),
        "num_experts": _experts(call),
        "top_k": routed.ids_TK.shape[1],
        "n_group": None,
        "topk_group": None,
        "local_expert_offset": routed.offset,
    }
    entry = _entry(call)
    if entry.name != FLOATS:
        given |= {"routing_bias": None, "routed_scaling_factor": None}
    return _launch(call, f"{entry.name}_routed_moe", given)


def supports_moe(call: MoeCall) -> str | None:
    layer, E = call.layer, call.routing.logits_TE.shape[1]
    reason = FITS.refusal(layer) or routers.refusal(call.routing)
    if reason is None and layer.expert_map is not None and layer.expert_offset is None:
        return "routes to experts that follow each other; give their expert_offset"
    return reason or _too_odd(layer, E, call.routing.top_k)


@moe.backend(
    NAME,
    reads=(*READS, *routers.READS),
    supports=supports_moe,
    devices=("cuda",),
    priority=-1,
    layout=SHUFFLED,
)
def run_moe(call: MoeCall) -> Tensor:
    """`moe` in one call of a `..._moe`, which is given logits. Weights of experts are rounded to
    bfloat16 there, whatever their dtype."""
    layer = call.layer
    if layer.x_TD.shape[0] == 0:
        return layer.x_TD.new_empty(layer.x_TD.shape)
    given = routers.given(call.routing)
    given["local_expert_offset"] = layer.expert_offset or 0
    return _launch(layer, f"{_entry(layer).name}_moe", given)


def _launch(call: ExpertsCall, name: str, given: dict[str, Any]) -> Tensor:
    """The result of a function, given how tokens are routed."""
    c, tokens = call, kept.tokens_of(call.x_TD.shape[0], current())
    measuring = kept.tuning((NAME, name, c.w13_EFD.shape, tokens))
    function = package.found("flashinfer.fused_moe", name)
    runs = runs_of(c, (name, given["top_k"], tokens))
    with package.on(c.x_TD.device), runs.around(c.x_TD.shape[0], measuring):
        out_TD = c.x_TD.new_empty(c.x_TD.shape)
        package.call(
            function,
            **given,
            **_entry(c).tensors(c),
            intermediate_size=c.widths[1],
            local_num_experts=c.w13_EFD.shape[0],
            tune_max_num_tokens=tokens,
            activation_type=int(arguments.activation_type(c)),
            output=out_TD,
        )
    return out_TD


def _floats(call: ExpertsCall) -> dict[str, Any]:
    return {
        "hidden_states": arguments.aligned(call.x_TD),
        "gemm1_weights": orders.block_view(call.w13_EFD),
        "gemm2_weights": orders.block_view(call.w2_EDI),
    }


def _blocks(call: ExpertsCall) -> dict[str, Any]:
    """Float8 in blocks: rows as they are, and the scales of tokens by groups of columns."""
    codes_TD, scale_TG = quantize(call.x_TD, call.x_format)
    return {
        **_weights(call),
        "hidden_states": codes_TD,
        "hidden_states_scale": scale_TG.t().contiguous(),
        "fp8_quantization_type": _fp8_kind("DeepSeekFp8"),
        "use_shuffled_weight": False,
    }


def _mxfp8(call: ExpertsCall) -> dict[str, Any]:
    codes_TD, scale_TG = quantize(call.x_TD, call.x_format)
    return {
        **_weights(call),
        "hidden_states": codes_TD,
        "hidden_states_scale": scale_TG,
        "fp8_quantization_type": _fp8_kind("MxFp8"),
        "use_shuffled_weight": True,
    }


def _fp8_kind(name: str) -> int:
    return int(getattr(package.module("flashinfer.fused_moe").Fp8QuantizationType, name))


def _mxfp4(call: ExpertsCall) -> dict[str, Any]:
    """Four bits with scales that are powers of two; tokens of 16 bits, or of 8."""
    if not call.x_format:
        return _four_bits(call) | {"hidden_states": arguments.aligned(call.x_TD)}
    codes_TD, scale_TG = quantize(call.x_TD, call.x_format)
    scale_TG = scale_TG.view(torch.float8_e4m3fn)
    return _four_bits(call) | {"hidden_states": codes_TD, "hidden_states_scale": scale_TG}


def _nvfp4(call: ExpertsCall) -> dict[str, Any]:
    """Tokens are quantised by one global scale, and the second inputs by each expert's own: up is
    multiplied by what undoes the first product's scales, over the second input's."""
    c = call
    assert c.x_scale is not None and c.global_scale13_E is not None
    assert c.h_scale is not None and c.global_scale2_E is not None
    x_scale, factors13_E = one_input_scale(c.x_scale, c.global_scale13_E)
    codes, x_sf = arguments.nvfp4(c.x_TD, x_scale)
    inverse_E = c.h_scale.reciprocal().expand(factors13_E.shape)
    return _four_bits(c) | {
        "hidden_states": codes,
        "hidden_states_scale": x_sf.view(torch.float8_e4m3fn).view(c.x_TD.shape[0], -1),
        "output1_scale_scalar": (factors13_E * inverse_E if c.gated else inverse_E).contiguous(),
        "output1_scale_gate_scalar": factors13_E,
        "output2_scale_scalar": c.global_scale2_E.contiguous(),
    }


def _four_bits(call: ExpertsCall) -> dict[str, Any]:
    absent = (
        "hidden_states_scale", "gemm1_bias", "gemm2_bias", "gemm1_alpha", "gemm1_beta",
        "gemm1_clamp_limit", "output1_scale_scalar", "output1_scale_gate_scalar",
        "output2_scale_scalar",
    )  # fmt: skip
    layout = package.module("flashinfer").SfLayout.layout_linear
    return {**dict.fromkeys(absent), **_weights(call), "hidden_states_scale_layout": layout}


def _weights(call: ExpertsCall) -> dict[str, Any]:
    """Codes, and block scales: those of one byte as the type by which its kernels know them."""
    c = call
    assert c.w13_scale_EFG is not None and c.w2_scale_EDG is not None
    scales = (c.w13_scale_EFG, c.w2_scale_EDG)
    if c.w13_EFD.dtype is torch.uint8:
        scales = (scales[0].view(torch.float8_e4m3fn), scales[1].view(torch.float8_e4m3fn))
    return {
        "gemm1_weights": c.w13_EFD,
        "gemm1_weights_scale": scales[0],
        "gemm2_weights": c.w2_EDI,
        "gemm2_weights_scale": scales[1],
    }


@dataclass(frozen=True, slots=True)
class Entry:
    """A family of functions: what their names begin with, and what they are given of tensors."""

    name: str
    tensors: Callable[[ExpertsCall], dict[str, Any]]


FLOATS, FLOAT8 = "trtllm_bf16", "trtllm_fp8_block_scale"
FLOAT4 = "trtllm_fp4_block_scale"
ENTRIES = {
    ("", ""): Entry(FLOATS, _floats),
    (BLOCKS, GROUPS): Entry(FLOAT8, _blocks),
    ("mxfp8", "mxfp8"): Entry(FLOAT8, _mxfp8),
    ("mxfp4", ""): Entry(FLOAT4, _mxfp4),
    ("mxfp4", "mxfp8"): Entry(FLOAT4, _mxfp4),
    ("nvfp4", "nvfp4"): Entry(FLOAT4, _nvfp4),
}


def _entry(call: ExpertsCall) -> Entry:
    return ENTRIES[call.w_format, call.x_format]


_RUNS: kept.Kept[kept.Runs] = kept.Kept("what TensorRT-LLM's kernels need")


def runs_of(call: ExpertsCall, of: tuple[str, int, int]) -> kept.Runs:
    """How calls alike ran. They may begin in a capture, which makes nothing that is kept here."""
    key = (call.w13_EFD.shape, call.x_TD.get_device(), call.x_format, *of)
    return _RUNS.found(key) or (kept.Runs() if kept.capturing() else _RUNS.get(key, kept.Runs))


experts.needs(NAME, MACHINE.needs)
experts.rounds(NAME, FITS.multiples)
experts.remembers(NAME, aligned=True)
moe.needs(NAME, MACHINE.needs)
moe.remembers(NAME, aligned=True)

"""Arguments of the ops of a decoding step, of as many sequences as a case has tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import Case, make_layer

Calls = dict[str, dict[str, Any]]
H, N, S, T = 4, 2, 5, 3  # heads, heads of keys, slots, tokens of a prompt
LISTS = ("weights", "scales", "zeros", "global_scales", "biases")


def _convolution_step(case: Case, dtype: torch.dtype) -> Calls:
    x, state, weight = torch.randn(case.T, 32), torch.randn(case.T, 32, 4), torch.randn(32, 4)
    call = {"x_BD": x.to(dtype), "state_BDW": state.to(dtype), "weight_DW": weight.to(dtype)}
    return {"plain": call, "bias": {**call, "bias_D": torch.randn(32).to(dtype), "silu": True}}


def _rule(lead: tuple[int, ...], names: str, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments that `delta_rule` and its step share; `names` are the axes before heads."""
    q, k, v = (torch.randn(*lead, *sizes).to(dtype) for sizes in ((N, 16), (N, 16), (H, 8)))
    g, beta = -torch.rand(*lead, H, 1).expand(*lead, H, 16).contiguous(), torch.rand(*lead, H)
    state = torch.randn(lead[0], H, 16, 8)
    return {
        f"q_{names}ND": q, f"k_{names}ND": k, f"v_{names}HV": v, f"g_{names}HD": g,
        f"beta_{names}H": beta, "state_BHDV": state, "scale": 0.25,
    }  # fmt: skip


def _delta_rule(case: Case, dtype: torch.dtype) -> Calls:
    call = _rule((case.T, T), "BT", dtype)
    return {"plain": call, "normalize": {**call, "normalize": True, "state_BHDV": None}}


def _delta_rule_step(case: Case, dtype: torch.dtype) -> Calls:
    call = _rule((case.T,), "B", dtype)
    return {"plain": call, "normalize": {**call, "normalize": True}}


def _space(lead: tuple[int, ...], names: str, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments that `state_space_scan` and its step share."""
    x, b, c = (torch.randn(*lead, *sizes).to(dtype) for sizes in ((H, 8), (N, 16), (N, 16)))
    return {
        f"x_{names}HV": x, f"dt_{names}H": torch.rand(*lead, H), "a_H": -torch.ones(H),
        f"b_{names}ND": b, f"c_{names}ND": c, "state_BHVD": torch.randn(lead[0], H, 8, 16),
    }  # fmt: skip


def _of_heads() -> dict[str, Any]:
    return {"skip_H": torch.rand(H), "dt_bias_H": torch.rand(H), "softplus": True}


def _state_space_scan(case: Case, dtype: torch.dtype) -> Calls:
    call = {**_space((case.T, T), "BT", dtype), "least": 0.0, "most": 0.5}
    return {"plain": call, "of_heads": {**call, **_of_heads(), "state_BHVD": None}}


def _state_space_step(case: Case, dtype: torch.dtype) -> Calls:
    call = _space((case.T,), "B", dtype)
    return {"plain": call, "of_heads": {**call, **_of_heads()}}


def _experts_onto(case: Case, dtype: torch.dtype) -> Calls:
    layer = make_layer(case, dtype)
    call = {
        "residual_TD": torch.randn(case.T, case.D).to(dtype), "x_TD": layer.x_TD,
        "weights_TK": layer.weights_TK, "ids_TK": layer.ids_TK, "w13_EFD": layer.w13_EFD,
        "w2_EDI": layer.w2_EDI,
    }  # fmt: skip
    return {"plain": call, "bias": {**call, "b13_EF": layer.b13_EF, "b2_ED": layer.b2_ED}}


def _weights(dtype: torch.dtype) -> dict[str, Any]:
    w, b = (torch.randn(8, 32) / 4).to(dtype), torch.randn(8).to(dtype)
    return {"weights": [w, (w * 2)[:5]], "biases": [b, None]}


def _linears(case: Case, dtype: torch.dtype) -> Calls:
    return {"plain": {"x_TK": torch.randn(case.T, 32).to(dtype), **_weights(dtype)}}


def _quantized_linears(case: Case, dtype: torch.dtype) -> Calls:
    found: Calls = {}
    for name in ("uint4:1x32", "float8_e4m3fn:row", "mxfp4", "nvfp4", "mxfp6_e2m3"):
        format, parts = Format.of(name), []
        for w_NK, b_N in zip(*_weights(dtype).values(), strict=True):
            common = packing.global_scale_of(w_NK, format) if format.has_global_scale else None
            done = packing.quantize(w_NK, format, global_scale=common)
            parts.append((done.values, done.scale, done.zero, common, b_N))
        lists = zip(LISTS, map(list, zip(*parts, strict=True)), strict=True)
        found[name] = {"x_TK": torch.randn(case.T, 32).to(dtype), **dict(lists), "w_format": name}
    return found


def _normed_linears(case: Case, dtype: torch.dtype) -> Calls:
    x, gain = torch.randn(case.T, 32).to(dtype), torch.rand(32).to(dtype)
    call = {"x_TK": x, "residual_TK": None, "gain_K": gain, "eps": 1e-6, **_weights(dtype)}
    return {
        "plain": call, "residual": {**call, "residual_TK": x * 2},
        "rounded_once": {**call, "gain_shift": 0.0},
        "shifted": {**call, "residual_TK": x * 2, "gain_shift": 1.0},
    }  # fmt: skip


def _normed_quantized_linears(case: Case, dtype: torch.dtype) -> Calls:
    norms, layers = _normed_linears(case, dtype), _quantized_linears(case, dtype)
    return {
        f"{norm}_{name}": {
            **{k: v for k, v in norms[norm].items() if k not in ("weights", "biases")},
            **{k: v for k, v in layers[name].items() if k != "x_TK"},
        }
        for norm, name in (
            ("plain", "uint4:1x32"), ("residual", "float8_e4m3fn:row"), ("shifted", "mxfp4"),
            ("rounded_once", "nvfp4"),
        )
    }  # fmt: skip


def _seen(case: Case) -> Tensor:
    return (torch.arange(S) < 4).expand(case.T, S).contiguous()


def _one_query(case: Case, dtype: torch.dtype) -> Calls:
    q, k, v = (
        torch.randn(case.T, H, 16),
        torch.randn(case.T, N, S, 16),
        torch.randn(case.T, N, S, 16),
    )
    call = {
        "q_BHD": q.to(dtype), "k_BNSD": k.to(dtype), "v_BNSD": v.to(dtype), "mask_BS": _seen(case),
        "scale": 0.25,
    }  # fmt: skip
    return {"plain": call, "sinks": {**call, "sinks_H": torch.randn(H)}}


def _one_query_latents(case: Case, dtype: torch.dtype) -> Calls:
    q, latents = torch.randn(case.T, H, 32), torch.randn(case.T, S, 32)
    call = {
        "q_BHR": q.to(dtype), "q_rope_BHD": q[..., :16].to(dtype),
        "latents_BSR": latents.to(dtype), "rotated_BSD": latents[..., :16].contiguous().to(dtype),
        "mask_BS": _seen(case), "scale": 0.25,
    }  # fmt: skip
    chosen = {"sinks_H": torch.randn(H), "indices_BC": torch.tensor([[3, 0]]).repeat(case.T, 1)}
    return {"plain": call, "chosen": {**call, **chosen}}


def _rope_attention(case: Case, dtype: torch.dtype) -> Calls:
    shapes = {"q_BHD": (H, 16), "k_BND": (N, 16), "v_BND": (N, 16), "cos_BW": (16,),
              "sin_BW": (16,), "keys_BNSD": (N, S, 16), "values_BNSD": (N, S, 16)}  # fmt: skip
    call: dict[str, Any] = {n: torch.randn(case.T, *s).to(dtype) for n, s in shapes.items()}
    call |= {"slot": torch.tensor([3]), "mask_BS": _seen(case), "scale": 0.25}
    gains = {"q_gain_D": torch.rand(16).to(dtype), "k_gain_D": torch.rand(16).to(dtype)}
    return {"plain": call, "normed": {**call, **gains}}


DECODE_MAKERS: dict[str, Callable[[Case, torch.dtype], Calls]] = {
    "convolution_step": _convolution_step,
    "delta_rule": _delta_rule,
    "delta_rule_step": _delta_rule_step,
    "experts_onto": _experts_onto,
    "linears": _linears,
    "normed_linears": _normed_linears,
    "normed_quantized_linears": _normed_quantized_linears,
    "one_query": _one_query,
    "one_query_latents": _one_query_latents,
    "quantized_linears": _quantized_linears,
    "rope_attention": _rope_attention,
    "state_space_scan": _state_space_scan,
    "state_space_step": _state_space_step,
}

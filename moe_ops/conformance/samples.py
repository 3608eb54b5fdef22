"""Arguments of every op: for a case and a dtype, the variants of the parameters that matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops.conformance import adapter_samples
from moe_ops.conformance.code_samples import fits, in_formats, quantized, with_codes
from moe_ops.conformance.decode_samples import DECODE_MAKERS
from moe_ops.conformance.gradient_samples import (
    activate_backward,
    expert_wgrad,
    expert_wgrad_onto,
    experts_accumulating,
    experts_backward,
    experts_saving,
    used_rows,
)
from moe_ops.conformance.rank_samples import (
    combine_tokens,
    dispatch_tokens,
    experts_batched,
    sum_ranks,
    tables,
)
from moe_ops.conformance.routing_samples import route_recording, route_replaying
from moe_ops.conformance.tensors import distinct_logits, half_map, padded, strided, with_holes
from moe_ops.quant.formats import Format
from moe_ops.registry.spec import DECODE_OPS, OPS, Op
from moe_ops.testing import ACTIVATIONS, GPT_OSS, Case, make_layer


class Sample(NamedTuple):
    """One call of an op: a readable name and every positional argument, defaults included."""

    name: str
    args: tuple[Any, ...]


def samples(op_name: str, case: Case, dtype: torch.dtype) -> list[Sample]:
    """Valid calls of an op at the sizes of a case, with floats of a dtype; of an op of a decoding
    step there may be none, as some take one row alone, or no float32."""
    op = OPS.get(op_name) or DECODE_OPS[op_name]
    make = MAKERS.get(op_name) or DECODE_MAKERS[op_name]
    calls = (
        Sample(name, op.arguments.in_order(named)) for name, named in make(case, dtype).items()
    )
    return [call for call in calls if op_name in MAKERS or _is_valid(op, call.args)]


def _is_valid(op: Op, args: tuple[Any, ...]) -> bool:
    try:
        op.check(op.call(*args))
    except ValueError:
        return False
    return True


def specified(op_name: str, args: tuple[Any, ...], got: Any) -> list[Tensor]:
    """The tensors an op returns, without the rows that its contract leaves unspecified."""
    if got is None:  # what it writes to is an argument
        return []
    if op_name == "dispatch":
        x_RD, rows_R, ends_E = got
        return [x_RD[: int(ends_E[-1])], rows_R, ends_E]
    if op_name == "expert_gemm":
        ends_E = args[2]
        return [got[: int(ends_E[-1])]]
    if op_name == "dispatch_tokens":
        x_GD, scale_GS, weights_GK, ids_GK, *handle = got
        served_G = (ids_GK >= 0).any(1)
        return [x_GD[served_G], scale_GS[served_G], weights_GK[ids_GK >= 0], ids_GK, *handle]
    used = used_rows(op_name, args, got)
    if used is None:
        used = adapter_samples.used_rows(op_name, args, got)
    if used is not None:
        return used
    return [got] if isinstance(got, Tensor) else list(got)


def mutated(op: Op, args: tuple[Any, ...]) -> list[Tensor]:
    """The arguments of a call that the op writes to."""
    given = op.arguments.by_name(op.call(*args))
    return [given[name] for name in op.arguments.mutated if given[name] is not None]


def _route(case: Case, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    T, E, K = case.T, case.E, case.K
    call: dict[str, Any] = {"logits_TE": distinct_logits(T, E, dtype), "top_k": K}
    bias, scales = torch.randn(E) * 0.3, torch.rand(E) + 0.5
    found = {
        "plain": call,
        "strided": {**call, "logits_TE": strided(call["logits_TE"])},
        "renormalize": {**call, "renormalize": True, "eps": 1e-6, "scale": 2.5},
        "selected_softmax": {**call, "score": "logit", "softmax_selected": True, "scale": 1 / K},
        "selection_bias": {**call, "bias_E": bias, "renormalize": True, "min_sum": 1e-3},
        "sigmoid_bias": {**call, "score": "sigmoid", "bias_E": bias.to(dtype), "renormalize": True},
        "sqrtsoftplus": {**call, "score": "sqrtsoftplus", "bias_E": bias, "scale": 1.5},
        "select_on_logit": {**call, "score": "sigmoid", "bias_E": bias, "select_on": "logit"},
        "per_expert_scale": {**call, "per_expert_scale_E": scales.to(dtype), "renormalize": True},
        "to_bfloat16": {**call, "out_dtype": "bfloat16"},
        "to_float16": {**call, "out_dtype": "float16", "renormalize": True},
    }
    if E % 2 == 0:
        n_group = 8 if E == 64 else 2
        kept = n_group if n_group // 2 * (E // n_group) < K else n_group // 2
        for reduce in ("max", "top2sum"):
            for fill in ("zero", "-inf", "zero_weight"):
                found[f"groups_{reduce}_{fill}"] = {
                    **call, "score": "sigmoid", "bias_E": bias.abs(), "n_group": n_group,
                    "topk_group": kept, "group_reduce": reduce, "group_fill": fill,
                }  # fmt: skip
    return found


INPUT_FORMATS = (
    "float8_e4m3fn:row", "float8_e4m3fn:tensor", "float8_e4m3fn:1x16", "float8_e4m3fn:1x32",
    "float8_e4m3fn:1x128", "float8_e5m2:1x128",
    "int8:row", "int8:1x1", "mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8", "mxfp8_e5m2", "nvfp4",
)  # fmt: skip

# Formats of weights and inputs that meet in one product; every kind of element, group and scale.
ALONE = ("float8_e5m2:row", "int8:1x32", "uint8:1x32", "int4:1x32", "uint4:1x16", "mxfp4")
PAIRS = (
    ("float8_e4m3fn:16x32", "float8_e4m3fn:1x32"),
    ("float8_e4m3fn:128x128:e8m0", "float8_e4m3fn:1x128"),
    ("float8_e4m3fn:row", "float8_e4m3fn:row"),
    ("float8_e4m3fn:tensor", "float8_e4m3fn:tensor"),
    ("int8:row", "int8:row"),
    ("mxfp4", "mxfp6_e3m2"),
    ("mxfp6_e2m3", "mxfp8"),
    ("nvfp4", "nvfp4"),
    *((weights, "") for weights in ALONE),
)
# Formats of weights alone: a table, and blocks with scales of their own.
DECODED = ("nf4:1x32", "q4_k", "q5_k", "q6_k")
# Weights of four bits that kernels multiply as codes with tokens of float8 above this width alone.
OF_WIDE, WIDER_THAN = (("mxfp4", "float8_e4m3fn:row"), ("uint4:row", "float8_e4m3fn:row")), 512


def _quantize(case: Case, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    x = make_layer(case, dtype).x_TD
    x[:1] = 0
    found: dict[str, dict[str, Any]] = {
        format: {"x_RD": x, "format": format} for format in INPUT_FORMATS if fits(format, case.D)
    }
    for format in ("float8_e4m3fn:tensor", "int8:tensor", "nvfp4"):
        if fits(format, case.D):
            call = {"x_RD": x, "format": format, "scale": torch.tensor([0.01])}
            found[f"{format}_static"] = call
    return {**found, "strided": {"x_RD": strided(x), "format": "float8_e4m3fn:1x16"}}


def _dispatch(case: Case, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    layer, E = make_layer(case, dtype), case.E
    ids = layer.ids_TK
    call = {"x_TD": layer.x_TD, "ids_TK": ids, "num_experts": E}
    half = {"num_experts": (E + 1) // 2, "expert_map": half_map(E)}
    return {
        "plain": call,
        "int64": {**call, "ids_TK": ids.long()},
        "holes": {**call, "ids_TK": with_holes(ids, E)},
        "nothing_here": {**call, "ids_TK": torch.full_like(ids, -1)},
        "one_expert": {**call, "ids_TK": torch.full_like(ids, E - 1)},
        "map": {**call, **half},
        "map_and_holes": {**call, **half, "ids_TK": with_holes(ids, E).long()},
        "strided": {**call, "x_TD": strided(layer.x_TD), "ids_TK": strided(ids)},
    }


def _expert_loads(case: Case, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    ids, E = make_layer(case, dtype).ids_TK, case.E
    call = {"ids_TK": ids, "num_experts": E}
    return {
        "plain": call,
        "int64": {**call, "ids_TK": ids.long()},
        "holes": {**call, "ids_TK": with_holes(ids, E)},
        "map": {**call, "expert_map": half_map(E)},
        "strided": {**call, "ids_TK": strided(ids)},
    }


def _expert_gemm(case: Case, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    layer, E = make_layer(case, dtype), case.E
    w, flipped = layer.w13_EFD, layer.w13_EFD.transpose(1, 2)
    x, _, ends = OPS["dispatch"].reference(layer.x_TD, layer.ids_TK, E)
    tail, _, tail_ends = OPS["dispatch"].reference(layer.x_TD, with_holes(layer.ids_TK, E), E)
    tail[int(tail_ends[-1]) :] = float("nan")
    call = {"x_RD": x, "w_EFD": w, "ends_E": ends}
    everything = torch.full_like(ends, x.shape[0])
    name = str(dtype).removeprefix("torch.")
    formats = {}
    for w_format, x_format in (*PAIRS, *((one, "") for one in DECODED)):
        if not fits(w_format, case.D) or not fits(x_format, case.D):
            continue
        more: dict[str, Any] = {**quantized(w, w_format, "w", "FD"), "w_format": w_format}
        if x_format:
            q, scale = OPS["quantize"].reference(x, x_format)
            more |= {"x_RD": q, "x_scale_RG": scale, "x_format": x_format, "out_dtype": name}
        if Format.of(w_format).has_global_scale:
            more |= {"global_scale_E": torch.rand(E) + 0.5, "bias_EF": layer.b13_EF}
        formats[f"{w_format}_{x_format}"] = {**call, **more}
    return {
        **formats,
        "plain": call,
        "bias": {**call, "bias_EF": layer.b13_EF},
        "float32_bias": {**call, "bias_EF": layer.b13_EF.float(), "w_EFD": padded(w)},
        "transposed": {**call, "w_EFD": flipped.contiguous(), "transposed": True},
        "transposed_view": {
            **call, "w_EFD": flipped, "bias_EF": layer.b13_EF, "transposed": True,
        },
        "view": {**call, "w_EFD": flipped.contiguous().transpose(1, 2)},
        "strided": {**call, "x_RD": strided(x), "w_EFD": strided(w)},
        "padded_x": {**call, "x_RD": padded(x)},
        "tail": {**call, "x_RD": tail, "ends_E": tail_ends, "bias_EF": layer.b13_EF},
        "no_rows_used": {**call, "ends_E": torch.zeros_like(ends)},
        "first_expert": {**call, "ends_E": everything},
        "last_expert": {**call, "ends_E": torch.where(torch.arange(E) < E - 1, 0, everything)},
    }  # fmt: skip


def _activate(case: Case, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    y = (torch.randn(case.T * case.K, 2 * case.I) * 2).to(dtype)
    found = {name: {"y_RF": y, **kwargs} for name, kwargs in ACTIVATIONS.items()}
    return {**found, "strided": {"y_RF": strided(y)}}


def _combine(case: Case, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    R = case.T * case.K
    weights = torch.rand(case.T, case.K).softmax(-1) if R else torch.empty(case.T, case.K)
    y, rows = torch.randn(R, case.D).to(dtype), torch.randperm(R).to(torch.int32)
    used = R - R // 3
    holes, holed_rows = y.clone(), rows.clone()
    holes[used:], holed_rows[used:] = float("nan"), -1
    call = {"y_RD": y, "weights_TK": weights, "rows_R": rows}
    return {
        "plain": call,
        "same_dtype": {**call, "weights_TK": weights.to(dtype)},
        "holes": {**call, "y_RD": holes, "rows_R": holed_rows},
        "nothing_here": {**call, "y_RD": torch.full_like(y, float("nan")), "rows_R": rows * 0 - 1},
        "strided": {**call, "y_RD": strided(y), "weights_TK": strided(weights)},
    }


def _experts(case: Case, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    layer, E = make_layer(case, dtype), case.E
    ids, w13, w2 = layer.ids_TK, layer.w13_EFD, layer.w2_EDI
    call = {
        "x_TD": layer.x_TD, "weights_TK": layer.weights_TK, "ids_TK": ids,
        "w13_EFD": w13, "w2_EDI": w2,
    }  # fmt: skip
    biases = {"b13_EF": layer.b13_EF, "b2_ED": layer.b2_ED}
    ungated = {"w2_EDI": make_layer(case, dtype, gated=False).w2_EDI, "w13_EFD": w13[:, ::2]}
    flipped = {"w13_EFD": w13.transpose(1, 2), "w2_EDI": w2.transpose(1, 2), "transposed": True}
    copied = {k: v.contiguous() if isinstance(v, Tensor) else v for k, v in flipped.items()}
    here = (E + 1) // 2
    half = {
        "w13_EFD": w13[:here], "w2_EDI": w2[:here], "expert_map": half_map(E),
        "b13_EF": layer.b13_EF[:here], "b2_ED": layer.b2_ED[:here],
    }  # fmt: skip
    found = {
        name: {**call, **kwargs} for name, kwargs in ACTIVATIONS.items() if "gated" not in kwargs
    }
    for w_format, x_format in PAIRS:
        if fits(w_format, case.D, case.I) and fits(x_format, case.D, case.I):
            found[f"{w_format}_{x_format}"] = {**call, **in_formats(layer, w_format, x_format)}
    if "nvfp4_nvfp4" in found:
        found["nvfp4_static"] = {
            **found["nvfp4_nvfp4"], **biases, "ids_TK": with_holes(ids, E),
            "global_scale13_E": (torch.rand(E) + 0.5) * 0.01,
            "global_scale2_E": (torch.rand(E) + 0.5) * 0.02,
            "x_scale": torch.tensor(0.01), "h_scale": torch.tensor([0.02]),
        }  # fmt: skip
    found["fp8_static"] = {
        **found["float8_e4m3fn:tensor_float8_e4m3fn:tensor"],
        "x_scale": torch.tensor(0.01), "h_scale": torch.tensor([0.02]),
    }  # fmt: skip
    scales_E = {name: (torch.rand(E) + 0.5) * 0.02 for name in ("x_scale", "h_scale")}
    found["fp8_by_expert"] = {**found["fp8_static"], **scales_E, "ids_TK": with_holes(ids, E)}
    return {
        **with_codes(found),
        "gpt_oss": {**call, **biases, **copied, **GPT_OSS},
        "ungated": {**call, **ungated, "kind": "relu2", "gated": False},
        "bias": {**call, **biases},
        "same_dtype_weights": {**call, "weights_TK": layer.weights_TK.to(dtype)},
        "holes": {**call, **biases, "ids_TK": with_holes(ids, E).long()},
        "nothing_here": {**call, **biases, "ids_TK": torch.full_like(ids, -1)},
        "one_expert": {**call, "ids_TK": torch.full_like(ids, E - 1)},
        "map": {**call, **half},
        "map_and_holes": {**call, **half, "ids_TK": with_holes(ids, E)},
        "transposed": {**call, **copied},
        "transposed_view": {**call, **flipped},
        "strided": {k: strided(v) for k, v in call.items()},
        "padded": {**call, "w13_EFD": padded(w13), "w2_EDI": padded(w2)},
    }


def _experts_of_all(case: Case, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Calls of `experts` in every kind of format; ops of gradients have those of `_experts`."""
    found = _experts(case, dtype)
    layer, plain = make_layer(case, dtype), found["same_dtype_weights"]
    pairs = [(of, "") for of in DECODED if fits(of, case.D, case.I)]
    pairs += OF_WIDE if min(case.D, case.I) > WIDER_THAN else ()
    return {**found, **{f"{w}_{x}": {**plain, **in_formats(layer, w, x)} for w, x in pairs}}


def _moe(case: Case, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    layer, E, K = make_layer(case, dtype), case.E, case.K
    here = (E + 1) // 2
    call = {
        "x_TD": layer.x_TD, "logits_TE": distinct_logits(case.T, E, dtype),
        "w13_EFD": layer.w13_EFD, "w2_EDI": layer.w2_EDI, "top_k": K,
    }  # fmt: skip
    name = str(dtype).removeprefix("torch.")
    found = {
        "plain": call,
        "mixtral": {**call, "renormalize": True, "weights_dtype": name},
        "gpt_oss": {
            **call, **GPT_OSS, "score": "logit", "softmax_selected": True,
            "b13_EF": layer.b13_EF, "b2_ED": layer.b2_ED,
        },
        "gemma": {
            **call, "kind": "gelu_tanh", "per_expert_scale_E": torch.rand(E) + 0.5,
            "renormalize": True,
        },
        "transposed": {
            **call, "w13_EFD": layer.w13_EFD.transpose(1, 2).contiguous(),
            "w2_EDI": layer.w2_EDI.transpose(1, 2).contiguous(), "transposed": True,
        },
        "map": {
            **call, "w13_EFD": layer.w13_EFD[:here], "w2_EDI": layer.w2_EDI[:here],
            "expert_map": half_map(E),
        },
    }  # fmt: skip
    for w_format, x_format in (("mxfp4", ""), ("float8_e4m3fn:row", "float8_e4m3fn:row")):
        if fits(w_format, case.D, case.I):
            first = quantized(layer.w13_EFD, w_format, "w13", "FD")
            second = quantized(layer.w2_EDI, w_format, "w2", "DI")
            formats = {"w_format": w_format, "x_format": x_format}
            found[f"{w_format}_{x_format}"] = {**call, **formats, **first, **second}
    if E % 2 == 0 and E // 2 >= K:
        found["deepseek"] = {
            **call, "score": "sigmoid", "bias_E": torch.rand(E), "n_group": 2, "topk_group": 1,
            "renormalize": True, "eps": 1e-20, "scale": 2.5,
        }  # fmt: skip
    return found


def _experts_over_ranks(case: Case, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Calls of `experts` that have no map, with each transport in turn."""
    found = {}
    for i, (name, given) in enumerate(_experts(case, dtype).items()):
        one_scale = "nvfp4_nvfp4" in name or ":tensor_float8_e4m3fn:tensor" in name
        if "expert_map" in given or "x_scale_TG" in given or one_scale:
            continue
        collective = ("auto", "gather", "exchange")[i % 3]
        rows = {"rows": case.T + 1 + i % 2, "collective": collective}
        found[name] = {**given, **tables(case.E), **rows}
    return found


MAKERS: dict[str, Callable[[Case, torch.dtype], dict[str, dict[str, Any]]]] = {
    "route": _route,
    "route_recording": lambda case, dtype: route_recording(case, _route(case, dtype)),
    "route_replaying": lambda case, dtype: route_replaying(case, _route(case, dtype)),
    "quantize": _quantize,
    "dispatch": _dispatch,
    "expert_gemm": _expert_gemm,
    "expert_loads": _expert_loads,
    "activate": _activate,
    "combine": _combine,
    "experts": _experts_of_all,
    "experts_batched": lambda case, dtype: experts_batched(_experts(case, dtype)),
    "moe": _moe,
    "activate_backward": activate_backward,
    "expert_wgrad": expert_wgrad,
    "expert_wgrad_onto": expert_wgrad_onto,
    "experts_saving": lambda case, dtype: experts_saving(_experts(case, dtype)),
    "experts_accumulating": lambda case, dtype: experts_accumulating(_experts(case, dtype)),
    "experts_backward": lambda case, dtype: experts_backward(_experts(case, dtype), dtype),
    "experts_adapted": lambda case, dtype: adapter_samples.experts_adapted(_experts(case, dtype)),
    "experts_adapted_saving": lambda case, dtype: adapter_samples.experts_adapted_saving(
        _experts(case, dtype)
    ),
    "experts_adapted_backward": lambda case, dtype: adapter_samples.experts_adapted_backward(
        _experts(case, dtype), dtype
    ),
    "dispatch_tokens": dispatch_tokens,
    "combine_tokens": combine_tokens,
    "experts_over_ranks": _experts_over_ranks,
    "sum_ranks": sum_ranks,
}

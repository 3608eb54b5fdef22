"""The Triton backends for NVIDIA GPUs: routing, and the experts by their rows.

triton.tiny     up to 64 pairs of token and choice: nothing is sorted; two launches, of quantised
                weights up to four more
triton.rows     few rows an expert: weights stream past the rows
triton.grouped  many rows an expert: the rate of the matrix units decides; and all of float32.
                Quantised weights are decoded first, but on Hopper of most formats and widths

Inputs of formats that no GPU here multiplies are emulated, by triton.rows and triton.grouped.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_ops.backend import ANY_NUMBER, Rows
from moe_ops.backends import reads, triton_formats, triton_inputs
from moe_ops.backends.strides import contiguous, in_words, with_rows
from moe_ops.decode_ops.experts_onto import ExpertsOntoCall, experts_onto
from moe_ops.gradients import needs_grad
from moe_ops.kernels.triton import (
    LARGE,
    TINY_PAIRS,
    TINY_TOKENS,
    multiplies_codes,
    one_a_step,
)
from moe_ops.ops.experts import ExpertsCall, experts
from moe_ops.ops.route import RouteCall, route
from moe_ops.shapes import DTYPES

LEAST_CAPABILITY, LEAST_FLOAT8, HOPPER = (8, 0), (8, 9), (9, 0)
HALF = (torch.bfloat16, torch.float16)
FLOATS = (*HALF, torch.float32)
Supports = Callable[[ExpertsCall], str | None]

# Measured on an H200 over six layers (moe_ops/tuned/h200.json): up to how many tokens triton.tiny
# is the fastest, and up to how many rows an expert triton.rows is, if an expert's second weight has
# fewer elements than LARGE and if it has not.
MOST_TINY_TOKENS, MOST_ROWS_PER_EXPERT, MOST_ROWS_PER_LARGE_EXPERT = 4, 32, 16
# The same for quantised weights: rows where triton.grouped decodes them first, by the bits of a
# code; with inputs of 8 bits, on an H100; and where it multiplies codes as they are stored, by the
# bits and whether rows have one scale for a step of columns, and of large experts.
MOST_TINY_TOKENS_OF_CODES = 1
MOST_DECODED = 4 * 2**30  # bytes of a layer that is decoded
# Those of six bits, which take the ways of four, were not measured.
MOST_ROWS_OF_CODES, MOST_ROWS_OF_QUANTISED_INPUTS = {4: 400, 6: 400, 8: 200}, 16
MOST_ROWS_AS_STORED = {
    (4, True): 32, (4, False): 28, (6, True): 32, (6, False): 28, (8, True): 32, (8, False): 32,
}  # fmt: skip
MOST_ROWS_OF_LARGE_AS_STORED = 24


@functools.cache
def unavailable() -> str | None:
    """Why Triton kernels cannot run here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "needs triton, which is not installed"
    return None


def refuse_device(t: Tensor, least: tuple[int, int] = LEAST_CAPABILITY) -> str | None:
    """Why kernels cannot run where a tensor is, or None."""
    if unavailable() is not None:
        return unavailable()
    if t.device.type == "cuda":
        capability = torch.cuda.get_device_capability(t.device)
        if capability < least:
            wanted, got = (".".join(map(str, version)) for version in (least, capability))
            return f"needs compute capability {wanted}, got {got}"
    return None


def either(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def supports_route(call: RouteCall) -> str | None:
    if needs_grad(call.logits_TE, call.bias_E, call.per_expert_scale_E):
        return "is not differentiable, and an argument requires grad"
    return refuse_device(call.logits_TE)


@route.backend("triton", reads=reads.ROUTE, supports=supports_route, devices=("cuda",), priority=1)
def route_tokens(call: RouteCall) -> tuple[Tensor, Tensor]:
    """`route` in one launch, a warp for each token."""
    from moe_ops.kernels.triton import routing
    from moe_ops.kernels.triton.replay import replay

    c = call
    fill = 0.0 if c.group_fill == "zero" else float("-inf")
    router = (
        c.score, c.select_on == "logit", c.n_group, c.topk_group, c.group_reduce == "top2sum", fill,
        c.softmax_selected, c.renormalize, c.eps, c.min_sum, c.scale,
    )  # fmt: skip
    tensors = with_rows(c.logits_TE), contiguous(c.bias_E), contiguous(c.per_expert_scale_E)
    return replay(routing.route, tensors, (c.top_k, router, DTYPES[c.out_dtype]))


def supports_experts(call: ExpertsCall) -> str | None:
    x_TD = call.x_TD
    if call.dtype not in FLOATS:
        return f"needs {either(FLOATS)}, got {call.dtype}"
    if needs_grad(x_TD, call.weights_TK, call.w13_EFD, call.w2_EDI, call.b13_EF, call.b2_ED):
        return "is not differentiable, and an argument requires grad"
    return _refuse_scales(call) or refuse_device(x_TD)


def supports_half(call: ExpertsCall) -> str | None:
    """The support of kernels that have no float32."""
    refusal = supports_experts(call)
    if refusal is None and call.dtype not in HALF:
        return f"needs {either(HALF)}, got {call.dtype}"
    return refusal


def supports_codes(call: ExpertsCall) -> str | None:
    """The support of kernels that take quantised weights, too."""
    refusal = supports_half(call)
    if refusal is not None or not call.w_format:
        return refusal
    c = call
    refusal = triton_formats.refusal(c.w_format, c.x_format, c.widths)
    stored = (c.w13_EFD, c.w2_EDI, c.w13_scale_EFG, c.w2_scale_EDG, c.w13_zero_EFG, c.w2_zero_EDG)
    if refusal is None and not all(t is None or t.is_contiguous() for t in stored):
        refusal = "needs contiguous weights, scales and zero points"
    if refusal is None and c.w13_EFD.dtype == torch.float8_e4m3fn:
        refusal = refuse_device(c.w13_EFD, LEAST_FLOAT8)
    in_words = refusal is None and _weight(c)[5] < 8
    if in_words and any(w.storage_offset() % 4 for w in (c.w13_EFD, c.w2_EDI)):
        bits = {4: "four", 6: "six"}[_weight(c)[5]]
        refusal = f"needs weights of {bits} bits that begin at a multiple of 4 bytes"
    return refusal


def _refuse_scales(call: ExpertsCall) -> str | None:
    """Why kernels do not take the scales of a call beside those of groups, or None."""
    c = call
    found = (c.global_scale13_E, c.global_scale2_E, c.x_scale, c.h_scale)
    common = tuple(t for t in found if t is not None)
    if not c.w_format:
        return "has global scales for quantised weights alone" if common else None
    if needs_grad(c.w13_scale_EFG, c.w2_scale_EDG, *common):
        return "is not differentiable, and an argument requires grad"
    static = tuple(t.numel() for t in (c.x_scale, c.h_scale) if t is not None)
    if not static or _formats(c)[2] in ("row", "tensor"):
        return None
    if _inputs(c) is None:
        return f"quantises inputs to {c.x_format} without static scales"
    return triton_inputs.refusal_of_static(c.x_format, c.dtype == torch.float16, static)


def supports_tiny(call: ExpertsCall) -> str | None:
    """The support of kernels in which all experts read the same tokens."""
    refusal = supports_codes(call)
    if refusal is None and _inputs(call) is not None:
        return "emulates no inputs, as triton.rows does"
    if refusal is None and call.x_scale is not None and call.x_scale.numel() > 1:
        return "quantises tokens by one static scale, got one for each expert"
    return refusal


def supports_many(call: ExpertsCall) -> str | None:
    """The support of the kernels for many rows an expert: floats, quantised weights, which are
    decoded first, and on Hopper those with inputs of 8 bits."""
    if not call.w_format:
        return supports_experts(call)
    refusal = supports_codes(call)
    if refusal is None and call.x_format:
        refusal = _refuse_quantised_inputs(call)
    return refusal


def _refuse_quantised_inputs(call: ExpertsCall) -> str | None:
    """Why the kernel for many rows an expert of quantised inputs does not take a call that those
    for few rows take, or None."""
    c = call
    if _inputs(c) is not None:
        decodes = c.x_scale is not None and not _multiplies_as_stored(c)
        if decodes and c.dtype == torch.float16:
            return "has no room in float16 for weights times a static scale of inputs"
        return None
    if c.global_scale13_E is not None or c.global_scale2_E is not None:
        return "has no kernel for quantised inputs and weights under a global scale"
    refusal = triton_formats.refusal_of_many(_weight(c), c.widths, c.gated, c.interleaved)
    if refusal is None and c.x_TD.device.type == "cuda":
        capability = torch.cuda.get_device_capability(c.x_TD.device)
        if capability != HOPPER:
            refusal = "has a kernel for quantised inputs on compute capability 9.0 alone"
    if refusal is None and any(w.storage_offset() % 16 for w in (c.w13_EFD, c.w2_EDI)):
        refusal = "needs quantised weights that begin at a multiple of 16 bytes"
    return refusal


def max_tiny_tokens(call: ExpertsCall) -> int:
    return min(TINY_TOKENS, TINY_PAIRS // call.ids_TK.shape[1])


def most_tiny_tokens(call: ExpertsCall) -> int:
    return MOST_TINY_TOKENS_OF_CODES if call.w_format else MOST_TINY_TOKENS


def most_rows_tokens(call: ExpertsCall) -> int | None:
    w2_EDI, expert_map = call.w2_EDI, call.expert_map
    experts = w2_EDI.shape[0] if expert_map is None else expert_map.shape[0]
    if call.w_format:
        most = _most_rows_of_codes(call)
    else:
        most = MOST_ROWS_PER_LARGE_EXPERT if _is_large(call) else MOST_ROWS_PER_EXPERT
    return None if most is None else most * experts // call.ids_TK.shape[1]


def _is_large(call: ExpertsCall) -> bool:
    """Whether an expert is."""
    return math.prod(call.widths) >= LARGE


def _most_rows_of_codes(call: ExpertsCall) -> int | None:
    """Rows an expert; None if there is no other kernel, or no memory for what it decodes."""
    if call.x_format and _refuse_quantised_inputs(call) is not None:
        return None
    if call.x_format and _inputs(call) is None:
        return MOST_ROWS_OF_QUANTISED_INPUTS
    weight = _weight(call)
    bits = weight[5]
    if _multiplies_as_stored(call):
        if _is_large(call):
            return MOST_ROWS_OF_LARGE_AS_STORED
        return MOST_ROWS_AS_STORED[bits, one_a_step(weight)]
    decoded = (call.w13_EFD.nbytes + call.w2_EDI.nbytes) * 16 // bits
    return None if decoded > MOST_DECODED else MOST_ROWS_OF_CODES[bits]


def _multiplies_as_stored(call: ExpertsCall) -> bool:
    """Whether triton.grouped decodes weights where it multiplies them with inputs of 16 bits."""
    c = call
    if c.x_TD.device.type != "cuda" or not multiplies_codes(_weight(c), c.widths):
        return False
    return torch.cuda.get_device_capability(c.x_TD.device) == HOPPER and not any(
        w.storage_offset() % 16 for w in (c.w13_EFD, c.w2_EDI)
    )


# The tensors of a launch, in their order.
TENSORS = (
    "x_TD", "weights_TK", "ids_TK", "w13_EFD", "w2_EDI", "b13_EF", "b2_ED", "expert_map",
    "residual_TD", "scale13_EFG", "scale2_EDG", "zero13_EFG", "zero2_EDG", "global13_E",
    "global2_E", "x_scale", "h_scale", "x_scale_TG",
)  # fmt: skip


def run_experts(
    kernel: str, call: ExpertsCall, residual_TD: Tensor | None = None, tiles: Any = None
) -> Tensor:
    """`experts` by the kernels of this module of `moe_ops.kernels.triton`, added to a residual if
    there is one; `tiles` are for it to take in the place of those of its tables."""
    if call.x_TD.shape[0] == 0:
        return torch.empty_like(call.x_TD, dtype=call.dtype)
    from moe_ops.kernels.triton.replay import replay

    rest = (kernel, call.transposed, call.activation, _formats(call), tiles)
    return replay(_launch_experts, _tensors(call, residual_TD), rest)


def _weight(call: ExpertsCall) -> Any:
    """The format of a call's weights as the kernels take it; None for floats."""
    return triton_formats.weight_of(call.w_format, call.x_format) if call.w_format else None


def _inputs(call: ExpertsCall) -> Any:
    """How the inputs of a call are emulated; None if they are not."""
    return triton_inputs.inputs_of(call.w_format, call.x_format) if call.x_format else None


Formats = tuple[Any, Any, str, torch.dtype]


def _formats(call: ExpertsCall) -> Formats:
    """Of a call, as kernels take them: the format of weights, how inputs are emulated, what of
    those of 8 bits has a scale, and the dtype of results."""
    scaled = triton_formats.scaled_of(call.x_format) if _inputs(call) is None else ""
    return _weight(call), _inputs(call), scaled, call.dtype


def _tensors(call: ExpertsCall, residual_TD: Tensor | None = None) -> tuple[Tensor | None, ...]:
    c = call
    x_TD = with_rows(c.x_TD) if c.x_scale_TG is None else in_words(c.x_TD)
    return (
        x_TD, contiguous(c.weights_TK), contiguous(c.ids_TK), c.w13_EFD, c.w2_EDI,
        with_rows(c.b13_EF), with_rows(c.b2_ED), contiguous(c.expert_map), contiguous(residual_TD),
        c.w13_scale_EFG, c.w2_scale_EDG, c.w13_zero_EFG, c.w2_zero_EDG,
        contiguous(c.global_scale13_E), contiguous(c.global_scale2_E), contiguous(c.x_scale),
        contiguous(c.h_scale), contiguous(c.x_scale_TG),
    )  # fmt: skip


def tiles_of(kernel: str, call: ExpertsCall) -> Any:
    """The tiles that a call of `tiny` or `rows` takes by the tables."""
    named = dict(zip(TENSORS, _tensors(call), strict=True))
    layer = _layer(named, call.transposed, call.activation, _formats(call))
    module = importlib.import_module(f"moe_ops.kernels.triton.experts.{kernel}")
    return module.tiles_of(call.x_TD, call.ids_TK, layer, call.expert_map)


def _launch_experts(*given: Any) -> Tensor:
    """Launch with the tensors of `run_experts`, and its other arguments behind them."""
    named = dict(zip(TENSORS, given, strict=False))
    kernel, transposed, act, formats, tiles = given[len(TENSORS) :]
    layer = _layer(named, transposed, act, formats)
    module = importlib.import_module(f"moe_ops.kernels.triton.experts.{kernel}")
    routed = (named[n] for n in ("x_TD", "weights_TK", "ids_TK"))
    more = {} if tiles is None else {"tiles": tiles}
    out_TD: Tensor = module.run(
        *routed, layer, named["expert_map"], residual_TD=named["residual_TD"], **more
    )
    return out_TD


def _layer(named: dict[str, Any], transposed: bool, act: Any, formats: Formats) -> Any:
    """The weights of a call, its tensors given by their names in TENSORS and its formats by
    `_formats`, as kernels take them."""
    from moe_ops.kernels.triton.experts.quantized import Codes, as_stored, scales_as_stored
    from moe_ops.kernels.triton.experts.weights import Experts

    codes, (weight, inputs, scaled, dtype) = None, formats
    if weight is not None:
        named |= {n: as_stored(named[n], weight) for n in ("w13_EFD", "w2_EDI")}
        named |= {n: scales_as_stored(named[n], weight) for n in ("scale13_EFG", "scale2_EDG")}
        codes = Codes(
            **{n: named[n] for n in TENSORS[9:]},
            weight=weight,
            inputs=inputs,
            scaled=scaled,
            result=dtype,
        )
    held = {n: named[n] for n in ("w13_EFD", "w2_EDI", "b13_EF", "b2_ED")}
    return Experts(**held, transposed=transposed, act=act, codes=codes)


def _emulates(call: ExpertsCall) -> bool:
    return _inputs(call) is not None


def _register(
    kernel: str,
    supports: Supports,
    read: tuple[str, ...],
    priority: int,
    rows: Rows = ANY_NUMBER,
) -> None:
    """The kernels of a module of `moe_ops.kernels.triton.experts`, alone and onto a residual."""
    given: dict[str, Any] = {"devices": ("cuda",), "priority": priority}
    of_tokens = {**given, "reads": (*read, *reads.CODES), "supports": supports, "rows": rows}

    def run(call: ExpertsCall) -> Tensor:
        return run_experts(kernel, call)

    experts.backend(f"triton.{kernel}", **of_tokens)(run)
    experts.emulates(f"triton.{kernel}", _emulates)
    experts.remembers(f"triton.{kernel}")

    def supports_onto(call: ExpertsOntoCall) -> str | None:
        if needs_grad(call.residual_TD):
            return "is not differentiable, and an argument requires grad"
        return supports(call.layer)

    def run_onto(call: ExpertsOntoCall) -> Tensor:
        return run_experts(kernel, call.layer, call.residual_TD)

    rows = Rows(preferred=_of_layer(rows.preferred), possible=_of_layer(rows.possible))
    onto = {**given, "reads": read, "supports": supports_onto, "rows": rows}
    experts_onto.backend(f"triton.{kernel}", **onto)(run_onto)
    experts_onto.emulates(f"triton.{kernel}", lambda call: _emulates(call.layer))


def _of_layer(limit: Callable[[ExpertsCall], Any] | None) -> Callable[[Any], Any] | None:
    return None if limit is None else lambda call: limit(call.layer)


TINY = Rows(preferred=most_tiny_tokens, possible=max_tiny_tokens)
_register("tiny", supports_tiny, reads.SCALED_EXPERTS, 3, TINY)
_register("rows", supports_codes, reads.SCALED_EXPERTS, 2, Rows(preferred=most_rows_tokens))
_register("grouped", supports_many, reads.SCALED_EXPERTS, 1)

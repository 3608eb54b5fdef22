"""`experts` as one node of ONNX Runtime: com.microsoft MoE, or QMoE for weights that are codes.

The node chooses experts itself, by the largest k of `router_probs`, and weighs them by a softmax
over these. So it is given log w at the experts that were chosen and a low number elsewhere: its
softmax is then w / sum(w), and its result times sum(w) is ours, whatever the router was. An expert
that a token names twice has the sum of both weights, and an id that is no expert's has no part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from moe_ops.exporting.codes import cannot
from moe_ops.exporting.positive import is_proven
from moe_ops.ops.dispatch import local_ids
from moe_ops.ops.experts import ExpertsCall, restored
from moe_ops.quant.formats import ROW, Format

NOT_CHOSEN = -1e4  # far below the logarithm of the smallest weight
LEAST_BLOCK = 16  # of the node's groups, which are powers of two


@dataclass(frozen=True, slots=True)
class Codes:
    """One stacked weight as QMoE takes it."""

    values: Tensor
    scale: Tensor
    zero: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Formulas that make nodes; `assume_positive` lets weights be that no graph proves positive."""

    assume_positive: bool

    def experts(self, call: ExpertsCall) -> Tensor:
        """`experts` as a node. Raises NotImplementedError, with the argument, for what it cannot
        say."""
        c = restored(call) if call.layout else call
        require_sayable(c)
        if not self.assume_positive and not is_proven(c.weights_TK):
            refuse("weights_TK", tuple(c.weights_TK.shape), NOT_PROVEN, SAY_SO)
        weight_TE = _of_experts(c)
        node = quantized_node if c.w_format else plain_node
        out_TD = node(c, _probs(weight_TE).to(c.x_TD.dtype))
        return (out_TD.float() * weight_TE.sum(1, keepdim=True)).to(c.x_TD.dtype)


def _of_experts(c: ExpertsCall) -> Tensor:
    """The weight of each expert for each token in float32, 0 of those that it did not choose."""
    (T, K), E = c.ids_TK.shape, c.w13_EFD.shape[0]
    ids_TK = local_ids(c.ids_TK, E, None).view(T, K)  # E: no expert's
    none = torch.zeros((T, E + 1), dtype=torch.float32, device=c.x_TD.device)
    return none.scatter_add(1, ids_TK, c.weights_TK.float())[:, :E]


def _probs(weight_TE: Tensor) -> Tensor:
    """What the node makes weight / sum(weight) of, the largest 0, as float16 is finest there."""
    log_TE = torch.where(weight_TE > 0, weight_TE.log(), NOT_CHOSEN)
    return log_TE - log_TE.amax(1, keepdim=True)


NOT_PROVEN = "is not made by a softmax or a sigmoid in this graph, and the node wants none below 0"
SAY_SO = "if there is none, say so by decompositions('ort', assume_positive=True)"


def refuse(argument: str, got: object, why: str, instead: str = "") -> NoReturn:
    """Raise NotImplementedError: a call of `experts` that the nodes cannot say."""
    raise cannot("experts", argument, got, why, "onnx", instead)


def require_sayable(c: ExpertsCall) -> None:
    """Raise NotImplementedError, with the argument, unless a node can say a call."""
    if c.expert_map is not None:
        refuse("expert_map", tuple(c.expert_map.shape), "sends experts away, which no node does")
    if c.x_TD.dtype not in (torch.float32, torch.float16):
        refuse("x_TD", c.x_TD.dtype, "is neither float32 nor float16, which the nodes compute in")
    if c.kind != "silu" or not c.gated:
        argument, got = ("kind", c.kind) if c.kind != "silu" else ("gated", c.gated)
        refuse(argument, got, "is no gated silu, which alone the nodes have on CPUs")
    if c.x_format:
        refuse("x_format", c.x_format, "quantises inputs, which no node does")
    for name in ("global_scale13_E", "global_scale2_E"):
        scale = getattr(c, name)
        if scale is not None:
            refuse(name, tuple(scale.shape), "is a global scale, which no node multiplies by")
    if c.w_format:
        _require_format(c)


def _require_format(c: ExpertsCall) -> None:
    found = Format.of(c.w_format)
    rows, size = found.group
    blocks = found.element == "uint4" and rows == 1 and size >= LEAST_BLOCK
    is_power = size > 0 and size & (size - 1) == 0
    if not (blocks and is_power) and (found.element, found.group) != ("int8", ROW):
        why = "is neither uint4:1xG, G a power of two from 16 on, nor int8:row"
        refuse("w_format", c.w_format, why)
    if found.group != ROW and any(width % size for width in c.widths):
        refuse("w_format", c.w_format, f"has groups that do not divide the widths {c.widths}")


def plain_node(c: ExpertsCall, probs_TE: Tensor) -> Tensor:
    """The node MoE of plain weights."""
    w13, w2 = c.w13_EFD, c.w2_EDI
    if c.transposed:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    b13 = None if c.b13_EF is None else _paired(c.b13_EF, c).to(c.x_TD.dtype)
    b2 = None if c.b2_ED is None else c.b2_ED.to(c.x_TD.dtype)
    inputs = (c.x_TD, probs_TE, _paired(w13, c), b13, w2, b2)
    return _symbolic("MoE", c, inputs, {})


def quantized_node(c: ExpertsCall, probs_TE: Tensor) -> Tensor:
    """The node QMoE of codes."""
    found, dtype = Format.of(c.w_format), c.x_TD.dtype
    w13_scale, w2_scale = c.w13_scale_EFG, c.w2_scale_EDG
    assert w13_scale is not None and w2_scale is not None
    w13_zero = None if c.w13_zero_EFG is None else _paired(c.w13_zero_EFG, c)
    first = _codes(found, _paired(c.w13_EFD, c), _paired(w13_scale, c), w13_zero)
    second = _codes(found, c.w2_EDI, w2_scale, c.w2_zero_EDG)
    b13 = None if c.b13_EF is None else _paired(c.b13_EF, c).to(dtype)
    b2 = None if c.b2_ED is None else c.b2_ED.to(dtype)
    attributes: dict[str, Any] = {
        "expert_weight_bits": found.bits, "quant_type": "int", "weights_prepacked": 0,
    }  # fmt: skip
    if found.group != ROW:
        attributes["block_size"] = found.group[1]
    inputs = (
        c.x_TD, probs_TE, first.values, first.scale, b13, second.values, second.scale, b2,
        None, None, None, first.zero, second.zero,
    )  # fmt: skip
    return _symbolic("QMoE", c, inputs, attributes)


def _codes(found: Format, values: Tensor, scale: Tensor, zero: Tensor | None) -> Codes:
    """Codes as the node has them: unsigned, scales in float32, zero points two in a byte."""
    scale = scale.float()
    if found.group == ROW:
        return Codes((values.to(torch.int16) + found.middle).to(torch.uint8), scale[..., 0], None)
    assert zero is not None
    if zero.shape[-1] % 2:
        zero = torch.nn.functional.pad(zero, (0, 1))
    # By numbers, as shifts of bytes come out of torch.onnx as numbers with a sign.
    low, high = zero[..., 0::2].float(), zero[..., 1::2].float()
    return Codes(values, scale, (low + high * 16.0).to(torch.uint8))


def _paired(t: Tensor, c: ExpertsCall) -> Tensor:
    """The rows of gate and up, of which a tensor has one on axis 1, by turns, as the node reads
    them."""
    if c.interleaved:
        return t
    return t.unflatten(1, (2, t.shape[1] // 2)).transpose(1, 2).flatten(1, 2)


def _symbolic(
    name: str, c: ExpertsCall, inputs: tuple[Tensor | None, ...], attributes: dict[str, Any]
) -> Tensor:
    said: dict[str, Any] = {
        "k": min(c.ids_TK.shape[1], c.w13_EFD.shape[0]),
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": float(c.alpha),
        "activation_beta": float(c.up_shift),
        "normalize_routing_weights": 1,
        **attributes,
    }
    if c.limit is not None:
        said["swiglu_limit"] = float(c.limit)
    return torch.onnx.ops.symbolic(
        f"com.microsoft::{name}", inputs, said, dtype=c.x_TD.dtype, shape=c.x_TD.shape, version=1
    )

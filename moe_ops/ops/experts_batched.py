"""The experts on tokens in batches: a row of slots for each expert, of which the first are used."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.options import check_int
from moe_ops.checks.shapes import (
    FLOATS_OR_DOUBLE,
    check_devices,
    check_size,
    check_tensor,
    wide_dtype,
)
from moe_ops.ops.dispatch import row_dtypes
from moe_ops.ops.experts import ExpertsCall, experts
from moe_ops.ops.experts import check as check_experts
from moe_ops.quant.formats import TENSOR, Format
from moe_ops.registry.spec import op

# Arguments of `experts` that batches have in another form, or not at all: a row has one expert.
LEFT_OUT = ("x_TD", "weights_TK", "ids_TK", "expert_map", "expert_offset", "x_scale_TG")


@dataclass(slots=True)
class Batches:
    """Tokens by experts: x_EMD [E, M, D], of which expert e has the first counts_E[e]."""

    x_EMD: Tensor
    counts_E: Tensor
    x_scale_EMG: Tensor | None = None
    expected: int = 0


def _flat() -> dict[str, str]:
    """The arguments by flat name, and where they are: what has no default first."""
    rest = [f"layer.{f.name}" for f in fields(ExpertsCall) if f.name not in LEFT_OUT]
    batches = [f"batches.{f.name}" for f in fields(Batches)]
    paths = (*batches[:2], *rest[:2], *batches[2:], *rest[2:])
    return {path.partition(".")[2]: path for path in paths}


@dataclass(slots=True)
class ExpertsBatchedCall:
    """The arguments of `experts_batched`: batches, and those of `experts` that are a layer's."""

    batches: Batches
    layer: ExpertsCall

    FLAT: ClassVar[dict[str, str]] = _flat()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the result."""
        return replace(self.layer, x_TD=self.batches.x_EMD).dtype


def check(call: ExpertsBatchedCall) -> None:
    """Raise ValueError or TypeError unless `experts_batched` takes these arguments."""
    b, w13_EFD = call.batches, call.layer.w13_EFD
    codes = b.x_scale_EMG is not None or bool(call.layer.out_dtype)
    check_tensor("x_EMD", b.x_EMD, 3, row_dtypes() if codes else FLOATS_OR_DOUBLE)
    check_tensor("w13_EFD", w13_EFD, 3, row_dtypes())
    E = w13_EFD.shape[0]
    if E < 1:
        raise ValueError(
            f"w13_EFD holds no expert, got shape {tuple(w13_EFD.shape)}; give one expert or more"
        )
    check_size("x_EMD", b.x_EMD, 0, E, "the experts of w13_EFD")
    check_tensor("counts_E", b.counts_E, 1, (torch.int32,))
    check_size("counts_E", b.counts_E, 0, E, "the experts of w13_EFD")
    check_devices(b.x_EMD, counts_E=b.counts_E)
    check_int("expected", b.expected, least=0)
    if b.x_scale_EMG is not None and b.x_scale_EMG.dim() != 3:
        raise ValueError(
            f"x_scale_EMG must have an axis of experts, one of their rows and one of groups, got "
            f"{tuple(b.x_scale_EMG.shape)}; QuantConfig.batched_scale_shape says how long they are"
        )
    if b.x_scale_EMG is not None:
        check_size("x_scale_EMG", b.x_scale_EMG, 0, E, "the experts of w13_EFD")
    try:
        check_experts(of_one(call))
    except (TypeError, ValueError) as error:
        # It speaks of the tokens that the slots of an expert stand for.
        said = str(error).replace("x_TD", "x_EMD").replace("x_scale_TG", "x_scale_EMG")
        raise type(error)(said) from None
    _check_scales_of_rows(call.layer)


def _check_scales_of_rows(layer: ExpertsCall) -> None:
    """Raise ValueError if one scale would be made of all slots."""
    if layer.x_format and layer.x_scale is None and Format.of(layer.x_format).group == TENSOR:
        raise ValueError(
            f"x_format={layer.x_format!r} takes one scale from all slots, and those past a count "
            "may hold anything; give a static scale (x_scale), or a format with a scale for each "
            "row or group"
        )


def of_one(call: ExpertsBatchedCall, rows: int | None = None) -> ExpertsCall:
    """The slots of the first expert, or so many, as tokens of a call of `experts`, whose ids and
    weights hold nothing: for those who look at shapes, strides and dtypes alone."""
    b = call.batches
    x_TD = b.x_EMD.select(0, 0)
    scale_TG = None if b.x_scale_EMG is None else b.x_scale_EMG.select(0, 0)
    if rows is not None:
        first = min(1, x_TD.shape[0])
        x_TD = x_TD.narrow(0, 0, first).expand(rows, -1)
        if scale_TG is not None:
            scale_TG = scale_TG.narrow(0, 0, first).expand(rows, -1)
    T = x_TD.shape[0]
    return replace(
        call.layer,
        x_TD=x_TD,
        ids_TK=b.counts_E.new_empty(T, 1),
        weights_TK=b.counts_E.new_empty(T, 1, dtype=wide_dtype(b.x_EMD)),
        x_scale_TG=scale_TG,
    )


def in_rows(call: ExpertsBatchedCall) -> ExpertsCall:
    """A call of `experts` of all slots: one is a token of one choice, -1 past a count."""
    b, (E, M, D) = call.batches, call.batches.x_EMD.shape
    scale_EMG = b.x_scale_EMG
    slots_EM = torch.arange(M, dtype=torch.int32, device=b.x_EMD.device).expand(E, M)
    experts_EM = torch.arange(E, dtype=torch.int32, device=b.x_EMD.device)[:, None]
    ids_EM = torch.where(slots_EM < b.counts_E[:, None], experts_EM, -1)
    return replace(
        call.layer,
        x_TD=b.x_EMD.reshape(E * M, D),
        ids_TK=ids_EM.reshape(E * M, 1),
        weights_TK=torch.ones(E * M, 1, dtype=wide_dtype(b.x_EMD), device=b.x_EMD.device),
        x_scale_TG=None if scale_EMG is None else scale_EMG.flatten(0, 1),
    )


@op(check=check)
def experts_batched(call: ExpertsBatchedCall) -> Tensor:
    """Run rows that are sorted into batches through the expert of each: y_em = W2_e act(W13_e x_em
    + b13_e) + b2_e for m < counts_E[e].

    Batches are what kernels of expert parallelism hand over where nothing may wait for counts, such
    as DeepEP's low-latency ones: their buffers can be given as they are. What x_EMD and its scales
    hold past a count changes nothing, and what the result holds there is unspecified. A count above
    M is M, one below 0 is 0. Rows are not weighed: `combine_tokens` of the layout "batched" does
    so.

    x_EMD: [E, M, D], floats or, with x_scale_EMG [E, M, groups], codes of an x_format of 8 bits, as
    `experts` takes tokens; with strides whose rows of all experts follow each other (contiguous
    ones do) none are copied. counts_E: int32 [E]. expected: about how many rows an expert has, by
    which kernels are picked, and no result is; 0 if it is not known. Other arguments and their
    meaning are those of `experts`. Result [E, M, D] in x's dtype, or out_dtype. Raises ValueError
    or TypeError for wrong shapes, dtypes, devices, formats or parameters, and ValueError for an
    x_format with a dynamic scale of all slots.
    """
    out_TD: Tensor = experts.part(in_rows(call))
    return out_TD.view(*call.batches.x_EMD.shape[:2], out_TD.shape[1])


experts_batched.fake(fake_impls.experts_batched)

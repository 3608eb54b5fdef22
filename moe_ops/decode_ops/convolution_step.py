"""One token of causal convolutions of each channel, whose last inputs stay where they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import silu

from moe_ops import fake_impls
from moe_ops.checks.shapes import misfit, wide
from moe_ops.registry.spec import DECODE_OPS, op


@dataclass(slots=True)
class ConvolutionStepCall:
    """The arguments of `convolution_step`, which writes to the state."""

    x_BD: Tensor
    state_BDW: Tensor
    weight_DW: Tensor
    bias_D: Tensor | None = None
    silu: bool = False

    MUTATED: ClassVar[tuple[str, ...]] = ("state_BDW",)


def refusal(call: ConvolutionStepCall) -> str | None:
    """Why these are no arguments of `convolution_step`, or None."""
    x_BD, state_BDW, weight_DW = call.x_BD, call.state_BDW, call.weight_DW
    if (x_BD.dim(), state_BDW.dim(), weight_DW.dim()) != (2, 3, 2):
        got = ", ".join(str(list(t.shape)) for t in (x_BD, state_BDW, weight_DW))
        return f"x, state and weight are {got}, not [B, D], [B, D, W] and [D, W]; reshape them"
    (B, D), kept, taps = x_BD.shape, state_BDW.shape[2], weight_DW.shape[1]
    if not 1 <= taps <= kept + 1:
        return f"{taps} weights do not fit {kept} inputs in the state and one more; keep more"
    named = (
        ("x", x_BD, (B, D)), ("state", state_BDW, (B, D, kept)), ("weight", weight_DW, (D, taps)),
        ("bias", call.bias_D, (D,)),
    )  # fmt: skip
    return misfit(named)


def check(call: ConvolutionStepCall) -> None:
    """Raise ValueError for what `refusal` names."""
    reason = refusal(call)
    if reason is not None:
        raise ValueError(f"convolution_step: {reason}")


@op(check=check, table=DECODE_OPS)
def convolution_step(call: ConvolutionStepCall) -> Tensor:
    """out[b, d] = Σ_w weight[d, w] y[b, d, w] + bias[d], and the silu of it if `silu`

    where y are the last inputs of a channel, as many as it has weights: those at the end of the
    state [B, D, W], and x. The state then loses its first input and gets x; it may have any of the
    dtypes and is written in place. [B, D] of the dtype of x, summed in float32 and rounded once. On
    a GPU it is one launch. Raises ValueError for what `refusal` names.
    """
    taps, S = call.weight_DW.shape[1], call.state_BDW
    x_BDW = wide(call.x_BD[..., None])
    y_BDW = torch.cat([wide(S[..., S.shape[2] - taps + 1 :]), x_BDW], -1)
    S.copy_(torch.cat([S[..., 1:], call.x_BD[..., None].to(S.dtype)], -1))
    out_BD = (y_BDW * wide(call.weight_DW)).sum(-1)
    if call.bias_D is not None:
        out_BD = out_BD + wide(call.bias_D)
    return (silu(out_BD) if call.silu else out_BD).to(call.x_BD.dtype)


convolution_step.fake(fake_impls.convolution_step)

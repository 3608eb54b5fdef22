"""The norm of a few rows and the linear layers in codes that read it; `passes/fuse_norm.py` puts it
into graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moe_ops import fake_impls
from moe_ops.decode_ops import quantized_linears as codes
from moe_ops.decode_ops.linears import DTYPES, shape_of
from moe_ops.decode_ops.normed_linears import normed, refusal_of_norm
from moe_ops.decode_ops.quantized_linears import QuantizedLinearsCall, quantized_linears
from moe_ops.registry.spec import DECODE_OPS, op


@dataclass(slots=True)
class NormedQuantizedLinearsCall:
    """The arguments of `normed_quantized_linears`."""

    x_TK: Tensor
    residual_TK: Tensor | None
    gain_K: Tensor
    eps: float
    weights: Sequence[Tensor]
    scales: Sequence[Tensor]
    zeros: Sequence[Tensor | None]
    global_scales: Sequence[Tensor | None]
    biases: Sequence[Tensor | None]
    w_format: str
    gain_shift: float | None = None

    def of(self, x_TK: Tensor) -> QuantizedLinearsCall:
        """The layers, of another input."""
        return QuantizedLinearsCall(
            x_TK, self.weights, self.scales, self.zeros, self.global_scales, self.biases,
            self.w_format,
        )  # fmt: skip


def refusal(call: NormedQuantizedLinearsCall) -> str | None:
    """Why the norm is none of this op, and what to do, or None."""
    if call.x_TK.dim() != 2 or call.x_TK.dtype not in DTYPES:
        given = f"x_TK is {call.x_TK.dtype} {shape_of(call.x_TK)}"
        return f"{given}, not bfloat16 or float16 [T, K]; use `quantized_linears`"
    return refusal_of_norm(call.x_TK, call.residual_TK, call.gain_K, "`quantized_linears`")


def check(call: NormedQuantizedLinearsCall) -> None:
    """Raise ValueError or TypeError for what `refusal` names, and for layers that
    `quantized_linears` does not take."""
    reason = refusal(call)
    if reason is not None:
        raise ValueError(f"normed_quantized_linears: {reason}")
    codes.check(call.of(call.x_TK))


@op(check=check, table=DECODE_OPS)
def normed_quantized_linears(call: NormedQuantizedLinearsCall) -> list[Tensor]:
    """[s, n, *quantized_linears(n, ...)] of up to 64 rows, with s and n as `normed_linears` has
    them: s = x + residual, left out where there is no residual, and n its rows, each normed.

    Codes, scales, biases and the gain may be read ahead of the end of the launch before: what
    writes them must have ended two launches ago, as for parameters it has. Raises ValueError or
    TypeError for what `normed_linears` and `quantized_linears` refuse.
    """
    first, n_TK = normed(call.x_TK, call.residual_TK, call.gain_K, call.eps, call.gain_shift)
    return [*first, n_TK, *quantized_linears.body(call.of(n_TK))]


normed_quantized_linears.fake(fake_impls.normed_quantized_linears)

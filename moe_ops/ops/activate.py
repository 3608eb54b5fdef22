"""The activation between the two expert matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.options import check_finite
from moe_ops.checks.shapes import FLOATS_OR_DOUBLE, check_choice, check_tensor, wide
from moe_ops.registry.spec import op

KINDS = ("silu", "gelu", "gelu_tanh", "relu2")
Options = tuple[str, bool, bool, float, float | None, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """Arguments of the `activate` op after its tensor; that, or a layer of them, checks them."""

    kind: str
    gated: bool = True
    interleaved: bool = False
    alpha: float = 1.0
    limit: float | None = None
    up_shift: float = 0.0

    @property
    def args(self) -> Options:
        return options_of(self)


@dataclass(slots=True)
class ActivateCall:
    """The arguments of `activate`."""

    y_RF: Tensor
    kind: str = "silu"
    gated: bool = True
    interleaved: bool = False
    alpha: float = 1.0
    limit: float | None = None
    up_shift: float = 0.0


def check(call: ActivateCall) -> None:
    """Raise ValueError or TypeError unless `activate` takes these arguments."""
    check_tensor("y_RF", call.y_RF, 2, FLOATS_OR_DOUBLE)
    check_activation(call)
    if call.gated and call.y_RF.shape[1] % 2:
        raise ValueError(
            f"a gated activation halves the width of y_RF, which is odd: {tuple(call.y_RF.shape)}"
        )


class Activates(Protocol):
    """What says which activation: a record that holds one, or `Activation`."""

    @property
    def kind(self) -> str: ...
    @property
    def gated(self) -> bool: ...
    @property
    def interleaved(self) -> bool: ...
    @property
    def alpha(self) -> float: ...
    @property
    def limit(self) -> float | None: ...
    @property
    def up_shift(self) -> float: ...


def options_of(act: Activates) -> Options:
    """The arguments of `activate` after its tensor."""
    return (act.kind, act.gated, act.interleaved, act.alpha, act.limit, act.up_shift)


def check_activation(act: Activates) -> None:
    """Raise ValueError unless these parameters describe an activation."""
    kind, alpha, limit, up_shift = act.kind, act.alpha, act.limit, act.up_shift
    if kind in KINDS and alpha == 1.0 and limit is None and up_shift == 0.0 and act.gated:
        return  # the common ones
    check_choice("kind", kind, KINDS)
    if alpha - alpha != 0.0 or up_shift - up_shift != 0.0:  # infinite, or not a number
        check_finite("alpha", alpha)
        check_finite("up_shift", up_shift)
    if kind != "silu" and alpha != 1.0:
        raise ValueError(f"alpha={alpha} goes with kind='silu', got kind={kind!r}")
    if limit is not None and not limit > 0:
        raise ValueError(f"limit={limit} must be positive, or None for no clamp")
    if not act.gated and (act.interleaved or up_shift != 0.0):
        raise ValueError(
            "interleaved and up_shift speak of the `up` half, which an ungated activation has not"
        )


@op(check=check)
def activate(call: ActivateCall) -> Tensor:
    """Apply the experts' activation: h = f(gate) * (up + up_shift), or h = f(y) where not gated.

    gate and up are the first and the second half of each row of y_RF, or its even and odd columns
    if interleaved. With a limit, gate = min(gate, limit) and up is clamped to [-limit, limit]
    first. f is

        silu       g * sigmoid(alpha * g)         gelu       g * Phi(g)
        gelu_tanh  the tanh approximation of it   relu2      max(g, 0) ** 2

    Computed in float32 and rounded once to y's dtype. Rows may hold NaN (unused rows do): nothing
    mixes rows.

    y_RF: float [R, F], F even if gated; result [R, F / 2], or [R, F] if not gated.
    Raises ValueError or TypeError for wrong shapes, dtypes or parameters.

    Sources: GLU variants, arXiv:2002.05202; squared ReLU, arXiv:2109.08668; the clamped, shifted
    form with alpha = 1.702 and limit = 7 is gpt-oss's (arXiv:2508.10925).
    """
    y, limit, dtype = wide(call.y_RF), call.limit, call.y_RF.dtype
    if not call.gated:
        y = y if limit is None else y.clamp(max=limit)
        return _act(y, call.kind, call.alpha).to(dtype)
    if call.interleaved:
        gate, up = y[:, ::2], y[:, 1::2]
    else:
        gate, up = y.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if call.up_shift != 0.0:
        up = up + call.up_shift
    return (_act(gate, call.kind, call.alpha) * up).to(dtype)


def _act(gate: Tensor, kind: str, alpha: float) -> Tensor:
    if kind == "silu":
        return F.silu(gate) if alpha == 1.0 else gate * torch.sigmoid(alpha * gate)
    if kind == "gelu":
        return F.gelu(gate)
    if kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh")
    return F.relu(gate).square()


activate.fake(fake_impls.activate)

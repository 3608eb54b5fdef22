"""One token of a selective state space (Mamba2), whose state stays where it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import softplus

from moe_ops import fake_impls
from moe_ops.checks.shapes import misfit, wide, wide_dtype
from moe_ops.registry.spec import DECODE_OPS, op


@dataclass(slots=True)
class StateSpaceStepCall:
    """The arguments of `state_space_step`, which writes to the state."""

    x_BHV: Tensor
    dt_BH: Tensor
    a_H: Tensor
    b_BND: Tensor
    c_BND: Tensor
    state_BHVD: Tensor
    skip_H: Tensor | None = None
    dt_bias_H: Tensor | None = None
    softplus: bool = False
    ahead: bool = False

    MUTATED: ClassVar[tuple[str, ...]] = ("state_BHVD",)


def refusal(call: StateSpaceStepCall) -> str | None:
    """Why these are no arguments of `state_space_step`, or None."""
    given = (call.x_BHV, call.dt_BH, call.b_BND, call.c_BND)
    return refusal_of(given, (call.a_H, call.skip_H, call.dt_bias_H), call.state_BHVD, "B")


def refusal_of(
    given: Sequence[Tensor],
    of_heads: Sequence[Tensor | None],
    state_BHVD: Tensor | None,
    lead: str,
) -> str | None:
    """Why x, dt, b and c, of leading axes with these letters, do not fit each other, what there is
    of each head, or the state, or None."""
    x, dt, b, c = given
    axes, names = len(lead), ", ".join(lead)
    if (x.dim(), b.dim()) != (axes + 2, axes + 2):
        got = f"{list(x.shape)} and {list(b.shape)}"
        return f"x and b are {got}, not [{names}, H, V] and [{names}, N, D]; reshape them"
    (H, V), (N, D) = x.shape[axes:], b.shape[axes:]
    if N == 0 or H % N:
        return f"{N} groups of heads do not divide {H} heads; repeat them"
    sizes = tuple(x.shape[:axes])
    named: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
        ("x", x, (*sizes, H, V)), ("dt", dt, (*sizes, H)), ("b", b, (*sizes, N, D)),
        ("c", c, (*sizes, N, D)), ("state", state_BHVD, (x.shape[0], H, V, D)),
    ]  # fmt: skip
    named += zip(("a", "skip", "dt_bias"), of_heads, 3 * [(H,)], strict=True)
    reason = misfit(named)
    if reason is not None:
        return reason
    if state_BHVD is not None and state_BHVD.dtype != wide_dtype(x):
        return f"the state is {state_BHVD.dtype}, not float32; convert it"
    return None


def check(call: StateSpaceStepCall) -> None:
    """Raise ValueError for what `refusal` names."""
    reason = refusal(call)
    if reason is not None:
        raise ValueError(f"state_space_step: {reason}")


@op(check=check, table=DECODE_OPS)
def state_space_step(call: StateSpaceStepCall) -> Tensor:
    """out[b, h] = S c[b, n(h)] + skip[h] x[b, h] after the state S = state[b, h] [V, D] has become

        exp(dt a[h]) S + dt x[b, h] b[b, n(h)]ᵀ

    with dt = dt[b, h] + dt_bias[h], of which the softplus is taken if `softplus`. [B, H, V], of the
    dtype of x. The state is float32 and is written in place. H / N heads share a b and a c; no skip
    and no dt_bias count as 0. All sums are in float32. On a GPU it is one launch, which reads and
    writes the state once; if `ahead`, it may read it ahead of the end of the launch before: what
    wrote it must have ended two launches ago. Raises ValueError for what `refusal` names.
    """
    H = call.x_BHV.shape[1]
    x_BHV, S = wide(call.x_BHV), call.state_BHVD
    dt_BH = steps_of(call.dt_BH, call.dt_bias_H, call.softplus)
    b_BHD, c_BHD = (of_every_head(t, H) for t in (call.b_BND, call.c_BND))
    S.mul_((dt_BH * wide(call.a_H)).exp()[..., None, None])
    S.addcmul_((dt_BH[..., None] * x_BHV)[..., None], b_BHD[:, :, None])
    out_BHV = (S @ c_BHD[..., None])[..., 0]
    if call.skip_H is not None:
        out_BHV = out_BHV + wide(call.skip_H)[:, None] * x_BHV
    return out_BHV.to(call.x_BHV.dtype)


def steps_of(dt: Tensor, bias_H: Tensor | None, positive: bool) -> Tensor:
    """The lengths [..., H] of the steps, in float32."""
    dt = wide(dt) if bias_H is None else wide(dt) + wide(bias_H)
    return softplus(dt) if positive else dt


def of_every_head(x: Tensor, H: int) -> Tensor:
    """[..., N, D] in float32, one for each of H heads."""
    N = x.shape[-2]
    return wide(x) if N == H else wide(x).repeat_interleave(H // N, -2)


state_space_step.fake(fake_impls.state_space_step)

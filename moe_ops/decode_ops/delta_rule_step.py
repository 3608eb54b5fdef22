"""One token of linear attention by the gated delta rule, whose state stays where it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.shapes import misfit, wide, wide_dtype
from moe_ops.registry.spec import DECODE_OPS, op

EPS = 1e-6  # below the root of an l2 norm


@dataclass(slots=True)
class DeltaRuleStepCall:
    """The arguments of `delta_rule_step`, which writes to the state."""

    q_BND: Tensor
    k_BND: Tensor
    v_BHV: Tensor
    g_BHD: Tensor
    beta_BH: Tensor
    state_BHDV: Tensor
    scale: float
    normalize: bool = False
    ahead: bool = False

    MUTATED: ClassVar[tuple[str, ...]] = ("state_BHDV",)


def refusal(call: DeltaRuleStepCall) -> str | None:
    """Why these are no arguments of `delta_rule_step`, or None."""
    return refusal_of(
        (call.q_BND, call.k_BND, call.v_BHV, call.g_BHD, call.beta_BH), call.state_BHDV, "B"
    )


def refusal_of(given: Sequence[Tensor], state_BHDV: Tensor | None, lead: str) -> str | None:
    """Why q, k, v, g and beta, of leading axes with these letters, do not fit each other or the
    state, or None."""
    q, k, v, g, beta = given
    axes, names = len(lead), ", ".join(lead)
    if (q.dim(), v.dim()) != (axes + 2, axes + 2):
        got = f"{list(q.shape)} and {list(v.shape)}"
        return f"q and v are {got}, not [{names}, N, D] and [{names}, H, V]; reshape them"
    (N, D), (H, V) = q.shape[axes:], v.shape[axes:]
    if N == 0 or H % N:
        return f"{N} heads of the keys do not divide {H} of the values; repeat them"
    sizes = (*q.shape[:axes], H)
    gates = (*sizes, D) if g.dim() > axes + 1 else sizes
    named = [("q", q, q.shape), ("k", k, q.shape), ("v", v, (*sizes, V)), ("g", g, gates)]
    named += [("beta", beta, sizes)]
    if state_BHDV is not None:
        named += [("state", state_BHDV, (q.shape[0], H, D, V))]
    reason = misfit(named)
    if reason is not None:
        return reason
    if state_BHDV is not None and state_BHDV.dtype != wide_dtype(q):
        return f"the state is {state_BHDV.dtype}, not float32; convert it"
    return None


def check(call: DeltaRuleStepCall) -> None:
    """Raise ValueError for what `refusal` names."""
    reason = refusal(call)
    if reason is not None:
        raise ValueError(f"delta_rule_step: {reason}")


@op(check=check, table=DECODE_OPS)
def delta_rule_step(call: DeltaRuleStepCall) -> Tensor:
    """out[b, h] = Sᵀ q[b, n(h)] scale after the state S = state[b, h] [D, V] has become

        S' + k[b, n(h)] ((v[b, h] - S'ᵀ k[b, n(h)]) beta[b, h])ᵀ  with  S' = exp(g[b, h]) S

    [B, H, V], of the dtype of q. The state is float32 and is written in place. H / N heads share a
    key. g, of which nothing is above 0, is [B, H], or [B, H, D] with a gate for each row of S. If
    `normalize`, q and k are first x / sqrt(Σ x² + 1e-6). All sums are in float32. It writes over
    what a gradient would read, so autograd refuses one; `delta_rule` has it. On a GPU it is
    one launch, which reads and writes the state once; if `ahead`, it may read it ahead of the end
    of the launch before: what wrote it must have ended two launches ago. Raises ValueError for what
    `refusal` names.
    """
    H = call.v_BHV.shape[1]
    q_BHD, k_BHD = (heads(x, H, call.normalize)[:, :, None] for x in (call.q_BND, call.k_BND))
    S = call.state_BHDV
    gate = wide(call.g_BHD).exp()
    S.mul_(gate[..., None] if gate.dim() == 3 else gate[..., None, None])
    beta_BH = wide(call.beta_BH)[..., None, None]
    fresh_BHV = (wide(call.v_BHV)[:, :, None] - k_BHD @ S) * beta_BH
    S.addcmul_(k_BHD.mT, fresh_BHV)
    return (q_BHD * call.scale @ S)[:, :, 0].to(call.q_BND.dtype)


def heads(x: Tensor, H: int, normalize: bool) -> Tensor:
    """Heads [..., N, D] in float32, one for each of H, normalised or not."""
    x = wide(x)
    if normalize:
        x = x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS)
    N = x.shape[-2]
    return x if N == H else x.repeat_interleave(H // N, -2)


delta_rule_step.fake(fake_impls.delta_rule_step)

"""Linear attention by the gated delta rule over the tokens of a prompt, of any number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_ops import fake_impls
from moe_ops.checks.shapes import wide
from moe_ops.decode_ops.delta_rule_step import heads, refusal_of
from moe_ops.registry.spec import DECODE_OPS, op

CHUNK = 64  # tokens between two states
BLOCK = 16  # tokens of which pairs have a gate each, where gates differ by channel


@dataclass(slots=True)
class DeltaRuleCall:
    """The arguments of `delta_rule`."""

    q_BTND: Tensor
    k_BTND: Tensor
    v_BTHV: Tensor
    g_BTHD: Tensor
    beta_BTH: Tensor
    state_BHDV: Tensor | None
    scale: float
    normalize: bool = False


def refusal(call: DeltaRuleCall) -> str | None:
    """Why these are no arguments of `delta_rule`, or None."""
    return refusal_of(
        (call.q_BTND, call.k_BTND, call.v_BTHV, call.g_BTHD, call.beta_BTH), call.state_BHDV, "BT"
    )


def check(call: DeltaRuleCall) -> None:
    """Raise ValueError for what `refusal` names."""
    reason = refusal(call)
    if reason is not None:
        raise ValueError(f"delta_rule: {reason}")


@op(check=check, table=DECODE_OPS)
def delta_rule(call: DeltaRuleCall) -> tuple[Tensor, Tensor]:
    """(out, state) of `delta_rule_step` for the tokens t = 0 .. T - 1 one after the other: out
    [B, T, H, V], of the dtype of q, and the last state [B, H, D, V], float32 and new memory.

    The first state is `state`, or 0 if that is None. q and k are [B, T, N, D], v is [B, T, H, V], g
    [B, T, H] or [B, T, H, D], beta [B, T, H]. A token with a k, beta and g of 0 leaves the state as
    it is. Sums are in float32. One call serves any T: what a chunk of tokens adds to a state, and
    reads of it, follows from a triangular system in the chunk, and a loop goes from chunk to chunk.
    On a GPU it is one launch. Raises ValueError for what `refusal` names.
    """
    B, T, H, V = call.v_BTHV.shape
    D = call.q_BTND.shape[3]
    size = min(CHUNK, -(-max(T, 1) // BLOCK) * BLOCK)
    q, k = (chunks(heads(x, H, call.normalize), size) for x in (call.q_BTND, call.k_BTND))
    q, v, beta = q * call.scale, chunks(call.v_BTHV, size), chunks(call.beta_BTH, size)
    k_beta = k * beta
    g = chunks(call.g_BTHD, size)  # one number, or one for each channel
    (scores, system), to_end = decayed(torch.stack([q, k_beta]), k, g)
    from_state = g.cumsum(3).exp()
    to_solve = torch.cat([v * beta, k_beta * from_state], -1)
    solved = torch.linalg.solve_triangular(system, to_solve, upper=False, unitriangular=True)
    new, read = solved.split([V, D], -1)
    q = q * from_state
    k = k * to_end
    left = from_state[..., -1, :, None]  # of the state of the chunk before

    S = q.new_zeros(B, H, D, V) if call.state_BHDV is None else call.state_BHDV.clone()
    out = torch.empty_like(new)
    for i in range(out.shape[2]):
        fresh = new[:, :, i] - read[:, :, i] @ S
        out[:, :, i] = q[:, :, i] @ S + scores[:, :, i] @ fresh
        S = S * left[:, :, i] + k[:, :, i].mT @ fresh
    out_BTHV = out.flatten(2, 3)[:, :, :T].transpose(1, 2)
    return out_BTHV.to(call.q_BTND.dtype).contiguous(), S


def chunks(x: Tensor, size: int) -> Tensor:
    """[B, T, H, X] or [B, T, H] as chunks [B, H, C, size, X or 1], in float32, the last filled up
    with 0."""
    x = wide(x if x.dim() == 4 else x[..., None]).transpose(1, 2)
    x = pad(x, (0, 0, 0, -x.shape[2] % size))
    B, H, T, X = x.shape
    return x.reshape(B, H, T // size, size, X)


def decayed(x: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [..., i, j] = Σ_d x[..., i, d] k[..., j, d] exp(g[..., j + 1, d] + .. + g[..., i, d])
    of the tokens j <= i of each chunk, else 0; and that exp for the last i, [..., j, d]."""
    if g.shape[-1] == 1:
        kept = kept_between(g)
        return (x @ k.mT) * kept, kept[..., -1, :, None]
    size = k.shape[-2]
    out = x.new_zeros(*x.shape[:-1], size)
    pairs, to_end = within_blocks(*(t.unflatten(-2, (-1, BLOCK)) for t in (x, k, g)))
    sums = g.unflatten(-2, (-1, BLOCK)).cumsum(-2)  # from the beginning of each block
    before = to_end[..., :0, 0, :]  # of the tokens before a block, up to its beginning
    for n in range(size // BLOCK):
        rows, columns = slice(n * BLOCK, (n + 1) * BLOCK), slice(n * BLOCK)
        # By way of the end of the block before neither factor exceeds 1.
        to_x, to_k = x[..., rows, :] * sums[..., n, :, :].exp(), k[..., columns, :] * before.exp()
        out[..., rows, columns] = to_x @ to_k.mT
        out[..., rows, rows] = pairs[..., n, :, :]
        before = torch.cat([before + sums[..., n, -1:, :], to_end[..., n, :, :]], -2)
    return out, before.exp()


def kept_between(g: Tensor) -> Tensor:
    """[..., i, j] = exp(g[..., j + 1, 0] + .. + g[..., i, 0]) for j <= i, else 0, of [..., T, 1].

    As the difference of sums from the beginning it would lose what is small beside these.
    """
    size = g.shape[-2]
    after = torch.ones(size, size, dtype=torch.bool, device=g.device).tril(-1)
    sums = g.expand(*g.shape[:-1], size).masked_fill(~after, 0.0).cumsum(-2)
    return sums.masked_fill(after.mT, float("-inf")).exp()


def within_blocks(x: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The scores of `decayed` for tokens [..., BLOCK, D] of the same block, with a gate for each
    channel; and the sums of gates behind each token, up to the end of its block."""
    scores = x.new_zeros(*x.shape[:-1], BLOCK)
    sums = torch.zeros_like(g)
    for i in range(BLOCK):
        sums[..., :i, :] += g[..., i : i + 1, :]
        gated = sums[..., : i + 1, :].exp() * k[..., : i + 1, :]
        scores[..., i, : i + 1] = (x[..., i : i + 1, :] * gated).sum(-1)
    return scores, sums


delta_rule.fake(fake_impls.delta_rule)

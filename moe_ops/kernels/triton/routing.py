"""Routing on the device: scores, group limits, top-k and weights of `moe_ops/ops/route.py`.

ROUTER: (score, by logit, groups, groups kept, worth by top two, fill, softmax of the selected,
renormalise, eps, least sum, scale, no weight outside of the groups kept).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.activation import sigmoid
from moe_ops.kernels.triton.launch import on_its_device, pdl_options, take_turn
from moe_ops.kernels.triton.replay import launch

# The bits of a float32 that are never set in a float of these types; a column fits into them.
FREE_BITS = {torch.bfloat16: 0xFFFF, torch.float16: 0x1FFF}
# Where a program takes four tokens instead of one: a processor holds no more than 32 programs of
# one warp. With 512 experts that was slower.
MANY_TOKENS, FEW_EXPERTS = 4096, 128
NONE: tl.constexpr = tl.constexpr(-(2**31))  # below the key of every float
NAN: tl.constexpr = tl.constexpr(2**31 - 1)  # above that of every number, as torch.topk has it


@triton.jit
def keys_of(choice_TE, used_TE):
    """int32 keys in the order of the floats: a warp finds the largest in one instruction."""
    bits = choice_TE.to(tl.int32, bitcast=True)
    # A NaN has either sign.
    keys_TE = tl.where(choice_TE != choice_TE, NAN, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return tl.where(used_TE, keys_TE, NONE)


@triton.jit
def floats_of(keys):
    """The floats that have these keys."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def packed_keys_of(logits_TE, used_TE, columns_E, LOW: tl.constexpr):
    """Keys of 16-bit floats, with the column in their free bits: the lower one is the larger."""
    keys_TE = keys_of(logits_TE, used_TE)
    return tl.where(used_TE, (keys_TE & ~LOW) | (LOW - columns_E)[None, :], NONE)


@triton.jit
def unpacked(keys_TK, LOW: tl.constexpr):
    """(columns, logits) of packed keys."""
    high_TK = keys_TK & ~LOW
    bits_TK = (high_TK ^ ((high_TK >> 31) & 0x7FFFFFFF)) & ~LOW
    return LOW - (keys_TK & LOW), bits_TK.to(tl.float32, bitcast=True)


@triton.jit
def first_largest(keys_TE, columns_E, BE: tl.constexpr):
    """The column of each row's largest key, the lower one among equals."""
    best_T = tl.max(keys_TE, 1)
    return tl.min(tl.where(keys_TE == best_T[:, None], columns_E[None, :], BE), 1)


@triton.jit
def softmax_of(logits_TE, used_TE):
    """(maximum, sum of powers) of each row."""
    top_T = tl.max(tl.where(used_TE, logits_TE, -float("inf")), 1)
    powers_TE = tl.where(used_TE, tl.exp(logits_TE - top_T[:, None]), 0.0)
    return top_T, tl.sum(powers_TE, 1)


@triton.jit
def scores_of(logits_TE, top_T, total_T, SCORE: tl.constexpr):
    """Scores of some logits; of a softmax by the maximum and the sum of their whole rows."""
    if SCORE == "softmax":
        return tl.exp(logits_TE - top_T[:, None]) / total_T[:, None]
    elif SCORE == "sigmoid":
        return sigmoid(logits_TE)
    elif SCORE == "sqrtsoftplus":
        # log(1 + u) to the last bit also where u is lost beside 1 (Kahan's correction).
        u = tl.exp(-tl.abs(logits_TE))
        v = 1.0 + u
        log1p = tl.where(v == 1.0, u, tl.log(v) * (u / tl.where(v == 1.0, 1.0, v - 1.0)))
        return tl.sqrt(tl.maximum(logits_TE, 0.0) + log1p)
    else:
        tl.static_assert(SCORE == "logit")
        return logits_TE


@triton.jit
def limit_groups(
    choice_TE,
    used_TE,
    columns_E,
    E: tl.constexpr,
    ROUTER: tl.constexpr,
    BE: tl.constexpr,
):
    """The choice with every expert outside the best groups at the router's fill; who is inside."""
    N_GROUP: tl.constexpr = ROUTER[2]
    TOPK_GROUP: tl.constexpr = ROUTER[3]
    TOP2: tl.constexpr = ROUTER[4]
    FILL: tl.constexpr = ROUTER[5]
    group_E = columns_E // (E // N_GROUP)
    worth_TE = choice_TE
    choice_keys_TE = keys_of(choice_TE, used_TE)
    for g in range(N_GROUP):
        inside = used_TE & (group_E == g)[None, :]
        inside_TE = tl.where(inside, choice_keys_TE, NONE)
        worth_T = floats_of(tl.max(inside_TE, 1))  # unlike the largest float it may be NaN
        if TOP2:
            column_T = first_largest(inside_TE, columns_E, BE)
            rest_TE = tl.where(columns_E[None, :] == column_T[:, None], NONE, inside_TE)
            worth_T += floats_of(tl.max(rest_TE, 1))
        worth_TE = tl.where(inside, worth_T[:, None], worth_TE)
    kept_TE = used_TE & False
    # A group's key is that of its first expert: the lower group first among equals.
    first_E = columns_E % (E // N_GROUP) == 0
    keys_TE = keys_of(worth_TE, used_TE & first_E[None, :])
    for _ in range(TOPK_GROUP):
        column_T = first_largest(keys_TE, columns_E, BE)
        keys_TE = tl.where(columns_E[None, :] == column_T[:, None], NONE, keys_TE)
        kept_TE = kept_TE | (group_E[None, :] == (column_T // (E // N_GROUP))[:, None])
    return tl.where(kept_TE, choice_TE, FILL), kept_TE


@triton.jit
def choice_of(
    logits_TE, scores_TE, used_TE, columns_E, bias_ptr,
    E: tl.constexpr, ROUTER: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """What experts are chosen by: scores or logits, with the bias, within the best groups; and
    the scores that become weights."""
    BY_LOGIT: tl.constexpr = ROUTER[1]
    N_GROUP: tl.constexpr = ROUTER[2]
    choice_TE = logits_TE if BY_LOGIT else scores_TE
    if bias_ptr is not None:
        bias_E = tl.load(bias_ptr + columns_E, mask=columns_E < E, other=0.0).to(tl.float32)
        choice_TE = choice_TE + bias_E[None, :]
    if N_GROUP > 1:
        choice_TE, kept_TE = limit_groups(choice_TE, used_TE, columns_E, E, ROUTER, BE)
        if ROUTER[11]:
            scores_TE = tl.where(kept_TE, scores_TE, 0.0)
    return choice_TE, scores_TE


@triton.jit
def finish_weights(weights_TK, used_TK, ROUTER: tl.constexpr):
    """Weights of the chosen from their scores; the columns that are not used are 0."""
    SOFTMAX: tl.constexpr = ROUTER[6]
    RENORMALIZE: tl.constexpr = ROUTER[7]
    EPS: tl.constexpr = ROUTER[8]
    MIN_SUM: tl.constexpr = ROUTER[9]
    SCALE: tl.constexpr = ROUTER[10]
    if SOFTMAX:
        top_T = tl.max(tl.where(used_TK, weights_TK, -float("inf")), 1)
        powers = tl.where(used_TK, tl.exp(weights_TK - top_T[:, None]), 0.0)
        weights_TK = powers / tl.sum(powers, 1)[:, None]
    weights_TK = tl.where(used_TK, weights_TK, 0.0)
    if RENORMALIZE:
        sums_T = tl.sum(weights_TK, 1) + EPS
        sums_T = tl.maximum(sums_T, MIN_SUM, propagate_nan=tl.PropagateNan.ALL)
        weights_TK = weights_TK / sums_T[:, None]
    return weights_TK * SCALE


@triton.jit(do_not_specialize=["T"])
def route_kernel(
    logits_ptr,
    stride_t,
    T,
    bias_ptr,
    per_expert_scale_ptr,
    weights_ptr,
    ids_ptr,
    given_ids_ptr,
    ring_ids_ptr,
    ring_weights_ptr,
    at_ptr,
    S,
    E: tl.constexpr,
    K: tl.constexpr,
    ROUTER: tl.constexpr,
    BT: tl.constexpr,
    BE: tl.constexpr,
    BK: tl.constexpr,
    LOW: tl.constexpr,
    PDL: tl.constexpr,
):
    """weights_TK and ids_TK of BT tokens, largest choice first; of given ids those of tokens whose
    first one is not negative. A ring gets them, too."""
    take_turn(PDL)
    rows_T = tl.program_id(0) * BT + tl.arange(0, BT)
    if at_ptr is not None:
        start = (tl.load(at_ptr) % S).to(tl.int32)  # while logits come: its division is a long one
    SCORE: tl.constexpr = ROUTER[0]
    columns_E = tl.arange(0, BE)
    used_TE = (rows_T < T)[:, None] & (columns_E < E)[None, :]
    offsets_TE = rows_T.to(tl.int64)[:, None] * stride_t + columns_E[None, :]
    logits_TE = tl.load(logits_ptr + offsets_TE, mask=used_TE, other=0.0).to(tl.float32)
    if SCORE == "softmax":
        top_T, total_T = softmax_of(logits_TE, used_TE)
    else:
        top_T, total_T = rows_T, rows_T  # not read
    slots_K = tl.arange(0, BK)
    used_TK = (rows_T < T)[:, None] & (slots_K < K)[None, :]
    if LOW > 0:
        # Every score grows with its logit, which the key holds: a choice is one maximum.
        keys_TE = packed_keys_of(logits_TE, used_TE, columns_E, LOW)
        keys_TK = tl.zeros((BT, BK), tl.int32)
        for k in range(K):
            best_T = tl.max(keys_TE, 1)
            keys_TE = tl.where(keys_TE == best_T[:, None], NONE, keys_TE)
            keys_TK = tl.where((slots_K == k)[None, :], best_T[:, None], keys_TK)
        ids_TK, logits_TK = unpacked(keys_TK, LOW)
        weights_TK = scores_of(logits_TK, top_T, total_T, SCORE)
    else:
        scores_TE = scores_of(logits_TE, top_T, total_T, SCORE)
        if given_ids_ptr is not None:
            given_rows_T = given_ids_ptr + rows_T.to(tl.int64) * K
            is_given_T = tl.load(given_rows_T, mask=rows_T < T, other=-1) >= 0
            whole_TE = scores_TE
        choice_TE, scores_TE = choice_of(
            logits_TE, scores_TE, used_TE, columns_E, bias_ptr, E, ROUTER, BE
        )  # fmt: skip
        if given_ids_ptr is not None:
            scores_TE = tl.where(is_given_T[:, None], whole_TE, scores_TE)
        keys_TE = keys_of(choice_TE, used_TE)
        ids_TK = tl.zeros((BT, BK), tl.int32)
        weights_TK = tl.zeros((BT, BK), tl.float32)
        for k in range(K):
            expert_T = first_largest(keys_TE, columns_E, BE)
            if given_ids_ptr is not None:
                given_T = tl.load(given_rows_T + k, mask=rows_T < T, other=-1).to(tl.int32)
                expert_T = tl.where(is_given_T, given_T, expert_T)
            hit_TE = columns_E[None, :] == expert_T[:, None]
            keys_TE = tl.where(hit_TE, NONE, keys_TE)
            here_TK = (slots_K == k)[None, :]
            ids_TK = tl.where(here_TK, expert_T[:, None], ids_TK)
            weight_T = tl.sum(tl.where(hit_TE, scores_TE, 0.0), 1)
            weights_TK = tl.where(here_TK, weight_T[:, None], weights_TK)
    weights_TK = finish_weights(weights_TK, used_TK, ROUTER)
    if per_expert_scale_ptr is not None:
        scale_TK = tl.load(per_expert_scale_ptr + ids_TK, mask=used_TK, other=0.0)
        weights_TK = weights_TK * scale_TK.to(tl.float32)
    offsets = rows_T.to(tl.int64)[:, None] * K + slots_K[None, :]
    weights_TK = weights_TK.to(weights_ptr.dtype.element_ty)
    tl.store(weights_ptr + offsets, weights_TK, mask=used_TK)
    tl.store(ids_ptr + offsets, ids_TK, mask=used_TK)
    if at_ptr is not None:
        # Of more tokens than a ring has rows the last ones are written.
        rung_TK = used_TK & (rows_T >= T - S)[:, None]
        places_T = (start + rows_T) % S
        places_TK = places_T.to(tl.int64)[:, None] * K + slots_K[None, :]
        tl.store(ring_ids_ptr + places_TK, ids_TK.to(tl.int16), mask=rung_TK)
        if ring_weights_ptr is not None:
            tl.store(ring_weights_ptr + places_TK, weights_TK.to(tl.float32), mask=rung_TK)


@on_its_device
def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    per_expert_scale_E: Tensor | None,
    top_k: int,
    router: tuple[Any, ...],
    weights_dtype: torch.dtype,
    alone: bool,
) -> tuple[Tensor, Tensor]:
    """The `route` op; `router` as above. `alone`: each token has a program of its own, in which
    its sums have one order."""
    return _launch(logits_TE, (bias_E, per_expert_scale_E), top_k, router, weights_dtype, alone)


@on_its_device
def route_recording(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    per_expert_scale_E: Tensor | None,
    ring_ids_SK: Tensor,
    ring_weights_SK: Tensor | None,
    at: Tensor,
    top_k: int,
    router: tuple[Any, ...],
    weights_dtype: torch.dtype,
    alone: bool,
) -> tuple[Tensor, Tensor]:
    """The `route_recording` op."""
    ring = ring_ids_SK, ring_weights_SK, at, ring_ids_SK.shape[0]
    routed = logits_TE, (bias_E, per_expert_scale_E), top_k, router, weights_dtype, alone
    return _launch(*routed, ring=ring)


@on_its_device
def route_replaying(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    per_expert_scale_E: Tensor | None,
    given_ids_SK: Tensor,
    top_k: int,
    router: tuple[Any, ...],
    weights_dtype: torch.dtype,
    alone: bool,
) -> tuple[Tensor, Tensor]:
    """The `route_replaying` op."""
    routed = logits_TE, (bias_E, per_expert_scale_E), top_k, router, weights_dtype, alone
    return _launch(*routed, given=given_ids_SK)


def _launch(
    logits_TE: Tensor,
    of_experts: tuple[Tensor | None, Tensor | None],
    top_k: int,
    router: tuple[Any, ...],
    weights_dtype: torch.dtype,
    alone: bool,
    given: Tensor | None = None,
    ring: tuple[Tensor | None, Tensor | None, Tensor | None, int | None] = (None,) * 4,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel with bias and scales of experts, ids that are given, and the ids and
    weights of a ring, where its first row is and how many it has."""
    bias_E, per_expert_scale_E = of_experts
    T, E = logits_TE.shape
    weights_TK = logits_TE.new_empty((T, top_k), dtype=weights_dtype)
    ids_TK = logits_TE.new_empty((T, top_k), dtype=torch.int32)
    if T == 0:
        return weights_TK, ids_TK
    plain = bias_E is None and router[2] == 1
    low = FREE_BITS.get(logits_TE.dtype, 0) if plain and given is None else 0
    many = low > 0 and T >= MANY_TOKENS and E <= FEW_EXPERTS
    tokens = 4 if many and not alone else 1
    launch(
        route_kernel, (triton.cdiv(T, tokens),),
        logits_TE, logits_TE.stride(0), T, bias_E, per_expert_scale_E, weights_TK, ids_TK,
        given, *ring,
        E=E, K=top_k, ROUTER=router,
        BT=tokens, BE=max(2, triton.next_power_of_2(E)), BK=triton.next_power_of_2(top_k),
        LOW=low, num_warps=tokens, **pdl_options(logits_TE),
    )  # fmt: skip
    return weights_TK, ids_TK

"""Products of few tokens with quantised weights whose codes wait in shared memory, in Gluon.

What `register_stream_steps.py` says, but for where codes are from when they are asked for to when
they are multiplied: a block has as many stages of a step in shared memory as it is given, which
take no registers, so that more of them are on their way and more blocks on a processor. Scales
take registers, a step ahead: those of 16 steps are behind one another in memory.

Of one token all steps are asked for at once. As its launches are short, what counts is how much of
one is on its way before the end of the one before, whose blocks have most of the registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from moe_ops.kernels.triton.experts.products.register_stream_steps import (
    add_step,
    along,
    load_scales,
    load_staged,
    load_token_scales,
    load_tokens,
    masked,
    ragged,
    steps_of,
    words_layout,
)

cp_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
commit, wait = async_copy.commit_group, async_copy.wait_group


@gluon.jit
def copy_step(
    held, weights, step, COLUMNS: gl.constexpr, C: gl.constexpr, W: gl.constexpr,
    SIZES: gl.constexpr, SOME: gl.constexpr,
):  # fmt: skip
    """Ask for the codes of a step, which come to a stage."""
    layout: gl.constexpr = words_layout(SIZES, W.bits)
    X: gl.constexpr = layout.shape[2]
    at = weights[0][:, :, None] + (step * X + gl.arange(0, X, along(layout, 2)))[None, None, :]
    if SOME or ragged(COLUMNS, C):
        mask = masked(weights[1], step, COLUMNS, C, W, layout, SOME)
        cp_async(held, at, mask=mask, eviction_policy="evict_first")
    else:
        cp_async(held, at, eviction_policy="evict_first")
    commit()


@gluon.jit
def first_stages(
    weights, COLUMNS: gl.constexpr, C: gl.constexpr, W: gl.constexpr, SIZES: gl.constexpr,
    SOME: gl.constexpr,
):  # fmt: skip
    """Stages, all but the last of which codes of the first steps are on their way to."""
    layout: gl.constexpr = words_layout(SIZES, W.bits)
    S: gl.constexpr = layout.shape[0]
    M: gl.constexpr = layout.shape[1]
    X: gl.constexpr = layout.shape[2]
    P: gl.constexpr = SIZES.stages
    L: gl.constexpr = steps_of(COLUMNS, C)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    stages = ()
    for p in gl.static_range(P):
        held = gl.allocate_shared_memory(weights[0].dtype.element_ty, [S, M, X], plain)
        if p < P - 1 and p < L:
            copy_step(held, weights, p, COLUMNS, C, W, SIZES, SOME)
        stages = stages + (held,)  # noqa: RUF005
    return stages


@gluon.jit
def load_factors(
    weights, step, COLUMNS: gl.constexpr, C: gl.constexpr, W: gl.constexpr, SOME: gl.constexpr
):
    """(scales, zero points) of a step; anything in place of what the format does not have."""
    _, _, w_scale_ptr, w_zero_ptr, at, end = weights
    MASKED: gl.constexpr = SOME or ragged(COLUMNS, C)
    scale = at
    if W.across != -1:  # else it leaves the sum
        scale = load_scales(w_scale_ptr, at, end, step, W, MASKED)
    zero = scale
    if w_zero_ptr is not None:
        zero = load_scales(w_zero_ptr, at, end, step, W, MASKED)
    return scale, zero


@gluon.jit
def add_product_of_stages(
    acc, weights, stages, tokens, COLUMNS: gl.constexpr, C: gl.constexpr, W: gl.constexpr,
    DTYPE: gl.constexpr, SIZES: gl.constexpr, SOME: gl.constexpr,
):  # fmt: skip
    """acc and the products of all steps of a part, whose first codes are on their way to stages."""
    P: gl.constexpr = SIZES.stages
    L: gl.constexpr = steps_of(COLUMNS, C)
    LOOPED: gl.constexpr = (L - P + 1) // P * P if L >= P else 0
    layout: gl.constexpr = words_layout(SIZES, W.bits)
    HAS: gl.constexpr = tokens[1] is not None
    here_S = weights[1]
    x, t = load_tokens(tokens, here_S, 0, COLUMNS, C, W, SIZES, SOME)
    scale, zero = load_factors(weights, 0, COLUMNS, C, W, SOME)
    for first in range(0, LOOPED, P):
        for p in gl.static_range(P):
            step = first + p
            wait(P - 2)
            now = ((stages[p].load(layout), scale, zero), x, t)
            # To the stage that was read a step ago.
            copy_step(stages[(p + P - 1) % P], weights, step + P - 1, COLUMNS, C, W, SIZES, SOME)
            x, t = load_tokens(tokens, here_S, step + 1, COLUMNS, C, W, SIZES, SOME)
            scale, zero = load_factors(weights, step + 1, COLUMNS, C, W, SOME)
            acc = add_step(acc, now, HAS, W, DTYPE, SIZES)
    for step in gl.static_range(LOOPED, L):
        wait(min(P - 2, L - 1 - step))
        now = ((stages[step % P].load(layout), scale, zero), x, t)
        if step + P - 1 < L:
            copy_step(stages[(step + P - 1) % P], weights, step + P - 1, COLUMNS, C, W, SIZES, SOME)
        if step + 1 < L:
            x, t = load_tokens(tokens, here_S, step + 1, COLUMNS, C, W, SIZES, SOME)
            scale, zero = load_factors(weights, step + 1, COLUMNS, C, W, SOME)
        acc = add_step(acc, now, HAS, W, DTYPE, SIZES)
    return acc


@gluon.jit
def all_codes(
    weights, COLUMNS: gl.constexpr, C: gl.constexpr, W: gl.constexpr, SIZES: gl.constexpr,
    SOME: gl.constexpr,
):  # fmt: skip
    """(stages that codes of all steps are on their way to, their scales and zero points)."""
    layout: gl.constexpr = words_layout(SIZES, W.bits)
    S: gl.constexpr = layout.shape[0]
    M: gl.constexpr = layout.shape[1]
    X: gl.constexpr = layout.shape[2]
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    stages = ()
    factors = ()
    for step in gl.static_range(steps_of(COLUMNS, C)):
        held = gl.allocate_shared_memory(weights[0].dtype.element_ty, [S, M, X], plain)
        copy_step(held, weights, step, COLUMNS, C, W, SIZES, SOME)
        stages = stages + (held,)  # noqa: RUF005
        factors = factors + (load_factors(weights, step, COLUMNS, C, W, SOME),)  # noqa: RUF005
    return stages, factors


@gluon.jit
def add_product_of_all(
    acc, codes, tokens, COLUMNS: gl.constexpr, C: gl.constexpr, W: gl.constexpr,
    DTYPE: gl.constexpr, SIZES: gl.constexpr,
):  # fmt: skip
    """acc and the products of all steps of a part with one token, whose steps are `staged`."""
    stages, factors = codes
    steps, x_scale_ptr, t_at = tokens
    layout: gl.constexpr = words_layout(SIZES, W.bits)
    wait(0)
    for step in gl.static_range(steps_of(COLUMNS, C)):
        x = load_staged(steps[step], W, SIZES)
        t = load_token_scales(x_scale_ptr, t_at, step, COLUMNS, C, W)
        scale, zero = factors[step]
        now = ((stages[step].load(layout), scale, zero), x, t)
        acc = add_step(acc, now, x_scale_ptr is not None, W, DTYPE, SIZES)
    return acc

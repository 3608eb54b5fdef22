"""The ops of a layer that training adds, by the grouped products: `experts_saving`, which keeps the
rows of the first product, and `experts_backward`.

    saving    sort, y = W13 x of gathered tokens, h = activate(y), W2 h, sum of each token's rows
    backward  dh = W2^T g of gathered gradients, `activate_backward`, W13^T dy, the same sum

Both with adapters, too: each product then adds them, by rows that `narrow_rows` made before it.
A weight is multiplied as it lies, by other strides where it is to be transposed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton import LINEAR, Act
from moe_ops.kernels.triton.activate import activate_rows
from moe_ops.kernels.triton.activate_backward import activate_backward, fill
from moe_ops.kernels.triton.experts.adapters import Adapters, Added, Pair, added_rows, turned
from moe_ops.kernels.triton.experts.operands.dequantized_weights import decoded, decoded13
from moe_ops.kernels.triton.experts.products.grouped import product, tile_rows
from moe_ops.kernels.triton.experts.schedule.combine import sum_rows
from moe_ops.kernels.triton.experts.schedule.sort import sort_pairs
from moe_ops.kernels.triton.experts.schedule.tile_map import TileMap, tile_map
from moe_ops.kernels.triton.experts.weights import Experts
from moe_ops.kernels.triton.launch import on_its_device, pdl_options, take_turn
from moe_ops.kernels.triton.replay import launch

PAIRS = 1024  # of a program of `invert_kernel`


@on_its_device
def saving(
    x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, w13_EFD: Tensor, w2_EDI: Tensor,
    b13_EF: Tensor | None, b2_ED: Tensor | None, expert_map: Tensor | None, transposed: bool,
    act: Act, wgmma: tuple[bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The `experts_saving` op. `wgmma`: which products the kernel for Hopper runs."""
    layer = _layer(w13_EFD, w2_EDI, b13_EF, b2_ED, transposed, act)
    out_TD, y_RF, _, _, rows_R, ends_E = _saving(
        x_TD, weights_TK, ids_TK, expert_map, layer, None, wgmma
    )
    return out_TD, y_RF, rows_R, ends_E


@on_its_device
def saving_adapted(
    x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, expert_map: Tensor | None, layer: Experts,
    adapters: Adapters, wgmma: tuple[bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The `experts_adapted_saving` op, of codes that are decoded first. `wgmma`: as of `saving`."""
    layer = _of_floats(layer, x_TD)
    made = _saving(x_TD, weights_TK, ids_TK, expert_map, layer, adapters, wgmma)
    out_TD, y_RF, added13, added2, rows_R, ends_E = made
    u13_Rr, wu2_Rr = _rows_of(added13.u, y_RF), _rows_of(added2.weighted, y_RF)
    return out_TD, y_RF, u13_Rr, wu2_Rr, rows_R, ends_E


def _saving(
    x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, expert_map: Tensor | None, layer: Experts,
    adapters: Adapters | None, wgmma: tuple[bool, bool],
) -> tuple[Tensor, Tensor, Added, Added, Tensor, Tensor]:  # fmt: skip
    """(out_TD, y_RF, what both products added, rows_R, ends_E)."""
    (w13, *_, b13_EF), (w2, *_, b2_ED), act = layer.stack13, layer.stack2, layer.act
    (T, K), (E, D, _), new = ids_TK.shape, layer.sizes, x_TD.new_empty
    y_RF, added13, tiles, (rows_R, inverse_R, ends_E) = _first(
        x_TD, ids_TK, expert_map, w13, b13_EF, adapters, wgmma[0]
    )
    order, (_, pair2), y_RD = (rows_R, ends_E), _pairs(adapters), new(T * K, D)
    h_RI = activate_rows(y_RF, rows_R, act)
    added2 = added_rows(h_RI, order, adapters, pair2, K, E, of_tokens=False, weights_TK=weights_TK)
    args = h_RI, None, ends_E, w2, b2_ED, y_RD, None, LINEAR, tiles, wgmma[1]
    product(*args, added=added2)
    out_TD = sum_rows(y_RD, inverse_R, weights_TK, K) if T > 0 else new(0, D)
    return out_TD, y_RF, added13, added2, rows_R, ends_E


@on_its_device
def first_rows(
    x_TD: Tensor, ids_TK: Tensor, expert_map: Tensor | None, layer: Experts, wgmma: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(y_RF, rows_R, ends_E): what the `experts_saving` op keeps, without its result. Codes of the
    first weight are decoded first. `wgmma`: whether the kernel for Hopper runs the product."""
    w13 = layer.stack13[0] if layer.codes is None else decoded13(layer, x_TD.dtype)
    y_RF, _, _, (rows_R, _, ends_E) = _first(
        x_TD, ids_TK, expert_map, w13, layer.b13_EF, None, wgmma
    )
    return y_RF, rows_R, ends_E


def _first(
    x_TD: Tensor, ids_TK: Tensor, expert_map: Tensor | None, w13: Tensor, b13_EF: Tensor | None,
    adapters: Adapters | None, wgmma: bool,
) -> tuple[Tensor, Added, TileMap | None, tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """(y_RF, what its product added, the table of its tiles, (rows_R, inverse_R, ends_E)), of a
    weight [E, F, D]."""
    (T, K), E = ids_TK.shape, w13.shape[0]
    rows_R, inverse_R, ends_E = sort_pairs(ids_TK, E, expert_map)
    order, (pair13, _) = (rows_R, ends_E), _pairs(adapters)
    y_RF = x_TD.new_empty(T * K, w13.shape[1])
    added = added_rows(x_TD, order, adapters, pair13, K, E, of_tokens=True)
    tiles = None
    if T > 0:
        tiles = tile_map(ends_E, T * K, tile_rows(x_TD, T * K, w13, wgmma))
    args = x_TD, rows_R, ends_E, w13, b13_EF, y_RF, K, LINEAR, tiles, wgmma
    product(*args, added=added)
    return y_RF, added, tiles, (rows_R, inverse_R, ends_E)


@on_its_device
def backward(
    grad_TD: Tensor, y_RF: Tensor, rows_R: Tensor, ends_E: Tensor, weights_TK: Tensor,
    w13_EFD: Tensor, w2_EDI: Tensor, b2_ED: Tensor | None, transposed: bool, act: Act,
    wanted: tuple[bool, bool], wgmma: tuple[bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The `experts_backward` op. `wanted`: gradients of tokens, and what those of the second weight
    are made of; `wgmma`: which products the kernel for Hopper runs."""
    layer = _layer(w13_EFD, w2_EDI, None, b2_ED, transposed, act)
    made = _backward(grad_TD, y_RF, (rows_R, ends_E), weights_TK, layer, None, wanted, wgmma)
    dx_TD, dweights_TK, dy_RF, wh_RI, _, _ = made
    return dx_TD, dweights_TK, dy_RF, wh_RI


@on_its_device
def backward_adapted(
    grad_TD: Tensor, y_RF: Tensor, order: tuple[Tensor, Tensor], weights_TK: Tensor,
    layer: Experts, adapters: Adapters, wanted: tuple[bool, bool], wgmma: tuple[bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The `experts_adapted_backward` op. Codes are decoded first; the rest is as of `backward`."""
    layer = _of_floats(layer, grad_TD)
    made = _backward(grad_TD, y_RF, order, weights_TK, layer, adapters, wanted, wgmma)
    dx_TD, dweights_TK, dy_RF, wh_RI, added13, added2 = made
    v13_Rr, v2_Rr = (_rows_of(added.u, y_RF) for added in (added13, added2))
    return dx_TD, dweights_TK, dy_RF, wh_RI, v13_Rr, v2_Rr


def _backward(
    grad_TD: Tensor, y_RF: Tensor, order: tuple[Tensor, Tensor], weights_TK: Tensor,
    layer: Experts, adapters: Adapters | None, wanted: tuple[bool, bool],
    wgmma: tuple[bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Added, Added]:  # fmt: skip
    """(dx_TD, dweights_TK, dy_RF, wh_RI, what the products by W13 and W2 transposed added)."""
    w13_EDF, w2_EID = (stack[0].transpose(1, 2) for stack in (layer.stack13, layer.stack2))
    (T, K), (E, D, I), new, act = weights_TK.shape, layer.sizes, grad_TD.new_empty, layer.act
    R, (for_tokens, for_weights), (rows_R, ends_E) = T * K, wanted, order
    pairs, b2_ED = _pairs(adapters), layer.b2_ED
    pair2, pair13 = (turned(p, whole) for p, whole in zip(reversed(pairs), wgmma, strict=True))
    dh_RI = new(R, I)
    tiles = None
    if T > 0:
        tiles = tile_map(ends_E, R, tile_rows(grad_TD, R, w2_EID, wgmma[0]))
    added2 = added_rows(grad_TD, order, adapters, pair2, K, E, of_tokens=True)
    args = grad_TD, rows_R, ends_E, w2_EID, None, dh_RI, K, LINEAR, tiles, wgmma[0]
    product(*args, added=added2)
    # What a bias adds is added before all is rounded.
    dtype = weights_TK.dtype if b2_ED is None else torch.float32
    dy_RF, wh_RI, dweights_TK = activate_backward(
        dh_RI, y_RF, weights_TK, rows_R, act, for_weights, dtype
    )
    if b2_ED is not None and T > 0:
        add_bias_dots(grad_TD, b2_ED, rows_R, ends_E, dweights_TK)
    added13 = added_rows(dy_RF, order, adapters, pair13, K, E, of_tokens=False)
    dx_RD = new(R if for_tokens else 0, D)
    args = dy_RF, None, ends_E, w13_EDF, None, dx_RD, None, LINEAR, tiles, wgmma[1]
    product(*args, added=added13)
    dx_TD = sum_rows(dx_RD, inverse_of(rows_R), None, K) if for_tokens and T > 0 else new(0, D)
    return dx_TD, dweights_TK, dy_RF, wh_RI, added13, added2


def _of_floats(layer: Experts, like: Tensor) -> Experts:
    return layer if layer.codes is None else decoded(layer, like.dtype)


def _pairs(adapters: Adapters | None) -> tuple[Pair, Pair]:
    """The pairs of both weights."""
    return ((None, None),) * 2 if adapters is None else (adapters.pair13, adapters.pair2)


def _rows_of(u: Tensor | None, like: Tensor) -> Tensor:
    """The rows between A and B; without adapters they have no columns."""
    return like.new_empty(like.shape[0], 0) if u is None else u


def _layer(
    w13_EFD: Tensor, w2_EDI: Tensor, b13_EF: Tensor | None, b2_ED: Tensor | None, transposed: bool,
    act: Act,
) -> Experts:  # fmt: skip
    return Experts(
        w13_EFD=w13_EFD, w2_EDI=w2_EDI, b13_EF=b13_EF, b2_ED=b2_ED, transposed=transposed, act=act
    )


def inverse_of(rows_R: Tensor) -> Tensor:
    """The row of each pair, -1 for pairs that have none, from the pair in each row."""
    R, options = rows_R.shape[0], pdl_options(rows_R)
    inverse_R = rows_R.new_empty(R)
    fill(inverse_R, -1)
    launch(
        invert_kernel, (triton.cdiv(R, PAIRS),), rows_R, inverse_R, R,
        BLOCK=PAIRS, num_warps=4, **options,
    )  # fmt: skip
    return inverse_R


@triton.jit(do_not_specialize=["R"])
def invert_kernel(rows_ptr, inverse_ptr, R, BLOCK: tl.constexpr, PDL: tl.constexpr):
    take_turn(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.load(rows_ptr + row, mask=row < R, other=-1)
    tl.store(inverse_ptr + pair, row, mask=pair >= 0)


def add_bias_dots(
    grad_TD: Tensor, b2_ED: Tensor, rows_R: Tensor, ends_E: Tensor, dweights_TK: Tensor
) -> None:
    """Add to the gradient of each pair's weight what the bias of its expert, which that multiplies
    too, adds to the result."""
    (E, D), K = b2_ED.shape, dweights_TK.shape[1]
    launch(
        bias_dots_kernel, (rows_R.shape[0],),
        grad_TD, grad_TD.stride(0), b2_ED, rows_R, ends_E, dweights_TK,
        E=E, K=K, D=D, BE=max(2, triton.next_power_of_2(E)),
        BD=min(1024, triton.next_power_of_2(D)), num_warps=4, **pdl_options(grad_TD),
    )  # fmt: skip


@triton.jit
def bias_dots_kernel(
    grad_ptr, stride_grad, bias_ptr, rows_ptr, ends_ptr, dweights_ptr,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row by one program."""
    take_turn(PDL)
    row = tl.program_id(0)
    pair = tl.load(rows_ptr + row)
    if pair < 0:
        return
    e = tl.arange(0, BE)
    ends_E = tl.load(ends_ptr + e, mask=e < E, other=2147483647)
    expert = tl.sum((ends_E <= row).to(tl.int32), 0).to(tl.int64)
    grad_ptr += (pair // K).to(tl.int64) * stride_grad
    bias_ptr += expert * D
    dots_D = tl.zeros((BD,), tl.float32)
    for first in range(0, D, BD):
        d = first + tl.arange(0, BD)
        grad_D = tl.load(grad_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        dots_D += grad_D * tl.load(bias_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    dweights_ptr += pair
    tl.store(dweights_ptr, tl.load(dweights_ptr) + tl.sum(dots_D, 0))

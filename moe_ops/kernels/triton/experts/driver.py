"""How a call of experts runs, on every path:

    x     rounded to the format of inputs, if that is emulated
    sort  pairs of token and choice in the order of experts, and a table of tiles where one is read
    x     codes, or another order of columns: `operands/operand.py`; of few tokens beside the sort,
          rounded or not: `operands/beside_sort.py`
    u     of adapters, `narrow` of x: `adapters.py`
    up    the first product, and the activation: h
    u     of h
    h     as x before
    down  the second product
    sum   of the rows of each token, and onto a residual

A few tokens are not sorted, and their second product makes the sum. A path brings both launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from moe_ops.kernels.triton import TINY_PAIRS, TINY_TOKENS
from moe_ops.kernels.triton.experts.adapters import (
    Adapters,
    Added,
    Pair,
    added_pairs,
    added_rows,
)
from moe_ops.kernels.triton.experts.call import Call, Reads
from moe_ops.kernels.triton.experts.formats.codes import Codes, floats_of, with_float8
from moe_ops.kernels.triton.experts.operands import operand
from moe_ops.kernels.triton.experts.operands.beside_sort import made_beside, sort_beside_tokens
from moe_ops.kernels.triton.experts.operands.dequantized_weights import decoded
from moe_ops.kernels.triton.experts.schedule.batches import Batches, order_batches, put_back
from moe_ops.kernels.triton.experts.schedule.combine import sum_rows
from moe_ops.kernels.triton.experts.schedule.sort import sort_pairs
from moe_ops.kernels.triton.experts.schedule.tile_map import tile_map
from moe_ops.kernels.triton.experts.weights import Experts
from moe_ops.kernels.triton.launch import on_its_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """The two launches of a path and how they read tokens; whether pairs are sorted; the rows of a
    tile of the table that they read, if they do; whether weights of codes are decoded first; and
    whether they make codes of x and of h themselves."""

    up: Callable[[Call], None]
    down: Callable[[Call], None]
    reads: Reads
    sorts: bool = True
    tile_rows: Callable[[Call, Tensor], int] | None = None
    decodes: bool = False
    rounds: Callable[[Call], tuple[bool, bool]] = lambda c: (False, False)

    @property
    def run(self) -> Callable[..., Tensor]:
        """`run` below, of these products."""
        return on_its_device(functools.partial(run, self))


def run(
    products: Products, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, layer: Experts,
    expert_map: Tensor | None, residual_TD: Tensor | None = None, tiles: Any = None,
    adapters: Adapters | None = None, batches: Batches | None = None, invariant: bool = False,
) -> Tensor:  # fmt: skip
    """The `experts` op, with adapters if there are any, added to a contiguous residual if there is
    one. `tiles` are those that the products take, None for products with a table of tiles. The
    device of x is the current one.

    With batches tokens are their slots, which have one expert each: ids and weights are room for
    theirs, and slots that are not used change nothing and are not written. An invariant call is
    one whose rows are to have the same bits in a call of any number: all paths do the same to them
    but multiply.
    """
    if products.reads.float8 and layer.codes is not None:
        layer = replace(layer, codes=with_float8(layer.codes))
    (T, K), (E, D, I), codes = ids_TK.shape, layer.sizes, layer.codes
    # Where h is rounded to codes, they are those of h, not of h times its weight.
    reads = products.reads.apart if invariant else products.reads
    early = reads.weighs and (codes is None or codes.inputs is None)
    c = Call(
        layer=layer, codes=codes, sizes=(E, D, I), reads=reads, ids_TK=ids_TK,
        expert_map=expert_map, residual_TD=residual_TD, weights=weights_TK if early else None,
        dtype=floats_of(x_TD, codes), tiles=tiles, batches=batches,
        invariant=invariant, summed=weights_TK if invariant and not products.sorts else None,
    )  # fmt: skip
    c.rounds_x, c.rounds_h = products.rounds(c)
    x_TD = _order(products, c, x_TD, weights_TK, adapted=adapters is not None)
    c.h = operand.room_for_hidden(c)
    # Right before the product that adds it: some begin ahead of its end.
    if adapters is not None:
        c.added13 = _added(c, x_TD, adapters, adapters.pair13, of_tokens=True)
    products.up(c)
    h_values = c.h.values
    c.h = operand.hidden_operand(c)
    if adapters is not None:
        c.added2 = _added(c, h_values, adapters, adapters.pair2, of_tokens=False)
    c.out = x_TD.new_empty(T * K if products.sorts else T, D, dtype=c.dtype)
    products.down(c)
    if c.inverse_R is None:
        return c.out
    if batches is not None:
        return put_back(c.out, batches.counts_E, c.order[1])
    given = None if early else weights_TK
    return sum_rows(c.out, c.inverse_R, given, K, residual_TD, ordered=invariant)


def _order(
    products: Products, c: Call, x_TD: Tensor, weights_TK: Tensor, *, adapted: bool
) -> Tensor:
    """Sort pairs, if they are, and make tokens what the first product reads; what adapters read."""
    (T, K), E, codes, batches, made = c.ids_TK.shape, c.sizes[0], c.codes, c.batches, None
    if products.sorts and not c.reads.gathered and batches is None:
        made = made_beside(c, x_TD, adapted=adapted)
    if made is None:
        x_TD = operand.rounded_tokens(x_TD, codes)
    if products.decodes and codes is not None:
        c.layer = decoded(c.layer, c.dtype)
    if products.sorts:
        routed, order = (c.ids_TK, E, c.expert_map), None
        if batches is not None and not c.reads.float8 and _stays(codes):
            c.weights, ends_E = None, batches.counts_E
            c.order = (None, ends_E)
        elif batches is not None:
            order = order_batches(batches.counts_E, c.ids_TK, weights_TK)
        elif made is not None:
            order = sort_beside_tokens(*routed, x_TD, made)
        else:
            order = sort_pairs(*routed)
        if order is not None:
            rows_R, c.inverse_R, ends_E = order
            c.order = (rows_R, ends_E)
    else:
        _check_few(T, K)
    if products.tile_rows is not None:
        c.tile_map = tile_map(ends_E, T * K, products.tile_rows(c, x_TD), c.slots)
    c.x = operand.tokens_operand(c, x_TD) if made is None else operand.ready_tokens(c, made)
    return made.values if made is not None and made.how == "emulated" else x_TD


def _stays(codes: Codes | None) -> bool:
    """Whether products read and write batches in their slots. Rows that are rounded by what is
    known of others, or of their experts, are brought into the order of experts first."""
    return codes is None or (codes.inputs is None and not codes.by_row)


def _added(c: Call, x: Tensor, adapters: Adapters, pair: Pair, *, of_tokens: bool) -> Added:
    """What a product of x, tokens or h, adds for its adapters."""
    E = c.sizes[0]
    # h is stored in the order in which its product decodes codes.
    weight = c.layer.weight if c.arranges and not of_tokens else None
    if not c.order:
        routed = x, c.ids_TK, c.expert_map
        return added_pairs(*routed, adapters, pair, E, of_tokens=of_tokens, weight=weight)
    rows_R, ends_E = c.order
    sorted_ = x, (rows_R, ends_E), adapters, pair, c.ids_TK.shape[1], E
    return added_rows(*sorted_, of_tokens=of_tokens, weight=weight)


def _check_few(T: int, K: int) -> None:
    """Raises ValueError if tokens are more than what runs without being sorted."""
    if T > TINY_TOKENS or T * K > TINY_PAIRS:
        raise ValueError(
            f"takes {TINY_TOKENS} tokens and {TINY_PAIRS} pairs of token and choice at most, got "
            f"{T} tokens with {K} choices; run `rows`"
        )

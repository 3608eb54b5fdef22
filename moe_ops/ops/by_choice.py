"""Sums of the choices of a token that several ranks serve, in the order of one process."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_ops.ops.combine import combine
from moe_ops.ops.sum_ranks import sum_ranks
from moe_ops.ranks.choices import rows_of_pairs
from moe_ops.registry.invariance import INVARIANT, invariant_if


def asked() -> bool:
    """Whether calls here have to be batch invariant. Of what Dynamo traces nobody knows, unless
    `ask_in_graphs` was called."""
    return not torch.compiler.is_dynamo_compiling() and INVARIANT.get()


def ask_in_graphs() -> None:
    """Have Dynamo ask, too, when it traces: for compiled code that always runs in a block of
    `invariant`."""
    torch.compiler.assume_constant_result(asked)


def sum_over_ranks(
    run: Callable[[Tensor, Tensor, Tensor], Tensor],
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    group: str,
    *,
    fused: int = 0,
    batch_invariant: bool = False,
) -> Tensor:
    """The weighted sum of the experts of all ranks, for tokens that all of them have: the bits that
    one process gives which holds all experts.

    run(x, weights, ids) is what this rank's experts make of rows of one choice each, 0 for experts
    of others. Ranks add these rows, of which each is one rank's alone, so that no sum is rounded.
    The last `fused` columns of ids are of experts that every rank holds, -1 but on one of them.
    batch_invariant: as a layer asks for it, wherever it is called.
    """
    T, K = ids_TK.shape
    ones_N1, ids_N1 = torch.ones_like(weights_TK).view(T * K, 1), ids_TK.reshape(T * K, 1)
    add, weigh = (invariant_if(batch_invariant, op) for op in (sum_ranks, combine))
    y_ND = add(run(x_TD.repeat_interleave(K, 0), ones_N1, ids_N1), group)
    out_TD: Tensor = weigh(y_ND, weights_TK, rows_of_pairs(ids_TK, fused=fused))
    return out_TD

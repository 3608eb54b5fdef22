"""Which activation lies between two expert products: by comparison with traced formulas.

Inductor decomposes activations before our passes run, differently from release to release. So no
decomposed form is written down here: each formula is traced through the decompositions of the torch
at hand, and must be the very expression that the graph holds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from moe_ops.ops.activate import Activation
from moe_ops.passes.rewriting.graph import Key, Mismatch, expression, has_shape, tensor

Formula = Callable[[Tensor], Tensor]


def _gelu_by_hand(x: Tensor) -> Tensor:
    """The tanh form as GPT-2 spells it out."""
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


# How models spell an activation; rounding apart, those of one kind are equal.
SPELLINGS: tuple[tuple[str, Formula], ...] = (
    ("silu", F.silu),
    ("gelu", F.gelu),
    ("gelu_tanh", functools.partial(F.gelu, approximate="tanh")),
    ("gelu_tanh", _gelu_by_hand),
    ("relu2", lambda x: F.relu(x).square()),
    ("relu2", lambda x: torch.square(F.relu(x))),
)


def identify(y: fx.Node, h: fx.Node) -> Activation:
    """The activation by which h is computed from y [R, F]. Raises Mismatch if it is none of ours.

    Every node between the two is accounted for, as are all constants.
    """
    width, narrow = tensor(y).shape[1], tensor(h).shape[1]
    if not isinstance(width, int) or not isinstance(narrow, int):
        raise Mismatch("the width of the activation is not known")
    if not has_shape(tensor(h), tensor(y).shape[0], narrow):
        raise Mismatch(f"the activation changes the rows {tuple(tensor(y).shape)}")
    got = expression(h, {y: "y"})
    dtypes = tensor(y).dtype, tensor(h).dtype
    if dtypes[0] is not dtypes[1]:
        raise Mismatch(f"the activation turns {dtypes[0]} into {dtypes[1]}")
    found = _read(got, width, narrow, dtypes[0])
    if found is None:
        raise Mismatch("the activation between the products is not one that `activate` computes")
    return found


@functools.lru_cache(maxsize=64)
def _read(got: Key, width: int, narrow: int, dtype: torch.dtype) -> Activation | None:
    """The activation with this expression, or None. Equal layers are compared once."""
    for activation, formula in _candidates(got, gated=narrow * 2 == width):
        if _traced(formula, width, dtype) == got:
            return activation
    return None


def _candidates(got: Key, gated: bool) -> Iterator[tuple[Activation, Formula]]:
    """What the expression may be, with its own constants for the parameters of a formula.

    A formula takes some 20 ms to trace, so those are left out that cannot be it.
    """
    text, numbers = repr(got), set(_numbers(got))
    # A clamp has both signs of its limit.
    limits = sorted(n for n in numbers if n > 0 and -n in numbers)
    if limits and "sigmoid" in text:
        interleaved = bool(_steps(got) - {1})
        for limit in limits:
            for alpha in sorted(n for n in numbers if n > 0):
                yield (
                    Activation(
                        kind="silu",
                        interleaved=interleaved,
                        alpha=alpha,
                        limit=limit,
                        up_shift=1.0,
                    ),
                    functools.partial(_shifted, interleaved, limit, alpha),
                )
    for kind, act in SPELLINGS:
        if not gated:
            yield Activation(kind=kind, gated=False), functools.partial(_plain, act)
        elif limits:
            for limit in limits:
                clamped = functools.partial(_clamped, act, limit)
                yield Activation(kind=kind, limit=limit), clamped
        else:
            yield Activation(kind=kind), functools.partial(_gate, act)
            # In float32 throughout, rounded once, which is what `activate` itself does.
            yield Activation(kind=kind), functools.partial(_gate_in_float32, act)


def _plain(act: Formula, y: Tensor) -> Tensor:
    return act(y)


def _gate(act: Formula, y: Tensor) -> Tensor:
    gate, up = y.chunk(2, dim=-1)
    return act(gate) * up


def _gate_in_float32(act: Formula, y: Tensor) -> Tensor:
    gate, up = y.chunk(2, dim=-1)
    return (act(gate.float()) * up.float()).to(y.dtype)


def _clamped(act: Formula, limit: float, y: Tensor) -> Tensor:
    gate, up = y.chunk(2, dim=-1)
    return act(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)


def _shifted(interleaved: bool, limit: float, alpha: float, y: Tensor) -> Tensor:
    gate, up = (y[..., ::2], y[..., 1::2]) if interleaved else y.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def _numbers(key: Key) -> Iterator[float]:
    if isinstance(key, tuple):
        for part in key:
            yield from _numbers(part)
    elif isinstance(key, float) and math.isfinite(key):
        yield key


def _steps(key: Key) -> set[int]:
    """The steps of all slices in an expression."""
    if not isinstance(key, tuple):
        return set()
    own = {key[5]} if key[:1] == ("slice",) else set()
    return own.union(*map(_steps, key))


@functools.lru_cache(maxsize=256)
def _traced(formula: Formula, width: int, dtype: torch.dtype) -> Key:
    """The expression of a formula of y [R, width] after Inductor's decompositions."""
    from torch._inductor.decomposition import select_decomp_table

    with torch._subclasses.fake_tensor.unset_fake_temporarily(), torch.no_grad():
        y = torch.empty(3, width, dtype=dtype)
        graph = make_fx(formula, decomposition_table=select_decomp_table())(y).graph
    (placeholder,) = graph.find_nodes(op="placeholder")
    (out,) = graph.output_node().args
    return expression(out, {placeholder: "y"})

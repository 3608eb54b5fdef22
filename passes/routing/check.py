"""A second opinion on what was read of a router: its nodes and `route`, run on the same numbers.

The nodes between the leaves and the results are copied into a `Program`, a value without graph,
fake tensors or symbols, which is run for some tokens on the CPU. Layers of one router have one
program, so that it is run once for all of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from moe_ops.interop.interrupts import let_through
from moe_ops.ops.route import route
from moe_ops.passes.rewriting.graph import RESHAPES, Mismatch, aten, same, tensor, value

TOKENS, TOLERANCE = 16, 1e-5

# Ops whose first size, in a list, is the number of tokens.
SHAPED = frozenset({aten.full.default, aten.expand.default, *RESHAPES})


@dataclass(frozen=True, slots=True)
class Ref:
    """A leaf or step of a program, by its number, as an argument of a later step."""

    number: int


@dataclass(frozen=True, slots=True)
class Step:
    """A call; sequences are tuples."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Leaves (name, shape, dtype), then steps, for a number of tokens, and the results' numbers."""

    tokens: int
    leaves: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]


def program(results: Iterable[fx.Node], leaves: dict[str, fx.Node], T: Any) -> Program:
    """The nodes from the leaves, by name, to the results. Raises Mismatch at another input.

    T, their number of tokens, may be symbolic, and is the only size that may.
    """
    numbers = {node: number for number, node in enumerate(leaves.values())}
    steps: list[Step] = []
    tokens = max(1, min(T, TOKENS)) if isinstance(T, int) else TOKENS

    def visit(node: fx.Node) -> int:
        if node not in numbers:
            if node.op != "call_function":
                raise Mismatch(f"it also reads {node}")
            args = fx.node.map_arg(node.args, visit_argument)
            kwargs = fx.node.map_arg(node.kwargs, visit_argument)
            if node.target in SHAPED:
                args = _with_tokens(node, args, T, tokens)
            named = tuple(sorted(_frozen(kwargs).items()))
            steps.append(Step(node.target, _frozen(args), named))  # type: ignore[arg-type]
            numbers[node] = len(leaves) + len(steps) - 1
        return numbers[node]

    def visit_argument(node: fx.Node) -> Any:
        size = value(node)
        if isinstance(size, SymInt):
            if not same(size, T):
                raise Mismatch(f"it reads a size, {size}, other than the number of tokens")
            return tokens
        return Ref(visit(node))

    found = tuple(visit(node) for node in results)
    shapes = {name: tuple(tensor(node).shape) for name, node in leaves.items()}
    shapes["logits_TE"] = (tokens, *shapes["logits_TE"][1:])
    return Program(
        tokens=tokens,
        leaves=tuple((name, shapes[name], tensor(node).dtype) for name, node in leaves.items()),
        steps=tuple(steps),
        results=found,
    )


def _with_tokens(node: fx.Node, args: Any, T: Any, tokens: int) -> Any:
    """The arguments of a call, of which a shape that starts with T now starts with `tokens`."""
    if len(args) < 1 or not same(tensor(node).shape[0] if tensor(node).dim() > 1 else -1, T):
        return args
    at = 0 if node.target is aten.full.default else 1
    if len(args) > at and isinstance(args[at], (list, tuple)) and args[at][0] != -1:
        return (*args[:at], (tokens, *args[at][1:]), *args[at + 1 :])
    return args


def _frozen(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: torch.device("cpu") if k == "device" else _frozen(v) for k, v in x.items()}
    return tuple(map(_frozen, x)) if isinstance(x, (list, tuple)) else x


@functools.lru_cache(maxsize=256)
def disagreement(found: Program, arguments: tuple[tuple[str, Any], ...]) -> str | None:
    """What a program does differently from `route` with these arguments, or None.

    The results of the program are the ids and the weights in float32.
    """
    with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        named = dict(arguments)
        generator = torch.Generator("cpu").manual_seed(0)
        leaves = {n: _numbers(n, s, d, generator) for n, s, d in found.leaves}
        try:
            ids, weights = _run(found, leaves)
        except Exception as error:  # whatever an op raises when the tokens are others
            let_through(error)
            return f"it cannot be run on its own: {error}"
        leaves = {n: t.flatten() if n == "bias_E" else t for n, t in leaves.items()}
        want_weights, want_ids = route.reference(**leaves, **named)
        if ids.shape != want_ids.shape or weights.shape != want_weights.shape:
            return f"it gives {tuple(ids.shape)} ids and {tuple(weights.shape)} weights"
        sure = _sure(leaves, named, want_ids, generator)
        got, want = _dense(ids, weights, leaves), _dense(want_ids, want_weights, leaves)
        if not sure.any():
            return "its experts are too near to ties to tell"
        if not torch.equal(got[0][sure], want[0][sure]):
            return "it chooses other experts"
        if not torch.allclose(got[1][sure], want[1][sure], rtol=TOLERANCE, atol=1e-8):
            return "its weights are others"
    return None


def _run(found: Program, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The ids and weights of all tokens, as many at a time as the program is for."""
    runs = []
    for some in leaves["logits_TE"].split(found.tokens):
        values: list[Any] = [some if name == "logits_TE" else t for name, t in leaves.items()]
        for step in found.steps:
            kwargs = {name: _given(x, values) for name, x in step.kwargs}
            values.append(step.target(*(_given(x, values) for x in step.args), **kwargs))
        runs.append([values[number] for number in found.results])
    ids, weights = (torch.cat(parts) for parts in zip(*runs, strict=True))
    return ids, weights.float()


def _given(x: Any, values: list[Any]) -> Any:
    if isinstance(x, Ref):
        return values[x.number]
    return [_given(y, values) for y in x] if isinstance(x, tuple) else x


def _numbers(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Values of a leaf: logits without ties in any row, and biases and scales above zero."""
    if name != "logits_TE":
        random = torch.rand(shape, generator=generator, device="cpu")
        return (random + 0.5 if name == "per_expert_scale_E" else random / 4).to(dtype)
    tokens, E = shape
    T = tokens * -(-TOKENS // tokens)
    # Small multiples of a power of two, which bfloat16 holds exactly for hundreds of experts; in
    # some rows all of them are negative.
    step = 2.0 ** math.floor(math.log2(8 / E))
    rows = torch.arange(T, device="cpu")[:, None]
    order = torch.rand((T, E), generator=generator, device="cpu").argsort(-1)
    from_zero = order - torch.where(rows % 4 == 0, E, E // 2)
    return (from_zero * step * 2.0 ** -(rows % 3)).to(dtype)


def _sure(
    leaves: dict[str, Tensor], named: dict[str, Any], ids: Tensor, generator: torch.Generator
) -> Tensor:
    """The tokens whose experts are the same for logits that differ a little: no rounding counts."""
    logits = leaves["logits_TE"].float()
    sure = torch.ones(len(logits), dtype=torch.bool, device="cpu")
    for _ in range(3):
        noise = torch.rand(logits.shape, generator=generator, device="cpu") - 0.5
        moved = leaves | {"logits_TE": logits + 2e-4 * noise}
        others = route.reference(**moved, **named)[1]
        sure &= (others.sort(-1).values == ids.sort(-1).values).all(-1)
    return sure


def _dense(ids: Tensor, weights: Tensor, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Which experts are chosen, and their weights, both as [T, E]."""
    zeros = torch.zeros_like(leaves["logits_TE"], dtype=torch.float32)
    return zeros.scatter(1, ids.long(), 1.0), zeros.scatter(1, ids.long(), weights)

"""Slices whose ends torch left open, decided before Inductor lowers them."""

from __future__ import annotations

import sys
from typing import Any

import torch
from sympy import Eq, sympify  # type: ignore[import-untyped]
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import (
    CallMethodKey,
    free_unbacked_symbols,
    resolve_unbacked_bindings,
)

# Under the flag Inductor of torch 2.11 lowers x[a:] only if x is known to end before this, which is
# how a graph writes the missing end; else it stops with a KeyError: 'unbacked_bindings'.
MISSING_END = sys.maxsize
NEEDS_END = torch.__version__ < "2.12"
BINDINGS = "unbacked_bindings"  # of a node's meta: new symbols, and where in the result they are


def settle(graph: fx.Graph) -> None:
    """Decide from the sizes being compiled where each `x[start:end]` begins and ends, with a guard.

    Under our flag torch does not look at the value of a size. Where it cannot prove that `s` is
    within a size like `64 * ceil(s / 64)`, it gives the result's size a new symbol, as if it
    depended on data, and Inductor is to define that symbol. Inductor does not if guards made since
    then prove it (`failed OrderedSet([]) >= OrderedSet([u5])`), torch 2.11 defines some in code
    that names what it lacks (`Mod`), and where a symbol is missing it stops, too (`KeyError:
    'unbacked_bindings'`). A slice that does depend on data stays as it is. So does one whose ends
    are numbers: Inductor defines the size of `x[-3:]`, and a guard would cost fewer rows a graph.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor):
        values = fx.node.map_arg(node.args, lambda arg: arg.meta["val"])
        symbolic = any(isinstance(end, torch.SymInt) for end in values[2:4])
        if symbolic and not free_unbacked_symbols([v for v in values if v is not None]):
            _define(node, *_bounds(*values))
        elif NEEDS_END:
            _write_end(graph, node)


def _write_end(graph: fx.Graph, node: fx.Node) -> None:
    """Say where `x[a:]` ends if x has a size like s + 2, of which `sizes.tell` says nothing."""
    args: list[Any] = [*node.args, *(0, 0, MISSING_END)[len(node.args) - 1 :]]
    x, dim, start, end, *step = args
    size = x.meta["val"].shape[dim]
    missing = isinstance(end, int) and end >= MISSING_END
    if missing and isinstance(size, torch.SymInt) and not size.node.expr.is_Symbol:
        with graph.inserting_before(node):
            end = graph.call_function(torch.ops.aten.sym_size.int, (x, dim))
        end.meta["val"] = size
        node.args = (x, dim, start, end, *step)


def _bounds(
    x: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> tuple[Any, Any]:
    """The size and the storage offset of x[start:end:step]; each comparison of sizes is a guard."""
    size = x.shape[dim]
    first = 0 if start is None else _index(start, size)
    last = size if end is None else _index(end, size)
    length = (last - first + step - 1) // step if last > first else 0
    return length, x.storage_offset() + first * x.stride(dim)


def _index(index: Any, size: Any) -> Any:
    return min(max(index + size if index < 0 else index, 0), size)


def _define(node: fx.Node, size: Any, offset: Any) -> None:
    """Say of the symbols that the node was to define what they are."""
    env = node.meta["val"].fake_mode.shape_env
    for symbol, path in (resolve_unbacked_bindings(env, node.meta.pop(BINDINGS, {})) or {}).items():
        assert isinstance(path[0], CallMethodKey), f"{symbol} of {node} is at {path}"
        value = size if path[0].name == "size" else offset
        expr = sympify(value.node.expr if isinstance(value, torch.SymInt) else value)
        # Not through _set_replacement: it refuses what it cannot prove to be a size.
        known = env.replacements.setdefault(symbol, expr)
        env._update_version_counter()
        checks = [check.expr for check in env.deferred_runtime_asserts.pop(symbol, ())]
        for check in [Eq(known, expr), *checks]:  # no code defines and checks the symbol now
            held = env.guard_or_defer_runtime_assert(env.replace(check), f"of {node.format_node()}")
            assert held, f"{check} does not hold where {symbol} is {expr}, at {node.format_node()}"

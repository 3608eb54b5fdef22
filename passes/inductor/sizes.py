"""What it takes that sizes of 0 and 1 stay symbolic, under a private flag of torch."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx
from torch._C import DispatchKey
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import _config as shape_config
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod
from torch.utils._sympy.value_ranges import ValueRanges

from moe_ops.passes.inductor.slices import BINDINGS, MISSING_END, NEEDS_END

# Without it they are compiled apart. With it torch still takes x[-1:] to have a row, so what it
# traces is not to be run on an empty x.
OBLIVIOUS = "backed_size_oblivious"
HAS_OBLIVIOUS = hasattr(shape_config, OBLIVIOUS)
FIXES_LATE = torch.__version__ < "2.12"
ASKS_FOR_ONE = torch.__version__ < "2.13"  # of masks of attention, see `_attend`
ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
TRACED = DispatchKey.CompositeImplicitAutograd  # what stands here runs while a graph is traced


class _Inside:
    """How many calls are under the flag, and what it was before the first of them."""

    calls = 0
    before = False


class _InsideThread(_Inside, threading.local):
    """How many calls of a thread are under the flag: from torch 2.12 on each thread has a flag of
    its own."""


_inside = _Inside() if torch.__version__ < "2.12" else _InsideThread()
_anywhere = _Inside()  # in all threads
_entering = threading.Lock()


def call_oblivious(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call compiled code under the flag, where there is one."""
    if not HAS_OBLIVIOUS:
        return call(*args, **kwargs)
    # shape_config.patch would take five times as long, 50 µs a call.
    with _entering:
        if not _inside.calls:
            _inside.before = getattr(shape_config, OBLIVIOUS)
            setattr(shape_config, OBLIVIOUS, True)
        if ASKS_FOR_ONE and not _anywhere.calls:
            _trace_attention_by(_attend)
        _inside.calls += 1
        _anywhere.calls += 1
    try:
        return call(*args, **kwargs)
    finally:
        with _entering:
            _inside.calls -= 1
            _anywhere.calls -= 1
            if ASKS_FOR_ONE and not _anywhere.calls:
                _trace_attention_by(None)
            if not _inside.calls:
                setattr(shape_config, OBLIVIOUS, _inside.before)


class _Assumed(threading.local):
    """What Inductor is to take for granted in this thread: by environment, the ranges to put back,
    or None.
    """

    ranges: dict[Any, dict[Any, Any]] | None = None


_assumed = _Assumed()


@contextlib.contextmanager
def assuming() -> Iterator[None]:
    """Inside, `tell` says that sizes which are more than 1 in the call being compiled always are.

    Inductor splits and fuses loops by what it knows: that 64 * s² is more than 64 * s it knows of s
    from 2 on. What it makes of that is right for 1, too: a loop over one element, as torch has it
    of sizes that are size-like. No guard keeps 1 out: neither those that Dynamo makes afterwards,
    as the ranges are as before by then, nor those that a cache keeps with the compiled graph.
    """
    outer, _assumed.ranges = _assumed.ranges, {}
    try:
        yield
    finally:
        for env, before in _assumed.ranges.items():
            vars(env).pop("produce_guards", None)  # the one of the class is seen again
            _set_ranges(env, before)
        _assumed.ranges = outer


@contextlib.contextmanager
def as_they_are() -> Iterator[None]:
    """Inside, what `assuming` takes for granted is not, for what is decided once for all sizes."""
    assumed = _assumed.ranges or {}
    with contextlib.ExitStack() as stack:
        for env, before in assumed.items():
            stack.enter_context(_ranges(env, before))
        yield


def tell(graph: fx.Graph) -> None:
    """Make the graph's symbolic sizes ready for Inductor, as those traced without the flag are."""
    vals = (node.meta.get("val") for node in graph.nodes)
    fake = next((val for val in vals if isinstance(val, FakeTensor)), None)
    env = None if fake is None else fake.fake_mode.shape_env
    if env is None:
        return
    symbols = tuple(env.size_like)
    # From here on a guard that fixes a size at 0 or 1 fixes it everywhere, as one at 7 does. Of
    # sizes that are size-like torch refuses to learn that: after a guard on 1 it takes s52 for 1
    # where it asks the guards, and for a symbol where it multiplies. Inductor then fuses nodes of
    # 2048*s27 and of 2048*s27*s52 elements, and stops as it cannot split one like the other.
    _fix(env)
    env.size_like.clear()
    if NEEDS_END:
        for symbol in symbols:
            env.constrain_symbol_range(symbol, 0, MISSING_END - 1)
    if _assumed.ranges is not None:
        decided = _deciding(graph)
        several = tuple(symbol for symbol in symbols if symbol not in decided)
        _assume_several(env, several, _assumed.ranges)


def fix_traced() -> None:
    """Do so before AOTAutograd traces the graph that Dynamo is compiling, under torch 2.11. There
    `x.view(b, s, -1, d).squeeze(2)` keeps an axis of b elements, of a b that a guard fixes at 1."""
    context = TracingContext.try_get()
    if FIXES_LATE and context is not None and context.fake_mode is not None:
        env = context.fake_mode.shape_env
        if env is not None:
            _fix(env)


def _fix(env: Any) -> None:
    """Let sizes that guards fix at 0 or 1 be these numbers."""
    for guard in env.guards:
        equation = guard.expr if getattr(guard.expr, "rel_op", "") == "==" else None
        if equation is not None and equation.lhs in env.size_like and equation.rhs in (0, 1):
            env.size_like.discard(equation.lhs)
            env._set_replacement(equation.lhs, equation.rhs, "a guard fixes it")


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention as it is traced under the flag by torch before 2.13.

    To choose a kernel that asks whether a mask [B, N, S, tokens seen] has one row for all
    sequences, and only then whether it has one for each. Either will do, but the first question
    leaves a guard, by which a batch of 1 has a graph of its own. So where a mask has a row for each
    of any number of sequences the answer is no, without a guard.
    """
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    with contextlib.ExitStack() as stack:
        if _inside.calls and attn_mask is not None and attn_mask.dim() == 4:
            rows, sequences = attn_mask.shape[0], query.shape[0]
            # Where a guard has fixed one sequence, queries have 1 and the mask may have a symbol.
            if (
                isinstance(rows, torch.SymInt)
                and isinstance(sequences, torch.SymInt)
                and rows.node.hint == sequences.node.hint
            ):
                stack.enter_context(_never_one(rows))
        return ATTENTION._op_dk(TRACED, *given, scale=scale, enable_gqa=enable_gqa)


def _trace_attention_by(kernel: Callable[..., Any] | None) -> None:
    """What torch traces attention by, in all threads: None is its own way."""
    if kernel is None:
        ATTENTION.py_kernels.pop(TRACED)
    else:
        ATTENTION.py_kernels[TRACED] = kernel
    ATTENTION._dispatch_cache.clear()  # it holds what was looked up before


@contextlib.contextmanager
def _never_one(size: torch.SymInt) -> Iterator[None]:
    """Inside, torch is told that a size is not 1, whatever it is in the call being compiled."""
    env, question = size.node.shape_env, sympy.Eq(size.node.expr, 1)
    if not isinstance(question, sympy.Eq):  # a guard fixed the size, so nobody asks
        yield
        return
    env.evaluate_expr = functools.partial(_denied, question, env.evaluate_expr)
    try:
        yield
    finally:
        del env.evaluate_expr  # the one of the class is seen again


def _denied(
    question: sympy.Eq, evaluate: Callable[..., Any], expr: Any, *args: Any, **kw: Any
) -> Any:
    """Whether torch takes an expression for true: not the one in question."""
    return sympy.false if expr == question else evaluate(expr, *args, **kw)


def _deciding(graph: fx.Graph) -> set[Any]:
    """The symbols by which sizes in the graph are decided: the end of `x[:2]` is min(2, s).

    Nothing may be assumed of these. If s is taken for more than 1, min(2, s) is 2, so a later call
    with a size of 1 would read and return rows that are not there.
    """
    found: set[Any] = set()
    for node in graph.nodes:
        for size in _sizes(node):
            for part in sympy.preorder_traversal(size):
                if isinstance(part, (sympy.Add, sympy.Mul, sympy.Pow)):
                    continue
                # s // 64 at 1 is what the expression says, 64 // s is decided by what s may be.
                by = part.args[1:] if isinstance(part, (FloorDiv, Mod, PythonMod)) else part.args
                found.update(*(arg.free_symbols for arg in by))
        if BINDINGS in node.meta:  # torch left open what it comes to
            found.update(*(size.free_symbols for x in node.all_input_nodes for size in _sizes(x)))
    return found


def _sizes(node: fx.Node) -> list[Any]:
    """The symbolic expressions in the shapes, strides, offsets and numbers that a node gives."""
    found: list[Any] = []
    for val in tree_leaves(node.meta.get("val")):
        if isinstance(val, FakeTensor):
            found += [*val.shape, *val.stride(), val.storage_offset()]
        else:
            found.append(val)
    return [size.node.expr for size in found if isinstance(size, torch.SymInt)]


def _assume_several(env: Any, symbols: tuple[Any, ...], ranges: dict[Any, dict[Any, Any]]) -> None:
    """Let sizes start at 2 that are neither fixed nor 0 or 1 in the call that is compiled."""
    if env not in ranges:
        ranges[env] = {}
        env.produce_guards = functools.partial(_guards, env, env.produce_guards, ranges[env])
    for symbol in symbols:
        range, value = env.var_to_range.get(symbol), env.backed_var_to_val.get(symbol)
        if symbol in env.replacements or range is None or value is None or value < 2:
            continue
        ranges[env].setdefault(symbol, range)
        _set_ranges(env, {symbol: range & ValueRanges(2, range.upper)})


def _guards(
    env: Any, produce: Callable[..., Any], before: dict[Any, Any], *args: Any, **kw: Any
) -> Any:
    """The guards that a cache keeps: of the ranges as they were."""
    with _ranges(env, before):
        return produce(*args, **kw)


@contextlib.contextmanager
def _ranges(env: Any, ranges: dict[Any, Any]) -> Iterator[None]:
    """Inside, sizes have other ranges."""
    outside = {symbol: env.var_to_range[symbol] for symbol in ranges}
    _set_ranges(env, ranges)
    try:
        yield
    finally:
        _set_ranges(env, outside)


def _set_ranges(env: Any, ranges: dict[Any, Any]) -> None:
    env.var_to_range.update(ranges)
    env._update_version_counter()  # what was worked out with other ranges is forgotten

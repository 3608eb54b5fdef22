"""What is asked of a backend for each sample: functions that raise AssertionError.

The first group is asked of every sample that the backend runs, the second of each kind of sample
once, the third of one sample of the op.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from moe_ops.conformance.call import Call
from moe_ops.conformance.memory import bits, memory_of, tensors
from moe_ops.interop.code_objects import with_own_code_object
from moe_ops.ops.experts import WEIGHTS
from moe_ops.planning.choose import OTHER_ARITHMETIC, Node, Rules, choose
from moe_ops.planning.thresholds import THRESHOLD_OPS
from moe_ops.quant.formats import TENSOR, Format
from moe_ops.registry.backend import LAYOUT
from moe_ops.registry.invariance import INVARIANT, PLANNED
from moe_ops.registry.spec import OPS
from moe_ops.testing import TOL, assert_close

BY_A_SIZE = "decides by a size that is not known when compiling"
# Ops of which no row of the result is that of the first argument.
OTHER_ROWS = (
    "dispatch", "combine", "expert_loads", "dispatch_tokens", "combine_tokens", "expert_wgrad",
    "expert_wgrad_onto",
)  # fmt: skip


def supports(call: Call) -> None:
    """It says the same of tensors without memory, by which a compiler asks."""
    mode = FakeTensorMode()
    fakes = [_fake(mode, a) for a in call.copies()]
    with mode:
        reason = call.asked(fakes)
    if reason is not None:
        raise AssertionError(
            f"`supports` takes this call, and of the same tensors without memory, by which a "
            f"compiler asks, it says: {reason}; look at shapes, strides and dtypes alone"
        )


def numbers(call: Call) -> None:
    """The results are those of the definition, on memory filled with NaN."""
    args = call.copies()
    call.compare(call.run(args), args)


def arguments(call: Call) -> None:
    """It changes no argument but those that the op writes to, and returns none of them."""
    args, names = call.copies(), list(call.named)
    kept = {
        name: [(t, memory_of(t)) for t in tensors(a)]
        for name, a in zip(names, args, strict=True)
        if name not in call.op.arguments.mutated
    }
    got = call.run(args)
    for written, pairs in kept.items():
        if any(not torch.equal(memory_of(t), before) for t, before in pairs):
            raise AssertionError(
                f"it writes to {written}, or next to it; write to memory of its own"
            )
    given = {
        t.untyped_storage().data_ptr(): n
        for n, a in zip(names, args, strict=True)
        for t in tensors(a)
    }
    for i, t in enumerate(tensors(got)):
        name = given.get(t.untyped_storage().data_ptr())
        if name is not None and t.numel():
            raise AssertionError(f"result {i} lies in the memory of {name}; return a copy")


def shapes(call: Call) -> None:
    """Results have the shapes, dtypes and strides that compilers take them to have."""
    args = call.copies()
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    fakes = [_fake(mode, a) for a in args]
    with mode:
        wanted = list(tensors(call.op.overload(*fakes)))
    for i, (g, w) in enumerate(zip(tensors(call.run(args)), wanted, strict=True)):
        known = all(isinstance(n, int) for n in w.shape)  # not of how many rows other ranks send
        got, want = _described(g, known), _described(w, known)
        if got != want:
            raise AssertionError(f"result {i} is {got}, and compiled graphs take it to be {want}")


def rows(call: Call) -> None:
    """What becomes of a row depends on that row alone."""
    name = "x_TD" if "x_TD" in call.named else next(iter(call.named))
    at = list(call.named).index(name)
    args = call.copies()
    count = args[at].shape[0]
    kept = _kept(call, args, count)
    want = [t[:kept] for t in tensors(call.run(args)) if t.dim() and t.shape[0] == count]
    for what, changed in _others(args[at], kept):
        others = call.copies()
        others[at].copy_(changed)
        got = [t[:kept] for t in tensors(call.run(others)) if t.dim() and t.shape[0] == count]
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            if not torch.equal(bits(g), bits(w)):
                bad = [r for r in range(kept) if not torch.equal(bits(g[r]), bits(w[r]))]
                raise AssertionError(
                    f"{len(bad)} of {kept} rows of result {i}, row {bad[0]} first, change where "
                    f"other rows of {name}, from {kept} on, {what}; what becomes of a row may "
                    "depend on that row alone"
                )


def plans(call: Call) -> None:
    """It runs by the plans of compiled graphs, as one of several backends, too."""
    record = call.op.call(*call.copies())
    n, name = call.op.arguments.rows(record), call.backend.name
    texts = [name, f":{name}", f"{n}:{name},:reference"]
    texts += [f"{n - 1}:reference,:{name}"] if n > 1 else []
    for plan in map(_of_the_mode, texts):
        args = call.copies()
        got = call.ran(lambda *a, plan=plan: call.op.planned(*a, plan=plan), args)
        call.compare(got, args, f" by the plan {plan!r}")


def _of_the_mode(plan: str) -> str:
    """A plan as calls of the kind that is checked have it, which may be invariant ones alone."""
    return f"{PLANNED}{plan}" if INVARIANT.get() else plan


def choices(call: Call) -> str | None:
    """It is among those that a compiler chooses from when the number of rows is not known, and
    thresholds can name it. Gives a note where it decides by that number."""
    args = _of_any_number(call)
    record = call.op.call(*args)
    forced = ((None, call.backend.name),) if call.op.name in THRESHOLD_OPS else None
    node = Node(name=call.label, layer="")
    rules = Rules(thresholds=None, strict=False, table={}, batch_invariant=INVARIANT.get())
    found = choose(call.op, record, node, rules)
    reason = found.refusals.get(call.backend.name)
    if reason == OTHER_ARITHMETIC and forced is None:
        return None  # it stands behind others in invariant calls, and nobody can name it
    if reason == BY_A_SIZE:
        return f"{call.op.name} {call.sample}: {BY_A_SIZE}, so that graphs of any size leave it out"
    if reason != OTHER_ARITHMETIC and call.backend.name not in found.candidates:
        raise AssertionError(f"where the number of rows is not known, it says: {reason}")
    limits = call.backend.rows.possible is not None
    if forced is not None and not limits:
        plan = choose(call.op, record, node, replace(rules, thresholds=forced)).plan
        if plan.removeprefix(PLANNED).removeprefix(":") != call.backend.name:
            raise AssertionError(f"thresholds that name it give the plan {plan!r}")
    return None


def compiled(call: Call) -> None:
    """It runs in a graph of torch.compile with sizes that are not known."""
    plan, args = _of_the_mode(call.backend.name), call.copies()
    # What was compiled before stays, and counts towards no limit of this.
    run = with_own_code_object(lambda *a: call.op.planned(*a, plan=plan), "conformance")
    made = torch.compile(run, backend="aot_eager", dynamic=True, fullgraph=True)
    call.compare(call.ran(made, args), args, " of a compiled graph")


def gradients(call: Call) -> None:
    """It refuses a call that wants gradients, or has those of the definition."""
    args = call.copies()
    stored = WEIGHTS if call.named.get(LAYOUT) else ()  # in another order, without gradients
    leaves = [
        a
        for name, a in zip(call.named, args, strict=True)
        if isinstance(a, Tensor) and a.dtype is call.dtype and name not in stored
    ]
    for leaf in leaves:
        leaf.requires_grad_()
    if call.asked(args) is not None:
        return
    try:
        call.op.check(call.op.call(*args))
        want = _first_float(call.op.reference(*args))
    except ValueError:  # the op has none, and says so
        return
    out = _first_float(call.run(args))
    if out is None or want is None:
        return
    if not out.requires_grad:
        raise AssertionError(
            "`supports` takes a call that wants gradients, and the result has none; refuse it "
            "where torch.is_grad_enabled() and an argument requires one"
        )
    weight = torch.randn_like(want)
    for i, (g, w) in enumerate(
        zip(_grads(out, weight, leaves), _grads(want, weight, leaves), strict=True)
    ):
        if (g is None) != (w is None):
            raise AssertionError(f"gradient {i} is {g}, that of the definition {w}")
        if g is not None and w is not None:
            tol = TOL["model", torch.float32 if call.dtype == torch.float32 else torch.bfloat16]
            assert_close(g, w, tol, f"gradient {i} of {call.op.name}")


def captured(call: Call) -> None:
    """It runs in a CUDA graph, which reads its arguments anew each time."""
    args, later = call.copies(), call.copies()
    planned = call.op.planned
    name = call.backend.name
    call.ran(lambda *a: planned(*a, plan=name), args)  # compiles what it has to
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    for t in tensors(args):
        t.zero_()
    with torch.cuda.graph(graph):
        got = planned(*args, plan=name)
    for t, values in zip(tensors(args), tensors(later), strict=True):
        t.copy_(values)
    for t in tensors(got):
        t.view(torch.uint8).fill_(255) if t.is_contiguous() else t.zero_()
    graph.replay()
    torch.cuda.synchronize()
    call.compare(got, args, " of a CUDA graph's replay")


Check = Callable[[Call], Any]
EVERY: tuple[Check, ...] = (supports, numbers, arguments, shapes)
EACH_KIND: tuple[Check, ...] = (rows, plans, choices)
ONCE: tuple[Check, ...] = (compiled, gradients)
# What compares results again, or needs one.
AFTER_NUMBERS: tuple[Check, ...] = (arguments, shapes, rows, plans, compiled, gradients, captured)
NAMES = tuple(c.__name__ for c in (*EVERY, *EACH_KIND, *ONCE, captured))


def applies(check: Check, call: Call) -> bool:
    """Whether a check has anything to look at in a sample."""
    if check is rows:
        return call.op.name not in OTHER_ROWS and not _one_scale(call)
    if check is choices:
        return call.op.name in OPS
    if check is gradients:
        return not call.op.arguments.mutated
    if check is captured:
        record = call.op.call(*call.copies())
        return call.device.type == "cuda" and not call.backend.waits(record)
    return True


def _one_scale(call: Call) -> bool:
    """Whether a scale is made of all rows: the one case in which rows depend on each other."""
    named = call.named
    format = named.get("x_format") or named.get("format") or ""
    static = named.get("x_scale") is not None or named.get("scale") is not None
    made = "x_scale_RG" not in named or named["x_scale_RG"] is None
    return bool(format) and made and not static and Format.of(format).group == TENSOR


def _kept(call: Call, args: tuple[Any, ...], count: int) -> int:
    """The rows that stay as they are: half of them, of those that are used."""
    ends = call.named.get("ends_E")
    used = count if ends is None else int(ends[-1])
    return min((count + 1) // 2, used)


def _others(x: Tensor, kept: int) -> Iterator[tuple[str, Tensor]]:
    """An argument with other rows beside those that are kept, in words and as a tensor."""
    turned = x.clone()
    turned[kept:] = x.flip(0)[kept:].clone()
    yield "have the values of each other", turned
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return
    for what, value in (("are 0", 0.0), ("are NaN", float("nan")), ("are inf", float("inf"))):
        other = x.clone()
        other[kept:] = value
        yield what, other
    scaled = x.clone()
    scaled[kept:] *= 1000
    yield "are 1000 times what they were", scaled


def _fake(mode: FakeTensorMode, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_fake(mode, v) for v in value)
    return mode.from_tensor(value) if isinstance(value, Tensor) else value


def _of_any_number(call: Call) -> list[Any]:
    """The arguments without memory, of a number of tokens or rows that is not known."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    found: list[Any] = []
    for name, value in zip(call.named, call.copies(), strict=True):
        if not isinstance(value, Tensor):
            found.append(_fake(mode, value))
            continue
        sizes = [DimDynamic.STATIC] * value.dim()
        if name.rpartition("_")[2][:1] in ("T", "R", "B"):
            sizes[0] = DimDynamic.DUCK  # one symbol for all
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
        found.append(mode.from_tensor(value, symbolic_context=context))
    return found


def _described(t: Tensor, known: bool) -> str:
    dtype = str(t.dtype).removeprefix("torch.")
    if not known:
        return f"{dtype} of {t.dim()} axes"
    whole = zip(t.stride(), t.shape, strict=True)
    strides = tuple(step for step, n in whole if n > 1) if t.numel() else ()
    return f"{dtype} {list(t.shape)} with the strides {strides}"


def _first_float(result: Any) -> Tensor | None:
    return next((t for t in tensors(result) if t.is_floating_point()), None)


def _grads(out: Tensor, weight: Tensor, leaves: list[Tensor]) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(out, leaves, weight.to(out), allow_unused=True)


def chain() -> Iterator[Check]:
    """All checks, in the order in which they are made."""
    return itertools.chain(EVERY, EACH_KIND, ONCE, (captured,))

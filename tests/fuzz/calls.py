"""Random calls of the ops: good ones, some arguments of which are changed for better or worse.

`call_of(name, number)` makes the same call each time; a failure prints it.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_ops import OPS, Op, using
from moe_ops.checks.shapes import FLOATS
from moe_ops.conformance.samples import INPUT_FORMATS, PAIRS, samples, specified
from moe_ops.conformance.tensors import padded, strided
from moe_ops.testing import CASES, Tol, assert_close, reference_of, tolerance
from tests.fuzz.attempts import described

SIZES = [case for case in CASES if case.name in ("plain", "odd", "no_tokens", "many_experts")]
EXACT = Tol(0.0, "integers and 8-bit values are exact")
FORMATS = sorted({format for pair in PAIRS for format in pair} | set(INPUT_FORMATS))

# What may stand for an argument, by its type; most of it may not.
INTS: tuple[Any, ...] = (
    -1,
    0,
    1,
    2,
    3,
    2**31,
    2**63,
    2**70,
    2.0,
    float("nan"),
    "2",
    None,
    True,
    [],
)
NUMBERS: tuple[Any, ...] = (
    0.25, 1, 2.5, float("nan"), float("inf"), float("-inf"), "1", None, True, [1.0],
)  # fmt: skip
FLAGS: tuple[Any, ...] = (True, False, 1, 0, None, "no", 1.0, [])
NAMES = (
    "silu", "gelu", "relu2", "softmax", "sigmoid", "logit", "score", "max", "top2sum", "zero",
    "-inf", "float32", "bfloat16", "float16", "siluu", "Softmax", "", "nan", None, 3, True,
    torch.float32, b"silu", ["silu"], *FORMATS, "mxfp5", "int8:0x1", "int8:row:row", "int8:1x",
    "float8_e4m3fn:-1x128", ":", "\u00e9",
)  # fmt: skip
TENSORS: tuple[Callable[[Tensor], Any], ...] = (
    lambda t: None,
    lambda t: 3,
    lambda t: "x",
    lambda t: [1.0],
    lambda t: t.tolist() if not t.is_meta else [],
    lambda t: t[0] if t.shape[:1] and t.shape[0] else t,
    lambda t: t[None],
    lambda t: t[:0] if t.dim() else t[None],
    lambda t: t[:-1] if t.dim() else t[None],
    lambda t: t[..., :-1] if t.dim() else t[None],
    lambda t: torch.cat((t, t)) if t.dim() else t[None],
    lambda t: t.double(),
    lambda t: t.to(torch.bfloat16),
    lambda t: t.to(torch.int64),
    lambda t: t.to(torch.uint8),
    lambda t: t.to(torch.bool),
    lambda t: t.to("meta"),
    lambda t: torch.empty(0),
    lambda t: torch.tensor(1.0),
    lambda t: strided(t) if t.dim() else t,
    lambda t: padded(t) if t.dim() else t,
    lambda t: t.transpose(0, 1) if t.dim() > 1 else t,
    lambda t: torch.nn.Parameter(t, requires_grad=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of an op, what was changed in it, and the backend that is forced, if any."""

    op: Op
    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: list[str] = field(default_factory=list)  # that a message may name
    backend: str | None = None

    def __str__(self) -> str:
        words = [described(a) for a in self.args]
        words += [f"{name}={described(a)}" for name, a in self.kwargs.items()]
        return (
            f"moe_ops.{self.op.name}({', '.join(words)})\n"
            f"again, with PYTHONPATH=.: from tests.fuzz.calls import *; "
            f"c = call_of({self.op.name!r}, {self.number}); c.op(*c.args, **c.kwargs)"
            + (f"  # on {self.backend}" if self.backend else "")
        )


@functools.cache
def _good(name: str, case: int, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    torch.manual_seed(0)
    return [args for _, args in samples(name, SIZES[case], dtype)]


def call_of(name: str, number: int) -> Call:
    """The call of that number: every fourth as it is, the others changed in one to three ways."""
    rng, op = random.Random(f"{name} {number}"), OPS[name]
    args = rng.choice(_good(name, rng.randrange(len(SIZES)), rng.choice(FLOATS)))
    kinds = op.signature._kinds
    given = dict(zip(kinds, args, strict=True))
    names = list(kinds)
    for _ in range(0 if number % 4 == 0 else rng.randint(1, 3)):
        _change(rng, given, kinds, names)
    first = rng.randint(0, len(kinds))
    known = [given[n] for n in names[: len(kinds)] if n in given]
    # By position only as far as nothing was left out before.
    while list(given)[:first] != list(kinds)[:first]:
        first -= 1
    by_name = dict(list(given.items())[first:])
    positional = tuple(known[:first])
    if number % 50 == 49:
        positional = (*args, None)
        by_name = {}
    backend = rng.choice(list(op.backends)) if rng.random() < 0.15 else None
    return Call(op=op, number=number, args=positional, kwargs=by_name, names=names, backend=backend)


def _change(rng: random.Random, given: dict[str, Any], kinds: Any, names: list[str]) -> None:
    """Change, leave out or misspell one argument."""
    what = rng.random()
    name = rng.choice(list(given))
    if what < 0.04:
        del given[name]
    elif what < 0.08:
        wrong = rng.choice((name + "s", name.lower() + "_", "foo"))
        given[wrong] = given.pop(name)
        names.append(wrong)
    elif name in kinds:
        given[name] = _other(rng, kinds[name].type, given[name], given)


def _other(rng: random.Random, kind: type, value: Any, given: dict[str, Any]) -> Any:
    pools: dict[type, tuple[Any, ...]] = {int: INTS, float: NUMBERS, bool: FLAGS, str: NAMES}
    if kind is not Tensor:
        return rng.choice(pools[kind])
    tensors = [t for t in given.values() if isinstance(t, Tensor)]
    if not isinstance(value, Tensor):
        value = rng.choice(tensors) if tensors else torch.ones(2, 2)
    return rng.choice(TENSORS)(value)


def outcome(call: Call) -> str:
    """Run a call: "right" or "refused". Raises AssertionError for anything else that it does."""
    try:
        with using(call.backend, call.op) if call.backend else using("reference", "quantize"):
            got = call.op(*call.args, **call.kwargs)
    except (ValueError, TypeError) as error:
        named = [n for n in call.names if re.search(rf"(?<!\w){re.escape(n)}(?!\w)", str(error))]
        assert named, f"{type(error).__name__}: {error}\nnames no argument of\n{call}"
        return "refused"
    except NotImplementedError as error:
        assert call.backend, f"{error}\n{call}"
        assert f"backend {call.backend!r} is forced" in str(error), f"{error}\n{call}"
        return "refused"
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{call}") from error
    args = call.op.arguments.flat(call.op.call(*call.args, **call.kwargs))
    if any(isinstance(a, Tensor) and a.is_meta for a in args):
        return "right"  # shapes alone
    _compare(call, args, got)
    return "right"


def _compare(call: Call, args: tuple[Any, ...], got: Any) -> None:
    """Hold a result against the reference's, in float32 where nothing is quantised on the way."""
    name = call.op.name
    exact = not any(isinstance(a, str) and a in INPUT_FORMATS for a in args)
    with using("reference"):
        run = call.op.reference
        want = reference_of(run, *args) if exact else run(*args)
    pairs = zip(specified(name, args, got), specified(name, args, want), strict=True)
    for i, (g, w) in enumerate(pairs):
        tol = tolerance(name, g.dtype, args[0].dtype) if g.dtype in FLOATS else EXACT
        assert_close(g, w, tol, f"result {i} of {name}", str(call))

"""Force a backend for the calls inside a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moe_ops.checks.signature import did_you_mean
from moe_ops.registry.invariance import INVARIANT
from moe_ops.registry.registration import PATH
from moe_ops.registry.spec import DECODE_OPS, FORCED, OPS, Op


@contextmanager
def using(
    backend: str | None = None, *ops: Op | str, batch_invariant: bool | None = None
) -> Iterator[None]:
    """Force a backend inside the block, on the named ops or on every op; read each time an op runs.

        with moe_ops.using(batch_invariant=True): ...

    With batch_invariant, with or without a backend, each op gives a row the same bits whatever the
    other rows are; it raises NotImplementedError where no backend, or not the forced one, does. See
    docs/INVARIANCE.md. None leaves that as it is around the block.

    Ops in a graph that `moe_ops.compile` made keep the backends of its plan; force those there.
    One that was made without batch_invariant raises RuntimeError in a block that asks for it.

    A backend that runs calls by several paths takes one of them by its name, too, such as
    "triton.grouped/wgmma"; `python -m moe_ops backends` lists them.

    A forced backend never falls back: a call that it cannot run raises NotImplementedError with
    every refusal. The inner of two nested blocks wins. Raises ValueError for a name that no op (or
    a named op) has, and TypeError for a block that would change nothing.
    """
    if batch_invariant is not None and not isinstance(batch_invariant, bool):
        raise TypeError(f"batch_invariant must be True, False or None, got {batch_invariant!r}")
    if backend is None is batch_invariant:
        raise TypeError("using() changes nothing; name a backend, or give batch_invariant")
    forced = FORCED.get() if backend is None else _forced(backend, ops)
    wanted = INVARIANT.get() if batch_invariant is None else batch_invariant
    tokens = FORCED.set(forced), INVARIANT.set(wanted)
    try:
        yield
    finally:
        FORCED.reset(tokens[0])
        INVARIANT.reset(tokens[1])


def _forced(backend: str, ops: tuple[Op | str, ...]) -> dict[str, str]:
    """What is forced with a backend forced on these ops, too. Raises ValueError as `using`."""
    every = OPS | DECODE_OPS
    names = [o.name if isinstance(o, Op) else o for o in ops]
    unknown = [n for n in names if n not in list(every)]
    if unknown:
        hint = did_you_mean(unknown[0], every)
        names = [str(name) for name in unknown]
        raise ValueError(f"no op named {', '.join(names)}; the ops are {', '.join(every)}{hint}")
    known = sorted({b for n in (names or every) for b in every[n].backends})
    paths = sorted({b for n in (names or every) for b in every[n].paths})
    if backend not in known and backend not in paths:
        where = ", ".join(names) if names else "any op"
        hint = did_you_mean(backend, paths if PATH in str(backend) else known)
        raise ValueError(f"no backend {backend!r} of {where}; there are {', '.join(known)}{hint}")
    if not names:
        return {"*": backend}
    return {**(FORCED.get() or {}), **dict.fromkeys(names, backend)}

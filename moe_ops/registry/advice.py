"""A line in the log where a faster backend wants the weights prepared."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moe_ops.registry.backend import LAYOUT, Backend
from moe_ops.registry.gradients import grad_wanted

if TYPE_CHECKING:
    from moe_ops.registry.registration import Registration

log = logging.getLogger("moe_ops")


def advise(op: Registration, candidates: Sequence[Backend], chosen: Backend, call: Any) -> None:
    """Log, at level INFO and once for a backend, which call prepares weights, if a faster one than
    what was chosen of the candidates would run a call but for their order: one that is asked
    earlier, or that multiplies codes where the chosen one emulates them.

    Nothing is said of weights that are prepared for another one, and of a call whose gradients are
    wanted, which prepared weights have not.
    """
    is_earlier, emulates = True, False
    for backend in candidates:
        if backend is chosen:
            is_earlier, emulates = False, chosen.emulates(call)
        if backend.layout is None or (op.name, backend.name) in _told():
            continue
        if not (is_earlier or emulates) or backend.unread(call) != {LAYOUT: ""}:
            continue
        named = {**op.arguments.by_name(call), LAYOUT: backend.layout.name}
        if grad_wanted((), named) or not _would_run(op, backend, op.call(**named), is_earlier):
            continue
        _told().add((op.name, backend.name))
        log.info(
            "moe_ops.%s runs by %s; the faster %s would run it if its weights were prepared, once "
            "after loading, by moe_ops.prepare(model, %r)",
            op.name, chosen.name, backend.name, backend.layout.name,
        )  # fmt: skip


def _would_run(op: Registration, backend: Backend, call: Any, is_earlier: bool) -> bool:
    """Whether a backend would be chosen for a call whose weights are prepared for it."""
    rows, device = op.arguments.rows(call), op.arguments.first(call).device.type
    if backend.refusal(device, rows, call) is not None:
        return False
    if not is_earlier and backend.emulates(call):
        return False
    most = None if backend.rows.preferred is None else backend.rows.preferred(call)
    return most is None or not isinstance(rows, int) or rows <= most


@functools.cache
def _told() -> set[tuple[str, str]]:
    """What was logged: ops and backends."""
    return set()

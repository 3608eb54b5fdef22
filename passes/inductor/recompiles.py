"""One warning of ours where Dynamo stops to compile a model anew."""

from __future__ import annotations

import logging
import sys

DYNAMO = "torch._dynamo.convert_frame"  # the logger of the file that counts
HIT = "torch._dynamo hit config."

log = logging.getLogger("moe_ops")


def tell_of_limit() -> None:
    """From now on say what runs uncompiled when a compiled model of ours reaches Dynamo's limit.

    Dynamo says it in a warning of its own, which names a method of torch and none of what to do.
    """
    dynamo = logging.getLogger(DYNAMO)
    if not any(isinstance(handler, _Teller) for handler in dynamo.handlers):
        dynamo.addHandler(_Teller(logging.WARNING))


class _Teller(logging.Handler):
    """Hears Dynamo's warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        if not str(record.msg).startswith(HIT) or not _calls_ours():
            return
        limit, most, function, reason = (*(record.args or ()), *4 * ("unknown",))[:4]
        log.warning(
            "Dynamo has compiled %s %s times, the most that torch._dynamo.config.%s allows: calls "
            "that none of these graphs is for run it uncompiled, which is slower. The guard that "
            "failed last: %s. Let fewer things vary from call to call, or raise that limit",
            function, most, limit, " ".join(str(reason).partition("\n")[0].split()),
        )  # fmt: skip


def _calls_ours() -> bool:
    """Whether the code that is being compiled was called by moe_ops."""
    frame = sys._getframe()
    package = __name__.partition(".")[0]
    while frame := frame.f_back:  # type: ignore[assignment]
        name = frame.f_globals.get("__name__", "")
        if name.startswith(f"{package}.") and name != __name__:
            return True
    return False

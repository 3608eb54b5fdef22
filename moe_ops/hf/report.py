"""One log line per reason, from eager code and from code that is being traced alike."""

from __future__ import annotations

import logging

import torch

log = logging.getLogger("moe_ops")
_said: set[str] = set()


@torch.compiler.assume_constant_result
def warn_once(message: str) -> bool:
    """Log a warning unless it was logged before. Runs while Dynamo traces, not in the graph."""
    return _once(logging.WARNING, message)


@torch.compiler.assume_constant_result
def info_once(message: str) -> bool:
    """Log a message at INFO unless it was logged before. Runs while Dynamo traces, not in the
    graph."""
    return _once(logging.INFO, message)


def _once(level: int, message: str) -> bool:
    if message not in _said:
        _said.add(message)
        log.log(level, message)
    return True

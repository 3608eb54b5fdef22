"""The user's thresholds: backends by number of tokens."""

from __future__ import annotations

from typing import Any

from moe_ops.checks.options import check_int
from moe_ops.checks.signature import described, did_you_mean
from moe_ops.registry.ranges import Ranges
from moe_ops.registry.registration import PATH
from moe_ops.registry.spec import OPS

THRESHOLD_OPS = ("experts", "moe")  # a row of their first argument is a token
EXAMPLE = "((64, 'cpu'), (None, 'aten'))"


def check_thresholds(thresholds: Any) -> Ranges | None:
    """Thresholds as tuples, given as tuples or lists.

    Raises TypeError unless they are pairs of an int or None and a str; ValueError unless these are
    backends by ascending numbers of tokens, the last open.
    """
    if thresholds is None:
        return None
    if not isinstance(thresholds, (tuple, list)):
        raise TypeError(
            "thresholds must be pairs of the largest number of tokens and a backend, such as "
            f"{EXAMPLE}, got {described(thresholds)}"
        )
    ranges = tuple(_pair(i, pair) for i, pair in enumerate(thresholds))
    known = sorted({name for op in THRESHOLD_OPS for name in OPS[op].backends})
    paths = {name for op in THRESHOLD_OPS for name in OPS[op].paths}
    unknown = [name for _, name in ranges if name not in known and name not in paths]
    if unknown:
        hint = did_you_mean(unknown[0], paths if PATH in unknown[0] else known)
        raise ValueError(
            f"thresholds name {', '.join(unknown)}, but the backends of "
            f"{' and '.join(THRESHOLD_OPS)} are {', '.join(known)}{hint}"
        )
    *counts, last = [count for count, _ in ranges] or [0]
    numbers = [0 if count is None else count for count in counts]
    if last is not None or sorted({0, *numbers}) != [0, *numbers]:
        raise ValueError(
            f"thresholds {thresholds} must be ((largest number of tokens, backend), ...) with "
            f"ascending numbers above 0, and None as the last, such as {EXAMPLE}"
        )
    return ranges


def _pair(i: int, pair: Any) -> tuple[int | None, str]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        got = described(pair) if not isinstance(pair, (tuple, list)) else repr(pair)
        raise TypeError(
            f"thresholds[{i}] must be a pair of the largest number of tokens and a backend, as in "
            f"{EXAMPLE}, got {got}"
        )
    count, name = pair
    if count is not None and (not isinstance(count, int) or isinstance(count, bool)):
        raise TypeError(
            f"thresholds[{i}]: the number of tokens must be an int, or None in the last pair, got "
            f"{described(count)}"
        )
    if count is not None:
        check_int(f"thresholds[{i}]: the number of tokens", count)
    if not isinstance(name, str):
        raise TypeError(f"thresholds[{i}]: the backend must be a str, got {described(name)}")
    return count, name

"""Families by which `make test` judges; `make test-all` runs all others, too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

# Between them every group of routers, every kind of experts, and attention of every kind.
CHOSEN = (
    "aria", "deepseek_v2", "deepseek_v3", "deepseek_v4", "ernie4_5_moe", "gemma4", "glm4_moe",
    "gpt_oss", "granitemoe", "hy_v3", "inkling", "kolibri1", "minimax_m2", "mixtral", "muse_spark",
    "nemotron_h", "phimoe", "qwen3_moe", "zaya",
)  # fmt: skip


# Of these those that are compiled: routers and experts of others are spelled out in tests/passes.
COMPILED = ("deepseek_v3", "gpt_oss", "mixtral", "nemotron_h", "qwen3_moe")


def those_of(chosen: Iterable[Any], names: Iterable[Any]) -> list[Any]:
    """The names as parameters of a test; those that are not chosen are of `every` alone."""
    chosen = frozenset(chosen)
    return [n if n in chosen else pytest.param(n, marks=pytest.mark.every) for n in names]

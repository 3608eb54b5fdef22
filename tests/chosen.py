"""Families by which `make test` judges; `make test-all` runs all others, too."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest

# Between them every group of routers, every kind of experts, and attention of every kind.
CHOSEN = (
    "aria", "deepseek_v2", "deepseek_v3", "deepseek_v4", "ernie4_5_moe", "gemma4", "glm4_moe",
    "gpt_oss", "granitemoe", "hy_v3", "inkling", "kolibri1", "minimax_m2", "mixtral", "muse_spark",
    "nemotron_h", "phimoe", "qwen3_moe", "zaya",
)  # fmt: skip


# Of these those that are compiled: routers and experts of others are spelled out in tests/passes.
COMPILED = ("deepseek_v3", "gpt_oss", "nemotron_h")


def those_of(chosen: Iterable[Any], names: Iterable[Any]) -> list[Any]:
    """The names as parameters of a test; those that are not chosen are of `every` alone."""
    chosen = frozenset(chosen)
    return [n if n in chosen else pytest.param(n, marks=pytest.mark.every) for n in names]


def is_of_every(param: Any) -> bool:
    return any(mark.name == "every" for mark in getattr(param, "marks", ()))


def in_turn(*stacked: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Parametrisations as if they were stacked. With each value of the longest one of every other
    is tried, and these take turns; what else there is of the product is of `every` alone."""
    axes = [params_of(mark) for mark in reversed(stacked)]
    names = [name for mark in reversed(stacked) for name in names_of(mark)]
    chosen = [[i for i, param in enumerate(axis) if not is_of_every(param)] for axis in axes]
    turns = {tuple(kept[i % len(kept)] for kept in chosen) for i in range(max(map(len, chosen)))}
    params = []
    for at in itertools.product(*(range(len(axis)) for axis in axes)):
        parts = [axis[i] for axis, i in zip(axes, at, strict=True)]
        marks = [mark for part in parts for mark in part.marks]
        marks += [pytest.mark.every] * (at not in turns)
        values = [value for part in parts for value in part.values]
        params.append(pytest.param(*values, marks=marks, id="-".join(part.id for part in parts)))
    return pytest.mark.parametrize(names, params)


def names_of(mark: pytest.MarkDecorator) -> list[str]:
    names = mark.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]


def params_of(mark: pytest.MarkDecorator) -> list[Any]:
    """The parameters of a parametrisation, with their ids, which are pytest's."""
    names, ids = names_of(mark), mark.kwargs.get("ids")
    given = None if ids is None or callable(ids) else [*ids]
    params = []
    for i, value in enumerate(mark.args[1]):
        param = value
        if not isinstance(value, type(pytest.param())):
            param = pytest.param(*(value if len(names) > 1 else [value]))
        id = param.id
        if id is None and given is not None:
            id = given[i]
        if id is None:
            told = ids if callable(ids) else None
            parts = zip(names, param.values, strict=True)
            id = "-".join(id_of(name, part, i, told) for name, part in parts)
        params.append(pytest.param(*param.values, marks=param.marks, id=id))
    return params


def id_of(name: str, value: Any, i: int, told: Callable[[Any], Any] | None) -> str:
    if told is not None:
        return str(told(value))
    if isinstance(value, (str, int, float, bool, type(None))):
        return str(value)
    return getattr(value, "__name__", f"{name}{i}")


def one_in(n: int, mark: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """A parametrisation of which so many values are tried, evenly; others are of `every` alone."""
    params = params_of(mark)
    tried = [i for i, param in enumerate(params) if not is_of_every(param)][::n]
    return pytest.mark.parametrize(
        names_of(mark),
        [
            pytest.param(
                *p.values, marks=[*p.marks, *[pytest.mark.every] * (i not in tried)], id=p.id
            )
            for i, p in enumerate(params)
        ],
    )

"""Indexers of transformers, and those of a compiled model's twin, which stand for them."""

from __future__ import annotations

import copy
import functools
import logging
from typing import Any

import pytest
import torch
from torch import nn

from moe_ops.generation.linear_layers import give_ours
from moe_ops.twin import Twin
from tests.hf.auto_classes import build_published


@functools.cache
def indexers_of(name: str, before: type) -> tuple[nn.Module, nn.Module]:
    """An indexer of a published class, and that of a twin, which has `before` before its class."""
    model = build_published(name).model
    twin = Twin(model).module
    give_ours(twin, model)
    path = next(n for n, m in twin.named_modules() if isinstance(m, before))
    return model.get_submodule(path), twin.get_submodule(path)


def hold_uncompiled(stock: nn.Module, ours: nn.Module, *call: Any) -> None:
    """Uncompiled, and as a copy, ours gives what transformers' own does."""
    made = copy.deepcopy(ours)
    assert type(made) is type(stock) and type(ours) is not type(stock)
    for one in (ours, made):
        assert torch.equal(one(*call), stock(*call))


def hold_left(kind: Any, changes: str, caplog: pytest.LogCaptureFixture) -> None:
    """A module of a class that computes something else keeps this method, with a logged reason."""
    caplog.set_level(logging.INFO, "moe_ops")
    model = nn.Sequential(kind())
    twin = Twin(model).module
    give_ours(twin, model)
    assert type(twin[0]) is kind
    said = f"{kind.__name__} keeps its {changes}: ours is not known to compute the same"
    assert said in caplog.messages

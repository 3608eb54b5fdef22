"""Twins whose `generate` is ours, with nothing compiled and a stand-in for captures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe_ops.forward.regions import call_module
from moe_ops.generation.generate import quicken
from moe_ops.generation.sample import StopCheck
from moe_ops.generation.steps import Tools
from moe_ops.graphs.cuda_graph import GraphPool, capture_call
from moe_ops.twin import Twin
from tests.graphs.recorder import Recorder

PLAIN = {"max_new_tokens": 9, "pad_token_id": 0, "eos_token_id": None}


def uncompiled(capture: Any = capture_call, **more: Any) -> Tools:
    """What compiles nothing, and captures by `capture`: on a CPU only a stand-in does."""
    compilers = {"layers": call_module, "compile_step": as_is, "compile_model": as_is}
    return Tools(**{**compilers, "pool": GraphPool(capture), **more})


def as_is(function: Any) -> Any:
    return function


def twin_of(model: PreTrainedModel, tools: Tools | None = None) -> Any:
    made = Twin(model)
    quicken(made.module, tools or uncompiled(Recorder()), made.follow)
    return made.module


def check(model: Any, twin: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    """The tokens of both, which have to be the same."""
    kwargs = {**PLAIN, **kwargs}
    torch.manual_seed(7)
    want = model.generate(ids, **kwargs)
    torch.manual_seed(7)
    got = twin.generate(ids, **kwargs)
    assert torch.equal(got, want), f"got {got.tolist()}, want {want.tolist()}"
    return want


def defer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the end be known one token late, as on a GPU."""
    init = StopCheck.__init__
    monkeypatch.setattr(StopCheck, "__init__", lambda s, device: init(s, device, deferred=True))

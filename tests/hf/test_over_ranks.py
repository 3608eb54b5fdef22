"""What a model over ranks keeps from its first call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_ops.hf import over_ranks


class Base:
    """Of transformers' implementations of expert parallelism what is not looked at here."""


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_tables_of_a_first_call_serve_in_any_mode(
    monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    monkeypatch.setattr(over_ranks.Group, "of", lambda name: SimpleNamespace(size=2))
    tables = (torch.zeros(4, dtype=torch.int32), torch.arange(4, dtype=torch.int32))
    monkeypatch.setattr(over_ranks, "tables_of", lambda *args: [t.clone() for t in tables])
    made = object.__new__(over_ranks.expert_parallel_class(Base))
    made.module, made.over = SimpleNamespace(down_proj=torch.empty(2, 3)), SimpleNamespace(group="")
    with mode():
        found = made._tables(torch.device("cpu"))
    assert all(map(torch.equal, found, tables))
    assert not any(t.is_inference() for t in found)

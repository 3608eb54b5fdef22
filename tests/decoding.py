"""Decode ops where no GPU is: a plan of kernels runs the definition."""

from __future__ import annotations

import importlib

import pytest

from moe_ops.registry.spec import DECODE_OPS


def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes take every device for a GPU with kernels; in graphs these run the definition."""
    for name in ("merge_linears", "fuse_norm"):
        file = importlib.import_module(f"moe_ops.passes.{name}")
        monkeypatch.setattr(file, "runs_kernels", lambda device: True)
    for op in DECODE_OPS.values():
        define(monkeypatch, op.name, "triton")


def define(monkeypatch: pytest.MonkeyPatch, name: str, plan: str) -> None:
    """Have a plan of a decode op run its definition."""
    op = DECODE_OPS[name]
    monkeypatch.setitem(op._plans, plan, ((None, op.body, plan),))

"""Graphs that run node by node as the passes leave them: no code is made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import fx
from torch._inductor import compile_fx, config

from moe_ops.passes.explain.trace import Backend
from moe_ops.passes.inductor.pipeline import HOOK


def run_nodes(
    monkeypatch: pytest.MonkeyPatch, keep: Callable[[fx.Graph], Any] = lambda graph: None
) -> None:
    """Inductor calls `keep` with each graph after the passes, and makes no code of it."""
    compile_graph = compile_fx.compile_fx

    def inner(module: fx.GraphModule, inputs: list[Any], **_: Any) -> Any:
        hook = getattr(config, HOOK)

        def keep_graph(graph: fx.Graph) -> None:
            hook(graph)
            keep(graph)

        return Backend(keep_graph)._inner(module, inputs)

    def compile_so(model: Any, inputs: Any, inner_compile: Any = inner, **more: Any) -> Any:
        return compile_graph(model, inputs, inner_compile=inner_compile, **more)

    monkeypatch.setattr(compile_fx, "compile_fx", compile_so)

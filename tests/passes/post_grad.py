"""Post-grad graphs of small functions, made by Inductor itself, for tests of passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from moe_ops.passes.explain.trace import Backend, text

__all__ = ["Compiled", "text"]


@dataclass
class Compiled:
    """A function that is compiled down to the post-grad hook, and run from there as a graph.

    Inductor decomposes, simplifies and calls `hook` on each graph as it does for real; only its
    code generation is left out. `graphs` is what the hook left.
    """

    function: Callable[..., Any]
    hook: Callable[[fx.Graph], Any]
    dynamic: bool | None = False
    fullgraph: bool = True
    graphs: list[fx.Graph] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results of the rewritten graph, which is made on the first call."""
        if not self.graphs:
            torch._dynamo.reset()
            self._run = torch.compile(
                self.function,
                backend=Backend(self._hook),
                fullgraph=self.fullgraph,
                dynamic=self.dynamic,
            )
        with torch.inference_mode():
            return self._run(*args, **kwargs)

    def _hook(self, graph: fx.Graph) -> None:
        self.hook(graph)
        graph.lint()
        nodes = list(graph.nodes)
        assert list(reversed(graph.nodes)) == nodes[::-1], "a node stands before one that is erased"
        self.graphs.append(graph)

"""Exported programs of models of transformers: token ids in, logits out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from moe_ops.registry.spec import NAMESPACE

LONGEST, MOST_SEQUENCES = 4096, 256


class Logits(nn.Module):
    """A model as a function of token ids [B, S] alone, without a cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """The logits [B, S, vocabulary]."""
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits


def inputs_of(shapes: Sequence[tuple[int, int]], vocabulary: int, seed: int = 0) -> list[Tensor]:
    """Random token ids of these shapes [B, S]."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, shape, generator=g) for shape in shapes]


@torch.no_grad()
def exported(model: nn.Module, ids: Tensor, *, dynamic: bool = True) -> ExportedProgram:
    """The program of a model on our ops; a table of `decompositions` replaces these.

    `ids` are an example [B, S]. With `dynamic` both sizes may vary, else they stay. Raises what
    torch.export raises.
    """
    sizes = None
    if dynamic:
        batch = torch.export.Dim("batch", max=MOST_SEQUENCES)
        sizes = ({0: batch, 1: torch.export.Dim("length", min=2, max=LONGEST)},)
    return torch.export.export(Logits(model), (ids,), dynamic_shapes=sizes)


def ops_in(program: ExportedProgram) -> list[str]:
    """The names of our ops that a program holds, one for each call."""
    names = (str(node.target) for node in program.graph.nodes if node.op == "call_function")
    return [name for name in names if name.startswith(f"{NAMESPACE}.")]

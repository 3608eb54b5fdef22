"""Packages that AOTInductor makes of a layer with our ops, and what they have to give.

model.py FOLDER: writes NAME.pt2 and NAME.pt, the logits of TOKENS, for each of MODELS.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import moe_ops
from moe_ops.quant import packing
from moe_ops.quant.formats import Format

TOKENS = ((1, 2, 3), (4, 0, 2, 1, 3, 7, 5))
MODELS = {"floats": "", "int4": "int4:1x32"}
WORDS, D, E, I = 50, 64, 4, 32  # noqa: E741


class Layer(nn.Module):
    """Words, one layer of experts, of which each token has two, and logits."""

    def __init__(self, w_format: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, D), nn.Linear(D, WORDS, bias=False)
        self.router, self.w_format = nn.Linear(D, E, bias=False), w_format
        weights = {"w13": torch.randn(E, 2 * I, D) * D**-0.5, "w2": torch.randn(E, D, I) * I**-0.5}
        for name, w in weights.items():
            if w_format:
                done = packing.quantize(w, Format.of(w_format))
                w = done.values
                self.register_buffer(f"{name}_scale", done.scale)
            self.register_buffer(name, w)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x_TD = x.flatten(0, 1)
        routed = moe_ops.route(self.router(x_TD), 2, renormalize=True)
        codes = {}
        if self.w_format:
            scales = {"w13_scale_EFG": self.w13_scale, "w2_scale_EDG": self.w2_scale}
            codes = {**scales, "w_format": self.w_format}
        return self.head(x + moe_ops.experts(x_TD, *routed, self.w13, self.w2, **codes).view_as(x))


def package(name: str, folder: Path) -> None:
    torch.manual_seed(0)
    model = Layer(MODELS[name]).eval().requires_grad_(False)
    sizes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", max=64)}
    exported = torch.export.export(model, (torch.zeros(2, 5).long(),), dynamic_shapes=(sizes,))
    torch._inductor.aoti_compile_and_package(exported, package_path=str(folder / f"{name}.pt2"))
    torch.save([model(torch.tensor([some]))[0, -1] for some in TOKENS], folder / f"{name}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in MODELS:
        package(name, Path(sys.argv[1]))

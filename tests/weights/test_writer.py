"""`Writer`: copies that are made beside other work are all made, or what went wrong is raised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_ops.kernels.cpu import transpose
from moe_ops.layer import MoELayer
from moe_ops.quant.config import QuantConfig
from moe_ops.weights import load_checkpoint
from moe_ops.weights.writer import Writer
from tests.weights.checkpoints import LAYOUTS, PREFIX, write

# Rows and columns: blocks and lines whole and cut, one word wide, and too small for the kernel.
# Borders of 3 words leave lines unaligned, of 8 aligned.
ROOMS = (0, 3, 8)
SIZES = [(96, 2048), (256, 768), (130, 257), (13, 1021), (1021, 13), (8, 600), (1, 5000), (7, 9)]


def pair(rows: int, columns: int, room: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A place [columns, rows] with a border of `room`, a source, and what the whole is to be."""
    held = torch.zeros(columns, rows + 2 * room, dtype=dtype)
    stored = torch.randint(-(2**31), 2**31, (rows, columns + 2 * room)).to(dtype)
    source = stored[:, room : room + columns].T
    want = torch.nn.functional.pad(source, (room, room))
    return held, source, want


@pytest.mark.parametrize("compiler", [True, False], ids=["compiled", "no_compiler"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.int16])
def test_transposed_copies(
    dtype: torch.dtype, compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiler:
        monkeypatch.setattr(transpose, "_library", lambda: None)
    made = [pair(*size, room, dtype) for size in SIZES for room in ROOMS]
    with Writer() as writer:
        for size, (held, source, _) in zip((s for s in SIZES for _ in ROOMS), made, strict=True):
            room = (held.shape[1] - size[0]) // 2
            writer.add([(held[:, room : room + size[0]], source), (torch.empty(3), torch.ones(3))])
    for held, _, want in made:
        assert torch.equal(held, want)


def test_what_a_copy_raises_is_raised_in_the_end_and_the_others_are_made() -> None:
    kept = torch.zeros(4)
    with pytest.raises(RuntimeError, match="must match the size"), Writer() as writer:
        writer.add([(torch.zeros(2), torch.ones(3))])
        writer.add([(kept, torch.ones(4))])
    assert torch.equal(kept, torch.ones(4))


@pytest.mark.parametrize("name", ["gptq_int4", "fp8_blocks"])
def test_layers_of_inference_mode_are_loaded(name: str, tmp_path: Path) -> None:
    write(tmp_path, LAYOUTS[name])
    found = []
    for mode in (False, True):
        with torch.inference_mode(mode):
            quant = QuantConfig(weights=LAYOUTS[name].weights)
            layer = MoELayer(3, 2, 64, 64, quant=quant, dtype=torch.float32)
            report = load_checkpoint({PREFIX: layer}, tmp_path, style="qwen", progress=False)
            assert report.complete
            found.append(layer.w13_weight.view(torch.uint8).clone())
    assert torch.equal(*found)

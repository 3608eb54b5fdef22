"""gpt-oss checkpoints: MXFP4 experts run on the tensors as they are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe_ops.checks.options import check_type
from moe_ops.hf.experts import describe
from moe_ops.hf.optimize import optimize
from moe_ops.hf.saved import write_config
from moe_ops.hf.stored import StoredFormat, store, stored_format
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.scales import wrong_scale

PROJECTIONS = ("gate_up_proj", "down_proj")


@torch.no_grad()
def adopt_mxfp4(model: PreTrainedModel, tensors: Mapping[str, Tensor] | str | Path) -> int:
    """Give the experts of a gpt-oss model the MXFP4 tensors of a checkpoint; returns how many.

    `tensors` is the folder of the checkpoint, whose safetensors files are mapped, or maps the names
    of the checkpoint to tensors, for each experts module `<name>`:
    `<name>.gate_up_proj_blocks` uint8 [E, 2I, D/32, 16] (two e2m1 values in a byte, the first in
    the low bits), `<name>.gate_up_proj_scales` uint8 [E, 2I, D/32] (e8m0), and `down_proj` alike
    ([E, D, I/32, 16]). Nothing is laid out anew, and copied only to the device of the weight that
    it stands for, which may be meta. Biases stay as the model holds them: load the rest of the
    checkpoint before. Experts whose tensors are missing keep their weights. The model is then
    optimized, and can be saved.

    Raises TypeError for anything but a transformers model, FileNotFoundError for a folder without
    safetensors files, ValueError for shapes or dtypes that do not fit the model, for scales that
    are NaN, or if no experts module has its tensors. The experts are then as they were.
    """
    check_type("tensors", tensors, (Mapping, str, Path), "a folder, or tensors by their names")
    if isinstance(tensors, (str, Path)):
        tensors = _Folder(Path(tensors))
    optimize(model)
    adopted: list[tuple[nn.Module, StoredFormat, dict[str, Tensor]]] = []
    for name, module in model.named_modules():
        takes = hasattr(module, "has_gate") and stored_format(module) is None
        found = describe(module) if takes else "no experts of floats"
        wanted = [f"{name}.{p}_{part}" for p in PROJECTIONS for part in ("blocks", "scales")]
        if isinstance(found, str) or not any(key in tensors for key in wanted):
            continue
        missing = [key for key in wanted if key not in tensors]
        if missing:
            raise ValueError(
                f"the checkpoint lacks {', '.join(missing)}; give the tensors of all its files"
            )
        new: dict[str, Tensor] = {}
        for projection in PROJECTIONS:
            new |= _tensors(name, projection, module, tensors)
        state = StoredFormat(activation=found, w_format="mxfp4", x_format="")
        adopted.append((module, state, new))
    for module, state, new in adopted:
        device = getattr(module, PROJECTIONS[0]).device
        if device.type != "meta":
            new = {name: t.to(device) for name, t in new.items()}
        store(module, state, new)
    if not adopted:
        raise ValueError(
            "no experts module of the model has tensors here; they are named like "
            "model.layers.0.mlp.experts.gate_up_proj_blocks"
        )
    left = [n for n, m in model.named_modules() if hasattr(m, "has_gate") and not stored_format(m)]
    write_config(model, QuantConfig(weights="mxfp4"), left, replaces="mxfp4")
    return len(adopted)


class _Folder(Mapping[str, Tensor]):
    """The tensors of all safetensors files of a folder, mapped when they are asked for."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(
                f"no safetensors files in {folder}; give the folder of a gpt-oss checkpoint"
            )
        opened = [safe_open(file, framework="pt") for file in files]
        self._files = {key: file for file in opened for key in file.keys()}  # noqa: SIM118

    def __getitem__(self, key: str) -> Tensor:
        t: Tensor = self._files[key].get_tensor(key)
        return t

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _tensors(
    name: str, projection: str, module: nn.Module, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The blocks and scales of one projection under the names of the module."""
    blocks = tensors[f"{name}.{projection}_blocks"]
    scales = tensors[f"{name}.{projection}_scales"]
    E, rows, columns = getattr(module, projection).shape
    if module.is_transposed:
        rows, columns = columns, rows
    for what, t, shape in (
        ("blocks", blocks, (E, rows, columns // 32, 16)),
        ("scales", scales, (E, rows, columns // 32)),
    ):
        if tuple(t.shape) != shape or t.dtype != torch.uint8:
            raise ValueError(
                f"{name}.{projection}_{what} must be uint8 {list(shape)}, "
                f"got {t.dtype} {list(t.shape)}"
            )
    wrong = None if scales.is_meta else wrong_scale(scales, "e8m0")
    if wrong is not None:
        raise ValueError(f"{name}.{projection}_scales holds {wrong}; complete the download")
    return {projection: blocks.flatten(2), f"{projection}_scale": scales}

"""What of a checkpoint lies outside the experts and holds codes: refused before anything is loaded.

DeepSeek's shared experts and dense layers are float8 values with scales in tensors of their own.
The parameter that takes one is 16 or 32 bits wide, and would take the values without their scales.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from moe_ops.shapes import FLOATS
from moe_ops.weights.files import entries

Target = Callable[[str], Tensor | None]


def check_outside(file: Path, target: Target) -> None:
    """Raise ValueError if a tensor of a file is float8, and what it would be copied to is wider.

    `target`: by an entry's name the parameter or buffer that takes it as it is, None for what has
    none, as experts have not. Tensors are mapped for it, not read; a GGUF file has no float8.
    """
    if file.suffix == ".gguf":
        return
    for stored in entries(file):
        to = target(stored.name)
        if to is None or stored.like is not None:
            continue
        dtype = stored.read().dtype
        if dtype.is_floating_point and dtype not in FLOATS and dtype != to.dtype:
            raise ValueError(
                f"{stored.name} in {file} is {dtype}, codes whose scales are in another tensor, "
                f"but the layer has {to.dtype} there, and outside the experts nothing is decoded; "
                "dequantise it in the checkpoint (values times scales), or take shared experts and "
                "gate out of the layer and load them yourself; no weight was changed"
            )

"""What of a checkpoint lies outside the experts and holds codes: refused before anything is loaded.

DeepSeek's shared experts and dense layers are float8 values with scales in tensors of their own.
The parameter that takes one is 16 or 32 bits wide, and would take the values without their scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from moe_ops.shapes import FLOATS
from moe_ops.weights.layouts import Stored

Target = Callable[[str], Tensor | None]


def check_outside(found: Iterable[Stored], where: str, target: Target) -> None:
    """Raise ValueError if an entry is float8, and what it would be copied to is wider.

    `where`: the file of the entries. `target`: by an entry's name the parameter or buffer that
    takes it as it is, None for what has none, as experts have not. Tensors are mapped for it, not
    read.
    """
    for stored in found:
        to = target(stored.name)
        if to is None or stored.like is not None:
            continue
        dtype = stored.read().dtype
        if dtype.is_floating_point and dtype not in FLOATS and dtype != to.dtype:
            raise ValueError(
                f"{stored.name} in {where} is {dtype}, codes whose scales are in another tensor, "
                f"but the layer has {to.dtype} there, and outside the experts nothing is decoded; "
                "dequantise it in the checkpoint (values times scales), or take shared experts and "
                "gate out of the layer and load them yourself; no weight was changed"
            )

"""What an experts module holds when its weights are quantised: formats, and names of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops.ops.activate import Activation

_STORED = "_moe_ops_stored"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """How a module's weights are quantised, and under which suffixes its tensors stand.

    Both weights have their rows as outputs, whatever the module's class says.
    """

    activation: Activation
    w_format: str
    x_format: str
    scale_suffix: str = "_scale"
    repeat_rows: bool = False  # one scale for all rows of a half, repeated for each row

    def arguments(self, module: nn.Module) -> dict[str, Any]:
        """The arguments of the `experts` op that belong to the format."""
        first = "gate_up_proj" if self.activation.gated else "up_proj"
        return {
            "w13_scale_EFG": self._scale(module, first),
            "w2_scale_EDG": self._scale(module, "down_proj"),
            "w13_zero_EFG": getattr(module, f"{first}_zero", None),
            "w2_zero_EDG": getattr(module, "down_proj_zero", None),
            "alpha13_E": getattr(module, f"{first}_alpha", None),
            "alpha2_E": getattr(module, "down_proj_alpha", None),
            "w_format": self.w_format,
            "x_format": self.x_format,
        }

    def _scale(self, module: nn.Module, projection: str) -> Tensor:
        scale: Tensor = getattr(module, projection + self.scale_suffix)
        if scale.dtype == torch.float8_e8m0fnu:
            scale = scale.view(torch.uint8)
        if self.repeat_rows:
            rows = getattr(module, projection).shape[1]
            scale = scale.repeat_interleave(rows // scale.shape[1], dim=1)
        return scale.detach()


def stored_format(module: nn.Module) -> StoredFormat | None:
    """The format of a module that `store` changed, or None."""
    return getattr(module, _STORED, None)


def store(module: nn.Module, found: StoredFormat, tensors: dict[str, Tensor]) -> None:
    """Put quantised tensors into a module in place of its weights, and remember their format.

    A tensor whose name is that of a parameter takes its place, the others become buffers, so that
    moving the model and its state dict take all of them along.
    """
    for name, t in tensors.items():
        if name in module._parameters:
            module._parameters[name] = nn.Parameter(t, requires_grad=False)
        else:
            module.register_buffer(name, t)
    setattr(module, _STORED, found)

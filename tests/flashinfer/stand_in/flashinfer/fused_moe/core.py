"""What `cutlass_fused_moe` calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from flashinfer.fused_moe import cutlass
from flashinfer.signed import signed

ARCHITECTURES = ("90", "100", "103", "120")


@signed("get_cutlass_fused_moe_module")
def get_cutlass_fused_moe_module(backend: str, use_fast_build: bool) -> SimpleNamespace:
    """The functions of one architecture."""
    assert backend in ARCHITECTURES

    @signed("get_cutlass_fused_moe_module.cutlass_fused_moe")
    def cutlass_fused_moe(**given: Any) -> list[Tensor]:
        """Writes `output`."""
        cutlass.run(given | {"backend": "cutlass"})
        return [given["output"]]

    return SimpleNamespace(cutlass_fused_moe=cutlass_fused_moe)

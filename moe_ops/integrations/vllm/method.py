"""The class that vLLM makes in place of its own for experts without quantisation."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from moe_ops.integrations.vllm.served import Served, served


class ExpertsMethod(UnquantizedFusedMoEMethod):
    """Runs the experts of one layer of vLLM by the op `experts`.

    vLLM keeps everything else: it makes and loads the weights, routes, runs shared experts, and
    sums the ranks' parts. What the layer wants that is not served raises NotImplementedError when
    its weights are made, before any is loaded.
    """

    supports_pre_processed_weights = True  # they stay as they were loaded

    def __init__(self, moe: Any) -> None:
        # Not the constructor of vLLM's class, which would pick one of vLLM's kernels.
        FusedMoEMethodBase.__init__(self, moe)
        self.unquantized_backend = UnquantizedMoeBackend.OOT
        self.served: Served | None = None

    @property
    def is_monolithic(self) -> bool:
        """False: vLLM routes, then calls `apply`."""
        return False

    @property
    def supports_eplb(self) -> bool:
        """False, so that vLLM refuses: moving experts while it serves was not tried."""
        return False

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Make the weights as vLLM does. Raises NotImplementedError for a layer not served."""
        self.served = served(layer)
        super().create_weights(
            layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype,
            **extra_weight_attrs,
        )  # fmt: skip
        tell()

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave the weights as they are: `experts` reads them in the order of the checkpoint."""

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """This rank's part of the routed experts [T, D]. Shared experts run in vLLM's runner, as
        this class has no kernel that could overlap them."""
        if self.served is None:
            raise RuntimeError("the layer has no weights yet; call create_weights first")
        return self.served.run(x, topk_weights, topk_ids, layer)


@functools.cache
def tell() -> None:
    """Say once in a process, in vLLM's log, by what experts run."""
    init_logger("vllm.moe_ops").info("Experts that are not quantised run by moe_ops.experts")

"""b12x: rows [up; gate], scales as an MMA view, one factor for inputs and one for weights.

What only an open change of FlashInfer has is marked LATER: `fused_moe` does not export it, and no
signature of it is compared with the installed package's.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from flashinfer.fused_moe.cute_dsl import decoded
from flashinfer.fused_moe.cutlass import nvfp4
from flashinfer.fused_moe.numbers import (
    Held,
    Layer,
    calls,
    fp4_values,
    looks,
    nvfp4_codes,
    require_dense,
    through_nvfp4,
)
from flashinfer.signed import signed

KINDS = {"silu": "Swiglu", "gelu_tanh": "GegluTanh", "relu2": "Relu2"}


class B12xMoEWrapper:
    @signed("B12xMoEWrapper.__init__")
    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        use_cuda_graph: bool,
        max_num_tokens: int,
        activation: str,
        quant_mode: str | None,
        shared_static_workspace: object | None,
        shared_dynamic_workspace: object | None,
        shared_output: Tensor | None,
        **others: object,
    ) -> None:
        calls.append(("B12xMoEWrapper", {**locals(), **others}))
        assert quant_mode == "nvfp4" and use_cuda_graph and intermediate_size % 128 == 0
        self.kind, self.most, self.experts = KINDS[activation], max_num_tokens, num_experts
        assert shared_output is not None and shared_output.shape == (max_num_tokens, hidden_size)
        assert shared_output.dtype == torch.bfloat16
        self.output = shared_output
        self._static_workspace = shared_static_workspace or object()
        self._dynamic_workspace = shared_dynamic_workspace or object()
        self._folded_w1_alpha: Tensor | None = None
        self._folded_w1_alpha_key: tuple[Any, ...] | None = None
        self.views: tuple[Tensor, ...] = ()
        self.held = Held()

    @signed("B12xMoEWrapper.run")
    def run(
        self,
        x: Tensor,
        w1_weight: Tensor,
        w1_weight_sf: Tensor,
        w2_weight: Tensor,
        w2_weight_sf: Tensor,
        token_selected_experts: Tensor,
        token_final_scales: Tensor,
        w1_alpha: Tensor,
        w2_alpha: Tensor,
        fc2_input_scale: Tensor | None,
        input_global_scale: Tensor | None,
    ) -> Tensor:
        """A view of the wrapper's own buffer."""
        calls.append(("B12xMoEWrapper.run", {"tokens": x.shape[0]}))
        assert x.dtype == torch.bfloat16 and x.shape[0] <= self.most
        require_dense(x, w1_weight, w2_weight)
        assert fc2_input_scale is not None and input_global_scale is not None
        assert not looks() or int(token_selected_experts.max()) < self.experts
        # Kept, and remembered by address and version, as the installed wrapper does.
        self.views = tuple(w.view(torch.uint8) for w in (w1_weight, w2_weight))
        both = (w1_alpha, input_global_scale)
        key = tuple((t.data_ptr(), t._version) for t in both)
        if self._folded_w1_alpha is None or self._folded_w1_alpha_key != key:
            self._folded_w1_alpha = w1_alpha * input_global_scale
            self._folded_w1_alpha_key = key
        w1 = decoded(w1_weight, w1_weight_sf, self._folded_w1_alpha)
        w2 = decoded(w2_weight, w2_weight_sf, w2_alpha)
        layer = Layer(
            w1, w2, self.kind,
            first=through_nvfp4(1 / input_global_scale),
            second=_rounded(fc2_input_scale),
        )  # fmt: skip
        out = layer.run(x, token_selected_experts, token_final_scales)
        return self.output[: x.shape[0]].copy_(self.held.write(out))


def _rounded(scale: Tensor) -> Any:
    """Codes of the second input; one that is calibrated for float8 saturates four bits."""
    if looks():
        assert torch.equal(scale, torch.ones_like(scale)), "fc2_input_scale saturates codes"

    def rounded(h: Tensor, e: int) -> Tensor:
        codes, blocks = nvfp4_codes(h)
        return fp4_values(codes) * blocks.float().repeat_interleave(16, -1)

    return rounded


class LaterB12xMoEWrapper(B12xMoEWrapper):
    """LATER: with the threshold and the registration of an open change."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.threshold: int = kwargs.pop("cutlass_prefill_threshold", 0)
        super().__init__(*args, **kwargs)
        self.prefill: tuple[Any, ...] | None = None

    def register_cutlass_prefill_weights(
        self, w1_q: Tensor, w2_q: Tensor, quant_scales: list[Tensor]
    ) -> None:
        assert self.prefill is None, "registered twice"
        calls.append(("register_cutlass_prefill_weights", {"quant_scales": quant_scales}))
        self.prefill = (w1_q, w2_q, quant_scales)

    def run(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.threshold or x.shape[0] < self.threshold:
            return super().run(x, *args, **kwargs)
        assert self.prefill is not None
        calls.append(("prefill", {"tokens": x.shape[0]}))
        layer = nvfp4(*self.prefill, activation=self.kind)
        ids, weights = kwargs["token_selected_experts"], kwargs["token_final_scales"]
        return layer.run(x, ids, weights).to(x.dtype)


def _later() -> inspect.Signature:
    """LATER: the constructor's signature."""
    base = inspect.signature(B12xMoEWrapper.__init__)
    option = inspect.Parameter(
        "cutlass_prefill_threshold", inspect.Parameter.KEYWORD_ONLY, default=0, annotation=int
    )
    return base.replace(parameters=[*base.parameters.values(), option])


LaterB12xMoEWrapper.__init__.__signature__ = _later()  # type: ignore[attr-defined]
LaterB12xMoEWrapper.run.__signature__ = inspect.signature(B12xMoEWrapper.run)  # type: ignore[attr-defined]

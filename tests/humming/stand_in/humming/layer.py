"""A layer that decodes weights as they are documented, and multiplies the rows of each tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Values of float4e2m1 without their sign, which is the highest bit.
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SCALES = {"bfloat16": torch.bfloat16, "float8e8m0": torch.float8_e8m0fnu}
LARGEST = 448.0  # of float8e4m3


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """What a product is made for. Frozen and hashable, as heuristics keep what they chose."""

    shape_n: int
    shape_k: int
    num_experts: int
    a_dtype: str


@dataclass(repr=False, eq=False)
class HummingLayer(nn.Module):
    shape_n: int
    shape_k: int
    weight_config: dict[str, Any]
    input_config: dict[str, Any]
    num_experts: int
    torch_dtype: torch.dtype

    def __post_init__(self) -> None:
        super().__init__()
        E, N, K = self.num_experts, self.shape_n, self.shape_k
        groups = E, N, K // self.weight_config["group_size"]
        scale = torch.empty(groups, dtype=SCALES[self.weight_config["scale_dtype"]])
        self.weight = held(torch.zeros((E, N, K * 4 // 32), dtype=torch.int32))
        self.weight_scale = held(scale)
        self.humming_config: LayerConfig | None = None

    def load_from_tensors(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            own = getattr(self, name)
            assert (own.shape, own.dtype) == (tensor.shape, tensor.dtype), name
            setattr(self, name, held(tensor.clone()))

    def transform(self) -> None:
        self.humming_config = LayerConfig(
            shape_n=self.shape_n,
            shape_k=self.shape_k,
            num_experts=self.num_experts,
            a_dtype=self.input_config["dtype"],
        )

    def decoded(self) -> Tensor:
        """float32 [E, N, K]."""
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        codes = (self.weight[..., None] >> shifts & 15).flatten(-2)
        values = codes.float() - 8
        if self.weight_config["dtype"] == "float4e2m1":
            values = E2M1[codes & 7] * (1 - 2 * (codes >> 3))
        scale = self.weight_scale.float()
        return values * scale.repeat_interleave(self.weight_config["group_size"], -1)

    def forward(
        self,
        inputs: Tensor,
        input_scale: Tensor | None = None,
        sorted_ids: Tensor | None = None,
        expert_ids: Tensor | None = None,
        num_tokens_padded: Tensor | None = None,
        top_k: int = 1,
        compute_config: dict[str, Any] | None = None,
        tuning_config: dict[str, Any] | None = None,
    ) -> Tensor:
        assert self.humming_config is not None, "call transform() before forward()"
        assert compute_config == {"gemm_type": "indexed"} and tuning_config is not None
        assert sorted_ids is not None and expert_ids is not None and num_tokens_padded is not None
        config = self.humming_config
        if config.a_dtype == "float8e4m3" and inputs.dtype is torch.bfloat16:
            assert input_scale is None
            inputs, input_scale = quantized(inputs)
        assert (input_scale is None) == (config.a_dtype == "bfloat16")
        x = inputs.float() if input_scale is None else inputs.float() * input_scale
        checked(sorted_ids, expert_ids, num_tokens_padded)
        block, count, rows = tuning_config["block_shape"][0], int(num_tokens_padded), len(x) * top_k
        w, out = self.decoded(), torch.full((rows, self.shape_n), torch.nan, dtype=torch.bfloat16)
        for i in range(-(-count // block)):
            pairs = sorted_ids[i * block : (i + 1) * block].long()
            pairs = pairs[pairs // top_k < len(x)]
            out[pairs] = (x[pairs // top_k] @ w[int(expert_ids[i])].T).bfloat16()
        return out


def held(t: Tensor) -> nn.Parameter:
    return nn.Parameter(t, requires_grad=False)


def checked(*tensors: Tensor) -> None:
    for t in tensors:
        assert t.dtype is torch.int32 and t.is_contiguous()


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """float8e4m3 codes of rows, and a float32 scale of each: [R, 1]."""
    scale = x.float().abs().amax(-1, keepdim=True) / LARGEST
    return (x.float() / scale).to(torch.float8_e4m3fn), scale

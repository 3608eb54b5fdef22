"""CUTLASS: plain rows [up; gate], and scales as its formats want them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashinfer.fused_moe.kinds import ActivationType
from flashinfer.fused_moe.numbers import (
    Held,
    Layer,
    calls,
    e8m0,
    folded_scales,
    fp4_values,
    linear_scales,
    require_dense,
    through_nvfp4,
    unmixed,
)
from flashinfer.signed import signed


@signed("cutlass_fused_moe")
def cutlass_fused_moe(**given: Any) -> Tensor:
    """Writes `output`."""
    return run(given)


def run(given: dict[str, Any]) -> Tensor:
    """What both functions do, who are one for those that look at calls: but for the recipe of
    nvfp4, which the one hands to the other as a number, and which nobody gives."""
    seen = {n: value for n, value in given.items() if not n.startswith("nvfp4_4over6")}
    calls.append(("cutlass_fused_moe", seen))
    x, output, workspace = (given[n] for n in ("input", "output", "workspace_buffer"))
    w1, w2 = given["fc1_expert_weights"], given["fc2_expert_weights"]
    assert output is not None and output.dtype == given["output_dtype"]
    E = w2.shape[0]
    of_blocks = given["use_deepseek_fp8_block_scale"]
    wanted = workspace_bytes(x.shape[0], w2.shape[1], E * given["ep_size"], of_blocks)
    assert workspace is None or workspace.dtype == torch.uint8
    if workspace is not None and workspace.nbytes < wanted:
        raise RuntimeError(f"workspace_buffer too small: need {wanted}, got {workspace.nbytes}")
    blocks = [scale for scale in given["quant_scales"] if scale.dim() > 1]
    require_dense(x, w1, w2, output, *blocks)
    for bias in (given["fc1_expert_biases"], given["fc2_expert_biases"]):
        require_dense(bias)
        assert bias is None or bias.dtype == output.dtype
    routed = (given["token_selected_experts"], given["token_final_scales"])
    output.copy_(scratch.write(_layer(given).run(x, *routed, given["ep_rank"] * E)))
    return output


scratch = Held()  # of the runner that all layers of a process share


@signed("cutlass_fused_moe_workspace_size")
def cutlass_fused_moe_workspace_size(
    max_num_tokens: int,
    hidden_size: int,
    num_experts_total: int,
    ep_size: int,
    use_deepseek_fp8_block_scale: bool,
    **others: object,
) -> int:
    assert num_experts_total % ep_size == 0
    calls.append(("cutlass_fused_moe_workspace_size", {"max_num_tokens": max_num_tokens}))
    of_blocks = use_deepseek_fp8_block_scale
    return workspace_bytes(max_num_tokens, hidden_size, num_experts_total, of_blocks)


most_tokens = [0]  # of the kernels of blocks, whose runner all layers of a process share


def workspace_bytes(tokens: int, hidden: int, experts: int, of_blocks: bool = False) -> int:
    if of_blocks:
        tokens = most_tokens[0] = max(tokens, most_tokens[0])
    return 4 * tokens * hidden + 128 * experts


def _layer(given: dict[str, Any]) -> Layer:
    """The weights, by what FlashInfer tells the formats by."""
    w1, w2 = given["fc1_expert_weights"], given["fc2_expert_weights"]
    scales, x = given["quant_scales"], given["input"]
    common: dict[str, Any] = {
        "activation": ActivationType(given["activation_type"]).name,
        "b1": given["fc1_expert_biases"],
        "b2": given["fc2_expert_biases"],
    }
    if w1.dtype == torch.int64:
        return nvfp4(w1.view(torch.uint8), w2.view(torch.uint8), scales, **common)
    if given["use_w4_group_scaling"]:
        assert x.dtype == torch.bfloat16 and w1.dtype == torch.uint8
        return Layer(_mixed(w1, scales[0]), _mixed(w2, scales[1]), **common)
    if given["use_deepseek_fp8_block_scale"]:
        assert x.dtype == torch.bfloat16 and w1.dtype == torch.float8_e4m3fn
        w1, w2 = _blocks(w1, scales[0]), _blocks(w2, scales[1])
        return Layer(w1, w2, first=_through_float8, second=_through_float8, **common)
    if w1.dtype == torch.float8_e4m3fn:
        assert x.dtype == torch.float8_e4m3fn
        first, act, second, _ = scales
        assert first.shape == second.shape == w1.shape[:1] and scales[3].dim() == 0
        codes = lambda h, e: (h * act.expand(w1.shape[0])[e]).clamp(-448, 448)  # noqa: E731
        w1, w2 = w1.float() * first[:, None, None], w2.float() * second[:, None, None]
        round8 = lambda h, e: codes(h, e).to(torch.float8_e4m3fn).float()  # noqa: E731
        return Layer(w1, w2, second=round8, **common)
    assert not scales and x.dtype == w1.dtype
    return Layer(w1.float(), w2.float(), **common)


def nvfp4(w1: Tensor, w2: Tensor, scales: list[Tensor], **common: Any) -> Layer:
    """quant_scales: of each product 1 / the input's scale, swizzled scales as int32, factors."""
    made = []
    for w, (reciprocal, blocks, factors) in zip((w1, w2), (scales[:3], scales[3:]), strict=True):
        assert reciprocal.numel() == 1 and factors.shape == w.shape[:1]
        assert blocks.dtype == torch.int32
        sf = blocks.view(torch.float8_e4m3fn)
        rows, groups = w.shape[1], w.shape[2] // 8
        linear = torch.stack([linear_scales(one, rows, groups) for one in sf]).float()
        made.append(fp4_values(w) * linear.repeat_interleave(16, -1) * factors[:, None, None])
    return Layer(*made, first=through_nvfp4(scales[0]), second=through_nvfp4(scales[3]), **common)


def _mixed(w: Tensor, scales: Tensor) -> Tensor:
    rows, groups = w.shape[1], w.shape[2] // 16
    assert scales.dtype == torch.int32 and scales.shape[1:] == (rows // 64, groups // 4, 16, 4)
    found = [folded_scales(one.view(torch.uint8), rows, groups) for one in scales]
    values = fp4_values(torch.stack([unmixed(one) for one in w]))
    return values * e8m0(torch.stack(found)).repeat_interleave(32, -1)


def _blocks(w: Tensor, scale: Tensor) -> Tensor:
    assert scale.dtype == torch.float32
    return w.float() * scale.repeat_interleave(128, 1).repeat_interleave(128, 2)


def _through_float8(x: Tensor, e: int) -> Tensor:
    """Inputs as float8 with a scale for each 128 of a row."""
    groups = x.unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)

"""Round trips: a stock transformers model is saved and loaded, and the outputs are equal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.phimoe.modeling_phimoe import sparsemixer
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeMLP

from moe_ops.layer import MoELayer
from moe_ops.layer.options import Routing
from moe_ops.ops.activate import Activation
from moe_ops.parallel.config import ParallelConfig
from moe_ops.weights import load_checkpoint
from tests.chosen import in_turn

D, I, E, K = 32, 24, 6, 2  # noqa: E741
SIZES: dict[str, Any] = {
    "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 32, "num_experts_per_tok": K, "eos_token_id": None,
    "pad_token_id": None, "bos_token_id": None,
}  # fmt: skip
GROUPED: dict[str, Any] = {
    "n_routed_experts": E, "moe_intermediate_size": I, "intermediate_size": I,
    "first_k_dense_replace": 1, "n_shared_experts": 2, "n_group": 2, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5,
}  # fmt: skip


BIASED = Routing(
    score="sigmoid", n_group=2, topk_group=1, renormalize=True, eps=1e-20, scale=2.5,
    correction_bias=True,
)  # fmt: skip


def sparse_mixer(x_TD: Tensor, logits_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    return sparsemixer(logits_TE, jitter_eps=0.01, training=False, top_k=top_k)


@dataclass(frozen=True)
class Family:
    """A stock model, the style of its names, and the options of layers that compute the same."""

    style: str
    config: Callable[[], Any]
    options: Callable[[], dict[str, Any]]
    block: str = "mlp"  # what the file calls the module
    first: int = 0  # layer with experts


class OwnGate(nn.Module):
    """Shared experts as Qwen2 scales them: by a gate of their own."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.gate = nn.Linear(D, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.gate(x).sigmoid() * self.down_proj(h)


def qwen2_config() -> Any:
    return hf.Qwen2MoeConfig(
        **SIZES, num_experts=E, moe_intermediate_size=I, intermediate_size=I,
        shared_expert_intermediate_size=I,
    )  # fmt: skip


def deepseek_config() -> Any:
    return hf.DeepseekV3Config(
        **SIZES, **GROUPED, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4,
        v_head_dim=8,
    )  # fmt: skip


FAMILIES = {
    "mixtral": Family(
        "mixtral",
        lambda: hf.MixtralConfig(**SIZES, num_local_experts=E, intermediate_size=I),
        lambda: {"routing": Routing(renormalize=True)},
        block="block_sparse_moe",
    ),
    "qwen3": Family(
        "qwen",
        lambda: hf.Qwen3MoeConfig(
            **SIZES, num_experts=E, moe_intermediate_size=I, intermediate_size=I,
            norm_topk_prob=True,
        ),
        lambda: {"routing": Routing(renormalize=True)},
    ),
    "qwen2": Family(
        "qwen",
        qwen2_config,
        lambda: {"shared_experts": OwnGate(Qwen2MoeMLP(qwen2_config(), I)),
                 "shared_reduction": "replicated"},
    ),
    "olmoe": Family(
        "olmoe",
        lambda: hf.OlmoeConfig(**SIZES, num_experts=E, intermediate_size=I),
        dict,
    ),
    "deepseek": Family(
        "deepseek", deepseek_config,
        lambda: {"routing": BIASED, "shared_experts": 2}, first=1,
    ),
    "glm": Family(
        "glm", lambda: hf.Glm4MoeConfig(**SIZES, **GROUPED),
        lambda: {"routing": BIASED, "shared_experts": 2}, first=1,
    ),
    "gpt-oss": Family(
        "gpt-oss",
        lambda: hf.GptOssConfig(**SIZES, num_local_experts=E, intermediate_size=I),
        lambda: {
            "routing": Routing(score="logit", softmax_selected=True), "bias": True,
            "internal_gate": nn.Linear(D, E),
            "activation": Activation(kind="silu", alpha=1.702, limit=7.0, up_shift=1.0),
        },
    ),
    "phi3.5": Family(
        "phi3.5",
        lambda: hf.PhimoeConfig(**SIZES, num_local_experts=E, intermediate_size=I,
                                router_jitter_noise=0.01),
        lambda: {"routing": Routing(custom=sparse_mixer)},
        block="block_sparse_moe",
    ),
}  # fmt: skip


@dataclass
class Saved:
    folder: Path
    blocks: list[nn.Module]
    x: Tensor
    want: list[Tensor]


def save(family: Family, folder: Path, **how: Any) -> Saved:
    """A model with random weights on disk, and what its blocks make of some tokens."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(family.config()).float().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3)
        for name, b in model.named_buffers():
            if name.endswith("correction_bias"):
                b.normal_(std=0.3)
        model.save_pretrained(folder, **how)
        x = torch.randn(2, 5, D)
        blocks = [layer.mlp for layer in model.model.layers[family.first :]]
        want = [out[0] if isinstance(out := block(x), tuple) else out for block in blocks]
    return Saved(folder, blocks, x, want)


def layers_of(family: Family, block: str, **more: Any) -> dict[str, MoELayer]:
    return {
        f"model.layers.{i}.{block}": MoELayer(
            E, K, D, I, **{"internal_gate": True, **family.options(), **more}
        )
        for i in range(family.first, 2)
    }


SPLITS = {
    "one": [{}],
    "tp3": [{"parallel": ParallelConfig.of(tp=3, tp_rank=r)} for r in range(3)],
    "ep4_uneven": [
        {"tokens": "replicated",
         "parallel": ParallelConfig.of(dp=2, tp=2, dp_rank=r // 2, tp_rank=r % 2,
                                       expert_parallel=True)} for r in range(4)
    ],
    "ep3_redundant": [
        {"parallel": ParallelConfig.of(tp=3, tp_rank=r, expert_parallel=True),
         "redundant_experts": 3} for r in range(3)
    ],
}  # fmt: skip


@pytest.mark.slow
@in_turn(pytest.mark.parametrize("split", SPLITS), pytest.mark.parametrize("name", FAMILIES))
def test_a_stock_model_and_its_layers_give_the_same(name: str, split: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    saved = save(family, tmp_path)
    totals = [torch.zeros_like(want) for want in saved.want]
    for options in SPLITS[split]:
        layers = layers_of(family, family.block, **options)
        report = load_checkpoint(layers, tmp_path, style=family.style, progress=False)
        assert report.complete, str(report)
        with torch.no_grad():
            for total, layer in zip(totals, layers.values(), strict=True):
                total += layer(saved.x)
    for total, want in zip(totals, saved.want, strict=True):
        assert float(want.abs().max()) > 0.1
        torch.testing.assert_close(total, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("split", ["one", "tp3"])
@pytest.mark.parametrize("name", ["mixtral", "deepseek"])
def test_the_fused_names_of_transformers(name: str, split: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    saved = save(family, tmp_path, save_original_format=False)
    totals = [torch.zeros_like(want) for want in saved.want]
    for options in SPLITS[split]:
        layers = layers_of(family, "mlp", **options)
        report = load_checkpoint(layers, tmp_path, style="transformers", progress=False)
        assert report.complete, str(report)
        with torch.no_grad():
            for total, layer in zip(totals, layers.values(), strict=True):
                total += layer(saved.x)
    for total, want in zip(totals, saved.want, strict=True):
        torch.testing.assert_close(total, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def test_several_files_with_an_index(tmp_path: Path) -> None:
    family = FAMILIES["qwen3"]
    saved = save(family, tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2
    # What the index does not name is not part of the checkpoint.
    save_file({"model.layers.0.mlp.other": torch.zeros(1)}, tmp_path / "stale.safetensors")
    layers = layers_of(family, "mlp")
    assert load_checkpoint(layers, tmp_path, style="qwen", progress=False).complete
    with torch.no_grad():
        for layer, want in zip(layers.values(), saved.want, strict=True):
            torch.testing.assert_close(layer(saved.x), want, rtol=1e-5, atol=1e-5)


def test_floats_are_rounded_to_the_layers_dtype(tmp_path: Path) -> None:
    family = FAMILIES["mixtral"]
    save(family, tmp_path)
    layers = layers_of(family, family.block, dtype=torch.bfloat16)
    assert load_checkpoint(layers, tmp_path, style="mixtral", progress=False).complete
    files = load_file(tmp_path / "model.safetensors")
    layer = layers["model.layers.1.block_sparse_moe"]
    w3 = files["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    assert torch.equal(layer.w13_weight[2, I:], w3.bfloat16())

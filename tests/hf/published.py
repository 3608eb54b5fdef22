"""Quantised checkpoints of whole models, as others publish them, and the model they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.weights.checkpoints import LAYOUTS, Layout

FILE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 64, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    "intermediate_size": 64,
}  # fmt: skip
QWEN = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
MIXTRAL = {"w1": "w1", "w3": "w3", "w2": "w2"}


@dataclass(frozen=True)
class Family:
    """A family with tiny sizes: how its checkpoints name projections and the block of experts."""

    make: Callable[[], PreTrainedModel]
    projections: dict[str, str]
    block: str = "mlp"


FAMILIES = {
    "qwen": Family(
        lambda: Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**SIZES, num_experts=3, moe_intermediate_size=64)
        ),
        QWEN,
    ),
    "qwen_48": Family(  # which blocks of 32 rows do not divide
        lambda: Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**SIZES, num_experts=3, moe_intermediate_size=48)
        ),
        QWEN,
    ),
    "mixtral": Family(
        lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=3)),
        MIXTRAL,
        block="block_sparse_moe",
    ),
    "deepseek": Family(
        lambda: DeepseekV3ForCausalLM(
            DeepseekV3Config(
                **SIZES, n_routed_experts=4, moe_intermediate_size=64, n_shared_experts=1,
                first_k_dense_replace=1, n_group=1, topk_group=1, q_lora_rank=32, kv_lora_rank=32,
                qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32,
            )
        ),
        QWEN,
    ),
}  # fmt: skip


@torch.no_grad()
def write(
    folder: Path,
    layout: Layout,
    family: str = "qwen",
    *,
    outside: Sequence[str] = ("o_proj",),
    ignored: Sequence[str] = (),
    files: int = 1,
    beside: Layout | None = None,
) -> PreTrainedModel:
    """Write a checkpoint in float32 whose experts, and matrices outside with such names, are in a
    layout, but for those in ignored layers; those outside in the one `beside` it, if there is one.
    Returns the model of floats that it stands for.
    """
    known = FAMILIES[family]
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    model = known.make().float().eval().requires_grad_(False)
    entries: dict[str, Tensor] = {}

    def matrix(name: str, t: Tensor, shard: str, coded: bool) -> None:
        if not coded:
            entries[f"{name}.weight"] = t.clone()
            return
        made = (layout if ".experts." in name else beside or layout).write(g, *t.shape, shard)
        t.copy_(made.value)
        entries.update({f"{name}.{suffix}": part for suffix, part in made.entries.items()})

    for name, t in model.state_dict().items():
        name = name.replace(".mlp.", f".{known.block}.")
        coded = not any(part in name for part in ignored)
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(t):
                for shard, half in zip(("w1", "w3"), both.chunk(2), strict=True):
                    base = name.rpartition(".")[0]
                    matrix(f"{base}.{e}.{known.projections[shard]}", half, shard, coded)
        elif name.endswith("experts.down_proj"):
            for e, one in enumerate(t):
                matrix(f"{name.rpartition('.')[0]}.{e}.{known.projections['w2']}", one, "w2", coded)
        elif any(name.endswith(f"{part}.weight") for part in outside):
            matrix(name.removesuffix(".weight"), t, "w1", coded)
        else:
            entries[name] = t.clone()
    save(folder, entries, files)
    said = {"architectures": [type(model).__name__], "quantization_config": layout.config}
    (folder / CONFIG).write_text(json.dumps(model.config.to_dict() | said))
    return model


def save(folder: Path, entries: dict[str, Tensor], files: int = 1) -> None:
    """Write entries into so many files, with an index if there are several."""
    folder.mkdir(parents=True, exist_ok=True)
    if files == 1:
        save_file(entries, folder / FILE, metadata={"format": "pt"})
        return
    places = {name: f"model-{i % files}.safetensors" for i, name in enumerate(entries)}
    for file in set(places.values()):
        save_file({n: t for n, t in entries.items() if places[n] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def change(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the entries of a checkpoint in one file."""
    entries = load_file(folder / FILE)
    edit(entries)
    save_file(entries, folder / FILE, metadata={"format": "pt"})


def configure(folder: Path, **said: Any) -> None:
    """Change what config.json says."""
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | said))


__all__ = ["CONFIG", "FAMILIES", "FILE", "LAYOUTS", "change", "configure", "save", "write"]

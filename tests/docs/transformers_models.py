"""Whether a model of transformers runs on what a checkpoint of its own family holds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_ops
from moe_ops.hf import adopt_mxfp4
from moe_ops.hf.stored import stored_format
from moe_ops.quant.formats import Format
from tests.two_scales import dequantize

SIZES = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_experts_per_tok": 2,
}  # fmt: skip


def qwen() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(**SIZES, num_experts=3, moe_intermediate_size=64)


@torch.no_grad()
def floats() -> str | None:
    """By `optimize`, with the logits of transformers."""
    model = Qwen3MoeForCausalLM(qwen()).eval()
    ids = torch.arange(5)[None]
    want = model(ids).logits
    moe_ops.optimize(model)
    torch.testing.assert_close(model(ids).logits, want, rtol=1e-4, atol=1e-4)
    return None


def published(folder: Path, values: dict[str, Tensor]) -> str | None:
    """By `from_checkpoint`, if the experts that it makes hold these values.

    folder: a checkpoint of experts, which gets the rest of a model.
    """
    config = qwen()
    config.hidden_size, config.moe_intermediate_size = values["w2"].shape[1:]
    model = Qwen3MoeForCausalLM(config)
    entries = {n: t for n, t in model.state_dict().items() if ".experts." not in n}
    save_file(entries, folder / "rest.safetensors")
    path = folder / "config.json"
    said = json.loads(path.read_text()) | {"architectures": [type(model).__name__]}
    path.write_text(json.dumps(model.config.to_dict() | said))
    experts = moe_ops.from_checkpoint(folder, progress=False).model.layers[0].mlp.experts
    stored = stored_format(experts)
    wanted = {"gate_up_proj": torch.cat((values["w1"], values["w3"]), 1), "down_proj": values["w2"]}
    for name, want in wanted.items():
        if stored is None:  # decoded
            assert torch.equal(getattr(experts, name), want)
            continue
        codes, *more = (
            getattr(experts, f"{name}{end}", None)
            for end in ("_codes", "_scale", "_zero", "_global_scale")
        )
        found = dequantize(codes, more[0], Format.of(stored.w_format), *more[1:])
        torch.testing.assert_close(found, want.float(), rtol=1e-6, atol=0)
    return None


@torch.no_grad()
def mxfp4() -> str | None:
    """By `adopt_mxfp4`, which `from_checkpoint` is as good as (tests/hf/test_published.py)."""
    model = GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=3)).eval()
    tensors = {}
    for name, rows in (("gate_up_proj", 128), ("down_proj", 64)):
        key = f"model.layers.0.mlp.experts.{name}"
        tensors[f"{key}_blocks"] = torch.randint(256, (3, rows, 2, 16), dtype=torch.uint8)
        tensors[f"{key}_scales"] = torch.randint(120, 124, (3, rows, 2), dtype=torch.uint8)
    if adopt_mxfp4(model, tensors) != 1 or not model(torch.arange(5)[None]).logits.isfinite().all():
        return "the model does not run on it"
    return None

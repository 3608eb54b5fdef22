"""Sizes of configs of transformers: those of --tiny, and what a config's class leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Sizes for --tiny, of those that a config has.
TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "vocab_size": 256,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "pad_token_id": 0,
}
# Of these None says that a config's class has no size of its own. Elsewhere, as in q_lora_rank, it
# says that the model has no such part.
LEFT_OPEN = frozenset({
    "head_dim", "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts",
    "num_experts_per_tok", "top_k_experts",
})  # fmt: skip


def shrink(config: Any, sizes: Mapping[str, int | None], layers: int | None) -> None:
    """Set the sizes and the number of layers that a config, or one inside it, has."""
    before = getattr(config, "num_hidden_layers", None)
    given = {**sizes, **({} if layers is None else {"num_hidden_layers": layers})}
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            shrink(value, sizes, layers)
        elif isinstance(value, list) and len(value) == before and "num_hidden_layers" in given:
            setattr(config, name, value[: given["num_hidden_layers"]])  # one for each layer
        elif name in given and (isinstance(value, int) or (value is None and name in LEFT_OPEN)):
            setattr(config, name, given[name])
    if sizes and hasattr(config, "kv_lora_rank") and hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = config.num_attention_heads  # latents have keys for each head


def require_experts_per_token(config: Any) -> None:
    """Raise ValueError for a config, or one inside it, that leaves open how many experts a token
    has, as the classes of some do until a model's own file is read."""
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            require_experts_per_token(value)
        elif name == "num_experts_per_tok" and value is None:
            raise ValueError(
                f"{type(config).__name__} has no {name} of its own; name a folder or a model on "
                "the hub, or add --tiny"
            )

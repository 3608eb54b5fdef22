"""A batch that is trained on after `generate` wrote it in a larger one: how many choices of experts
are others, and how far log-probabilities are off, with and without the routing of `generate`.

    python examples/replay.py
    python examples/replay.py --batch-invariant
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

import needed  # noqa: F401
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import moe_ops

SEQUENCES, PROMPT, NEW, TRAINED = 32, 16, 64, 4


def build() -> Any:
    """A small model in bfloat16, on our ops, whose random weights are as large as trained ones."""
    config = Qwen3MoeConfig(
        hidden_size=256, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, moe_intermediate_size=128, num_experts=32, num_experts_per_tok=4,
        norm_topk_prob=True, vocab_size=1024, initializer_range=0.06,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return moe_ops.optimize(model)


def trained(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probabilities of new tokens in a training forward, and the experts of each token and
    layer, in order."""
    ids: list[Tensor] = []
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda _, args: ids.append(args[1]))
        for layer in model.model.layers
    ]
    logits = model.train()(input_ids=tokens).logits.detach()
    for hook in hooks:
        hook.remove()
    places = torch.stack(ids, 1).sort(-1).values.unflatten(0, tokens.shape)
    return log_probs(logits[:, PROMPT - 1 : -1], tokens), places


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probabilities of new tokens, by the logits [B, NEW, V] of the places before them."""
    of_all = logits.float().log_softmax(-1)
    return of_all.gather(-1, tokens[:, PROMPT:, None])[..., 0]


def main(arguments: list[str] | None = None) -> None:
    """Print a line without the recorded routing, and one with it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--batch-invariant", action="store_true", help="our ops, in both")
    torch.manual_seed(0)
    with moe_ops.using(batch_invariant=parser.parse_args(arguments).batch_invariant):
        model = build()
        with moe_ops.record_routing(model) as recording:
            made = model.generate(
                torch.randint(1024, (SEQUENCES, PROMPT)), max_new_tokens=NEW, do_sample=True,
                output_logits=True, return_dict_in_generate=True, pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
        tokens, logits = made.sequences[:TRAINED], torch.stack(made.logits, 1)[:TRAINED]
        record = recording.take().joined().sequences([*range(TRAINED)])
        generated = record.by_sequence().sort(-1).values
        replayed = record.padded(tokens.shape[1])
        for name in ("without", "with"):
            replay = moe_ops.replay_routing(model, replayed) if name == "with" else nullcontext()
            with replay:
                found, places = trained(model, tokens)
            others = (places[:, :-1] != generated).any(-1).float().mean()
            off = (found - log_probs(logits, tokens)).abs()
            print(
                f"{name:>7} replay: experts differ for {others:6.2%} of tokens and layers; "
                f"log-probabilities by {off.mean():.4f} on average, {off.max():.3f} at most"
            )


if __name__ == "__main__":
    main()

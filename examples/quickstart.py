"""A Hugging Face MoE model under torch.compile, without and with the passes of moe_ops.

    python examples/quickstart.py [--batch 32] [--prompt 32] [--tokens 32] [--json FILE]

Builds a Qwen3-MoE model of about half a billion random parameters, checks in float32 that the
passes keep its results, then generates with a static cache and prints how fast it is: with
transformers' own experts, and with those that the passes put in their place. The model itself is
never changed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, logging

import moe_ops

STOCK = ("grouped_mm", "batched_mm")  # what transformers has for a machine like this one


@dataclass(frozen=True)
class Speed:
    """How fast one experts implementation generated; medians over the tokens of three runs."""

    implementation: str
    compile_s: float
    prefill_ms: float
    decode_tokens_per_s: float


class Clock:
    """A streamer for `generate` that notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to flush."""


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START:6.1f} s] {text}", file=sys.stderr, flush=True)


def build_model(layers: int) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        hidden_size=1024,
        num_hidden_layers=layers,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=256,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=16384,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config).eval().requires_grad_(False)


def check_parity(model: Qwen3MoeForCausalLM, ids: Tensor) -> float:
    """Largest relative difference of the logits, stock against ours; raises if tokens differ."""
    with torch.inference_mode():
        want = model(ids, use_cache=False).logits
        got = moe_ops.compile(model, dynamic=False)(ids, use_cache=False).logits
    if not torch.equal(got.argmax(-1), want.argmax(-1)):
        raise AssertionError(f"greedy tokens differ:\n{got.argmax(-1)}\n{want.argmax(-1)}")
    return float((got - want).abs().max() / want.abs().max())


def measure(
    model: Any, name: str, ids: Tensor, tokens: int, options: dict[str, Any] | None = None
) -> Speed:
    """Compile the model's forward, generate once to warm up, then time three runs."""
    torch._dynamo.reset()
    eager_forward: Callable[..., Any] = model.forward
    model.forward = torch.compile(eager_forward, fullgraph=True, dynamic=False, options=options)

    def generate() -> list[float]:
        clock = Clock()
        length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        with torch.inference_mode():
            model.generate(
                ids, do_sample=False, cache_implementation="static", disable_compile=True,
                streamer=clock, **length,
            )  # fmt: skip
        return [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]

    start = time.perf_counter()
    generate()
    compile_s = time.perf_counter() - start
    runs = [generate() for _ in range(3)]
    del model.forward
    prefill = sorted(run[0] for run in runs)[1]
    steps = sorted(step for run in runs for step in run[1:])
    return Speed(name, compile_s, prefill * 1e3, ids.shape[0] / steps[len(steps) // 2])


def table(stock: list[Speed], ours: Speed) -> str:
    lines = [f"{'experts':<14}{'compile s':>10}{'prefill ms':>12}{'decode tok/s':>14}"]
    for speed in [*stock, ours]:
        lines.append(
            f"{speed.implementation:<14}{speed.compile_s:>10.1f}{speed.prefill_ms:>12.1f}"
            f"{speed.decode_tokens_per_s:>14.1f}"
        )
    prefill = min(s.prefill_ms for s in stock) / ours.prefill_ms
    decode = ours.decode_tokens_per_s / max(s.decode_tokens_per_s for s in stock)
    best = "ours / best stock"
    return "\n".join([*lines, f"{best:<24}{prefill:>11.2f}x{decode:>13.2f}x"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=8, help="decoder layers of the model")
    parser.add_argument("--batch", type=int, default=32, help="sequences generated together")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens generated per sequence")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model(args.layers)
    size = sum(p.numel() for p in model.parameters()) / 1e9
    say(
        f"Qwen3-MoE, {size:.2f} B random parameters, {args.layers} layers, 64 experts, top-8, "
        f"on {device}"
    )
    ids = torch.randint(0, 16384, (args.batch, args.prompt))
    error = check_parity(model, ids[:2])
    say(f"float32 parity: same greedy tokens, logits within {error:.1e} of transformers'")

    model, ids = model.to(device, torch.bfloat16), ids.to(device)
    speeds = []
    for name in STOCK:
        say(f"compiling and timing transformers' {name} (two graphs, half a minute)")
        model.set_experts_implementation(name)
        speeds.append(measure(model, name, ids, args.tokens))
    say("compiling and timing moe_ops")
    model.set_experts_implementation(STOCK[0])
    ours = measure(model, "moe_ops", ids, args.tokens, moe_ops.inductor_options())
    say("done")

    print(
        f"\n{size:.2f} B parameters in bfloat16 on {device}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, batch {args.batch}, prompt {args.prompt}, "
        f"{args.tokens} new tokens\n\n{table(speeds, ours)}"
    )
    if args.json:
        figures = {"arguments": vars(args), "device": device, "torch": torch.__version__}
        with open(args.json, "w") as file:
            json.dump(figures | {"speeds": [asdict(s) for s in [*speeds, ours]]}, file, indent=2)


START = time.perf_counter()

if __name__ == "__main__":
    main()

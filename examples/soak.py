"""Thousands of `generate` calls of random sizes: no growth, no recompilation, the eager tokens.

    python examples/soak.py [--calls 2000] [--warm-up 200] [--compare 20]

A small random Qwen3-MoE model in float32. Every `--compare`-th call is checked against the tokens
of transformers' own `generate`. Exits with an error at the first thing that is not as it should be.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

import needed  # noqa: F401
import torch
import transformers
from models import CONFIGS
from torch._dynamo.utils import counters

import moe_ops

SEGMENT = 20 << 20  # what the allocator takes at once, for other sizes side by side
TOKENS = {"max_new_tokens": 16, "pad_token_id": 0, "eos_token_id": 5}


def memory() -> tuple[int, int]:
    """Bytes that tensors hold, and bytes that the allocator holds."""
    if not torch.cuda.is_available():
        return 0, 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--warm-up", type=int, default=200)
    parser.add_argument("--compare", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="the largest")
    parser.add_argument("--prompt", type=int, default=200, help="the longest")
    args = parser.parse_args(arguments)
    # The first calls take every number of rows, with one token and with many, padded or not, as
    # often as it takes until such prompts are captured.
    kinds = ((1, 0), (args.prompt, 0), (9, 4))
    sizes = [(b, s, pad) for b in range(1, args.batch + 1) for s, pad in kinds] * 3
    if not len(sizes) <= args.warm_up < args.calls:
        parser.error(
            f"--warm-up {args.warm_up} has to be {len(sizes)} or more, for each size of --batch "
            f"{args.batch} three times, and less than --calls {args.calls}"
        )
    transformers.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["tiny"](None)).to(device).eval()
    ours = moe_ops.compile(model)
    rng, start, compared = random.Random(0), time.perf_counter(), 0
    before, graphs = memory(), 0
    for call in range(args.calls):
        if call == args.warm_up:
            before, graphs = memory(), counters["stats"]["unique_graphs"]
        if call < len(sizes):
            batch, length, pad = sizes[call]
        else:
            batch, length = rng.randint(1, args.batch), rng.randint(1, args.prompt)
            pad = rng.randint(1, length // 2) if length > 4 and rng.random() < 0.3 else 0
        ids = torch.randint(6, 250, (batch, length), device=device)
        mask = torch.ones_like(ids)
        mask[0, :pad] = 0
        tokens = ours.generate(ids, attention_mask=mask, **TOKENS)
        if call % args.compare == 0:
            compared += 1
            want = model.generate(ids, attention_mask=mask, **TOKENS)
            if not torch.equal(tokens, want):
                sys.exit(f"call {call}, {batch} x {length}: got {tokens}, want {want}")
        if call % 100 == 99:
            held = [f"{n / 1e6:.1f} MB" for n in memory()]
            passed = time.perf_counter() - start
            print(f"{call + 1} calls, {passed:.0f} s, {held}", file=sys.stderr, flush=True)
    compiled = counters["stats"]["unique_graphs"] - graphs
    after = memory()
    print(f"{args.calls} calls, {compared} compared; {compiled} graphs compiled since the warm-up")
    reports = moe_ops.generation_report(ours)
    prompts = sum(r.prompt_graphs for r in reports), sum(r.prompts_replayed for r in reports)
    print(f"{prompts[0]} graphs of prompts are kept, {prompts[1]} prompts were replayed")
    print(f"tensors {before[0]} -> {after[0]} bytes, allocator {before[1]} -> {after[1]} bytes")
    if compiled or after[0] > before[0] or after[1] > before[1] + SEGMENT:
        sys.exit("something grew, or was compiled, after the warm-up")


if __name__ == "__main__":
    main()

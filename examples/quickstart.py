"""A Hugging Face MoE model under torch.compile, without and with the passes of moe_ops.

    python examples/quickstart.py [--batch 32] [--prompt 32] [--tokens 16] [--quant int4]

Builds a Qwen3-MoE model of about a quarter of a billion random parameters, checks in float32 that
the passes keep its results, then generates with a static cache and prints how fast that is: with
the experts that the passes put in the place of transformers' own, then with transformers' own. The
model itself is never changed. With --quant a copy of it with quantised experts is timed, too.

Each row is printed as soon as it is known, from one run. At the end all run again in turns, every
other time in the opposite order, so that a machine that gets slower meanwhile is so for all. The
last table and its ratios are from those runs alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, NoReturn

import needed  # noqa: F401
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, logging

import moe_ops

STOCK = ("grouped_mm", "batched_mm")  # what transformers has for a machine like this one
ROUNDS = 4  # even: in opposite orders, two rounds are hit alike by a machine that gets slower
TOKENS_A_LAYER = 2048  # of the vocabulary: the output matrix takes the same share at any depth
FIRST = "first figures, from one run each; the table at the end is from more:"
BUSY = 1.5  # runs of one contender that differ by more tell of other work on the machine
QUANT = {
    "int8": "int8:row",
    "int4": "int4:1x128:bfloat16",
    "fp8": "float8_e4m3fn:128x128",
    "mxfp4": "mxfp4",
}
HEADER = f"{'experts':<14}{'compile s':>10}{'prefill ms':>12}{'decode tok/s':>14}"
START = time.perf_counter()


@dataclass(frozen=True)
class Speed:
    """How fast one experts implementation generated: medians over its runs and their tokens."""

    implementation: str
    compile_s: float  # of the first run, which compiles
    prefill_ms: float
    decode_tokens_per_s: float


class Clock:
    """A streamer for `generate` that notes when it was given the prompt and each token.

    The first of these times it says the first of `stages`, and so on.
    """

    def __init__(self, stages: Sequence[str] = ()) -> None:
        self.times: list[float] = []
        self._stages = stages

    def put(self, tokens: Tensor) -> None:
        if len(self.times) < len(self._stages):
            say(self._stages[len(self.times)])
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to flush."""


@dataclass
class Contender:
    """A model whose experts are compiled in one way, and the runs that were timed."""

    name: str
    whose: str
    batch: int
    generate: Callable[[Clock], None]
    compile_s: float = 0.0
    runs: list[list[float]] = field(default_factory=list)  # seconds of the prompt and each token

    def compile(self) -> None:
        stages = ("compiling for the prompts", "compiling for single tokens", "compiled, running")
        start = time.perf_counter()
        self.generate(Clock([f"{self.whose}{self.name}: {stage}" for stage in stages]))
        self.compile_s = time.perf_counter() - start

    def run(self) -> None:
        clock = Clock()
        self.generate(clock)
        self.runs.append([b - a for a, b in zip(clock.times, clock.times[1:], strict=False)])

    def speed(self) -> Speed:
        prefill = median(run[0] for run in self.runs)
        step = median(step for run in self.runs for step in run[1:])
        return Speed(self.name, self.compile_s, prefill * 1e3, self.batch / step)

    def spread(self) -> float:
        """How many times as long the slowest run took as the fastest: its prompt or its tokens."""
        prefills = [run[0] for run in self.runs]
        steps = [median(run[1:]) for run in self.runs]
        return max(max(prefills) / min(prefills), max(steps) / min(steps))


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
        vocab_size=TOKENS_A_LAYER * layers,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config).eval().requires_grad_(False)


def check_parity(model: Qwen3MoeForCausalLM, ids: Tensor) -> float:
    """Largest relative difference of the logits, stock against ours; raises if tokens differ."""
    with torch.inference_mode():
        want = model(ids, use_cache=False).logits
        got = moe_ops.compile(model, dynamic=False)(ids, use_cache=False).logits
    torch._dynamo.reset()
    if not torch.equal(got.argmax(-1), want.argmax(-1)):
        raise AssertionError(f"greedy tokens differ:\n{got.argmax(-1)}\n{want.argmax(-1)}")
    return float((got - want).abs().max() / want.abs().max())


def contender(
    model: Any,
    name: str,
    experts: str,
    ids: Tensor,
    tokens: int,
    options: dict[str, Any] | None = None,
) -> Contender:
    """The model with transformers' `experts`, its forward compiled with options of Inductor."""
    forward = torch.compile(model.forward, fullgraph=True, dynamic=False, options=options)

    def generate(clock: Clock) -> None:
        model.set_experts_implementation(experts)
        model.forward = forward
        try:
            with torch.inference_mode():
                model.generate(
                    ids,
                    do_sample=False,
                    max_new_tokens=tokens,
                    min_new_tokens=tokens,
                    cache_implementation="static",
                    disable_compile=True,
                    streamer=clock,
                )
        finally:
            del model.forward

    return Contender(name, "" if options else "transformers' ", ids.shape[0], generate)


def row(speed: Speed) -> str:
    return (
        f"{speed.implementation:<14}{speed.compile_s:>10.1f}{speed.prefill_ms:>12.1f}"
        f"{speed.decode_tokens_per_s:>14.1f}"
    )


def ratios(name: str, ours: Speed, others: Sequence[Speed]) -> str:
    """How many times as fast as the best of the others, which is 1 for as fast."""
    prefill = min(s.prefill_ms for s in others) / ours.prefill_ms
    decode = ours.decode_tokens_per_s / max(s.decode_tokens_per_s for s in others)
    return f"{name:<24}{prefill:>11.2f}x{decode:>13.2f}x"


def table(ours: Speed, stock: Sequence[Speed], quantised: Sequence[Speed] = ()) -> str:
    rows = [*(row(s) for s in (*stock, ours)), ratios("ours / best stock", ours, stock)]
    for one in quantised:
        rows += [row(one), ratios(f"{one.implementation} / ours", one, [ours])]
    return "\n".join([HEADER, *rows])


def quantised(model: Qwen3MoeForCausalLM, quant: str, ids: Tensor) -> Qwen3MoeForCausalLM:
    """A copy of the model with its experts in a format; says how far its logits are off."""
    with torch.inference_mode():
        want = model(ids[:2], use_cache=False).logits.float()
        twin = copy.deepcopy(model)
        say(str(moe_ops.quantize_model(twin, QUANT[quant], progress=False)))
        got = twin(ids[:2], use_cache=False).logits.float()
    error = float((got - want).norm() / want.norm())
    say(f"logits with experts in {QUANT[quant]} are {error:.1%} off those in bfloat16")
    return twin


def measure(contenders: Sequence[Contender]) -> list[Speed]:
    """Compile and run one after the other, printing a row each; then time all in turns.

    Warns on stdout, where the figures are, if the runs of a contender differ too much.
    """
    for i, one in enumerate(contenders):
        one.compile()
        one.run()
        if i == 0:
            print(f"{FIRST}\n{HEADER}", flush=True)
        print(row(one.speed()), flush=True)
        one.runs.clear()
    for i in range(ROUNDS):
        say(f"timing all {len(contenders)} again in turns, round {i + 1} of {ROUNDS}")
        for one in contenders if i % 2 == 0 else reversed(contenders):
            one.run()
    for one in contenders:
        if one.spread() > BUSY:
            print(
                f"warning: the slowest run of {one.name} took {one.spread():.1f} times as long as "
                f"its fastest; other work slows this machine, run again when it is idle"
            )
    return [one.speed() for one in contenders]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=4, help="decoder layers of the model")
    parser.add_argument("--batch", type=int, default=32, help="sequences generated together")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=16, help="tokens generated per sequence")
    parser.add_argument("--quant", choices=QUANT, help="quantise the experts of a copy, too")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args(arguments)
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model(args.layers)
    size = sum(p.numel() for p in model.parameters()) / 1e9
    say(
        f"Qwen3-MoE, {size:.2f} B random parameters, {args.layers} layers, 64 experts, top-8, "
        f"on {device}"
    )
    ids = torch.randint(0, model.config.vocab_size, (args.batch, args.prompt))
    say("checking moe_ops against transformers in float32 (compiling, up to a minute)")
    error = check_parity(model, ids[:2])
    say(f"float32 parity: same greedy tokens, logits within {error:.1e} of transformers'")

    model, ids = model.to(device, torch.bfloat16), ids.to(device)
    options = moe_ops.inductor_options()
    contenders = [contender(model, "moe_ops", STOCK[0], ids, args.tokens, options)]
    if args.quant:
        twin = quantised(model, args.quant, ids)
        contenders.append(contender(twin, args.quant, "moe_ops", ids, args.tokens, options))
    ours = len(contenders)
    contenders += [contender(model, s, s, ids, args.tokens) for s in STOCK]
    speeds = measure(contenders)
    first, more, stock = speeds[0], speeds[1:ours], speeds[ours:]
    print(
        f"\n{size:.2f} B parameters in bfloat16 on {device}, torch {torch.__version__}, "
        f"threads: {torch.get_num_threads()}; medians of {ROUNDS} runs in turns\n"
        f"prefill: {args.batch} prompts of {args.prompt} tokens; decode: {args.tokens} new tokens "
        f"each, tok/s of all together\n"
        f"{' and '.join(STOCK)} are transformers' own; moe_ops is ours"
        + (f", {args.quant} ours with experts in {QUANT[args.quant]}" if args.quant else "")
        + f"\n\n{table(first, stock, more)}"
    )
    if args.json:
        figures = {"arguments": vars(args), "device": device, "torch": torch.__version__}
        with open(args.json, "w") as file:
            json.dump(
                figures | {"speeds": [asdict(s) for s in (*stock, first, *more)]}, file, indent=2
            )


def interrupt(*_: object) -> NoReturn:
    """End at once: Python drops an exception that a destructor meets, and compiling runs many."""
    say("interrupted; the rows printed so far are from one run each")
    sys.stdout.flush()
    os._exit(130)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, interrupt)
    main()

"""A Hugging Face MoE model under torch.compile, without and with the passes of moe_ops.

    python examples/quickstart.py [--batch 32] [--prompt 32] [--tokens 16] [--quant int4]

Builds a Qwen3-MoE model of about a quarter of a billion random parameters and times `generate`:
of `moe_ops.compile(model)`, then of the model with each implementation of its experts that
transformers has, its forward compiled and a static cache. In between it checks in float32 that both
generate the same tokens. The model itself is never changed. With --quant a copy of it with
quantised experts is timed, too.

Each row is printed as soon as it is known, from one run. At the end all run again in turns, every
other time in the opposite order, so that a machine that gets slower meanwhile is so for all. The
last table and its ratios are from those runs alone.
"""

# ruff: noqa: E402
from __future__ import annotations

import sys
import time

START = time.perf_counter()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START:6.1f} s] {text}", file=sys.stderr, flush=True)


say("importing torch and transformers")  # which takes seconds, so it is said before anything else

import argparse
import copy
import json
import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, NoReturn

import needed  # noqa: F401
import torch
import transformers
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_ops
from moe_ops.bench.when import when

STOCK = ("grouped_mm", "batched_mm")  # what transformers has for a machine like this one
ROUNDS = 4  # even: in opposite orders, two rounds are hit alike by a machine that gets slower
TOKENS_A_LAYER = 2048  # of the vocabulary: the output matrix takes the same share at any depth
FIRST = "first figures, from one run each; the table at the end is from more:"
BUSY = 1.5  # runs of one contender that differ by more tell of other work on the machine
CHECKED = 4  # tokens that are generated in float32, too
PATIENCE = 5.0  # seconds after which it is said again what takes so long
QUANT = {
    "int8": "int8:row",
    "int4": "int4:1x128:bfloat16",
    "fp8": "float8_e4m3fn:128x128",
    "mxfp4": "mxfp4",
}
HEADER = f"{'experts':<14}{'compile s':>10}{'prefill ms':>12}{'decode tok/s':>14}"


class Said(logging.Handler):
    """What moe_ops logs, in lines like the others."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


@dataclass(frozen=True)
class Speed:
    """How fast one experts implementation generated: medians over its runs and their tokens."""

    implementation: str
    compile_s: float  # of the first run, which compiles
    prefill_ms: float
    decode_tokens_per_s: float


class Clock:
    """A logits processor for `generate` that notes when it began and when each token was known.

    The first of these times it says the first of `stages`, and so on.
    """

    def __init__(self, stages: Sequence[str] = ()) -> None:
        self.times: list[float] = []
        self._stages = list(stages)
        self._stage, self._began = "", 0.0

    def note(self) -> None:
        """Note the time, and say what comes next."""
        self.times.append(time.perf_counter())
        if self._stages:
            self._stage, self._began = self._stages.pop(0), self.times[-1]
            say(self._stage)

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if scores.is_cuda:
            torch.cuda.synchronize()
        self.note()
        return scores

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Say every few seconds which stage it still is."""
        done = threading.Event()

        def tell() -> None:
            while not done.wait(PATIENCE):
                say(f"{self._stage} ({time.perf_counter() - self._began:.0f} s so far)")

        thread = threading.Thread(target=tell, daemon=True)
        self.note()
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


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
        stages = ("compiling for prompts", "compiling for single tokens", "compiled, running")
        clock = Clock([f"{self.whose}{self.name}: {stage}" for stage in stages])
        with clock.telling():
            self.generate(clock)
        self.compile_s = time.perf_counter() - clock.times[0]

    def run(self) -> None:
        clock = Clock()
        clock.note()
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


def check_parity(model: Qwen3MoeForCausalLM, ids: Tensor) -> None:
    """Generate a few tokens in float32, stock and ours, on the CPU. Raises if they differ; says by
    how much their logits do, relative to the largest."""
    exact, ids = copy.deepcopy(model).to("cpu", torch.float32), ids.cpu()
    how = {"output_logits": True, "return_dict_in_generate": True}
    clock = Clock(["checking moe_ops against transformers in float32, compiling"])
    with torch.inference_mode(), clock.telling():
        want, got = (
            one.generate(ids, do_sample=False, max_new_tokens=CHECKED, **how)
            for one in (exact, moe_ops.compile(exact))
        )
    if not torch.equal(got.sequences, want.sequences):
        raise AssertionError(f"greedy tokens differ:\n{got.sequences}\n{want.sequences}")
    ours, stock = torch.stack(got.logits), torch.stack(want.logits)
    error = float((ours - stock).abs().max() / stock.abs().max())
    say(f"float32 parity: same greedy tokens, logits within {error:.1e} of transformers'")


def our_contender(model: Any, name: str, ids: Tensor, tokens: int) -> Contender:
    """The model's compiled twin, as README shows it."""
    fast = moe_ops.compile(model)
    experts = model.config._experts_implementation

    def generate(clock: Clock) -> None:
        model.set_experts_implementation(experts)  # which the twin shares, and others change
        with torch.inference_mode():
            fast.generate(
                ids,
                do_sample=False,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                logits_processor=[clock],
            )

    return Contender(name, "", ids.shape[0], generate)


def stock_contender(model: Any, experts: str, ids: Tensor, tokens: int) -> Contender:
    """The model with transformers' `experts`, its forward compiled, with a static cache."""
    forward = torch.compile(model.forward, fullgraph=True, dynamic=False)

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
                    logits_processor=[clock],
                )
        finally:
            del model.forward

    return Contender(experts, "transformers' ", ids.shape[0], generate)


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


def table(ours: Speed, stock: Sequence[Speed], quantized: Sequence[Speed] = ()) -> str:
    rows = [*(row(s) for s in (*stock, ours)), ratios("ours / best stock", ours, stock)]
    for one in quantized:
        rows += [row(one), ratios(f"{one.implementation} / ours", one, [ours])]
    return "\n".join([HEADER, *rows])


def quantized(model: Qwen3MoeForCausalLM, quant: str, ids: Tensor) -> Qwen3MoeForCausalLM:
    """A copy of the model with its experts in a format; says how far its logits are off."""
    with torch.inference_mode():
        want = model(ids[:2], use_cache=False).logits.float()
        twin = copy.deepcopy(model)
        say(str(moe_ops.quantize_model(twin, QUANT[quant], progress=False)))
        got = twin(ids[:2], use_cache=False).logits.float()
    error = float((got - want).norm() / want.norm())
    say(f"logits with experts in {QUANT[quant]} are {error:.1%} off those in bfloat16")
    return twin


def measure(
    contenders: Sequence[Contender], check: Callable[[], None] = lambda: None
) -> list[Speed]:
    """Compile and run one after the other, printing a row each; then time all in turns.

    `check` is called after the first row, for which nobody should have to wait longer. Warns on
    stdout, where the figures are, if the runs of a contender differ too much.
    """
    for i, one in enumerate(contenders):
        one.compile()
        one.run()
        if i == 0:
            print(f"{FIRST}\n{HEADER}", flush=True)
        print(row(one.speed()), flush=True)
        one.runs.clear()
        if i == 0:
            check()
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
    transformers.logging.set_verbosity_error()
    log = logging.getLogger("moe_ops")
    log.addHandler(Said())
    log.setLevel(logging.INFO)
    warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model(args.layers)
    size = sum(p.numel() for p in model.parameters()) / 1e9
    say(
        f"Qwen3-MoE, {size:.2f} B random parameters, {args.layers} layers, 64 experts, top-8, "
        f"on {device}"
    )
    ids = torch.randint(0, model.config.vocab_size, (args.batch, args.prompt))
    model, ids = model.to(device, torch.bfloat16), ids.to(device)
    contenders = [our_contender(model, "moe_ops", ids, args.tokens)]
    if args.quant:
        twin = quantized(model, args.quant, ids)
        contenders.append(our_contender(twin, args.quant, ids, args.tokens))
    ours = len(contenders)
    contenders += [stock_contender(model, s, ids, args.tokens) for s in STOCK]
    speeds = measure(contenders, lambda: check_parity(model, ids[:2]))
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
        figures = {"arguments": vars(args), "device": device, "torch": torch.__version__, **when()}
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

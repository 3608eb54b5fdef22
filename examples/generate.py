"""`generate` of a real-size MoE model with random weights: transformers' own, and ours.

    python examples/generate.py --model qwen3-30b --batch 1 8 32 --stock default max-autotune
    python examples/generate.py --experts bfloat16 int4:1x128:bfloat16 --stock none
    python examples/generate.py --experts bfloat16 int4:1x128:bfloat16 --stock none --adapter 16
    python examples/generate.py --experts int4:1x128:bfloat16 --linears float8_e4m3fn:row \
        --head float8_e4m3fn:row --stock none
    python examples/generate.py --batch 1 32 --tokens 64 320 --stock none --record

The second also quantises the experts, in place: weights, or weights+inputs, in a format of
docs/FORMATS.md; the third then gives them an adapter of a rank, and the fourth has linear layers
and the head in codes. The fifth also records the routing. Prints decoded tokens per second (between
64 and 128 new tokens), the time of a prompt, of the first call, the memory beyond weights and key-
value cache, and where a step's time goes. A second run of the same command finds the compiled code
in torch's caches.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import needed  # noqa: F401
import torch
import transformers
from models import CONFIGS, build
from step_parts import breakdown, kv_bytes, seconds, tables_of_steps, tensors_of
from torch import Tensor
from transformers import CompileConfig, StoppingCriteriaList

import moe_ops
from moe_ops.bench.rates import measure_rates
from moe_ops.bench.when import when

FLOAT = "bfloat16"  # the experts of a model as it is built
TURNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One way to generate at one batch size."""

    way: str
    batch: int
    first_call_s: float
    prompt_ms: float
    step_ms: float
    tokens_per_s: float
    extra_gb: float


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START:6.1f} s] {text}", file=sys.stderr, flush=True)


def quantize(model: Any, experts: str, **others: str | None) -> dict[str, float]:
    """Quantise the experts to "weights" or "weights+inputs", unless they are to stay floats, and
    linear layers and the head to their formats: seconds, and GB of memory at most."""
    weights, _, inputs = experts.partition("+")
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    config = None if experts == FLOAT else moe_ops.QuantConfig(weights=weights, inputs=inputs)
    took = seconds(lambda: say(str(moe_ops.quantize_model(model, config, **others))))
    peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {"seconds": took, "peak_gb": peak}


def cache_bytes(model: Any, batch: int, length: int) -> int:
    """Keys and values of the sequences, or of all sizes for which they are kept."""
    try:
        return sum(r.cache_bytes for r in moe_ops.generation_report(model))
    except ValueError:  # transformers' own
        return kv_bytes(model.config, batch, length)


def measure(way: str, model: Any, ids: Tensor, tokens: tuple[int, int], **kwargs: Any) -> Speed:
    """Time `generate`; what it takes for all new tokens less what it takes for half is decoding."""
    few, many = tokens
    batch, prompt = ids.shape

    def call(n: int) -> Callable[[], Any]:
        return lambda: model.generate(ids, max_new_tokens=n, do_sample=False, **kwargs)

    gpu = torch.cuda.is_available()
    say(f"{way}, batch {batch}: first call")
    first = seconds(call(many))
    say(f"{way}, batch {batch}: {first:.1f} s; timing")
    if gpu:  # what tuning took is no longer needed
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for n in (1, few):  # prompts that come the third time are captured, for each size of buffers
        for _ in range(2):
            seconds(call(n))
    times = {n: statistics.median(seconds(call(n)) for _ in range(3)) for n in (1, few, many)}
    step = (times[many] - times[few]) / (many - few)
    if step <= 0:
        raise RuntimeError(
            f"{many} new tokens took {times[many] * 1e3:.0f} ms and {few} took "
            f"{times[few] * 1e3:.0f} ms, too near to tell steps apart; ask for more with --tokens"
        )
    used = torch.cuda.max_memory_reserved() if gpu else 0
    weights = sum(t.nbytes for _, t in tensors_of(model))
    extra = max(0, used - weights - cache_bytes(model, batch, prompt + many))
    return Speed(
        way=way,
        batch=batch,
        first_call_s=first,
        prompt_ms=times[1] * 1e3,
        step_ms=step * 1e3,
        tokens_per_s=batch / step,
        extra_gb=extra / 1e9,
    )


def beside_recorded(way: str, model: Any, ids: Tensor, tokens: tuple[int, int]) -> list[Speed]:
    """`generate`, and with its routing recorded: in turns, of each the turn of the median step, as
    two measurements of one way differ by as much as recording takes."""
    found: list[list[Speed]] = [[], []]
    for _ in range(TURNS):
        found[0].append(measure(way, model, ids, tokens))
        with moe_ops.record_routing(model):
            found[1].append(measure(f"{way} recorded", model, ids, tokens))
    return [sorted(turns, key=lambda s: s.step_ms)[TURNS // 2] for turns in found]


def by_slots(
    model: Any, ids: Tensor, slots: list[int], tokens: tuple[int, int]
) -> dict[int, float]:
    """The ms of a step by how many tokens the buffers have room for, most of which are empty."""
    few, many = tokens
    batch, prompt = ids.shape
    found = {}
    for room in slots:

        def call(n: int, room: int = room) -> Callable[[], Any]:
            def ends(ids: Tensor, scores: Any, **_: Any) -> Tensor:
                return torch.full((batch,), ids.shape[1] >= prompt + n, device=ids.device)

            stop = StoppingCriteriaList([ends])
            new = {"max_new_tokens": room - prompt, "stopping_criteria": stop}
            return lambda: model.generate(ids, do_sample=False, **new)

        for _ in range(3):
            seconds(call(few))
        times = {n: statistics.median(seconds(call(n)) for _ in range(5)) for n in tokens}
        found[room] = (times[many] - times[few]) / (many - few) * 1e3
    return found


def header() -> str:
    return (
        f"{'way':<24}{'batch':>6}{'first s':>9}{'prompt ms':>11}{'step ms':>9}{'tok/s':>9}{'GB':>7}"
    )


def row(s: Speed) -> str:
    return (
        f"{s.way:<24}{s.batch:>6}{s.first_call_s:>9.1f}{s.prompt_ms:>11.1f}{s.step_ms:>9.2f}"
        f"{s.tokens_per_s:>9.0f}{s.extra_gb:>7.2f}"
    )


@dataclass
class Report:
    """What was measured so far: printed as it comes, and the whole of it written to a file."""

    path: str | None
    figures: dict[str, Any]

    def add(self, speed: Speed) -> None:
        if not self.figures["speeds"]:
            print(header())
        print(row(speed), flush=True)
        self.figures["speeds"].append(asdict(speed))
        self.write()

    def write(self) -> None:
        if self.path:
            with open(self.path, "w") as file:
                json.dump(self.figures, file, indent=2)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=CONFIGS, default="qwen3-30b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, nargs=2, default=[64, 128], metavar=("FEW", "MANY"))
    parser.add_argument(
        "--stock", choices=["default", "max-autotune", "none"], nargs="+", default=["default"]
    )
    parser.add_argument(
        "--experts", nargs="+", default=[FLOAT], metavar="FORMAT",
        help=f"of the experts on our way: {FLOAT}, or what to quantise them to",
    )  # fmt: skip
    for name, what in (("--linears", "linear layers"), ("--head", "the head")):
        parser.add_argument(name, metavar="FORMAT", help=f"of {what} on our way")
    parser.add_argument(
        "--adapter",
        type=int,
        metavar="RANK",
        help="also with an adapter of experts, on our way",
    )
    parser.add_argument(
        "--record", action="store_true", help="also with the routing recorded, on our way"
    )
    parser.add_argument("--inductor", default="{}", help="more options of Inductor, as JSON")
    parser.add_argument("--profile", action="store_true", help="where a step's time goes")
    parser.add_argument(
        "--slots", type=int, nargs="*", default=[],
        help="also the time of a step on our way with room for so many tokens",
    )  # fmt: skip
    parser.add_argument("--json", help="also write the figures to this file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    logging.basicConfig(format="           %(message)s")
    logging.getLogger("moe_ops").setLevel(logging.INFO)
    transformers.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    say(f"building {args.model} on {device}")
    model = build(args.model, args.layers, device)
    weights = sum(p.numel() for p in model.parameters())
    say(f"{weights / 1e9:.2f} B parameters; torch {torch.__version__}")

    on = torch.cuda.get_device_name() if device == "cuda" else device
    figures: dict[str, Any] = {"command": f"python {shlex.join(sys.argv)}", "device": on}
    figures |= {"torch": torch.__version__, "transformers": transformers.__version__, **when()}
    report = Report(args.json, figures | {"speeds": [], "steps": {}})

    prompts = {b: torch.randint(3, 255, (b, args.prompt), device=device) for b in args.batch}
    for index, experts in enumerate(args.experts):
        if index:
            model = None  # quantised, or stored otherwise by now
            gc.collect()  # or there are two models while the next is built
            model = build(args.model, args.layers, device)
        others = {"linear_format": args.linears, "head_format": args.head}
        if experts != FLOAT or any(others.values()):
            took = quantize(model, experts, **others)
            report.figures.setdefault("quantising", {})[experts] = took
        measure_ours(args, model, experts, prompts, report)
    if args.stock != ["none"]:
        model = None
        gc.collect()
        model = build(args.model, args.layers, device)
    for way in args.stock:
        kwargs: dict[str, Any] = {"cache_implementation": "static"}
        if way == "max-autotune":
            kwargs["compile_config"] = CompileConfig(mode=way)
        for ids in prompts.values() if way != "none" else ():
            torch._dynamo.reset()  # or its code for a second batch size is for any, which is slower
            report.add(measure(way, model, ids, args.tokens, **kwargs))


@torch.no_grad()
def adapt(model: Any, rank: int) -> None:
    """Give the experts of a model an adapter that does something, for inference; its twin follows.

    One that requires gradients would be copied before each call: an optimizer may have written it.
    """
    moe_ops.add_adapter(model, rank)
    for name, p in model.named_parameters():
        if "expert_adapters" in name:
            p.normal_(std=p.shape[-1] ** -0.5)
            p.requires_grad_(False)


def measure_ours(
    args: argparse.Namespace, model: Any, experts: str, prompts: dict[int, Tensor], report: Report
) -> None:
    """Every batch size on our way, and if asked where the time of a step goes."""
    way = "moe_ops" if experts == FLOAT else f"moe_ops {experts}"
    ours = moe_ops.compile(model, extra=json.loads(args.inductor))
    steps = {}
    for batch, ids in prompts.items():
        if args.record:
            for speed in beside_recorded(way, ours, ids, args.tokens):
                report.add(speed)
        else:
            report.add(measure(way, ours, ids, args.tokens))
        if args.slots:
            found = by_slots(ours, ids, args.slots, args.tokens)
            say(f"batch {batch}, ms a step by slots: {found}")
            report.figures.setdefault("slots_step_ms", {})[batch] = found
            report.write()
        if args.profile and ids.is_cuda:
            steps[batch] = breakdown(ours, ids)
    if args.adapter:
        adapt(model, args.adapter)
        for ids in prompts.values():
            report.add(measure(f"{way} r{args.adapter}", ours, ids, args.tokens))
    for size in moe_ops.generation_report(ours):
        say(str(size))
    if steps:  # last, as memory that this took would count as that of generate
        rate = measure_rates(ids.device, torch.bfloat16).copy_tbs
        for step in steps.values():
            step["floor_ms"] = {part: n / rate * 1e-9 for part, n in step["bytes"].items()}
        print(tables_of_steps(steps))
        of_formats = report.figures["steps"]
        of_formats.update(steps if experts == FLOAT else {experts: steps})
        report.write()


START = time.perf_counter()

if __name__ == "__main__":
    main()

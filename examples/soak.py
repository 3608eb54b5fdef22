"""Thousands of `generate` calls of random sizes: no growth, no recompilation, the eager tokens.

    python examples/soak.py [--calls 2000] [--warm-up 200] [--compare 20] [--json FILE]

Small random models in float32, one for each kind of what layers keep (`tiny.py`), take turns:
greedy calls, sampled ones, beams, chats of three turns, and pictures where a model sees them. Every
`--compare`-th call is checked against the tokens of transformers' own `generate`. Exits with an
error at the first thing that is not as it should be.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import random
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import needed  # noqa: F401
import torch
import transformers
from tiny import KINDS, build, picture
from torch._dynamo.utils import counters

import moe_ops

TOKENS = {"max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": 5}
TURNS = 3
LONGEST = 200  # with three turns within the slots that the shortest has, too
# What may come and go: of tensors graphs of prompts whose sizes came again; of the allocator what
# it takes at once, and of the process what its allocator keeps, for other sizes side by side.
TENSORS, SEGMENT, RESIDENT = 2 << 20, 20 << 20, 64 << 20


PLAIN = (torch.Tensor, torch.nn.Parameter)  # and no tensors of compilers


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of `generate`, or the turns of a chat."""

    number: int
    kind: str
    way: str  # greedy, sampled, beams, chat
    batch: int
    length: int
    pad: int = 0


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes after so many calls: of tensors, of torch's allocator for GPUs, of the process."""

    calls: int
    seconds: float
    tensors: int
    allocator: int
    resident: int


class Fallbacks(logging.Handler):
    """Counts why calls did not run by steps, as it is logged: each reason of each model once."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "falls back" in text or "stays transformers' own" in text:
            self.found[text] += 1


def held(calls: int, start: float) -> Held:
    gc.collect()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
        tensors, allocator = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    else:
        found = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
        own = [x.untyped_storage() for x in found if x.device.type == "cpu" and type(x) in PLAIN]
        tensors, allocator = sum({s.data_ptr(): s.nbytes() for s in own}.values()), 0
    pages = Path("/proc/self/statm")
    resident = int(pages.read_text().split()[1]) * 4096 if pages.exists() else 0
    seconds = time.perf_counter() - start
    return Held(
        calls=calls, seconds=seconds, tensors=tensors, allocator=allocator, resident=resident
    )


def first_calls(kind: str, batches: list[int], longest: int) -> list[dict[str, Any]]:
    """All numbers of rows, with one token and with many, padded or not, as often as it takes until
    such prompts are captured; and each way to generate."""
    sizes = [
        {"way": "greedy", "batch": b, "length": n, "pad": pad}
        for b in batches
        for n, pad in ((longest, 0), (9, 4), (1, 0))
    ]
    ways = [
        {"way": way, "batch": b, "length": 9, "pad": pad}
        for way in ("sampled", "beams", "chat")
        for b in batches
        for pad in (0, 4)
    ]
    return [{"kind": kind, **call} for call in sizes * 3 + ways]


def some_call(rng: random.Random, kind: str, batches: list[int], longest: int) -> dict[str, Any]:
    length = rng.randint(1, longest)
    pad = rng.randint(1, length // 2) if length > 4 and rng.random() < 0.3 else 0
    way = rng.choices(("greedy", "sampled", "beams", "chat"), (5, 2, 2, 1))[0]
    return {"kind": kind, "way": way, "batch": rng.choice(batches), "length": length, "pad": pad}


def run(model: Any, call: Call, most: int) -> list[torch.Tensor]:
    """The tokens of a call, of a chat those of each turn; the same for each model of a kind."""
    torch.manual_seed(call.number)
    ids = torch.randint(6, 250, (call.batch, call.length), device=model.device)
    if call.way == "beams":  # which are as many rows as the largest batch
        ids = ids[:1]
    mask = torch.ones_like(ids)
    mask[0, : call.pad] = 0
    how: dict[str, Any] = {**TOKENS}
    if call.way == "chat":
        return chat(model, ids, mask)
    if call.kind == "pictures" and call.length > 7 + call.pad and call.number % 2 == 0:
        how |= picture(model, ids)
        mask = torch.ones_like(ids)
    if call.way == "beams":
        how["num_beams"] = most
    how["do_sample"] = call.way == "sampled"
    return [model.generate(ids, attention_mask=mask, **how)]


def chat(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """The text after each turn, which goes on behind the cache of the turn before."""
    said: list[torch.Tensor] = []
    given: dict[str, Any] = {}
    for turn in range(TURNS):
        out = model.generate(
            ids,
            attention_mask=mask,
            return_dict_in_generate=True,
            **{**TOKENS, "eos_token_id": None},
            **given,
        )
        name = "cache" if "cache" in out else "past_key_values"  # before transformers 5.24
        given = {name: out[name]}
        said.append(out.sequences)
        more = torch.randint(6, 250, (len(ids), 1 + 2 * turn), device=ids.device)
        ids = torch.cat([out.sequences, more], 1)
        mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], 1)
    return said


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--warm-up", type=int, default=200)
    parser.add_argument("--compare", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=[*KINDS], metavar="KIND")
    parser.add_argument(
        "--batches",
        nargs="+",
        type=int,
        default=[1, 4],
        help="the last: also the beams of one text",
    )
    parser.add_argument("--prompt", type=int, default=150, help="the longest")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args(arguments)
    first = len(args.kinds) * len(first_calls("", args.batches, args.prompt))
    if not first <= args.warm_up < args.calls:
        parser.error(
            f"--warm-up {args.warm_up} has to be {first} or more, for each size and way of "
            f"{len(args.kinds)} kinds, and less than --calls {args.calls}"
        )
    if not 9 <= args.prompt <= LONGEST:
        parser.error(f"--prompt {args.prompt} has to be from 9 to {LONGEST}")
    return args


def calls_of(args: argparse.Namespace) -> list[Call]:
    """All calls, the kinds taking turns."""
    rng = random.Random(0)
    lists = [first_calls(kind, args.batches, args.prompt) for kind in args.kinds]
    found = [call for turn in zip(*lists, strict=True) for call in turn]
    for kind in itertools.islice(itertools.cycle(args.kinds), args.calls - len(found)):
        found.append(some_call(rng, kind, args.batches, args.prompt))
    return [Call(number=number, **call) for number, call in enumerate(found)]


def main(arguments: list[str] | None = None) -> None:
    args = options(arguments)
    transformers.logging.set_verbosity_error()
    fallbacks = Fallbacks()
    logging.getLogger("moe_ops").addHandler(fallbacks)
    logging.getLogger("moe_ops").setLevel(logging.INFO)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    stock = {kind: build(kind, device) for kind in args.kinds}
    ours = {kind: moe_ops.compile(model) for kind, model in stock.items()}
    start, compared, graphs, most = time.perf_counter(), 0, 0, args.batches[-1]
    found: list[Held] = []
    for call in calls_of(args):
        if call.number == args.warm_up:
            found.append(held(call.number, start))
            graphs = counters["stats"]["unique_graphs"]
        tokens = run(ours[call.kind], call, most)
        if call.number % args.compare == 0:
            compared += 1
            want = run(stock[call.kind], call, most)
            if not all(map(torch.equal, tokens, want)):
                sys.exit(f"{call}: got {tokens}, want {want}")
        if call.number % 100 == 99:
            passed = time.perf_counter() - start
            print(f"{call.number + 1} calls, {passed:.0f} s", file=sys.stderr, flush=True)
            if args.warm_up < call.number < args.calls - 1:
                found.append(held(call.number + 1, start))
    found.append(held(args.calls, start))
    compiled = counters["stats"]["unique_graphs"] - graphs
    tell(args, found, compared, compiled, fallbacks, ours)


def tell(
    args: argparse.Namespace,
    found: list[Held],
    compared: int,
    compiled: int,
    fallbacks: Fallbacks,
    ours: dict[str, Any],
) -> None:
    """Print and write what came of it; exits with an error unless all stayed as it was."""
    print(f"{args.calls} calls, {compared} compared; {compiled} graphs compiled since the warm-up")
    for kind, model in ours.items():
        try:
            reports = moe_ops.generation_report(model)
        except ValueError:  # no call of it runs by steps, as is told below
            reports = []
        figures = (
            sum(r.steps for r in reports),
            sum(r.prompt_graphs for r in reports),
            sum(r.prompts_replayed for r in reports),
        )
        print("{}: {} steps, {} graphs of prompts, {} prompts replayed".format(kind, *figures))
    first, last = found[0], found[-1]
    for name in ("tensors", "allocator", "resident"):
        print(f"{name}: {getattr(first, name) / 1e6:.1f} -> {getattr(last, name) / 1e6:.1f} MB")
    for reason, times in fallbacks.found.items():
        print(f"{times} models: {reason}")
    if args.json:
        report = {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "torch": torch.__version__, "transformers": transformers.__version__,
            "calls": args.calls, "compared": compared, "compiled": compiled,
            "fallbacks": dict(fallbacks.found), "held": [asdict(h) for h in found],
        }  # fmt: skip
        Path(args.json).write_text(json.dumps(report, indent=2))
    room = {"tensors": TENSORS, "allocator": SEGMENT * len(ours), "resident": RESIDENT}
    grown = [n for n, more in room.items() if getattr(last, n) > getattr(first, n) + more]
    if compiled or grown:
        sys.exit(f"after the warm-up {compiled} graphs were compiled, and these grew: {grown}")


if __name__ == "__main__":
    main()

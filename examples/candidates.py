"""Steps that check candidates: what they cost if all are wrong, what they gain if all are right.

    python examples/candidates.py --model qwen3-30b --layers 12 --candidates 4

Generates greedily at batch 1 with random weights: token by token, with candidates that are random,
and with those that the model chooses. Prints tokens per second of decoding (between FEW and MANY
new tokens), the steps, and the share of candidates that were accepted.
"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import needed  # noqa: F401
import torch
import transformers
from models import CONFIGS, build
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation.candidate_generator import CandidateGenerator

import moe_ops
from moe_ops.bench.when import when


class Known(CandidateGenerator):
    """So many candidates from a text, at the places where they would be."""

    def __init__(self, text: Tensor, number: int) -> None:
        self.text = text
        self.number = number
        self.given = self.taken = self.steps = 0

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        n = input_ids.shape[1]
        new = self.text[:, n : n + self.number]
        self.steps += 1
        self.given += new.shape[1]
        return torch.cat([input_ids, new], 1), None

    def update_candidate_strategy(
        self, input_ids: Tensor, scores: Tensor, num_matches: int
    ) -> None:
        self.taken += int(num_matches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to generate."""

    way: str
    first_call_s: float
    ms_per_token: float
    tokens_per_s: float
    steps: int
    accepted: float  # share of the candidates
    same: int  # tokens, from the first on, that are those of plain steps


def seconds(call: Any) -> tuple[float, Any]:
    """The wall time of a call, its work on a GPU included, and what it gave."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    out = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, out


def generated(model: Any, ids: Tensor, tokens: int, candidates: Known | None) -> Tensor:
    """The tokens, with these candidates if there are some."""
    call = {"max_new_tokens": tokens, "do_sample": False}
    if candidates is None:
        plain: Tensor = model.generate(ids, **call)
        return plain
    name = "_get_candidate_generator"  # of whatever transformers is asked for
    with patch.object(GenerationMixin, name, lambda *_, **__: candidates):
        out: Tensor = model.generate(ids, prompt_lookup_num_tokens=candidates.number, **call)
        return out


def measure(
    way: str, model: Any, ids: Tensor, tokens: tuple[int, int], text: Tensor | None, number: int
) -> tuple[Way, Tensor]:
    """Time one way; what it takes for all new tokens less what it takes for few is decoding."""

    def known() -> Known | None:
        return None if text is None else Known(text, number)

    few, many = tokens
    first, _ = seconds(lambda: generated(model, ids, many, known()))
    for n in tokens:  # prompts that come the third time are captured
        for _ in range(2):
            generated(model, ids, n, known())
    times = {}
    for n in tokens:
        runs = [seconds(lambda n=n: generated(model, ids, n, known()))[0] for _ in range(5)]
        times[n] = statistics.median(runs)
    step = (times[many] - times[few]) / (many - few)
    if step <= 0:
        raise RuntimeError(
            f"{many} new tokens took no longer than {few}; ask for more with --tokens"
        )
    counted = known()
    out = generated(model, ids, many, counted)
    measured = Way(
        way=way,
        first_call_s=first,
        ms_per_token=step * 1e3,
        tokens_per_s=1 / step,
        steps=many - 1 if counted is None else counted.steps,
        accepted=0.0 if counted is None else counted.taken / max(1, counted.given),
        same=0,
    )
    return measured, out


def row(w: Way, plain: Way) -> str:
    return (
        f"{w.way:<14}{w.first_call_s:>9.1f}{w.ms_per_token:>10.3f}{w.tokens_per_s:>9.0f}"
        f"{w.tokens_per_s / plain.tokens_per_s:>9.2f}{w.steps:>7}{w.accepted:>10.0%}{w.same:>6}"
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=CONFIGS, default="qwen3-30b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--candidates", type=int, default=4, help="for each step")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, nargs=2, default=[28, 128], metavar=("FEW", "MANY"))
    parser.add_argument("--json", help="also write the figures to this file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    logging.basicConfig(format="           %(message)s")
    logging.getLogger("moe_ops").setLevel(logging.INFO)
    transformers.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = moe_ops.compile(build(args.model, args.layers, device))
    torch.manual_seed(0)
    ids = torch.randint(3, 255, (1, args.prompt), device=device)
    few, many = args.tokens
    vocabulary = model.config.vocab_size
    text = torch.randint(3, vocabulary, (1, args.prompt + many + args.candidates), device=device)
    ways: list[Way] = []
    plain, want = measure("plain", model, ids, (few, many), None, 0)
    print(
        f"{'way':<14}{'first s':>9}{'ms/token':>10}{'tok/s':>9}{'times':>9}{'steps':>7}"
        f"{'accepted':>10}{'same':>6}"
    )
    for way in ("plain", "none accepted", "all accepted"):
        found, out = plain, want
        if ways:
            # Its own text is of the same steps: tokens of others could differ where two are close.
            found, out = measure(way, model, ids, (few, many), text, args.candidates)
            text = out
        differs = (out != want)[0, args.prompt :].nonzero()
        same = int(differs[0]) if len(differs) else many
        ways.append(Way(**{**asdict(found), "same": same}))
        print(row(ways[-1], plain), flush=True)
    for size in moe_ops.generation_report(model):
        print(size, file=sys.stderr)
    if args.json:
        on = torch.cuda.get_device_name() if device == "cuda" else device
        figures = {"command": f"python {shlex.join(sys.argv)}", "device": on}
        figures |= {"torch": torch.__version__, "transformers": transformers.__version__, **when()}
        with open(args.json, "w") as file:
            json.dump({**figures, "ways": [asdict(w) for w in ways]}, file, indent=2)


if __name__ == "__main__":
    main()

"""A Hugging Face MoE model whose experts lie on the ranks of a process group generates text.

    torchrun --nproc-per-node 2 examples/generate_parallel.py
    torchrun --nproc-per-node 2 examples/generate_parallel.py --tokens own --compiled

Random weights, made where they stay, so that no rank ever holds the whole model; with `--check`
each makes all of it, and compares tokens with those of one process. NCCL with a GPU for each
process, gloo on CPUs. With `--tokens replicated` all ranks work on one batch, with `own` each on a
part of it; `--halves` then runs prompts in two halves: one computes while the other one's tokens
travel, wherever it can be or where it pays. Prints tokens per second of decoding, those of all
ranks together, and the bytes of this rank's weights. A model that one GPU cannot hold, on two of
80 GB:

    torchrun --nproc-per-node 2 examples/generate_parallel.py --model qwen3-235b --layers 26 \\
        --dtype bfloat16 --compiled --tokens own --collective push --batch 8 32
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import needed  # noqa: F401
import timeline
import torch
import torch.distributed as dist
import transformers
from models import CONFIGS
from step_parts import seconds
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import moe_ops
from moe_ops.bench.when import when
from moe_ops.halves import HalvesPlan

STEPS = 16  # that are profiled
COLLECTIVES = ("gather", "exchange", "push", "auto")
HALVES = {"where_it_pays": None, "always": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One number of sequences. Tokens per second are those of all ranks; bytes are this rank's
    weights, and the most memory that it reserved."""

    batch: int
    prompt_ms: float
    tokens_per_s: float
    weight_bytes: int
    reserved_bytes: int

    def __str__(self) -> str:
        said = f"batch {self.batch}: {self.tokens_per_s:.1f} tokens/s after {self.prompt_ms:.1f} ms"
        return f"{said} for the prompt, {self.weight_bytes / 2**20:.1f} MiB of weights"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=CONFIGS, default="tiny")
    parser.add_argument("--layers", type=int, help="fewer than published")
    parser.add_argument("--tokens", choices=("replicated", "own"), default="replicated")
    parser.add_argument(
        "--collective", choices=COLLECTIVES, default="gather",
        help="of own tokens; of replicated ones push and auto sum by stores to the other GPUs",
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[4], help="sequences of all ranks"
    )  # fmt: skip
    parser.add_argument("--prompt", type=int, default=8)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--compiled", action="store_true", help="by moe_ops.compile")
    parser.add_argument("--halves", choices=HALVES, help="of prompts, of a rank's own tokens")
    parser.add_argument("--check", action="store_true", help="compare with one process")
    parser.add_argument(
        "--profile", action="store_true", help="on GPUs: the kernels of a layer in a step of rank 0"
    )  # fmt: skip
    parser.add_argument("--json", help="rank 0 writes figures to this file")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if args.profile and not on_gpu:
        parser.error("--profile shows kernels of a GPU, and torch finds none; drop it")
    if args.halves and (args.tokens != "own" or args.compiled):
        parser.error("--halves goes with --tokens own, without --compiled")
    try:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    except ValueError as error:  # no variable says which rank this is
        parser.error(f"{error}; start it by torchrun --nproc-per-node 2 {sys.argv[0]}")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for batch in args.batch:
        if args.tokens == "own" and batch % ranks:
            parser.error(f"--batch {batch} does not divide among {ranks} ranks")
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    with torch.inference_mode():
        run(args, rank, torch.device(device))
    gc.collect()  # of the model: NCCL waits for graphs that hold its collectives, for ever
    dist.destroy_process_group()


def run(args: argparse.Namespace, rank: int, device: torch.device) -> None:
    whole = make(args, torch.device("cpu")) if args.check else None
    model = shared(args, device, whole)
    if args.compiled:
        model = moe_ops.compile(model)
    plans = in_halves(model, HALVES[args.halves]) if args.halves else {}
    speeds, timelines = [], {}
    for batch in args.batch:
        torch.manual_seed(0)
        ids = torch.randint(model.config.vocab_size, (batch, args.prompt))
        mine = share(ids, args).to(device)
        speeds.append(measured(model, mine, batch, args))
        said = f"rank {rank}: {speeds[-1]}"
        if whole is not None:
            want = share(generate(whole.to(device), ids.to(device), args.new), args)
            same = torch.equal(generate(model, mine, args.new), want)
            said += f", as one process: {same}"
        said += "".join(f"\n  prompts run as {plan}" for plan in plans.values())
        plans.clear()  # ranks have other numbers of tokens now
        print(f"{said}\n", end="", flush=True)  # at once, or the lines of two ranks mix
        if args.profile:
            timelines[batch] = launches = profiled(model, mine)
            if rank == 0:
                print(timeline.table(launches), flush=True)
    if args.json and rank == 0:
        write(args.json, device, speeds, timelines)


Plans = dict[torch.Size, HalvesPlan]


class InHalves(nn.Module):
    """Decoder layers, in which prompts run in two halves if ranks agreed on it for their sizes."""

    def __init__(self, layers: list[nn.Module], halves: bool | None, plans: Plans) -> None:
        super().__init__()
        self.layers, self.halves, self.plans = nn.ModuleList(layers), halves, plans
        self.attention_type = getattr(layers[0], "attention_type", None)

    def forward(self, x: Tensor, **given: Any) -> Any:
        if x.shape[1] == 1:  # a step of decoding
            for layer in self.layers:
                x = layer(x, **given)
            return x
        if x.shape not in self.plans:
            self.plans[x.shape] = moe_ops.plan_halves(self.layers, x, halves=self.halves)
        return moe_ops.two_halves(self.layers, x, plan=self.plans[x.shape], **given)


def in_halves(model: PreTrainedModel, halves: bool | None) -> Plans:
    """Run layers with experts in halves, in place. Returns what ranks agree on, as it comes."""

    def kind(layer: nn.Module) -> tuple[Any, bool]:
        """What a layer attends to, and whether it has experts."""
        has_experts = any("experts" in name for name, _ in layer.named_modules())
        return getattr(layer, "attention_type", None), has_experts

    plans: Plans = {}
    found: list[nn.Module] = []
    for (_, has_experts), some in itertools.groupby(model.model.layers, kind):
        layers = list(some)
        found += [InHalves(layers, halves, plans)] if has_experts else layers
    model.model.layers = nn.ModuleList(found)
    return plans


def share(ids: Tensor, args: argparse.Namespace) -> Tensor:
    """Return the sequences of this rank."""
    return ids.chunk(dist.get_world_size())[dist.get_rank()] if args.tokens == "own" else ids


def measured(model: PreTrainedModel, ids: Tensor, batch: int, args: argparse.Namespace) -> Speed:
    """Decoding is what more than one new token takes longer than one; the least of three calls."""
    for new in (args.new, 1, 1):  # compiles, and captures
        generate(model, ids, new)
    prompt, took = (least_seconds(model, ids, new) for new in (1, args.new))
    return Speed(
        batch=batch,
        prompt_ms=prompt * 1e3,
        tokens_per_s=batch * (args.new - 1) / (took - prompt),
        weight_bytes=sum(p.nbytes for p in model.parameters()),
        reserved_bytes=torch.cuda.max_memory_reserved() if ids.is_cuda else 0,
    )


def profiled(model: PreTrainedModel, ids: Tensor) -> list[timeline.Launch]:
    """A layer of a step."""
    layers = model.config.num_hidden_layers
    return timeline.timeline(lambda: generate(model, ids, 1 + STEPS), STEPS, layers)


def write(
    path: str,
    device: torch.device,
    speeds: list[Speed],
    timelines: dict[int, list[timeline.Launch]],
) -> None:
    ranks, name = dist.get_world_size(), "cpu"
    if device.type == "cuda":
        name = f"{ranks} x {torch.cuda.get_device_name(device)}"
    words = [f"examples/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    found = {
        "command": f"torchrun --nproc-per-node {ranks} {shlex.join(words)}",
        "device": name,
        **when(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "speeds": [asdict(speed) for speed in speeds],
        "timelines": {n: [asdict(one) for one in found] for n, found in timelines.items()},
    }
    Path(path).write_text(json.dumps(found, indent=1) + "\n")


def make(args: argparse.Namespace, device: torch.device) -> PreTrainedModel:
    """The whole model, the same on every rank."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(CONFIGS[args.model](args.layers))
    return model.to(getattr(torch, args.dtype)).eval()


def shared(
    args: argparse.Namespace, device: torch.device, whole: PreTrainedModel | None
) -> PreTrainedModel:
    """This rank's share of it, or of one whose weights are made on the rank's device."""
    group = dist.group.WORLD.group_name
    how = {"tokens": args.tokens, "collective": args.collective}
    if whole is not None:
        return moe_ops.share_experts(copy.deepcopy(whole).to(device), group, **how)
    model = moe_ops.share_experts(make(args, torch.device("meta")), group, **how)
    model.to_empty(device=device)
    moe_ops.share_experts(model, group, **how)  # writes its tables anew
    # Ranks draw as many numbers for as many experts, so that what all of them hold is the same.
    torch.manual_seed(0)
    for module in model.modules():
        model._init_weights(module)
    return model


def least_seconds(model: PreTrainedModel, ids: Tensor, new: int) -> float:
    """Return the time of the fastest of three calls."""
    return min(seconds(lambda: generate(model, ids, new)) for _ in range(3))


def generate(model: PreTrainedModel, ids: Tensor, new: int) -> Tensor:
    # No sequence ends early: ranks take as many steps.
    found: Tensor = model.generate(
        ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
    )
    return found


if __name__ == "__main__":
    main()

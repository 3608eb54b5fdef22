"""A Hugging Face MoE model whose experts lie on the ranks of a process group generates text.

    torchrun --nproc-per-node 2 examples/generate_parallel.py
    torchrun --nproc-per-node 2 examples/generate_parallel.py --tokens own --compiled

Random weights, made where they stay, so that no rank ever holds the whole model; with `--check`
each makes all of it, and compares tokens with those of one process. NCCL with a GPU for each
process, gloo on CPUs. With `--tokens replicated` all ranks work on one batch, with `own` each on a
part of it. Prints tokens per second of decoding, those of all ranks together, and the bytes of this
rank's weights.
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.distributed as dist
from generate import CONFIGS, seconds
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import moe_ops

MODELS = ("tiny", "qwen3-30b")
COLLECTIVES = ("gather", "exchange", "push", "auto")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--tokens", choices=("replicated", "own"), default="replicated")
    parser.add_argument(
        "--collective", choices=COLLECTIVES, default="gather",
        help="of own tokens; of replicated ones push and auto sum by stores to the other GPUs",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, default=4, help="sequences of all ranks")
    parser.add_argument("--prompt", type=int, default=8)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--compiled", action="store_true", help="by moe_ops.compile")
    parser.add_argument("--check", action="store_true", help="compare with one process")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if args.tokens == "own" and args.batch % ranks:
        parser.error(f"--batch {args.batch} does not divide among {ranks} ranks")
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    with torch.inference_mode():
        run(args, rank, torch.device(device))
    dist.destroy_process_group()


def run(args: argparse.Namespace, rank: int, device: torch.device) -> None:
    torch.manual_seed(0)
    ids = torch.randint(CONFIGS[args.model](None).vocab_size, (args.batch, args.prompt))
    whole = make(args, torch.device("cpu")) if args.check else None
    model = shared(args, device, whole)
    if args.compiled:
        model = moe_ops.compile(model)
    size = dist.get_world_size()
    mine = (ids.chunk(size)[rank] if args.tokens == "own" else ids).to(device)
    for new in (args.new, 1, 1):  # compiles, and captures
        generate(model, mine, new)
    prompt, took = (least_seconds(model, mine, new) for new in (1, args.new))
    made = mine.shape[0] * (args.new - 1) * (size if args.tokens == "own" else 1)
    held = sum(p.nbytes for p in model.parameters())
    said = f"rank {rank}: {made / (took - prompt):.1f} tokens/s after {prompt * 1e3:.1f} ms"
    said += f" for the prompt, {held / 2**20:.1f} MiB of weights"
    if whole is not None:
        want = generate(whole.to(device), ids.to(device), args.new)
        want = want.chunk(size)[rank] if args.tokens == "own" else want
        out = generate(model, mine, args.new)
        said += f", as one process: {torch.equal(out, want)}"
    print(f"{said}\n", end="", flush=True)  # at once, or the lines of two ranks mix


def make(args: argparse.Namespace, device: torch.device) -> PreTrainedModel:
    """The whole model, the same on every rank."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(CONFIGS[args.model](None))
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
    """Of three calls."""
    return min(seconds(lambda: generate(model, ids, new)) for _ in range(3))


def generate(model: PreTrainedModel, ids: Tensor, new: int) -> Tensor:
    # No sequence ends early: ranks take as many steps.
    found: Tensor = model.generate(
        ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
    )
    return found


if __name__ == "__main__":
    main()

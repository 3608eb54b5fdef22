"""A Hugging Face MoE model whose experts lie on the ranks of a process group generates text.

    torchrun --nproc-per-node 2 examples/generate_parallel.py
    torchrun --nproc-per-node 2 examples/generate_parallel.py --tokens own --compiled

Random weights, the same on every rank before the experts are shared. NCCL with a GPU for each
process, gloo on CPUs. With `--tokens replicated` all ranks work on one batch, with `own` each on a
part of it. Prints tokens per second, the bytes of this rank's weights, and whether the tokens are
those of one process (`--check`, where the whole model fits).
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_ops

SIZES = {
    "tiny": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
        "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 256,
    },
    "qwen3-30b": {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SIZES, default="tiny")
    parser.add_argument("--tokens", choices=("replicated", "own"), default="replicated")
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
    config = Qwen3MoeConfig(**SIZES[args.model], norm_topk_prob=True)
    ids = torch.randint(config.vocab_size, (args.batch, args.prompt))
    whole = Qwen3MoeForCausalLM(config).to(getattr(torch, args.dtype)).eval()
    model = copy.deepcopy(whole) if args.check else whole
    moe_ops.share_experts(model, dist.group.WORLD.group_name, tokens=args.tokens)
    model.to(device)
    if args.compiled:
        model = moe_ops.compile(model)
    size = dist.get_world_size()
    mine = ids.chunk(size)[rank] if args.tokens == "own" else ids
    generate(model, mine.to(device), args.new)  # compiles, and captures
    start = time.perf_counter()
    out = generate(model, mine.to(device), args.new).cpu()
    seconds = time.perf_counter() - start
    made = mine.shape[0] * args.new * (size if args.tokens == "own" else 1)
    held = sum(p.nbytes for p in model.parameters())
    said = f"rank {rank}: {made / seconds:.1f} tokens/s, {held / 2**20:.1f} MiB of weights"
    if args.check:
        want = generate(whole.to(device), ids.to(device), args.new).cpu()
        want = want.chunk(size)[rank] if args.tokens == "own" else want
        said += f", as one process: {torch.equal(out, want)}"
    print(said, flush=True)


def generate(model: PreTrainedModel, ids: Tensor, new: int) -> Tensor:
    # No sequence ends early: ranks take as many steps.
    found: Tensor = model.generate(
        ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
    )
    return found


if __name__ == "__main__":
    main()

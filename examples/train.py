"""A small Hugging Face MoE model trains on our ops, and stock beside it.

    python examples/train.py --stock --plot loss.png
    python examples/train.py --text FILE --model tiny --steps 200
    python examples/train.py --lora --stock       # adapters of attention, on frozen experts
    python examples/train.py --qlora              # the same on experts in int4
    python examples/train.py --qlora --experts    # adapters of these experts, too
    torchrun --nproc-per-node 2 examples/train.py --fsdp

Random weights. Tokens are bytes, of a file or of a random text in which four bytes may follow each.
transformers' Trainer trains where accelerate is installed; elsewhere, and with `--fsdp`, a loop
around an optimizer. Prints the time of a step (the median), tokens per second of all ranks, the
first and the last loss, and the most memory that forward and backward of a batch take at one time,
gradients included. `--fsdp` shards the model by FSDP2, with gloo on CPUs.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import needed  # noqa: F401
import torch
import torch.distributed as dist
from models import CONFIGS
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import moe_ops
from moe_ops.bench.memory import peak_bytes
from moe_ops.bench.plot import pyplot
from moe_ops.bench.tables import aligned

OURS, STOCK = "moe_ops", "stock"
SMALL = "small"
VOCABULARY, SYMBOLS, FOLLOWERS = 256, 64, 4  # of bytes; of a random text
WARM_UP = 2  # steps that are not timed
SCHEME = "int4_w4a16"
ATTENTION = r".*\.self_attn\.\w*proj\w*"
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def small(layers: int | None) -> Qwen3MoeConfig:
    """A Qwen3-MoE model of two million parameters, whose experts can be quantised in groups."""
    return Qwen3MoeConfig(
        hidden_size=128, num_hidden_layers=layers or 2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, moe_intermediate_size=128, num_experts=16,
        num_experts_per_tok=4, norm_topk_prob=True, vocab_size=VOCABULARY,
    )  # fmt: skip


MODELS: dict[str, Callable[[int | None], Any]] = {SMALL: small, **CONFIGS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How one model trained."""

    name: str
    losses: list[float]
    step_s: float
    tokens_per_s: float
    peak: int


def main() -> None:
    args = parse()
    if args.plot:
        pyplot()  # raises before anything is trained
    device = begin(args)
    rows_BS = tokens_of(args)
    runs = [run(name, rows_BS, args, device) for name in (OURS, *((STOCK,) if args.stock else ()))]
    if not args.fsdp or dist.get_rank() == 0:
        print(table(runs))
        if args.plot:
            draw(runs, title(args), Path(args.plot))
    if args.fsdp:
        dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default=SMALL)
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--text", type=Path, help="a file to train on; random text if left out")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8, help="rows of a step, of all ranks")
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--lr", type=float, help="learning rate; 0.003, or 0.005 of adapters")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--stock", action="store_true", help="train transformers' own, too")
    adapters = parser.add_mutually_exclusive_group()
    adapters.add_argument("--lora", action="store_true", help="train adapters of attention alone")
    adapters.add_argument("--qlora", action="store_true", help=f"the same, experts in {SCHEME}")
    parser.add_argument("--experts", action="store_true", help="train adapters of experts, too")
    parser.add_argument("--fsdp", action="store_true", help="shard over the ranks of torchrun")
    parser.add_argument("--plot", help="draw the losses to this PNG file")
    args = parser.parse_args()
    if args.steps <= WARM_UP:
        parser.error(f"--steps {args.steps} leaves none to time; the first {WARM_UP} are warm-up")
    if args.fsdp and (args.lora or args.qlora):
        parser.error("--fsdp shards models that train whole; drop it, or the adapters")
    if args.experts and not (args.lora or args.qlora):
        parser.error("--experts goes with --lora or --qlora; without them experts train whole")
    if args.lr is None:
        args.lr = 0.005 if args.lora or args.qlora else 0.003
    return args


def begin(args: argparse.Namespace) -> torch.device:
    """This process's device. Begins the process group of --fsdp, if that is asked for."""
    on_gpu = torch.cuda.is_available()
    if not args.fsdp:
        return torch.device("cuda" if on_gpu else "cpu")
    try:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    except ValueError as error:  # no variable says which rank this is
        raise SystemExit(
            f"{error}; start it by torchrun --nproc-per-node 2 {sys.argv[0]} --fsdp"
        ) from error
    if args.batch % dist.get_world_size():
        raise SystemExit(
            f"--batch {args.batch} does not divide among {dist.get_world_size()} ranks"
        )
    if not on_gpu:
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def tokens_of(args: argparse.Namespace) -> Tensor:
    """The rows of all steps, in their order."""
    g, shape = torch.Generator().manual_seed(0), (args.steps * args.batch, args.length)
    if args.text is None:
        followers = torch.randint(SYMBOLS, (SYMBOLS, FOLLOWERS), generator=g)
        choices = torch.randint(FOLLOWERS, shape, generator=g)
        rows_BS = torch.zeros(shape, dtype=torch.long)
        for i in range(1, args.length):
            rows_BS[:, i] = followers[rows_BS[:, i - 1], choices[:, i]]
        return rows_BS
    text = torch.tensor(list(args.text.read_bytes()))
    starts = len(text) - args.length + 1
    if starts < 1:
        raise SystemExit(f"{args.text} has {len(text)} bytes, fewer than --length {args.length}")
    begins = torch.randint(starts, shape[:1], generator=g)
    return text[begins[:, None] + torch.arange(args.length)]


def run(name: str, rows_BS: Tensor, args: argparse.Namespace, device: torch.device) -> Run:
    """Build one of the models and train it; all have the same weights at first."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[args.model](args.layers))
    model = model.to(device, getattr(torch, args.dtype))
    if name == OURS:
        if args.qlora:
            quantized = moe_ops.quantize_model(model, SCHEME, progress=False)
            if quantized.kept:
                raise SystemExit(f"--model {args.model} is not quantised: {quantized.kept[0]}")
        moe_ops.optimize(model)
    if args.lora or args.qlora:
        in_codes = args.qlora and name == OURS  # which peft cannot adapt
        model = with_adapters(model, *(EXPERTS if args.experts and not in_codes else ()))
    if args.experts and name == OURS:
        adapt_experts(model, args.qlora)
    if args.fsdp:
        shard(model)
    by_trainer = not args.fsdp and importlib.util.find_spec("accelerate") is not None
    how = "Trainer" if by_trainer else "a loop"
    losses, times = (trainer if by_trainer else loop)(model, rows_BS, args)
    if not args.fsdp or dist.get_rank() == 0:
        print(f"{name}: {len(losses)} steps by {how}", file=sys.stderr)
    batch = next(batches(rows_BS, args, device))
    step_s = statistics.median(times[WARM_UP:])
    return Run(
        name=name,
        losses=losses,
        step_s=step_s,
        tokens_per_s=args.batch * args.length / step_s,
        peak=peak_bytes(lambda: model(input_ids=batch, labels=batch).loss.backward(), device),
    )


def with_adapters(model: Any, *parameters: str) -> Any:
    """The model with low-rank adapters of its attention, and of these parameters, which alone are
    trained."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=16, lora_alpha=32, target_modules=ATTENTION, task_type="CAUSAL_LM")
    config.target_parameters = list(parameters) or None
    return get_peft_model(model, config)


def adapt_experts(model: Any, in_codes: bool) -> None:
    """Have adapters of experts run apart from the weights: those of peft, or, on codes, ours."""
    if in_codes:
        moe_ops.add_adapter(model.get_base_model(), 16, alpha=32)
    else:
        moe_ops.optimize(model)


def shard(model: Any) -> None:
    """Leave this rank its part of the weights, in place."""
    mesh = dist.init_device_mesh(
        "cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),)
    )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def batches(rows_BS: Tensor, args: argparse.Namespace, device: torch.device) -> Iterator[Tensor]:
    """This rank's rows of each step."""
    for step_BS in rows_BS.split(args.batch):
        if args.fsdp:
            step_BS = step_BS.chunk(dist.get_world_size())[dist.get_rank()]
        yield step_BS.to(device)


def loop(model: Any, rows_BS: Tensor, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Train by an optimizer alone. Returns the loss, and the seconds, of every step."""
    device = next(model.parameters()).device
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, weight_decay=0.0)
    losses, times = [], []
    for batch in batches(rows_BS, args, device):
        start = now()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(now() - start)
        mean = loss.detach()
        if args.fsdp:
            dist.all_reduce(mean)
            mean = mean / dist.get_world_size()
        losses.append(mean.item())
    return losses, times


def now() -> float:
    """The time, when a GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def trainer(
    model: Any, rows_BS: Tensor, args: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Train by transformers' Trainer. Returns the loss, and the seconds, of every step."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    losses: list[float] = []
    times: list[float] = []

    class Recording(Trainer):
        def training_step(self, *given: Any, **named: Any) -> Tensor:
            loss = super().training_step(*given, **named)
            losses.append(loss.item())
            return loss

    class Clock(TrainerCallback):
        def on_step_begin(self, *given: Any, **named: Any) -> None:
            times.append(-now())

        def on_step_end(self, *given: Any, **named: Any) -> None:
            times[-1] += now()

    with tempfile.TemporaryDirectory() as folder:
        given = TrainingArguments(
            output_dir=folder, max_steps=args.steps, per_device_train_batch_size=args.batch,
            learning_rate=args.lr, lr_scheduler_type="constant", weight_decay=0.0,
            max_grad_norm=1.0, save_strategy="no", logging_strategy="no", report_to="none",
            disable_tqdm=True, train_sampling_strategy="sequential",
            use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        given._n_gpu = 1  # else Trainer has a batch for each GPU, and spreads them
        rows = [{"input_ids": row, "labels": row} for row in rows_BS]
        recording = Recording(model=model, args=given, train_dataset=rows, callbacks=[Clock()])
        recording.remove_callback(PrinterCallback)
        recording.train()
    model.zero_grad()
    return losses, times


def table(runs: Sequence[Run]) -> str:
    rows = [["experts", "step ms", "tokens/s", "first loss", "last loss", "peak MB"]]
    for one in runs:
        row = [one.name, f"{1e3 * one.step_s:.1f}", f"{one.tokens_per_s:.0f}"]
        row += [f"{loss:.4f}" for loss in (one.losses[0], one.losses[-1])]
        rows.append([*row, f"{one.peak / 1e6:.1f}"])
    return aligned(rows)


def title(args: argparse.Namespace) -> str:
    """What was trained, in words."""
    what = "adapters of " if args.lora or args.qlora else ""
    experts = f", our experts in {SCHEME}" if args.qlora else ""
    return f"{what}{args.model}, {args.dtype}{experts}, {args.batch} x {args.length} tokens a step"


def draw(runs: Sequence[Run], title: str, path: Path) -> None:
    """Write the losses as one picture. Ours is a thin line on a wide one, as they may be equal."""
    plt = pyplot()
    styles: dict[str, dict[str, Any]] = {
        STOCK: {"color": "#E69F00", "linewidth": 6, "alpha": 0.6, "zorder": 1},
        OURS: {"color": "#0072B2", "linewidth": 1.6, "zorder": 2},
    }
    figure, axes = plt.subplots(figsize=(8, 5), dpi=120, layout="constrained")
    for one in runs:
        steps, label = (
            range(1, len(one.losses) + 1),
            f"{one.name}, {1e3 * one.step_s:.0f} ms a step",
        )
        axes.plot(steps, one.losses, label=label, **styles[one.name])
    axes.set(title=title, xlabel="step", ylabel="loss, nats a token")
    axes.set_xlim(left=1)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, format="png")
    plt.close(figure)


if __name__ == "__main__":
    main()

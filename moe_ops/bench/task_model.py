"""A small Qwen3-MoE model that is trained on a text, once, and kept in a file.

Its weights are trained in float32 through `optimize`, and then rounded to bfloat16, as published
models have them. The same recipe, seed, threads and versions give the same bits on a CPU.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_ops.bench import progress
from moe_ops.bench.task_text import Text

VOCABULARY = 256  # bytes
WARM_UP, LAST_LR = 0.05, 0.1  # of the steps; of the learning rate, at the end of a cosine


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A model, and how it is trained; with the text this decides the weights.

    D: width of the model, I: of an expert, E: experts of a layer, K: of a token.
    """

    layers: int = 3
    D: int = 256
    I: int = 256  # noqa: E741  (the legend's letter for the expert width)
    E: int = 8
    K: int = 2
    batch: int = 16  # rows of a step
    length: int = 256  # bytes of a row
    steps: int = 600
    lr: float = 2e-3
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Where weights come from. `loss`: in nats a byte, the mean of the last tenth of the steps."""

    recipe: Recipe
    text: str  # its digest
    parameters: int
    loss: float
    seconds: float
    device: str
    threads: int
    torch: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trained:
    """A model in bfloat16 on the CPU, and rows of text that it was not trained on."""

    model: Any
    rows_NS: Tensor  # int64
    about: About


def build(recipe: Recipe) -> Any:
    """The model with random weights of the recipe's seed, float32."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    head_dim = 32
    config = Qwen3MoeConfig(
        hidden_size=recipe.D, num_hidden_layers=recipe.layers, head_dim=head_dim,
        num_attention_heads=recipe.D // head_dim, num_key_value_heads=max(1, recipe.D // 64),
        moe_intermediate_size=recipe.I, num_experts=recipe.E, num_experts_per_tok=recipe.K,
        norm_topk_prob=True, vocab_size=VOCABULARY, tie_word_embeddings=True,
        router_aux_loss_coef=0.01,
    )  # fmt: skip
    torch.manual_seed(recipe.seed)
    return Qwen3MoeForCausalLM(config)


def trained(path: Path, recipe: Recipe, text: Text, device: torch.device) -> Trained:
    """The model of a file, which is trained and written first if it is not there.

    Raises ValueError if the file holds a model of another recipe. Its held-out text is in the file,
    too, so that another Python measures the same.
    """
    if not path.exists():
        model, about = train(recipe, text, device)
        save(path, model, held_out_rows(text, recipe.length), about)
    found = load(path)
    if found.about.recipe != recipe:
        raise ValueError(
            f"{path} holds a model of {found.about.recipe}, this run is of {recipe}; give its "
            "options, or another file for --weights"
        )
    return found


def held_out_rows(text: Text, length: int) -> Tensor:
    """The held-out bytes as whole rows, uint8 [N, S]. Raises ValueError if they fill none."""
    rows = len(text.held_out) // length
    if not rows:
        raise ValueError(
            f"{len(text.held_out)} bytes are held out, and a row has {length}; take shorter rows"
        )
    return text.held_out[: rows * length].view(rows, length)


def train(recipe: Recipe, text: Text, device: torch.device) -> tuple[Any, About]:
    """Train a model through `optimize`: AdamW, gradients clipped to 1, the loss with that of
    balanced experts. Returns it in bfloat16 on the CPU."""
    from moe_ops.hf import optimize, restore

    model = optimize(build(recipe).to(device).train())
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share(step, recipe.steps))
    start, losses = time.perf_counter(), []
    for step, ids_BS in enumerate(batches(recipe, text)):
        ids_BS = ids_BS.to(device)
        out = model(input_ids=ids_BS, labels=ids_BS, output_router_logits=True)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(out.loss.detach() - model.router_aux_loss_coef * out.aux_loss.detach()))
        progress.tell(f"step {step + 1} of {recipe.steps}: {losses[-1]:.3f} nats a byte")
    progress.done()
    last = losses[-max(1, recipe.steps // 10) :]
    about = About(
        recipe=recipe, text=text.digest, parameters=sum(p.numel() for p in model.parameters()),
        loss=sum(last) / len(last), seconds=time.perf_counter() - start, device=device.type,
        threads=torch.get_num_threads(), torch=str(torch.__version__),
    )  # fmt: skip
    return restore(model).to("cpu", torch.bfloat16), about


def share(step: int, steps: int) -> float:
    """The share of the learning rate that a step has: up in a line, then down along a cosine."""
    warm_up = max(1, round(WARM_UP * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    along = (step - warm_up) / max(1, steps - warm_up)
    return LAST_LR + (1 - LAST_LR) * (1 + math.cos(math.pi * min(along, 1.0))) / 2


def batches(recipe: Recipe, text: Text) -> Iterator[Tensor]:
    """The rows of each step, from random places of the text, int64 [B, S]."""
    starts = len(text.train) - recipe.length + 1
    if starts < 1:
        raise ValueError(
            f"the text to train on has {len(text.train)} bytes, fewer than a row of {recipe.length}"
        )
    generator = torch.Generator().manual_seed(recipe.seed)
    for _ in range(recipe.steps):
        begins = torch.randint(starts, (recipe.batch, 1), generator=generator)
        yield text.train[begins + torch.arange(recipe.length)].long()


def save(path: Path, model: Any, rows_NS: Tensor, about: About) -> None:
    """Write the weights and the held-out rows to one file, at once."""
    from safetensors.torch import save_file

    named = {f"model.{name}": p.detach().contiguous() for name, p in model.named_parameters()}
    partial = path.with_name(f"{path.name}.partial")
    save_file({**named, "rows_NS": rows_NS.contiguous()}, partial, {"about": dumped(about)})
    partial.replace(path)


def dumped(about: About) -> str:
    return json.dumps(asdict(about))


def about_of(values: dict[str, Any]) -> About:
    """What `asdict` gave of it."""
    return About(**(values | {"recipe": Recipe(**values["recipe"])}))


def load(path: Path) -> Trained:
    """What `save` wrote. Raises ValueError for any other file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = about_of(json.loads((file.metadata() or {})["about"]))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        rows_NS = tensors.pop("rows_NS").long()
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"{path} holds no model of this command: {error}; choose another file for --weights"
        ) from error
    model = build(about.recipe).to(torch.bfloat16).eval().requires_grad_(False)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(tensors[f"model.{name}"])
    return Trained(model=model, rows_NS=rows_NS, about=about)

"""What a trained model makes of held-out text in each scheme, on this process or on ranks.

The model is a user's: bfloat16, experts by `quantize_model`, on the backends that the ops pick. On
several ranks all have the same tokens, each its share of the experts, and their parts are summed.
What a scheme loses is the difference of two losses on the same bytes, so that its error is far
smaller than that of either: the standard error of the mean over rows is given.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ops.bench.contenders import backends_of
from moe_ops.bench.task_model import Trained, load
from moe_ops.quant.schemes import SCHEMES
from moe_ops.ranks.groups import Group
from moe_ops.registry.registration import REFERENCE

BATCH = 16  # rows of a call
POLL = 0.2  # seconds between looks at what ranks found

Pair = tuple[str, str, str]  # scheme, format of weights, format of inputs; "" is 16 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCell:
    """A scheme in one pair of formats, on so many ranks. Bits include the scales.

    nats: the loss of the next byte; accuracy: how often the likeliest byte is the next. lost_nats:
    nats beyond those of bfloat16 on one rank, with its standard error. backend: of the experts,
    or of their products where the definition runs them.
    """

    scheme: str
    weight_format: str
    input_format: str
    ranks: int
    bits_per_weight: float
    backend: str
    nats: float
    accuracy: float
    lost_nats: float
    lost_error: float

    @property
    def key(self) -> tuple[Pair, int]:
        return (self.scheme, self.weight_format, self.input_format), self.ranks

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats)

    @property
    def lost(self) -> float:
        """By which share the perplexity is above that of bfloat16."""
        return math.expm1(self.lost_nats)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Score:
    """What was made of rows: the loss of each in nats, the mean over its bytes, and how often the
    likeliest byte was right."""

    nats_N: Tensor  # float64
    right_N: Tensor  # float64, shares

    @property
    def nats(self) -> float:
        return float(self.nats_N.mean())

    @property
    def accuracy(self) -> float:
        return float(self.right_N.mean())

    def beyond(self, other: Score) -> tuple[float, float]:
        """By how many nats this loss is larger, and the standard error of that."""
        more_N = self.nats_N - other.nats_N
        rows = len(more_N)
        return float(more_N.mean()), float(more_N.std() / rows**0.5) if rows > 1 else math.nan


@torch.inference_mode()
def score(model: Any, rows_NS: Tensor) -> Score:
    """What a model makes of rows. The first byte of a row is given, and not scored."""
    nats, right = [], []
    for ids_BS in rows_NS.split(BATCH):
        logits_BSV = model(input_ids=ids_BS, use_cache=False).logits[:, :-1].float()
        next_BS = ids_BS[:, 1:]
        chosen_BS = logits_BSV.log_softmax(-1).gather(-1, next_BS[..., None])[..., 0]
        nats.append(-chosen_BS.double().mean(-1).cpu())
        right.append((logits_BSV.argmax(-1) == next_BS).double().mean(-1).cpu())
    return Score(nats_N=torch.cat(nats), right_N=torch.cat(right))


def some_rows(trained: Trained, rows: int) -> Trained:
    """The model with so many of its rows, from all over its text."""
    step = max(1, len(trained.rows_NS) // rows)
    return replace(trained, rows_NS=trained.rows_NS[::step][:rows])


def default_pair(scheme: str) -> Pair:
    """The formats that `quantize_model` takes for a scheme."""
    from moe_ops.hf.quantize import DEFAULTS

    info = SCHEMES[scheme]
    return (scheme, *DEFAULTS.get(scheme, (info.weight_formats[0], info.input_formats[0])))


def pairs(schemes: Sequence[str], every: bool) -> list[Pair]:
    """Schemes with the formats that `quantize_model` takes, or with all that can be built."""
    if not every:
        return [default_pair(name) for name in schemes]
    return [(name, *formats) for name in schemes for formats in SCHEMES[name].pairs()]


def cells(
    trained: Trained, wanted: Sequence[Pair], device: torch.device, group: str = ""
) -> Generator[TaskCell]:
    """The cells of these pairs on the ranks of a group, as they are done; all ranks call this."""
    rows_NS, ranks = trained.rows_NS.to(device), Group.of(group).size
    plain, _ = in_formats(trained.model, ("none", "", ""), device)
    base = score(plain, rows_NS)
    for pair in wanted:
        model, bits = in_formats(trained.model, pair, device, group)
        found, ran = score_and_ran(model, rows_NS)
        scheme, weight_format, input_format = pair
        lost, error = found.beyond(base)
        yield TaskCell(
            scheme=scheme, weight_format=weight_format, input_format=input_format, ranks=ranks,
            bits_per_weight=bits, backend=ran, nats=found.nats,
            accuracy=found.accuracy, lost_nats=lost, lost_error=error,
        )  # fmt: skip


def score_and_ran(model: Any, rows_NS: Tensor) -> tuple[Score, str]:
    """The score, and which backend ran the experts, or their products."""
    found: list[Score] = []
    ran = backends_of(lambda: found.append(score(model, rows_NS)))
    whole = ran.get("experts", REFERENCE)
    return found[0], whole if whole != REFERENCE else ran.get("expert_gemm", REFERENCE)


def in_formats(model: Any, pair: Pair, device: torch.device, group: str = "") -> tuple[Any, float]:
    """A copy of the model on a device, its experts in the formats and this rank's alone, and the
    bits of a weight. Raises ValueError if the formats do not fit it."""
    from moe_ops.hf import optimize, quantize_model, share_experts

    scheme, weight_format, input_format = pair
    copied = copy.deepcopy(model).to(device)
    if group:
        share_experts(copied, group)
    if scheme == "none":
        return optimize(copied), 16.0
    report = quantize_model(
        copied, scheme, weight_format=weight_format, input_format=input_format, progress=False
    )
    if report.kept:
        raise ValueError(f"{scheme} does not fit the model: {report.kept[0]}")
    return copied, 16.0 * report.bytes_after / report.bytes_before


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What processes are given that share the experts: the file of the model, how many of its rows,
    and the type of device, of whose threads or GPUs each has its part."""

    path: Path
    rows: int
    device: str
    ranks: int


def over_ranks(shared: Shared, wanted: Sequence[Pair]) -> Generator[TaskCell]:
    """The cells of these pairs on as many processes with gloo, as they are done."""
    found = torch.multiprocessing.get_context("spawn").SimpleQueue()
    threads = max(1, torch.get_num_threads() // shared.ranks)
    with tempfile.TemporaryDirectory() as folder:
        given = (shared, wanted, f"file://{folder}/meeting", threads, found)
        running: Any = torch.multiprocessing.spawn(_rank, given, nprocs=shared.ranks, join=False)
        try:
            ended = False
            while not ended:
                ended = running.join(timeout=POLL)
                while not found.empty():
                    yield found.get()
        finally:
            for process in running.processes:
                process.terminate()


def _rank(
    rank: int, shared: Shared, wanted: Sequence[Pair], meeting: str, threads: int, found: Any
) -> None:
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", meeting, rank=rank, world_size=shared.ranks)
    device = torch.device(shared.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    model = some_rows(load(shared.path), shared.rows)
    world: Any = dist.group.WORLD
    for cell in cells(model, wanted, device, world.group_name):
        if rank == 0:
            found.put(cell)
    dist.destroy_process_group()

"""Expert parallelism on the ranks of this run: what collectives take, and layers over ranks.

    torchrun --nproc-per-node 2 -m moe_ops.bench ep --probe
    torchrun --nproc-per-node 2 -m moe_ops.bench ep --layer qwen3_30b --tokens 1,8,64,512
    torchrun --nproc-per-node 2 -m moe_ops.bench ep --part transport --modes push gather packed
    torchrun --nproc-per-node 2 -m moe_ops.bench ep --part shared --layer qwen3_30b

Modes take turns; "auto" is named with the transport that it picks. Ranks run everything as often as
each other, and the slowest one counts. On GPUs by NCCL, captured
in a CUDA graph where it can be; else by gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ops.bench import ep_shared
from moe_ops.bench.inputs import make_routed
from moe_ops.bench.tables import aligned
from moe_ops.bench.timing import Run, capture, time_turns
from moe_ops.ops import combine_tokens, dispatch_tokens, experts, experts_over_ranks, sum_ranks
from moe_ops.ranks import peers
from moe_ops.ranks.groups import Group, all_gather, all_reduce, all_to_all
from moe_ops.ranks.packed import pack
from moe_ops.ranks.transport import AUTO, EXCHANGE, GATHER, PUSH
from moe_ops.testing import LAYERS, Case
from moe_ops.using import using

UNPACKED = "unpacked"  # three all-gathers and a reduce-scatter, as many do it
PACKED = "packed"  # an all-gather of packed rows and a reduce-scatter, and nothing else
# What is measured, and how: a layer with its experts, tokens that go there and back, or a layer
# with shared experts and each of the two kinds alone.
LAYER, TRANSPORT, SHARED = "layer", "transport", "shared"
PARTS = {
    LAYER: (GATHER, EXCHANGE, PUSH, AUTO, UNPACKED),
    TRANSPORT: (GATHER, EXCHANGE, PUSH, PACKED),
    SHARED: ep_shared.WAYS,
}
MODES = tuple(dict.fromkeys(mode for modes in PARTS.values() for mode in modes))
ROUNDS = 16  # of a captured transport: what is between two replays must not show
SUMS = (PUSH, "all_reduce")  # backends of `sum_ranks`
PROBED = (2**11, 2**17, 2**20, 2**24, 2**26)  # bytes of a rank
REPEATS = {"cuda": 200, "cpu": 10}

Tensors = tuple[Tensor, ...]
Weights = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Microseconds of the slowest rank: the median, and the quartiles around it."""

    what: str  # a collective, or a layer
    how: str  # the mode, or the kind of experts
    size: int  # bytes, or tokens of each rank
    us: float
    low_us: float
    high_us: float
    captured: bool
    taken: str = ""  # the transport, where "auto" picked it


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A call, how often a captured graph makes it (0: it cannot be captured), and the transport
    that was picked, if the call left that open."""

    run: Callable[[], Any]
    rounds: int = 1
    taken: str = ""


@contextmanager
def world() -> Iterator[torch.device]:
    """The process group of this run, and this rank's device."""
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        device = torch.device("cpu")
        if on_gpu:
            device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
            torch.cuda.set_device(device)
        yield device
    finally:
        dist.destroy_process_group()


@torch.inference_mode()
def probe(device: torch.device) -> list[Spent]:
    """What collectives take by the bytes that each rank gives."""
    group, found = _world_group(), []
    each = [1] * group.size
    for size in PROBED:
        given = torch.zeros(group.size, size // group.size, dtype=torch.uint8, device=device)
        calls: dict[str, Callable[[], Any]] = {
            "all_gather": partial(all_gather, given, group),
            "all_to_all": partial(all_to_all, given, each, each, group),
            "all_reduce": partial(all_reduce, given, group),
        }
        for name, run in calls.items():
            found += _in_turns(name, size, {"": Timed(run=run)}, device)
    return [*found, *_sums(device, group)]


def _sums(device: torch.device, group: Group) -> list[Spent]:
    """What `sum_ranks` takes on GPUs, by stores to the others as far as there is memory, and by an
    all-reduce; one right after the other, as in a model."""
    if device.type != "cuda":
        return []
    peers.connect(group.name, device)
    found = []

    def summed(how: str, part_TD: Tensor) -> Tensor:
        with using(how, sum_ranks):
            return sum_ranks(part_TD, group.name)

    for size in PROBED:
        part_TD = torch.ones(size // 256, 128, dtype=torch.bfloat16, device=device)
        refusals = sum_ranks.refusals(part_TD, group.name)
        found += _in_turns("sum_ranks", size, {
            how: Timed(run=partial(summed, how, part_TD), rounds=ROUNDS)
            for how in SUMS if refusals[how] is None
        }, device)  # fmt: skip
    return found


@torch.inference_mode()
def measure(
    layers: Sequence[str],
    tokens: Sequence[int],
    modes: Sequence[str] | None,
    device: torch.device,
    part: str = LAYER,
) -> list[Spent]:
    """Layers of a share of the experts on each rank, or their tokens there and back, by mode and by
    tokens of a rank; without modes by all that the device has."""
    if modes is None:
        modes = [m for m in PARTS[part] if m != PUSH or device.type == "cuda"]
    found = []
    for name in layers:
        case = LAYERS[name]
        held = _weights(case, device) if part == LAYER else None
        for T in tokens:
            calls = [_call(case, T, mode, part, device, held) for mode in modes]
            what = name if part == LAYER else f"{name} {part}"
            found += _in_turns(what, T, dict(zip(modes, calls, strict=True)), device)
    return found


def _call(
    case: Case, T: int, mode: str, part: str, device: torch.device, held: Weights | None
) -> Timed:
    if part == SHARED:
        return Timed(run=ep_shared.call(case, T, mode, device), rounds=ROUNDS)
    if part == TRANSPORT:
        rounds = 0 if mode == EXCHANGE else ROUNDS
        return Timed(run=_transport(case, T, mode, device), rounds=rounds)
    assert held is not None
    run, taken = _layer(case, T, mode, held)
    return Timed(run=run, rounds=0 if taken == EXCHANGE else 1, taken=taken if mode == AUTO else "")


def table(found: Sequence[Spent]) -> str:
    """One line for each; rates are those of the bytes that a rank gives."""
    rows = [("what", "mode", "size", "us", "quartiles", "GB/s", "captured")]
    for s in found:
        rate = "-" if s.how else f"{s.size / s.us / 1e3:.1f}"
        quartiles = f"{s.low_us:.1f} to {s.high_us:.1f}"
        captured = "yes" if s.captured else "no"
        how = f"{s.how} ({s.taken})" if s.taken else s.how
        rows.append((s.what, how or "-", str(s.size), f"{s.us:.1f}", quartiles, rate, captured))
    return aligned(rows)


def _world_group() -> Group:
    assert dist.group.WORLD is not None
    return Group.of(dist.group.WORLD.group_name)


def _weights(case: Case, device: torch.device) -> Weights:
    """This rank's experts. Raises ValueError for a number that does not divide among the ranks."""
    R = dist.get_world_size()
    if case.E % R:
        raise ValueError(f"{case.name} has {case.E} experts, which do not divide among {R} ranks")
    each, dtype = case.E // R, torch.bfloat16
    w13 = torch.empty(each, 2 * case.I, case.D, dtype=dtype, device=device).normal_(std=0.02)
    w2 = torch.empty(each, case.D, case.I, dtype=dtype, device=device).normal_(std=0.02)
    return w13, w2


def _own(case: Case, T: int, device: torch.device) -> tuple[Tensors, Tensors]:
    """Tokens of this rank's own, with weights and ids, and the tables of who serves an expert."""
    R, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator(device).manual_seed(rank)
    routed = make_routed(case, T, "uniform", torch.bfloat16, generator)
    sent = (routed.x_TD, routed.weights_TK, routed.ids_TK.to(torch.int32))
    ids = torch.arange(case.E, dtype=torch.int32, device=device)
    each = case.E // R
    return sent, ((ids // each).to(torch.int32), (ids % each).to(torch.int32))


def _reduce_scatter(part_GD: Tensor, group: Group) -> Tensor:
    functional = torch.ops._c10d_functional
    begun = functional.reduce_scatter_tensor(part_GD, "sum", group.size, group.name)
    out_TD: Tensor = functional.wait_tensor(begun)
    return out_TD


def _transport(case: Case, T: int, mode: str, device: torch.device) -> Callable[[], Tensor]:
    """Tokens of this rank's own there and back, whose experts give them back as they are."""
    (x_TD, weights_TK, ids_TK), tables = _own(case, T, device)
    group = _world_group()

    def there_and_back() -> Tensor:
        x_GD, _, _, _, *handle = dispatch_tokens(
            x_TD, weights_TK, ids_TK, *tables, T, group.name, collective=mode
        )
        return combine_tokens(x_GD, ids_TK, *tables, *handle, T, group.name, mode)

    packed_TB = pack((x_TD, weights_TK, ids_TK))
    made_GD = x_TD.repeat(group.size, 1)

    def packed() -> Tensor:
        all_gather(packed_TB, group)
        return _reduce_scatter(made_GD, group)

    return packed if mode == PACKED else there_and_back


def _layer(case: Case, T: int, mode: str, held: Weights) -> tuple[Callable[[], Tensor], str]:
    """A call of a mode on tokens of this rank's own, and the transport that it takes."""
    sent, tables = _own(case, T, held[0].device)
    group = _world_group()
    if mode != UNPACKED:
        args = (*sent, *held, *tables, T, group.name, mode)
        if mode == AUTO:
            experts_over_ranks(*args)  # ranks learn whether they reach each other
            mode = experts_over_ranks.pick(experts_over_ranks.call(*args)).name
        return lambda: experts_over_ranks(*args), mode
    here_E = torch.where(tables[0] == group.rank, tables[1], -1)

    def unpacked() -> Tensor:
        part_GD = experts(*(all_gather(t, group) for t in sent), *held, expert_map=here_E)
        return _reduce_scatter(part_GD, group)

    return unpacked, mode


def _in_turns(
    what: str, size: int, calls: Mapping[str, Timed], device: torch.device
) -> list[Spent]:
    """What each of the calls, by how they do it, takes on the slowest rank."""
    on_gpu = device.type == "cuda"
    runs = [_captured(c.run, c.rounds) if on_gpu and c.rounds else c.run for c in calls.values()]
    found = []
    timings = time_turns(runs, REPEATS[device.type], device)
    for (how, call), timing in zip(calls.items(), timings, strict=True):
        captured = on_gpu and call.rounds > 0
        spans = torch.tensor([timing.us, timing.low_us, timing.high_us], device=device)
        spans /= call.rounds if captured else 1
        dist.all_reduce(spans, dist.ReduceOp.MAX)
        us, low, high = spans.tolist()
        found.append(
            Spent(
                what=what, how=how, size=size, us=us, low_us=low, high_us=high, captured=captured,
                taken=call.taken,
            )
        )  # fmt: skip
    return found


def _captured(run: Callable[[], Any], rounds: int) -> Run:
    for _ in range(3):
        run()
    replay, _ = capture([run], rounds)
    return replay

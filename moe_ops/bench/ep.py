"""Expert parallelism on the ranks of this run: what collectives take, and layers over ranks.

    torchrun --nproc-per-node 2 -m moe_ops.bench ep --probe
    torchrun --nproc-per-node 2 -m moe_ops.bench ep --layer qwen3_30b --tokens 1,8,64,512
    torchrun --nproc-per-node 2 -m moe_ops.bench ep --modes push batched --tokens 8,32,64,128
    torchrun --nproc-per-node 2 -m moe_ops.bench ep --part transport --modes push gather packed
    torchrun --nproc-per-node 2 -m moe_ops.bench ep --part transport --modes vdev2d packed pairs
    torchrun --nproc-per-node 2 -m moe_ops.bench ep --part shared --layer qwen3_30b

With `--routing zipf` some experts, and their ranks, are popular.
With `--x-format float8_e4m3fn:1x128` tokens are quantised and travel as codes, but for those of
"unpacked", which sends floats. Modes take turns;
"auto" is named with the transport that it picks. Ranks run everything as often as each other, and
the slowest one counts. On GPUs by NCCL, captured in a CUDA graph where it can be; else by gloo.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ops.bench import ep_batched, ep_shared
from moe_ops.bench.ep_peers import PACKED, PAIRS, PEERS, VDEV2D, Own, peer, reduce_scatter
from moe_ops.bench.inputs import make_routed, make_weights
from moe_ops.bench.tables import aligned
from moe_ops.bench.timing import Run, capture, time_turns
from moe_ops.ops import (
    combine_tokens,
    dispatch_tokens,
    experts,
    experts_over_ranks,
    quantize,
    sum_ranks,
)
from moe_ops.ops.experts_over_ranks import ExpertsOverRanksCall
from moe_ops.quant.config import QuantConfig
from moe_ops.ranks import peers
from moe_ops.ranks.groups import Group, all_gather, all_reduce, all_to_all
from moe_ops.ranks.transport import AUTO, EXCHANGE, GATHER, PUSH
from moe_ops.registry.using import using
from moe_ops.testing import Case

UNIFORM = "uniform"  # the routing that goes without saying
UNPACKED = "unpacked"  # three all-gathers and a reduce-scatter, as many do it
BATCHED = "batched"  # push with rows in batches; gather on CPUs
# What is measured, and how: a layer with its experts, tokens that go there and back, or a layer
# with shared experts and each of the two kinds alone.
LAYER, TRANSPORT, SHARED = "layer", "transport", "shared"
PARTS = {
    LAYER: (GATHER, EXCHANGE, PUSH, AUTO, UNPACKED, BATCHED),
    TRANSPORT: (GATHER, EXCHANGE, PUSH, PACKED, PAIRS, VDEV2D),
    SHARED: ep_shared.WAYS,
}
# Not among all modes of a part: it needs a run without push.
APART = (VDEV2D,)
NOT_CAPTURED = (EXCHANGE, PAIRS)
MODES = tuple(dict.fromkeys(mode for modes in PARTS.values() for mode in modes))
# Of a captured transport, as what is between two replays must not show; fewer of more tokens.
ROUNDS, SHORT = 16, 512
# Weights that go with inputs that travel as codes.
W_FORMATS = {
    "float8_e4m3fn:1x128": "float8_e4m3fn:128x128",
    "float8_e4m3fn:row": "float8_e4m3fn:row",
    "int8:row": "int8:row",
}
SUMS = (PUSH, "all_reduce")  # backends of `sum_ranks`
PROBED = (2**11, 2**17, 2**20, 2**24, 2**26)  # bytes of a rank
Made = TypeVar("Made")
REPEATS = {"cuda": 200, "cpu": 10}


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
    """A call, or a replay of so many calls in a graph, and the transport that "auto" picked."""

    run: Run
    call: Callable[[], Any]  # which holds the tensors that a graph reads
    calls: int = 0  # of a graph; 0: it is no graph
    taken: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """T tokens of each rank, whose experts are chosen by a routing of the benches, and how they are
    measured; tokens are quantised to x_format, if it is given."""

    case: Case
    T: int
    part: str = LAYER
    routing: str = UNIFORM
    x_format: str = ""

    @property
    def what(self) -> str:
        """The name of a cell without its number of tokens."""
        part = "" if self.part == LAYER else self.part
        routing = "" if self.routing == UNIFORM else self.routing
        return " ".join(filter(None, (self.case.name, part, routing, self.x_format)))


@contextmanager
def world() -> Iterator[torch.device]:
    """The process group of this run, and this rank's device."""
    on_gpu = torch.cuda.is_available()
    try:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    except ValueError as error:  # no variable says which rank this is
        raise SystemExit(
            f"{error}; start it by torchrun --nproc-per-node 2 -m moe_ops.bench ep, or take "
            "--simulate"
        ) from error
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    yield device
    # Not after an error, whose traceback holds graphs: NCCL waits for those that hold its
    # collectives, for ever.
    gc.collect()
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
            found += _in_turns(name, size, {"": _graph(run, 1, device)}, device)
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
            out_TD: Tensor = sum_ranks(part_TD, group.name)
        return out_TD

    for size in PROBED:
        part_TD = torch.ones(size // 256, 128, dtype=torch.bfloat16, device=device)
        refusals = sum_ranks.refusals(part_TD, group.name)
        ways = [how for how in SUMS if refusals[how] is None]
        calls = {how: _graph(partial(summed, how, part_TD), ROUNDS, device) for how in ways}
        found += _in_turns("sum_ranks", size, calls, device)
    return found


@torch.inference_mode()
def measure(
    cells: Sequence[Cell], modes: Sequence[str] | None, device: torch.device
) -> list[Spent]:
    """Layers of a share of the experts on each rank, or their tokens there and back, by mode;
    without modes by all that the device has. What a mode cannot run is said, and left out."""
    found = []
    for _, alike in itertools.groupby(cells, lambda cell: (cell.part, cell.case, cell.x_format)):
        held: dict[str, Any] | None = None  # so that others are gone before these are made
        for cell in alike:
            if cell.part == LAYER and held is None:
                held = weights_of(cell, device)
            calls: dict[str, Timed] = {}
            for mode in modes_of(cell, device) if modes is None else modes:
                made = _of_mode(mode, cell, device, held)
                calls |= {} if made is None else {mode: made}
            found += _in_turns(cell.what, cell.T, calls, device)
            calls.clear()  # whose graphs hold the weights, before others are made
    return found


def modes_of(cell: Cell, device: torch.device) -> list[str]:
    """All modes of a cell's part that a device can run together."""
    left_out = {
        *APART,
        *(() if device.type == "cuda" else (PUSH,)),
        *(PEERS if cell.x_format else ()),
    }
    return [m for m in PARTS[cell.part] if m not in left_out]


def _of_mode(
    mode: str, cell: Cell, device: torch.device, held: dict[str, Any] | None
) -> Timed | None:
    """A call of a mode, eager if it cannot be captured; None if it cannot run."""
    make: Callable[[], Callable[[], Tensor]]
    if cell.part == SHARED:
        make = partial(ep_shared.call, cell.case, cell.T, mode, device, cell.routing)
    elif cell.part == TRANSPORT:
        make = partial(transport, cell, mode, device)
    else:
        assert held is not None, "layers have weights"
        make = partial(layer_call, cell, mode, held)
    named = f"{cell.what} by {mode} of {cell.T} tokens"
    # Made by all before any runs it, as a rank that could not would be waited for.
    run = _tried(make, f"{named}: left out", device)
    ran = None if run is None else _tried(partial(_ran, run, device), f"{named}: left out", device)
    if run is None or ran is None:
        return None
    taken = ""
    if mode == AUTO and held is not None:
        taken = experts_over_ranks.pick(layer_arguments(cell, mode, held)).name
    if (taken or mode) in NOT_CAPTURED:
        return Timed(run=run, call=run, taken=taken)
    rounds = 1 if cell.part == LAYER else max(1, min(ROUNDS, ROUNDS * SHORT // cell.T))
    graph = partial(_graph, run, rounds, device, taken)
    return _tried(graph, f"{named}: not captured", device) or Timed(run=run, call=run, taken=taken)


def _ran(run: Callable[[], Tensor], device: torch.device) -> Tensor:
    out = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return out


def _tried(make: Callable[[], Made], what: str, device: torch.device) -> Made | None:
    """What all ranks could make; None where one or another could not, which is said."""
    made, reason = None, "another rank could not"
    try:
        made = make()
    except Exception as error:  # whatever a contender raises: the others go on
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    failed = torch.tensor(float(made is None), device=device)
    dist.all_reduce(failed, dist.ReduceOp.MAX)
    if failed.item() and dist.get_rank() == 0:
        print(f"{what}: {reason}", flush=True)
    return None if failed.item() else made


def table(found: Sequence[Spent]) -> str:
    """A table with one line for each measurement. Rates count the bytes that a rank gives."""
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


def weights_of(cell: Cell, device: torch.device) -> dict[str, Any]:
    """This rank's experts, of a format that goes with its tokens' one; arguments of `experts` by
    name. Raises ValueError for a number that does not divide among the ranks."""
    R, case, x_format = dist.get_world_size(), cell.case, cell.x_format
    if case.E % R:
        raise ValueError(f"{case.name} has {case.E} experts, which do not divide among {R} ranks")
    quant = QuantConfig(weights=W_FORMATS[x_format], inputs=x_format) if x_format else None
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    made = make_weights(replace(case, E=case.E // R), torch.bfloat16, generator, quant)
    return {"w13_EFD": made.w13_EFD, "w2_EDI": made.w2_EDI, **made.keywords}


Tensors = tuple[Tensor, Tensor]


def own_of(cell: Cell, device: torch.device) -> tuple[Own, Tensors]:
    """Tokens of this rank's own, with weights and ids, and the tables of who serves an expert."""
    group, case = _world_group(), cell.case
    generator = torch.Generator(device).manual_seed(group.rank)
    routed = make_routed(case, cell.T, cell.routing, torch.bfloat16, generator)
    own = Own(
        x_TD=routed.x_TD, weights_TK=routed.weights_TK, ids_TK=routed.ids_TK.to(torch.int32),
        experts=case.E, group=group,
    )  # fmt: skip
    ids = torch.arange(case.E, dtype=torch.int32, device=device)
    each = case.E // group.size
    return own, ((ids // each).to(torch.int32), (ids % each).to(torch.int32))


def transport(cell: Cell, mode: str, device: torch.device) -> Callable[[], Tensor]:
    """Tokens of this rank's own there and back, whose experts give them back as they are; where
    they travel as codes, other rows of their width."""
    own, tables = own_of(cell, device)
    if mode in PEERS:
        return peer(mode, own)
    x_TD, group, T, x_format = own.x_TD, own.group, cell.T, cell.x_format

    def there_and_back() -> Tensor:
        q_TD, scale_TS = quantize(x_TD, x_format) if x_format else (x_TD, None)
        x_GD, _, _, _, *handle = dispatch_tokens(
            q_TD, own.weights_TK, own.ids_TK, *tables, T, group.name, scale_TS, mode
        )
        y_GD = x_TD.new_empty(x_GD.shape) if x_format else x_GD
        return combine_tokens(y_GD, own.ids_TK, *tables, *handle, T, group.name, mode)

    return there_and_back


def layer_arguments(cell: Cell, mode: str, held: dict[str, Any]) -> ExpertsOverRanksCall:
    """A layer on tokens of this rank's own."""
    own, tables = own_of(cell, held["w13_EFD"].device)
    sent = (own.x_TD, own.weights_TK, own.ids_TK)
    weights = (held["w13_EFD"], held["w2_EDI"])
    more = {name: value for name, value in held.items() if name not in ("w13_EFD", "w2_EDI")}
    return experts_over_ranks.call(*sent, *weights, *tables, cell.T, own.group.name, mode, **more)


def layer_call(cell: Cell, mode: str, held: dict[str, Any]) -> Callable[[], Tensor]:
    """A function that runs the layer of a cell in one mode."""
    if mode == BATCHED:
        return ep_batched.call(layer_arguments(cell, GATHER, held))
    if mode != UNPACKED:
        args = experts_over_ranks.arguments.flat(layer_arguments(cell, mode, held))
        return lambda: experts_over_ranks(*args)
    own, tables = own_of(cell, held["w13_EFD"].device)
    here_E = torch.where(tables[0] == own.group.rank, tables[1], -1)

    def unpacked() -> Tensor:
        gathered = (all_gather(t, own.group) for t in (own.x_TD, own.weights_TK, own.ids_TK))
        x_GD, weights_GK, ids_GK = gathered
        part_GD = experts(x_GD, weights_GK, ids_GK, expert_map=here_E, **held)
        return reduce_scatter(part_GD, own.group)

    return unpacked


def _in_turns(
    what: str, size: int, calls: Mapping[str, Timed], device: torch.device
) -> list[Spent]:
    """What each of the calls takes on the slowest rank, by how they do it."""
    timings = time_turns([c.run for c in calls.values()], REPEATS[device.type], device)
    found = []
    for (how, call), timing in zip(calls.items(), timings, strict=True):
        spans = torch.tensor([timing.us, timing.low_us, timing.high_us], device=device)
        spans /= max(1, call.calls)
        dist.all_reduce(spans, dist.ReduceOp.MAX)
        us, low, high = spans.tolist()
        found.append(
            Spent(
                what=what, how=how, size=size, us=us, low_us=low, high_us=high,
                captured=call.calls > 0, taken=call.taken,
            )
        )  # fmt: skip
    return found


def _graph(run: Callable[[], Any], rounds: int, device: torch.device, taken: str = "") -> Timed:
    """A graph of so many calls on a GPU; the call elsewhere."""
    if device.type != "cuda":
        return Timed(run=run, call=run, taken=taken)
    return Timed(run=_captured(run, rounds), call=run, calls=rounds, taken=taken)


def _captured(run: Callable[[], Any], rounds: int) -> Run:
    for _ in range(3):
        run()
    replay, _ = capture([run], rounds)
    return replay

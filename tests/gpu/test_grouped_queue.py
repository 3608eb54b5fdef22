"""The queue of tiles of the grouped products: every tile once, the same bits whoever takes it."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moe_ops.kernels.triton import Act
from moe_ops.kernels.triton.experts.products import grouped
from moe_ops.kernels.triton.experts.schedule.sort import sort_pairs
from moe_ops.kernels.triton.experts.schedule.tile_map import TileMap, tile_map
from moe_ops.kernels.triton.experts.weights import Experts
from moe_ops.testing import BF16, TOL, Case, assert_close
from tests.gpu.captures import captured
from tests.kernels.gated import grouped_gated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="the queue is part of the kernel for Hopper",
    ),
]

ACT = Act("silu")

# Fewer tiles than processors, and less than half as many; one step of a draw ahead of the next;
# a wave and a bit; waves of few rows an expert; many waves.
CASES = (
    Case(name="few_tiles", T=300, E=4, K=2, D=512, I=512),
    Case(name="fewest_steps", T=3000, E=16, K=4, D=208, I=208),
    Case(name="a_wave_and_a_bit", T=1024, E=8, K=2, D=256, I=2048),
    Case(name="few_rows", T=1024, E=128, K=8, D=512, I=384),
    Case(name="many_waves", T=8192, E=64, K=8, D=1024, I=256),
)
HANG = 600  # seconds, after which a test is given up
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def experts_of(case: Case) -> Experts:
    def normal(*shape: int, std: float) -> Tensor:
        return torch.empty(*shape, device="cuda", dtype=BF16).normal_(std=std)

    return Experts(
        w13_EFD=normal(case.E, 2 * case.I, case.D, std=case.D**-0.5),
        w2_EDI=normal(case.E, case.D, case.I, std=case.I**-0.5),
        b13_EF=None, b2_ED=None, transposed=False, act=ACT,
    )  # fmt: skip


def routings(case: Case) -> Iterator[tuple[str, Tensor]]:
    """Ids of experts: even and uneven, all on one, nobody, and tiles of 1 to 66 rows."""
    T, E, K = case.T, case.E, case.K
    nobody = torch.full((T, K), -1, device="cuda", dtype=torch.int32)
    yield "uniform", torch.rand(T, E, device="cuda").topk(K).indices.int()
    chances = 1.0 / torch.arange(1, E + 1, device="cuda").square()
    chances[1::4] = 1e-9
    yield "uneven", torch.multinomial(chances.expand(T, E), K).int()
    one = nobody.clone()
    one[:, 0] = E - 1
    yield "one", one
    some = torch.rand(T, E, device="cuda").topk(K).indices.int()
    yield "some", some.where(torch.rand(T, K, device="cuda") < 0.3, -1)
    rows = 128 * (T * K // (256 * E)) + torch.randint(1, 67, (E,), device="cuda")
    ids = torch.arange(E, device="cuda").repeat_interleave(rows)[: T * K]
    ids = torch.cat([ids, ids.new_full((T * K - ids.numel(),), -1)])
    yield "halves", ids[torch.randperm(T * K, device="cuda")].view(T, K).int()
    yield "nobody", nobody


def definition(x: Tensor, weights: Tensor, ids: Tensor, layer: Experts) -> Tensor:
    out = torch.zeros(x.shape, device="cuda")
    for e in range(layer.w13_EFD.shape[0]):
        t, k = (ids == e).nonzero(as_tuple=True)
        if t.numel():
            gate, up = (x[t].float() @ layer.w13_EFD[e].float().T).chunk(2, -1)
            y = (torch.nn.functional.silu(gate) * up) @ layer.w2_EDI[e].float().T
            out.index_add_(0, t, y * weights[t, k, None])
    return out


def inputs_of(case: Case) -> tuple[Tensor, Tensor, Experts]:
    x = torch.randn(case.T, case.D, device="cuda", dtype=BF16)
    return x, torch.rand(case.T, case.K, device="cuda"), experts_of(case)


@pytest.fixture(autouse=True)
def no_hang(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel that hangs cannot be stopped: say what is known, and end the process."""
    tables: list[Tensor] = []
    heads = torch.empty(8, 3, dtype=torch.int32, pin_memory=True).fill_(-1)
    stream = torch.cuda.Stream()

    def recording(ends_E: Tensor, rows: int, block_m: int) -> TileMap:
        tiles = tile_map(ends_E, rows, block_m)
        tables.append(tiles.table)
        return tiles

    def hung() -> None:
        with torch.cuda.stream(stream):
            for head, table in zip(heads, tables[-len(heads) :], strict=False):
                head.copy_(table[0, :3], non_blocking=True)
        stopped.wait(2)
        capture = request.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            print(f"\n{request.node.nodeid} did not end in {HANG} s")
            print("row tiles, long ones, counter of the last tables:", heads.tolist(), flush=True)
            faulthandler.dump_traceback(os.dup(1))
            os._exit(3)

    monkeypatch.setattr(grouped, "tile_map", recording)
    stopped = threading.Event()
    timer = threading.Timer(HANG, hung)
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()
    stopped.set()


@each_case
@pytest.mark.parametrize("busy", [False, True], ids=["alone", "beside_others"])
def test_fifty_replays_of_every_routing_give_the_same_bits(case: Case, busy: bool) -> None:
    x, weights, layer = inputs_of(case)
    every = dict(routings(case))
    ids = every["uniform"].clone()

    def call() -> Tensor:
        return grouped.run(x, weights, ids, layer, None, wgmma=(True, True))

    call()
    torch.cuda.synchronize()
    graph, outs = captured(lambda: [call(), call()])
    others, a = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    firsts: dict[str, Tensor] = {}
    for repeat in range(50):
        for name, chosen in every.items():
            ids.copy_(chosen)
            for out in outs:
                out.fill_(float("nan"))
            if busy:
                # Products that hold some of the processors, for longer the later.
                others.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(others):
                    for _ in range(repeat % 4):
                        torch.mm(a, a[:, : 128 * (1 + repeat % 13)])
            graph.replay()
            for out in outs:
                assert torch.equal(out, firsts.setdefault(name, out.clone())), name
    for name, chosen in every.items():
        want = definition(x, weights, chosen, layer)
        assert_close(firsts[name], want, TOL["experts", BF16], name)
    torch.cuda.synchronize()


@each_case
def test_a_product_leaves_the_queue_as_it_was(case: Case) -> None:
    x, _, layer = inputs_of(case)
    for name, ids in routings(case):
        rows, _, ends = sort_pairs(ids, case.E, None)
        block_m = grouped.tile_rows(x, ids.numel(), layer.w13_EFD, True)
        tiles = grouped.tile_map(ends, ids.numel(), block_m)
        used = int(ends[-1])
        firsts: list[Tensor] = []
        for _ in range(3):
            h = grouped_gated(
                x, rows, ends, layer.w13_EFD, None, case.K, ACT, tiles=tiles, wgmma=True
            )  # fmt: skip
            assert int(tiles.table[0, 2]) == 0, name
            y = grouped.grouped_rows(h, ends, layer.w2_EDI, None, tiles=tiles, wgmma=True)
            assert int(tiles.table[0, 2]) == 0, name
            firsts = firsts or [h, y]
            for one, first in zip((h, y), firsts, strict=True):
                assert one[:used].isfinite().all() and torch.equal(one[:used], first[:used]), name

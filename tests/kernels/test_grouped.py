"""The grouped products, small and odd, against float32 torch."""

import itertools
from collections import Counter
from dataclasses import astuple
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from moe_ops.kernels.triton import Act, Weight
from moe_ops.kernels.triton.experts.products import grouped_blocks, grouped_wgmma
from moe_ops.kernels.triton.experts.products.grouped import grouped_rows
from moe_ops.kernels.triton.experts.products.grouped_plain import config_for
from moe_ops.kernels.triton.experts.products.grouped_wgmma import Scaling
from moe_ops.kernels.triton.experts.schedule import tile_scheduler
from moe_ops.kernels.triton.experts.schedule.tile_map import GROUP, tile_map
from moe_ops.ops.activate import activate
from moe_ops.testing import DEVICE
from tests.chosen import in_turn
from tests.kernels.gated import grouped_gated
from tests.kernels.gluon_in_torch import LANGUAGE, pointer, value

# kind, gated, interleaved, alpha, limit, up_shift
SWIGLU = Act("silu")
GPT_OSS = Act("silu", True, True, 1.702, 7.0, 1.0)
UNGATED = Act("relu2", gated=False)
ACTS = {"silu": SWIGLU, "gpt_oss": GPT_OSS, "relu2": UNGATED}
each_act = pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
COUNTS = (0, 5, 0, 70, 1, 33)  # rows of each expert
UNUSED = 6  # rows of no expert


def inputs(counts=COUNTS, tokens=23, D=40, I=24, gated=True, bias=False, dtype=torch.float32):  # noqa: E741
    generator = torch.Generator().manual_seed(0)

    def randn(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)

    E, used, F = len(counts), sum(counts), 2 * I if gated else I
    pairs = torch.randint(0, 2 * tokens, (used,), generator=generator, dtype=torch.int32)
    rows = torch.cat([pairs, pairs.new_full((UNUSED,), -1)]).to(DEVICE)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32).to(DEVICE)
    b13, b2 = (randn(E, F), randn(E, D)) if bias else (None, None)
    w13, w2 = randn(E, F, D, scale=D**-0.5), randn(E, D, I, scale=I**-0.5)
    return randn(tokens, D), rows, ends, w13, b13, w2, b2


def by_expert(a, ends, w, bias):
    """W[e] @ a[r] + bias[e] in float32, for the rows of every expert."""
    out = a.new_full((a.shape[0], w.shape[1]), torch.nan, dtype=torch.float32)
    start = 0
    for e, end in enumerate(ends.tolist()):
        y = a[start:end].float() @ w[e].float().T
        out[start:end] = y if bias is None else y + bias[e].float()
        start = end
    return out[:start]


def transposed(w):
    return w.mT.contiguous().mT


def check(act, layout=lambda w: w, **kw):
    gated, tolerance = act.gated, 1e-2 if kw.get("dtype") else 1e-5
    x, rows, ends, w13, b13, w2, b2 = inputs(gated=gated, **kw)
    used = int(ends[-1])
    h = grouped_gated(x, rows, ends, layout(w13), b13, 2, act)
    expected = activate(by_expert(x[rows.long() // 2], ends, w13, b13), *astuple(act))
    torch.testing.assert_close(h[:used].float(), expected, atol=tolerance, rtol=tolerance)
    y = grouped_rows(h, ends, layout(w2), b2)
    expected = by_expert(h, ends, w2, b2)
    torch.testing.assert_close(y[:used].float(), expected, atol=tolerance, rtol=tolerance)
    return h, y


@pytest.mark.parametrize("bias", [False, True])
@each_act
def test_products(act, bias):
    check(act, bias=bias)


def test_rows_of_no_expert_stay_unwritten():
    h, y = check(SWIGLU)
    assert h[-UNUSED:].isnan().all() and y[-UNUSED:].isnan().all()


def test_transposed_weights():
    check(SWIGLU, transposed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision(dtype):
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as integers")
    check(GPT_OSS, bias=True, dtype=dtype, D=72, I=40)


@pytest.mark.parametrize("counts", [(0, 0, 0), (130,), (0, 0, 64)])
def test_all_rows_or_none(counts):
    check(SWIGLU, counts=counts)


def test_no_rows_at_all():
    x, rows, ends, w13, *_ = inputs(counts=(0,))
    assert grouped_gated(x, rows[:0], ends, w13, None, 2, SWIGLU).shape == (0, 24)


def test_the_tile_map_covers_every_row_once():
    counts, block_m = (0, 40 * 16, 3, 0, 16, 17, 25), 16
    ends = torch.tensor(counts).cumsum(0).to(torch.int32).to(DEVICE)
    tiles = tile_map(ends, int(ends[-1]) + UNUSED, block_m)
    total, longs, counter = tiles.table[0, :3].tolist()
    assert total == sum(-(-n // block_m) for n in counts) <= tiles.capacity
    assert counter == 0
    entries = tiles.table[1 : 1 + total, :5].tolist()
    covered, heights = [], []
    for tile, (expert, first_row, end, group, size) in enumerate(entries):
        assert group <= tile < group + size and 1 <= size <= GROUP
        start = first_row + (tile - group) * block_m
        heights.append(min(block_m, end - start))
        assert end == ends[expert] and heights[-1] > 0
        covered += range(start, start + heights[-1])
    assert sorted(covered) == list(range(sum(counts)))
    assert longs == sum(n > block_m // 2 for n in heights)


def test_the_tile_map_of_slots():
    """Counts past the slots are all of them, and those below none are none."""
    slots, counts, block_m = 40, (3, 0, 55, 40, -7, 16), 16
    tiles = tile_map(torch.tensor(counts, dtype=torch.int32, device=DEVICE), 240, block_m, slots)
    total, longs, _ = tiles.table[0, :3].tolist()
    rows = {}
    for tile, (e, first, end, group, _) in enumerate(tiles.table[1 : 1 + total, :5].tolist()):
        start = first + (tile - group) * block_m
        rows.setdefault(e, []).extend(range(start, min(end, start + block_m)))
    used = {e: min(count, slots) for e, count in enumerate(counts) if count > 0}
    assert rows == {e: [*range(e * slots, e * slots + n)] for e, n in used.items()}
    assert (total, longs) == (1 + 3 + 3 + 1, 2 + 2 + 1) and total <= tiles.capacity


@pytest.mark.parametrize(
    "ends",
    [
        [-1, 20, 50],
        [20, 51, 51],
        [20, 2**31 - 1, 50],
        [-(2**31), -9, 50],
        [50, 0, 50, 0, 50, 0, 50],
    ],
)
def test_wrong_ends_make_no_tile_outside_the_rows_or_the_table(ends):
    rows, block_m = 50, 16
    with patch.object(torch, "empty", guarded_empty):
        tiles = tile_map(torch.tensor(ends, dtype=torch.int32, device=DEVICE), rows, block_m)
    total, longs, _ = tiles.table[0, :3].tolist()
    assert 0 <= longs <= total <= tiles.capacity
    entries = tiles.table[1 : 1 + total, :5].tolist()
    for tile, (expert, first_row, end, group, size) in enumerate(entries):
        assert 0 <= expert < len(ends) and 0 <= group <= tile < group + size
        assert 0 <= first_row + (tile - group) * block_m < end <= rows
    behind = torch.as_strided(tiles.table, (GUARD,), (1,), tiles.table.numel())
    assert bool((behind == 7).all())


GUARD = 4096


def guarded_empty(*shape, **kw):
    """Memory with sevens behind it."""
    size = shape[0] * shape[1]
    return torch.full((size + GUARD,), 7, **kw)[:size].view(shape)


def queued(tiles, n_tiles, blocks, block_m):
    """What the items of the warp-specialised kernel's queue are, by the kernel's own functions."""
    table = tiles.table.flatten().tolist()
    fake = SimpleNamespace(
        load=table.__getitem__,
        where=lambda condition, yes, no: yes if condition else no,
        minimum=min,
        num_programs=lambda axis: blocks,
    )
    with patch.object(tile_scheduler, "gl", fake), patch.object(tile_scheduler, "FEWEST_CUT", 128):
        queue = tile_scheduler.queue_of.fn(0, n_tiles, block_m)
        for item in range(queue[-1] + 1):
            yield tile_scheduler.tile_of.fn(tile_scheduler.look_up.fn(item, queue), queue, block_m)


@in_turn(
    pytest.mark.parametrize("block_m", [128, 16, 256]),
    pytest.mark.parametrize("blocks", [7, 132, 400]),
    pytest.mark.parametrize("n_tiles", [1, 3, 8]),
    pytest.mark.parametrize(
        "counts", [(0, 300, 64, 65, 0, 129, 2304), (0, 70, 1, 33), (1, 9, 130)]
    ),
)
def test_the_queue_holds_every_row_of_every_tile_once(counts, n_tiles, blocks, block_m):
    ends = torch.tensor(counts).cumsum(0).to(torch.int32).to(DEVICE)
    *items, after = queued(tile_map(ends, sum(counts), block_m), n_tiles, blocks, block_m)
    assert after[0] == -1
    seen = Counter()
    for expert, end, row, n in items:
        assert end <= ends[expert] and row >= (ends[expert - 1] if expert else 0)
        seen.update((r, n) for r in range(row, min(end, row + block_m)))
    assert seen == Counter((r, n) for r in range(sum(counts)) for n in range(n_tiles))


@in_turn(
    pytest.mark.parametrize("shared_memory", [99 * 1024, 163 * 1024, 227 * 1024]),
    pytest.mark.parametrize("rows_per_expert", [1, 40, 64, 500]),
    pytest.mark.parametrize("element_size", [2, 4]),
)
def test_tiles_fit_shared_memory(rows_per_expert, element_size, shared_memory):
    c = config_for(rows_per_expert, element_size, shared_memory)
    assert c.stages >= 2
    stage = (c.block_m + c.block_n) * c.block_k * element_size
    assert c.stages * stage <= shared_memory


# What the warp-specialised kernel does not see at the sizes above: widths that TMA can copy, more
# than 192 of them, no multiple of 64; tiles of 128 rows, whole, of one row more, and short.
@pytest.mark.gpu
@in_turn(
    pytest.mark.parametrize("bias", [False, True]),
    pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"]),
    each_act,
    pytest.mark.parametrize(
        "sizes", [(272, 208), (512, 384), (2880, 720)], ids=lambda s: f"D{s[0]}"
    ),
    pytest.mark.parametrize("counts", [(0, 300, 64, 65, 0, 129, 2304), (0, 70, 1, 33)], ids=len),
)
def test_products_of_many_rows(counts, sizes, act, dtype, bias):
    D, I = sizes  # noqa: E741
    first = check(act, counts=counts, tokens=999, D=D, I=I, dtype=dtype, bias=bias)
    again = check(act, counts=counts, tokens=999, D=D, I=I, dtype=dtype, bias=bias)
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@in_turn(
    pytest.mark.parametrize("gated", [True, False]),
    pytest.mark.parametrize("interleaved", [True, False]),
    pytest.mark.parametrize(("down", "width"), [(128, 448), (256, 448), (384, 448), (-1, 464)]),
)
def test_all_rows_behind_64_columns_share_the_scale_of_float8_weights(
    gated, interleaved, down, width
):
    """By the kernel's own function, for every tile along N of two experts."""
    act = Act("silu", gated, gated and interleaved)
    W = Weight("float8_e4m3fn", down, 128, "float32", True, 8)
    N, K, across = 2 * width if gated else width, 500, 4
    groups = -(-N // down) if down > 0 else 1
    fake = SimpleNamespace(
        arange=lambda *_: torch.arange(64), SliceLayout=lambda *_: None, minimum=least,
        cdiv=lambda a, b: -(-a // b),
    )  # fmt: skip
    plain = {n: int(getattr(grouped_blocks, n)) for n in ("ROWS", "SUM", "CHUNK", "STEP")}
    names = plain | {"gl": fake, "_group": grouped_blocks._group.fn}
    with patch.multiple(grouped_blocks, **names):
        for expert, n in itertools.product(range(2), range(-(-N // 256))):
            scales, tile = (None, None, None, groups), (expert, 100, 70, n)
            rows, *at = grouped_blocks._at.fn(scales, tile, N, K, W, act)
            assert rows.tolist() == [*range(70, 100), *[99] * 34]
            for chunk, first in enumerate(at):
                for row in rows_behind(chunk, n, N, act):
                    group = row // down if down > 0 else 0
                    assert first == (expert * groups + group) * across


@in_turn(
    pytest.mark.parametrize("down", [1, -1]),
    pytest.mark.parametrize("of_a", ["row", "expert", "tensor"]),
    each_act,
)
def test_sums_meet_the_scales_of_their_rows_and_columns(act, of_a, down):
    """By the kernel's own functions, for every tile along N of two experts."""
    N = 2 * 208 if act.gated else 208
    a = torch.rand({"row": 100, "expert": 2, "tensor": 1}[of_a])
    w = torch.rand(2, N if down == 1 else 1)
    scales = (pointer(a), pointer(w), None)
    given = {"gl": LANGUAGE, "finite": lambda scale: scale, "scale_of": lambda scale, _: scale}
    with patch.multiple(grouped_wgmma, **given):
        for expert, n, c in itertools.product(range(2), range(-(-N // 256)), range(4)):
            sums, tile = value(torch.full((64, 64), c + 2)), (value(expert), 100, 70, n)
            S = Scaling(down, "float32", of_a, "row", None)
            a_scale = grouped_wgmma._row_scales.fn(sums, scales, tile, S)
            chunk = grouped_wgmma._scaled.fn(sums, c, a_scale, scales, tile, N, S, act)
            of_rows = a[70:] if of_a == "row" else a[expert if of_a == "expert" else 0].expand(30)
            columns = rows_behind(c, n, N, act)
            of_columns = w[expert].expand(N)[columns]
            want = (c + 2) * (of_rows[:, None] * of_columns[None, :])
            assert torch.equal(chunk[:30, : len(columns)], want)


def test_quotients_are_rounded_as_divisions_are(monkeypatch):
    """Of any scales: tiny ones, none, and what is no number."""
    fma = lambda a, b, c: (a.double() * b.double() + c.double()).float()  # noqa: E731
    inverse = lambda *args, **_: 1.0 / args[2][0]  # noqa: E731
    more = {"fma": fma, "inline_asm_elementwise": inverse}
    monkeypatch.setattr(grouped_wgmma, "gl", SimpleNamespace(**vars(LANGUAGE) | more))
    scales = torch.rand(400) * 2.0 ** torch.randint(-10, 10, (400,))
    scales[:6] = torch.tensor([0.0, 1e-42, 3e38, -0.7, float("nan"), 1.0])
    x = (torch.randn(256, 400) * scales.abs().clamp(1e-40, 1e36) * 100).bfloat16().float()
    got = grouped_wgmma.quotient.fn(value(x), value(scales))
    want = torch.where(scales == 0, 0.0, x / scales)
    assert torch.equal(got.nan_to_num(7e9), want.nan_to_num(7e9))


def least(a, b):
    return a.clamp(max=b) if isinstance(a, torch.Tensor) else min(a, b)


def rows_behind(chunk, n, N, act):
    """The rows of W, of those that are there, behind 64 columns of the accumulators of a tile."""
    if not act.gated:
        rows = range(256 * n + 64 * chunk, 256 * n + 64 * chunk + 64)
    else:
        first, up = 128 * n + chunk % 2 * 64, chunk // 2
        columns = [c for c in range(first, first + 64) if c < N // 2]
        rows = [2 * c + up if act.interleaved else c + up * N // 2 for c in columns]
    return [row for row in rows if row < N]

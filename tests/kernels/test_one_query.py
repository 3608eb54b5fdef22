"""Attention of one query: the kernels, and transformers' interface to it, against plain softmax.

The interpreter multiplies float16 and float32 alone, so bfloat16 is left to tests/gpu.
"""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch
from torch import Tensor, nn

from moe_ops.decode_ops.one_query import OneQueryCall, formula, one_query, refusal
from moe_ops.testing import F32, Tol, assert_close

pytest.importorskip("triton")
from moe_ops.kernels.triton.decode.one_query import attend
from moe_ops.kernels.triton.decode.one_query_plan import (
    MOST_SLOTS,
    MOST_SPLITS,
    AttentionPlan,
    plan_for,
)
from tests.chosen import one_in

OTHER = "use torch's attention"
op_file = importlib.import_module("moe_ops.decode_ops.one_query")
TOL = Tol(1e-5, "float32 sums in another order")
TOL_F16 = Tol(2e-3, "weights and outputs rounded to the 11 bits of float16")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROCESSORS = 132  # of an H200
LEAST_MEMORY = 99 * 1024  # bytes of shared memory for a block, where there is least (sm_86, sm_89)
# Sequences, heads, heads of the cache, slots, head sizes of keys and values.
SIZES = [
    (1, 8, 1, 64, 16, 16),
    (3, 6, 2, 100, 32, 16),
    (2, 4, 4, 256, 64, 64),
    (2, 32, 1, 33, 16, 16),
]
NAN = float("nan")


def tensors(size: tuple[int, ...], dtype: torch.dtype = F32) -> tuple[Tensor, ...]:
    B, H, N, S, D, DV = size
    q = torch.randn(B, H, D, device=DEVICE, dtype=dtype)
    k = torch.randn(B, N, S, D, device=DEVICE, dtype=dtype)
    v = torch.randn(B, N, S, DV, device=DEVICE, dtype=dtype)
    mask = torch.rand(B, S, device=DEVICE) < 0.5
    mask[:, S // 2 :] = False
    mask[0, : S // 2 - 1] = False  # one slot alone, behind a tile without any
    mask[:, S // 2 - 1] = True
    return q, k, v, mask


def definition(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """In float64, with weights of 0 for what is masked, whatever is there."""
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeat, 1).double().nan_to_num() for x in (k, v))
    scores = (k @ q.double()[..., None])[..., 0] * scale
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask[:, None], float("-inf"))
    else:
        scores = scores + mask[:, None].double()
    if sinks is not None:
        column = sinks.double()[None, :, None].expand(len(scores), -1, 1)
        scores = torch.cat([scores, column], -1)
    p = scores.softmax(-1)[..., : k.shape[2]]
    return (p[:, :, None] @ v)[:, :, 0].to(F32)


def with_garbage(k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with NaN behind the last slot that each sequence sees."""
    k, v = k.clone(), v.clone()
    for b, seen in enumerate(mask):
        end = int(seen.nonzero().max()) + 1
        k[b, :, end:] = v[b, :, end:] = NAN
    return k, v


def split(slots: int, splits: int, tile: int) -> AttentionPlan:
    """As many programs as that, or what is left of them where a tile is no smaller than a share."""
    share = -(-slots // splits)
    span = -(-share // tile) * tile
    return AttentionPlan(-(-slots // span), span, tile, 4, 2)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_kernel(size: tuple[int, ...]) -> None:
    q, k, v, mask = tensors(size)
    k, v = with_garbage(k, v, mask)
    want = definition(q, k, v, mask, 0.3)
    assert_close(attend(q, k, v, mask, 0.3), want, TOL, "kernel")


@pytest.mark.parametrize("splits", [None, 1, 3])
def test_queries_that_share_a_sequence(splits: int | None) -> None:
    """Each has a mask of its own; the definition is given the keys of each."""
    q, _, _, mask = tensors((6, 6, 2, 100, 32, 16))
    _, k, v, _ = tensors((2, 6, 2, 100, 32, 16))
    sinks = torch.randn(6, device=DEVICE)
    of_each = k.repeat_interleave(3, 0), v.repeat_interleave(3, 0)
    want = definition(q, *of_each, mask, 0.3, sinks)
    plan = None if splits is None else split(100, splits, 16)
    assert_close(attend(q, k, v, mask, 0.3, sinks, plan), want, TOL, "kernel")
    for hides in (mask, torch.zeros(mask.shape, device=DEVICE).masked_fill(~mask, -1e30)):
        assert_close(formula(q, k, v, hides, 0.3, sinks), want, TOL, "formula")
    assert refusal(OneQueryCall(q[:5], k, v, mask[:5], 0.3)) == (
        "q, k and v of [5, 6, 32], [2, 2, 100, 32], [2, 2, 100, 16] do not fit each other; give "
        "them one S, q and k one D, k and v one B that divides that of q, and an N that divides H"
    )


@pytest.mark.slow
@one_in(2, pytest.mark.parametrize("splits", [1, 2, 3, 4, 5, 7]))
def test_every_way_to_share_the_slots(splits: int) -> None:
    size = (2, 6, 2, 100, 32, 16)
    q, k, v, mask = tensors(size)
    k, v = with_garbage(k, v, mask)
    sinks = torch.randn(size[1], device=DEVICE)
    for tile, sink in ((16, None), (16, sinks), (32, sinks)):
        plan = split(size[3], splits, tile)
        got = attend(q, k, v, mask, 0.3, sink, plan)
        assert_close(got, definition(q, k, v, mask, 0.3, sink), TOL, str(plan))
        assert torch.equal(got, attend(q, k, v, mask, 0.3, sink, plan))


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(1, 1), (5, 1), (6, 2), (17, 1)], ids=str)
@pytest.mark.parametrize("sizes", [(16, 256), (64, 32), (256, 128)], ids=str)
def test_heads_of_every_size_and_groups_of_any(
    heads: tuple[int, int], sizes: tuple[int, int]
) -> None:
    q, k, v, mask = tensors((1, *heads, 45, *sizes))
    sinks = torch.randn(heads[0], device=DEVICE)
    for plan in (None, split(45, 2, 16)):
        got = attend(q, k, v, mask, 0.2, sinks, plan)
        assert_close(got, definition(q, k, v, mask, 0.2, sinks), TOL, str(plan))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("splits", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_masks_that_are_added(dtype: torch.dtype, splits: int) -> None:
    q, k, v, seen = tensors((3, 6, 2, 100, 32, 16), dtype)
    k, v = with_garbage(k, v, seen)
    hidden = torch.finfo(dtype).min
    mask = torch.where(seen, torch.randn(seen.shape, device=DEVICE), hidden).to(dtype)
    sinks = torch.randn(6, device=DEVICE, dtype=dtype)
    got = attend(q, k, v, mask, 0.3, sinks, split(100, splits, 16))
    assert got.dtype == dtype
    tol = TOL if dtype == F32 else TOL_F16
    assert_close(got.float(), definition(q, k, v, mask, 0.3, sinks), tol, "added")


@pytest.mark.parametrize("slots", [1, 16, 17, pytest.param(1300, marks=pytest.mark.slow)])
def test_one_slot_in_use(slots: int) -> None:
    """Its value is the output; more than 1024 slots are shared out without being told to."""
    for used in {0, slots // 2, slots - 1}:
        q, k, v, mask = tensors((1, 4, 2, slots, 16, 16))
        mask[:] = False
        mask[:, used] = True
        k, v = with_garbage(k, v, mask)
        want = v[:, :, used].repeat_interleave(2, 1)
        assert_close(attend(q, k, v, mask, 0.3), want, TOL, f"slot {used} of {slots}")


def test_a_sink_larger_than_every_score_leaves_nothing() -> None:
    q, k, v, mask = tensors(SIZES[1])
    sinks = torch.full((6,), 1e4, device=DEVICE)
    for splits in (1, 4):
        got = attend(q, k, v, mask, 0.3, sinks, split(100, splits, 16))
        assert torch.equal(got, torch.zeros_like(got))


@pytest.mark.slow
def test_a_window_behind_many_tiles() -> None:
    q, k, v, mask = tensors((2, 4, 2, 400, 16, 16))
    mask[:] = False
    mask[0, 300:310] = mask[1, 5:9] = True
    for splits in (1, 2, 6):
        got = attend(q, k, v, mask, 0.3, None, split(400, splits, 16))
        assert_close(got, definition(q, k, v, mask, 0.3), TOL, f"{splits} programs")


def test_plans_cover_the_slots_and_leave_no_program_idle() -> None:
    for pairs, slots, row_bytes in itertools.product(
        (1, 3, 4, 8, 64, 132, 133, 256, 2048),
        (1, 16, 17, 250, 256, 257, 1024, 3000, 4096, 4097, 12288, MOST_SLOTS),
        (64, 96, 256, 512, 768, 1024, 2048),
    ):
        plan = plan_for(pairs, slots, row_bytes, 2048, PROCESSORS)
        what = f"{pairs} pairs, {slots} slots, {row_bytes} bytes: {plan}"
        assert (plan.splits - 1) * plan.span < slots <= plan.splits * plan.span, what
        assert plan.splits <= MOST_SPLITS and plan.span % plan.tile == 0, what
        assert plan.tile >= 16 and plan.tile & (plan.tile - 1) == 0, what
        assert plan.tile * row_bytes * (plan.stages - 1) < LEAST_MEMORY - 32 * 1024, what


def test_slots_are_shared_where_processors_are_to_spare() -> None:
    splits = {
        (pairs, slots): plan_for(pairs, slots, 512, 2048, PROCESSORS).splits
        for pairs in (4, 32, 256) for slots in (256, 1024, 4096)
    }  # fmt: skip
    assert splits == {
        (4, 256): 1, (4, 1024): 16, (4, 4096): 64,
        (32, 256): 1, (32, 1024): 16, (32, 4096): 16,
        (256, 256): 1, (256, 1024): 1, (256, 4096): 1,
    }  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_attention_function(size: tuple[int, ...]) -> None:
    from moe_ops.generation.one_query import one_query_attention

    q, k, v, mask = tensors(size)
    module = nn.Module()
    module.num_key_value_groups = q.shape[1] // k.shape[1]
    got, _ = one_query_attention(module, q[:, :, None], k, v, mask[:, None, None], scaling=0.3)
    assert_close(got[:, 0], definition(q, k, v, mask, 0.3), TOL, "function")


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_formula_with_sinks_and_added_masks(size: tuple[int, ...]) -> None:
    from moe_ops.generation.one_query import attended

    q, k, v, seen = tensors(size)
    sinks = torch.randn(size[1], device=DEVICE)
    mask = torch.where(seen, 0.0, torch.finfo(F32).min)
    got = attended(q[:, :, None], k, v, mask[:, None, None], 0.3, sinks)
    assert_close(got[:, 0], definition(q, k, v, seen, 0.3, sinks), TOL, "formula")


@pytest.mark.slow
def test_a_compiled_step_reads_the_buffers_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `index_copy_` wrote in the same graph, without a copy of all slots."""
    from moe_ops.generation import one_query as of_transformers
    from moe_ops.generation.slots import SlotLayer

    monkeypatch.setattr(of_transformers, "has_kernels", lambda query: True)
    read = []
    monkeypatch.setattr(op_file, "formula", lambda *args: read.append(args) or formula(*args))
    layer = SlotLayer(2, 64, torch.tensor(5))
    layer.lazy_initialization(torch.empty(2, 3, 1, 16), torch.empty(2, 3, 1, 32))
    mask = (torch.arange(64) < 6).expand(2, 1, 1, 64)
    module = nn.Module()

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = layer.update(k * 2, v.cos())
        return of_transformers.one_query_attention(module, q + 1, k, v, mask, scaling=0.3)[0]

    q, k, v = torch.randn(2, 6, 1, 16), torch.randn(2, 3, 1, 16), torch.randn(2, 3, 1, 32)
    with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):
        got = torch.compile(step, fullgraph=True)(q, k, v)
    ((_, keys, values, *_),) = read
    assert (keys.data_ptr(), values.data_ptr()) == (layer.keys.data_ptr(), layer.values.data_ptr())
    assert torch.equal(layer.keys[:, :, 5:6], k * 2) and layer.values.count_nonzero() == v.numel()
    assert_close(
        got[:, 0], definition(q[:, :, 0] + 1, keys, values, mask[:, 0, 0], 0.3), TOL, "compiled"
    )


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("hides", [False, True])
def test_the_op(sinks: bool, hides: bool) -> None:
    q, k, v, seen = tensors((3, 6, 2, 20, 32, 16))
    mask = seen if hides else torch.where(seen, 0.5, torch.finfo(F32).min)
    given = q, k, v, mask, 0.3, torch.randn(6, device=DEVICE) if sinks else None
    got = one_query(*given)
    assert got.is_contiguous()
    assert_close(got, definition(*given), TOL, "op")
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.moe_ops.one_query.default, given, test_utils=tests)


def test_refusals_say_why() -> None:
    def meta(*shape: int, dtype: torch.dtype = F32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def why(slots: int = 64, sizes: tuple[int, int] = (32, 32), **but: Tensor) -> str | None:
        tensors = {
            "q_BHD": meta(1, 4, sizes[0]),
            "k_BNSD": meta(1, 2, slots, sizes[0]),
            "v_BNSD": meta(1, 2, slots, sizes[1]),
            "mask_BS": meta(1, slots, dtype=torch.bool),
        }
        return refusal(OneQueryCall(**tensors | but, scale=1.0))

    assert why() is None and why(sinks_H=meta(4)) is None
    assert why(MOST_SLOTS) is None
    assert why(MOST_SLOTS + 1) == f"has {MOST_SLOTS + 1} slots, more than {MOST_SLOTS}; {OTHER}"
    assert why(sizes=(24, 32)) == f"heads of 24, no power of two from 16 to 256; {OTHER}"
    assert why(sizes=(32, 512)) == f"heads of 512, no power of two from 16 to 256; {OTHER}"
    assert why(k_BNSD=meta(1, 2, 64, 32, dtype=torch.bfloat16)) == (
        "torch.float32, torch.bfloat16 and torch.float32 are not one of float32, bfloat16, "
        "float16; convert them"
    )
    assert why(q_BHD=meta(1, 4, 1, 32)) == (
        "q, k and v are [1, 4, 1, 32], [1, 2, 64, 32], [1, 2, 64, 32], not [B, H, D] and "
        "[B, N, S, D]; reshape them"
    )
    unfit = (
        "q, k and v of [1, {}, 32], [1, 2, {}, 32], [1, 2, 64, 32] do not fit each other; "
        "give them one S, q and k one D, k and v one B that divides that of q, and an N that "
        "divides H"
    )
    assert why(q_BHD=meta(1, 3, 32)) == unfit.format(3, 64)
    assert why(k_BNSD=meta(1, 2, 65, 32)) == unfit.format(4, 65)
    assert why(q_BHD=meta(1, 4, 64)[..., ::2]) == (
        "the query has the strides (256, 64, 2); make it contiguous"
    )
    assert why(v_BNSD=meta(1, 64, 2, 32).transpose(1, 2)) == (
        "the cache is a view with other strides; make it contiguous"
    )
    assert why(mask_BS=meta(64, 1).T.bool()) is None  # one sequence: its slots are 1 apart
    assert why(mask_BS=meta(1, 128)[:, ::2]) == (
        "the mask has the strides (128, 2); make its rows contiguous"
    )
    mask = "the mask is torch.{}, not of 1 x 64 slots; give bools or floats of that shape"
    assert why(mask_BS=meta(1, 65)) == mask.format("float32 [1, 65]")
    assert why(mask_BS=meta(1, 64, dtype=torch.int64)) == mask.format("int64 [1, 64]")
    assert why(sinks_H=meta(5)) == "the sinks are [5], not a contiguous [4]; give one a head"
    assert why(mask_BS=torch.empty(1, 64)) == (
        "the query is on meta, something else on cpu; move one of them"
    )
    wrong = [torch.empty(shape) for shape in ((1, 4, 24), (1, 2, 8, 24), (1, 2, 8, 24), (1, 8))]
    with pytest.raises(ValueError, match="one_query: heads of 24"):
        one_query(*wrong, 1.0)

"""`expert_wgrad`, and samples of `expert_wgrad_onto`, by their Triton kernel, in Triton's
interpreter where there is no GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops import OPS, expert_wgrad
from moe_ops.conformance import Only, examine
from moe_ops.conformance.memory import surrounded
from moe_ops.conformance.tensors import strided
from moe_ops.kernels.triton.wgrad import Tiles, tiles_for, wgrad, wgrad_onto
from moe_ops.testing import BF16, CASES, DEVICE, F16, F32, TOL, Case, assert_close, poisoned
from tests.chosen import in_turn
from tests.kernels.sampled import anywhere, cases, hold, run

HERE = torch.device(DEVICE)
BY_NAME = {case.name: case for case in CASES}
# The interpreter multiplies no bfloat16.
DTYPES = (F32, F16, BF16) if DEVICE == "cuda" else (F32, F16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_op = pytest.mark.parametrize("name", ["expert_wgrad", "expert_wgrad_onto"])
QUICK = ("odd_unaligned", "one_token", "no_tokens", "one_expert")
SMALL = Tiles(block_m=16, block_n=16, block_r=16, warps=4, stages=2)
COUNTS = (5, 0, 33, 16, 1)  # rows of each expert


@each_dtype
@each_op
@pytest.mark.parametrize("case", cases(QUICK))
def test_samples(case: str, name: str, dtype: torch.dtype) -> None:
    assert hold(OPS[name], BY_NAME[case], dtype) == {}


@pytest.mark.slow
@each_op
def test_the_kit_finds_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with anywhere(monkeypatch, OPS[name]):
        for sample in ("odd_unaligned/float16", "one_token/float32"):
            report = examine(name, "triton", only=Only(sample=sample), device=DEVICE)
            assert report.sound, str(report)


def rows_of(
    counts: tuple[int, ...], M: int, N: int, dtype: torch.dtype, unused: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    """a and b with NaN in rows of no expert, and ends."""
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    a, b = (torch.randn(sum(counts) + unused, n).to(dtype) for n in (M, N))
    a[sum(counts) :] = b[sum(counts) :] = float("nan")
    return surrounded(a, HERE), surrounded(b, HERE), ends.to(HERE)


def check(a: Tensor, b: Tensor, ends: Tensor, tiles: Tiles | None = None) -> Tensor:
    got = wgrad(a, b, ends, None, None, a.dtype, tiles=tiles)
    want = expert_wgrad.reference(a.float(), b.float(), ends)
    assert_close(got, want, TOL["expert_wgrad", a.dtype])
    return got


@each_dtype
@pytest.mark.parametrize(("M", "N"), [(33, 17), (200, 40), (17, 300), (130, 1)])
def test_every_tile_is_made_once(M: int, N: int, dtype: torch.dtype) -> None:
    """Also where tiles fill more than a group of rows of them, by small tiles and by the table."""
    a, b, ends = rows_of(COUNTS, M, N, dtype)
    made = [check(a, b, ends, tiles) for tiles in (SMALL, None)]
    assert all(not w[1].any() for w in made)  # the expert without rows


@each_dtype
def test_many_rows_of_one_expert(dtype: torch.dtype) -> None:
    check(*rows_of((0, 150, 3), 20, 18, dtype))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of numpy
@each_dtype
def test_the_same_rows_give_the_same_bits(dtype: torch.dtype) -> None:
    """Whatever other experts have, and as often as they are given."""
    a, b, ends = rows_of(COUNTS, 40, 24, dtype)
    want = wgrad(a, b, ends, None, None, dtype)
    assert torch.equal(wgrad(a, b, ends, None, None, dtype), want)
    first, last = int(ends[1]), int(ends[2])  # of the expert with 33 rows
    more = torch.full((7, 1), float("inf"), dtype=dtype, device=HERE)
    a, b = (torch.cat((more.expand(-1, t.shape[1]), t[first:last])) for t in (a, b))
    ends = torch.tensor([7, 7, last - first + 7], dtype=torch.int32, device=HERE)
    got = wgrad(a, b, ends, None, None, dtype)
    assert torch.equal(got[2], want[2]) and bool(got[0].isinf().all())


@each_dtype
def test_rows_by_name(dtype: torch.dtype) -> None:
    """Names of rows that are used; what others hold names no row at all. Rows may be strided, and
    lie anywhere."""
    _, _, ends = rows_of(COUNTS, 1, 1, dtype)
    used = int(ends[-1])
    a, b = strided(torch.randn(9, 33).to(dtype)), torch.randn(21, 24).to(dtype)[:, 3:20]
    names = [torch.randint(0, len(t), (used + 3,), dtype=torch.int32) for t in (a, b)]
    for t in names:
        t[used:] = torch.tensor([-1, -(2**31), 2**31 - 1])
    names = [surrounded(t, HERE) for t in names]
    a, b = surrounded(a, HERE), surrounded(b, HERE)
    got = run(expert_wgrad, (a, b, ends, *names))
    want = expert_wgrad.reference(a.float(), b.float(), ends, *names)
    assert_close(got, want, TOL["expert_wgrad", dtype])


@each_dtype
@pytest.mark.parametrize("out", DTYPES, ids=str)
def test_results_in_another_dtype(out: torch.dtype, dtype: torch.dtype) -> None:
    a, b, ends = rows_of(COUNTS, 33, 17, dtype)
    got = run(expert_wgrad, (a, b, ends, None, None, str(out).removeprefix("torch.")))
    assert got.dtype is out
    assert_close(got, expert_wgrad.reference(a.float(), b.float(), ends), TOL["expert_wgrad", out])


@pytest.mark.parametrize("ends", [[-9, 20, 99], [2**31 - 1, 20, 50], [20, 5, 50]])
def test_wrong_ends_read_no_row_outside(ends: list[int]) -> None:
    """What lies around the rows is NaN."""
    a, b, _ = rows_of((50,), 33, 17, F32, unused=0)
    made = wgrad(a, b, torch.tensor(ends, dtype=torch.int32, device=HERE), None, None, F32)
    assert bool(made.isfinite().all())


@in_turn(
    each_dtype,
    pytest.mark.parametrize(("M", "N"), [(33, 17), (200, 40), (17, 300), (130, 1)]),
    pytest.mark.parametrize("tiles", [SMALL, None], ids=["small", "table"]),
)
def test_calls_give_the_bits_of_results_that_are_added_in_turn(
    M: int, N: int, tiles: Tiles | None, dtype: torch.dtype
) -> None:
    """Every tile once, whose memory nothing around it is written to."""
    ends = torch.tensor(COUNTS).cumsum(0).to(HERE, torch.int32)
    got = surrounded(torch.randn(len(COUNTS), M, N), HERE)
    want = got.clone()
    for _ in range(3):
        a, b = (torch.randn(sum(COUNTS), n, device=HERE).to(dtype) for n in (M, N))
        wgrad_onto(a, b, ends, None, None, got, tiles)
        want += wgrad(a, b, ends, None, None, F32, tiles=tiles)
    assert torch.equal(got, want)
    around = torch.empty(0, device=HERE).set_(got.untyped_storage())
    assert int(around.isfinite().sum()) == got.numel()


@pytest.mark.parametrize("ends", [[-9, 20, 99], [2**31 - 1, 20, 50], [20, 5, 50]])
def test_wrong_ends_add_no_row_from_outside(ends: list[int]) -> None:
    """What lies around the rows is NaN."""
    a, b = (surrounded(torch.randn(50, n), HERE) for n in (33, 17))
    got = torch.zeros(3, 33, 17, device=HERE)
    wgrad_onto(a, b, torch.tensor(ends, dtype=torch.int32, device=HERE), None, None, got)
    assert bool(got.isfinite().all())


MEMORY = {80: 166912, 89: 101376, 90: 232448}


def test_tiles_fit_and_split_rows_by_the_dtype_alone() -> None:
    sizes = itertools.product((1, 33, 64, 768, 4096), (1, 17, 64, 129, 2048), (1.0, 100.0, 5e4))
    split: dict[int, set[int]] = {2: set(), 4: set()}
    for (M, N, rows), memory, whole in itertools.product(sizes, MEMORY.values(), (True, False)):
        for size, found in split.items():
            tiles = tiles_for(M, N, rows, size, memory, whole)
            found.add(tiles.block_r)
            stage = (tiles.block_m + tiles.block_n) * tiles.block_r * size
            assert tiles.stages > 1 and tiles.stages * stage < memory
    assert all(len(found) == 1 for found in split.values())
    wide = tiles_for(2048, 1536, 4096.0, 2, MEMORY[90], True)
    assert (wide.block_m, wide.block_n) == (128, 256)


def test_what_wants_a_gradient_is_refused() -> None:
    case = Case(name="few", T=2, E=2, K=1, D=8, I=8)
    a, b, ends = rows_of((1, 1), case.D, case.I, F32, unused=0)
    backend, call = expert_wgrad.backends["triton"], expert_wgrad.call(a, b, ends)
    assert backend.refusal("cuda", 2, call) is None
    call.b_RN = b.detach().requires_grad_()
    said = "is not differentiable, and an argument requires grad"
    assert backend.refusal("cuda", 2, call) == said
    assert backend.refusal("cpu", 2, call) == "needs a tensor on cuda, got cpu"


def test_the_kernel_for_hopper_is_not_asked_for_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor of a copy by TMA is of a tensor without rows."""
    from moe_ops.kernels.triton import wgrad_hopper

    asked: list[torch.Size] = []
    monkeypatch.setattr(wgrad_hopper, "launch", lambda *args: asked.append(args[0].shape))
    ends = torch.zeros(3, dtype=torch.int32, device=HERE)
    names = torch.zeros(0, dtype=torch.int32, device=HERE)
    a, b = (torch.randn(0, n, device=HERE).half() for n in (128, 256))
    for named in ((names, None), (None, names)):
        with poisoned():
            got = wgrad(a, b, ends, *named, F16, True)
        assert got.shape == (3, 128, 256) and not got.any()
    assert asked == []
    rows = torch.randn(5, 128, device=HERE).half(), torch.randn(5, 256, device=HERE).half()
    wgrad(*rows, ends, torch.zeros(5, dtype=torch.int32, device=HERE), None, F16, True)
    assert asked == [torch.Size((5, 128))]

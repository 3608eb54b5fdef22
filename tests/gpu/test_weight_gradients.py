"""Kernels of training for Hopper: gradients of weights, and products of weights whose columns lie.

What belongs to no row is NaN.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_ops.kernels.triton import LINEAR, Act
from moe_ops.kernels.triton.experts.products.grouped import product
from moe_ops.kernels.triton.launch import is_hopper
from moe_ops.kernels.triton.wgrad import wgrad
from moe_ops.ops.expert_wgrad import expert_wgrad
from moe_ops.testing import BF16, F16, TOL, assert_close

pytestmark = pytest.mark.gpu
HALF = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
NAN = float("nan")
COUNTS = {
    "even": (256,) * 8,
    "ragged": (0, 1, 63, 64, 65, 300, 0, 513),
    "few": (5, 0, 33, 16, 1),
    "long": (1000, 0, 0, 2000),
    "none": (0, 0, 0),
}


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if not is_hopper(torch.empty(0, device="cuda")):
        pytest.skip("the kernels are for Hopper")


def operands(
    counts: tuple[int, ...], M: int, N: int, dtype: torch.dtype, names_a: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The arguments of `wgrad`; rows past the last expert's, and tokens that no row names, are
    NaN, and their names are of no token."""
    used, unused = sum(counts), 37
    tokens = used // 3 + 4
    names = torch.randint(0, tokens - 3, (used + unused,), dtype=torch.int32, device="cuda")
    names[used:] = 10**9
    rows = tokens if names_a else used + unused, used + unused if names_a else tokens
    a_RM, b_RN = (
        torch.randn(count, width, dtype=dtype, device="cuda")
        for count, width in zip(rows, (M, N), strict=True)
    )
    named, lies = (a_RM, b_RN) if names_a else (b_RN, a_RM)
    named[tokens - 3 :], lies[used:] = NAN, NAN
    ends_E = torch.tensor(counts, device="cuda").cumsum(0).int()
    return a_RM, b_RN, ends_E, names if names_a else None, None if names_a else names


@HALF
@pytest.mark.parametrize("names_a", [False, True])
@pytest.mark.parametrize(("M", "N"), [(128, 256), (208, 768), (1536, 272), (144, 2048)])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_weight_gradients(
    counts: tuple[int, ...], M: int, N: int, names_a: bool, dtype: torch.dtype
) -> None:
    given = operands(counts, M, N, dtype, names_a)
    made = wgrad(*given, dtype, True)
    a_RM, b_RN, ends_E, a_rows_R, b_rows_R = given
    begin = 0
    for e, end in enumerate(ends_E.tolist()):
        a = a_RM[begin:end] if a_rows_R is None else a_RM[a_rows_R[begin:end].long()]
        b = b_RN[begin:end] if b_rows_R is None else b_RN[b_rows_R[begin:end].long()]
        assert_close(made[e], a.float().T @ b.float(), TOL["expert_wgrad", dtype], f"expert {e}")
        begin = end
    assert torch.equal(made, wgrad(*given, dtype, True))


@pytest.mark.parametrize("names_a", [False, True])
def test_an_expert_is_its_own(names_a: bool) -> None:
    """NaN in the rows of others, the ones beside its own among them, changes no bit."""
    counts, M, N = (70, 65, 300, 1), 256, 512
    a_RM, b_RN, ends_E, a_rows_R, b_rows_R = operands(counts, M, N, BF16, names_a)
    named, lies, names = (a_RM, b_RN, a_rows_R) if names_a else (b_RN, a_RM, b_rows_R)
    assert names is not None
    names[70:135] = torch.arange(65, dtype=torch.int32, device="cuda")
    names[:70] %= 65
    names[135:436] = 65 + names[135:436] % 40
    want = wgrad(a_RM, b_RN, ends_E, a_rows_R, b_rows_R, BF16, True)[1]
    names[:70], names[135:436] = 65, 66
    named[65:], lies[:70], lies[135:] = NAN, NAN, NAN
    got = wgrad(a_RM, b_RN, ends_E, a_rows_R, b_rows_R, BF16, True)
    assert torch.equal(got[1], want)
    assert bool(got[[0, 2, 3]].isnan().all())


@pytest.mark.parametrize("ends", [[-9, 20, 99], [2**31 - 1, 20, 50], [20, 5, 50]])
def test_wrong_ends_read_no_row_outside(ends: list[int]) -> None:
    a_RM, b_RN, _, _, names = operands((50,), 128, 256, BF16, False)
    wrong = torch.tensor(ends, dtype=torch.int32, device="cuda")
    assert names is not None
    names[50:] = 0
    a_RM[50:] = 1.0
    assert bool(wgrad(a_RM, b_RN, wrong, None, names, BF16, True).isfinite().all())


def test_the_op_takes_the_kernel() -> None:
    from moe_ops.backends.triton_hopper import refuse_wgrad

    given = operands(COUNTS["ragged"], 256, 512, BF16, False)
    assert refuse_wgrad(expert_wgrad.call(*given)) is None
    assert torch.equal(expert_wgrad(*given), wgrad(*given, BF16, True))


@HALF
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize(
    ("N", "act"),
    [(256, LINEAR), (272, LINEAR), (1000, LINEAR), (1536, Act("silu")), (544, Act("silu"))],
)
def test_products_of_weights_whose_columns_lie(
    N: int, act: Act, gathered: bool, dtype: torch.dtype
) -> None:
    """As of the same weights whose rows lie, bit for bit."""
    E, K, D, T = 16, 2, 512, 600
    ids = torch.rand(T, E, device="cuda").topk(K).indices.flatten()
    ids[-100:] = E  # rows of no expert
    order = ids.argsort(stable=True).int()
    ends_E = torch.bincount(ids, minlength=E + 1)[:E].cumsum(0).int()
    used = int(ends_E[-1])
    a = torch.randn(T if gathered else T * K, D, dtype=dtype, device="cuda")
    if not gathered:
        a[used:] = NAN
    w_EDN = torch.randn(E, D, N, dtype=dtype, device="cuda")
    made = []
    for w_END in (w_EDN.transpose(1, 2), w_EDN.transpose(1, 2).contiguous()):
        width = N // 2 if act.gated else N
        out = torch.full((T * K, width), NAN, dtype=dtype, device="cuda")
        product(a, order, ends_E, w_END, None, out, K if gathered else None, act, None, True)
        made.append(out)
    assert torch.equal(made[0][:used], made[1][:used])
    assert bool(made[0][:used].isfinite().all()) and bool(made[0][used:].isnan().all())

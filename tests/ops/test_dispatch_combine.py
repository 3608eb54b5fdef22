"""`dispatch` and `combine`: a stable sort by expert, and the weighted sum that undoes it."""

import pytest
import torch
from torch import Tensor

from moe_ops import combine, dispatch
from moe_ops.checks.shapes import DTYPES, FLOATS
from moe_ops.conformance.tensors import half_map, strided, with_holes
from moe_ops.testing import CASES, TOL, Case, assert_close, make_layer
from tests.ops.refused import (
    FIRST_FLOAT_NAMES,
    Bad,
    assert_refused,
    wrong_device,
    wrong_dtype,
    wrong_rank,
    wrong_size,
)

NAN = float("nan")
FAR = 2**40 + 1  # becomes 1 in 32 bits

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_index = pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["int32", "int64"])


def sort_by_hand(ids: list[list[int]], num_experts: int) -> tuple[list[int], list[int]]:
    """The pair in each row (-1 where there is none) and the end of each expert's rows."""
    flat = [e for row in ids for e in row]
    rows, ends = [], []
    for expert in range(num_experts):
        rows += [pair for pair, e in enumerate(flat) if e == expert]
        ends.append(len(rows))
    return rows + [-1] * (len(flat) - len(rows)), ends


def sum_by_hand(y_RD: Tensor, weights_TK: Tensor, rows_R: Tensor) -> Tensor:
    out = torch.zeros(weights_TK.shape[0], y_RD.shape[1], dtype=torch.float64)
    for row, pair in enumerate(rows_R.tolist()):
        if pair >= 0:
            token, choice = divmod(pair, weights_TK.shape[1])
            out[token] += float(weights_TK[token, choice]) * y_RD[row].double()
    return out


@each_index
@each_case
def test_dispatch_sorts_stably_by_expert(case: Case, index: torch.dtype) -> None:
    layer = make_layer(case)
    for ids in (layer.ids_TK, with_holes(layer.ids_TK, case.E)):
        x_RD, rows_R, ends_E = dispatch(layer.x_TD, ids.to(index), case.E)
        rows, ends = sort_by_hand(ids.tolist(), case.E)
        assert rows_R.tolist() == rows
        assert ends_E.tolist() == ends
        assert (rows_R.dtype, ends_E.dtype) == (torch.int32, torch.int32)
        used = [pair // case.K for pair in rows if pair >= 0]
        assert torch.equal(x_RD[: len(used)], layer.x_TD[used])


@each_index
def test_dispatch_sends_every_bad_id_nowhere(index: torch.dtype) -> None:
    ids = torch.tensor([[0, -1], [-7, 2], [3, 4], [2**31 - 1, 1]], dtype=index)
    _, rows_R, ends_E = dispatch(torch.randn(4, 5), ids, 3)
    assert rows_R.tolist() == [0, 7, 3, -1, -1, -1, -1, -1]
    assert ends_E.tolist() == [1, 2, 3]


def test_dispatch_does_not_cut_ids_to_32_bits() -> None:
    _, rows_R, ends_E = dispatch(torch.randn(2, 5), torch.tensor([[1], [FAR]]), 3)
    assert rows_R.tolist() == [0, -1]
    assert ends_E.tolist() == [0, 1, 1]


@each_index
def test_an_expert_map_turns_global_ids_into_local_ones(index: torch.dtype) -> None:
    here = torch.tensor([1, -1, 5, 0, 2], dtype=index)  # 5 is no local expert
    ids = torch.tensor([[3, 0], [1, 2], [-1, 4], [5, 3], [0, -9]], dtype=index)
    _, rows_R, ends_E = dispatch(torch.randn(5, 7), ids, 3, here)
    assert rows_R.tolist() == [0, 7, 1, 8, 5, -1, -1, -1, -1, -1]
    assert ends_E.tolist() == [2, 4, 5]


def test_dispatch_takes_strided_tokens_and_ids() -> None:
    layer = make_layer(CASES[0])
    want = dispatch(layer.x_TD, layer.ids_TK, 8)
    for got, same in zip(
        dispatch(strided(layer.x_TD), strided(layer.ids_TK), 8), want, strict=True
    ):
        assert torch.equal(got, same)


@pytest.mark.parametrize("dtype", FLOATS, ids=DTYPES)
@each_case
def test_combine_sums_the_rows_of_each_token(case: Case, dtype: torch.dtype) -> None:
    R = case.T * case.K
    y_RD = torch.randn(R, case.D).to(dtype)
    weights_TK = torch.rand(case.T, case.K)
    rows_R = torch.randperm(R).to(torch.int32)
    got = combine(y_RD, weights_TK, rows_R)
    assert got.dtype == dtype
    assert_close(got, sum_by_hand(y_RD, weights_TK, rows_R), TOL["combine", dtype])


@pytest.mark.parametrize("junk", [NAN, float("inf")], ids=["nan", "inf"])
def test_combine_never_reads_an_unused_row(junk: float) -> None:
    y_RD = torch.randn(12, 7)
    y_RD[[0, 4, 11]] = junk
    rows_R = torch.randperm(12).to(torch.int32)
    rows_R[[0, 4, 11]] = -1
    weights_TK = torch.rand(4, 3)
    want = sum_by_hand(y_RD, weights_TK, rows_R)
    assert_close(combine(y_RD, weights_TK, rows_R), want, TOL["combine", torch.float32])


def test_combine_never_reads_a_row_of_a_pair_that_is_not_there() -> None:
    y_RD = torch.tensor([[1.0], [NAN], [NAN], [NAN], [NAN], [2.0]])
    bad = [4, 6, -2, 2**31 - 1, -(2**31), 1]
    for first in (6, 7, 12, -6, -7):
        rows_R = torch.tensor([bad[0], first, *bad[2:]], dtype=torch.int32)
        got = combine(y_RD, torch.ones(3, 2), rows_R)
        assert got.tolist() == [[2.0], [0.0], [1.0]]


def test_combine_ignores_the_weight_of_a_pair_without_a_row() -> None:
    y_RD = torch.tensor([[3.0], [NAN]])
    got = combine(y_RD, torch.tensor([[NAN, 0.5]]), torch.tensor([1, -1], dtype=torch.int32))
    assert got.tolist() == [[1.5]]


def test_a_token_without_rows_gives_zeros() -> None:
    y_RD = torch.full((4, 5), NAN)
    got = combine(y_RD, torch.ones(2, 2), torch.full((4,), -1, dtype=torch.int32))
    assert torch.equal(got, torch.zeros(2, 5))


@pytest.mark.parametrize(
    ("dtype", "step"),
    [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)],
    ids=["bfloat16", "float16"],
)
def test_products_round_as_the_dtypes_promote(dtype: torch.dtype, step: float) -> None:
    # (1 + s) ** 2 is 1 + 2s + s ** 2, whose last term a product of this dtype drops.
    y_RD = torch.tensor([[1 + step], [-1 - 2 * step]], dtype=dtype)
    weights_TK = torch.tensor([[1 + step, 1.0]])
    rows_R = torch.tensor([0, 1], dtype=torch.int32)
    assert combine(y_RD, weights_TK, rows_R).tolist() == [[step**2]]
    assert combine(y_RD, weights_TK.to(dtype), rows_R).tolist() == [[0.0]]


def test_the_sum_is_taken_in_float32() -> None:
    # In bfloat16 each 1 would vanish beside 256.
    y_RD = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    rows_R = torch.arange(3, dtype=torch.int32)
    got = combine(y_RD, torch.ones(1, 3, dtype=torch.bfloat16), rows_R)
    assert got.tolist() == [[258.0]]


@pytest.mark.parametrize("dtype", FLOATS, ids=DTYPES)
@each_case
def test_identity_experts_give_the_tokens_back(case: Case, dtype: torch.dtype) -> None:
    layer = make_layer(case, dtype)
    x_RD, rows_R, _ = dispatch(layer.x_TD, layer.ids_TK, case.E)
    weights_TK = layer.weights_TK / layer.weights_TK.sum(-1, keepdim=True)
    assert_close(combine(x_RD, weights_TK, rows_R), layer.x_TD, TOL["combine", dtype])


def test_two_ranks_together_combine_what_one_does() -> None:
    layer, E = make_layer(CASES[0]), CASES[0].E
    x_RD, rows_R, _ = dispatch(layer.x_TD, layer.ids_TK, E)
    whole = combine(x_RD, layer.weights_TK, rows_R)
    odd_map = torch.where(torch.arange(E) % 2 == 1, torch.arange(E) // 2, -1)
    parts = []
    for expert_map in (half_map(E), odd_map):
        x_RD, rows_R, ends_E = dispatch(layer.x_TD, layer.ids_TK, E // 2, expert_map)
        x_RD[int(ends_E[-1]) :] = NAN
        parts.append(combine(x_RD, layer.weights_TK, rows_R))
    assert_close(parts[0] + parts[1], whole, TOL["combine", torch.float32])


IDS = torch.zeros(3, 2, dtype=torch.int32)
DISPATCH = {"x_TD": torch.ones(3, 4), "ids_TK": IDS, "num_experts": 2}
BAD_DISPATCH = {
    "x_rank": wrong_rank("x_TD", (3,), 2),
    "x_dtype": wrong_dtype(
        "x_TD", (3, 4), "int32", FIRST_FLOAT_NAMES + ", float8_e4m3fn, float8_e5m2, uint8, int8"
    ),
    "ids_rank": wrong_rank("ids_TK", (3,), 2),
    "ids_dtype": wrong_dtype("ids_TK", (3, 2), "float32", "int32, int64"),
    "ids_rows": wrong_size("ids_TK", (2, 2), 0, "3 (the tokens of x_TD)", torch.int32),
    "ids_device": wrong_device("ids_TK", (3, 2), torch.int32),
    "no_choices": Bad(
        {"ids_TK": IDS[:, :0]},
        "ids_TK must name at least one expert a token, got shape (3, 0)",
    ),
    "no_experts": Bad({"num_experts": 0}, "num_experts=0 must be at least 1"),
    "endless_experts": Bad(
        {"num_experts": 2**31}, "num_experts=2147483648 must be at most 2147483647"
    ),
    "map_rank": wrong_rank("expert_map", (3, 2), 1),
    "map_dtype": wrong_dtype("expert_map", (4,), "float32", "int32, int64"),
    "map_device": wrong_device("expert_map", (4,), torch.int64),
    "map_empty": Bad(
        {"expert_map": IDS[0, :0]},
        "expert_map is empty; it must hold a local id, or -1, for each global expert",
    ),
}
PAIRS = "6 (tokens times top-k of weights_TK)"
COMBINE = {
    "y_RD": torch.ones(6, 4),
    "weights_TK": torch.ones(3, 2),
    "rows_R": torch.arange(6, dtype=torch.int32),
}
BAD_COMBINE = {
    "y_rank": wrong_rank("y_RD", (6,), 2),
    "y_dtype": wrong_dtype("y_RD", (6, 4), "int32", FIRST_FLOAT_NAMES),
    "y_rows": wrong_size("y_RD", (5, 4), 0, PAIRS),
    "weights_rank": wrong_rank("weights_TK", (6,), 2),
    "weights_dtype": wrong_dtype("weights_TK", (3, 2), "int64"),
    "weights_device": wrong_device("weights_TK", (3, 2)),
    "rows_rank": wrong_rank("rows_R", (3, 2), 1),
    "rows_dtype": wrong_dtype("rows_R", (6,), "int64", "int32"),
    "rows_size": wrong_size("rows_R", (4,), 0, PAIRS, torch.int32),
    "rows_device": wrong_device("rows_R", (6,), torch.int32),
}


@pytest.mark.parametrize("bad", BAD_DISPATCH.values(), ids=BAD_DISPATCH)
def test_dispatch_refuses_a_bad_call(bad: Bad) -> None:
    assert_refused(dispatch, DISPATCH, bad)


@pytest.mark.parametrize("bad", BAD_COMBINE.values(), ids=BAD_COMBINE)
def test_combine_refuses_a_bad_call(bad: Bad) -> None:
    assert_refused(combine, COMBINE, bad)

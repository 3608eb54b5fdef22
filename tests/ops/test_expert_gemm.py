"""`expert_gemm` on every backend: each row times the weight of its expert, and nothing else."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from moe_ops import expert_gemm, quantize, using
from moe_ops.checks.shapes import DTYPES, FLOATS
from moe_ops.conformance.tensors import padded, strided
from moe_ops.testing import TOL, assert_close
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
R, D, F, E = 21, 24, 40, 5
TIGHT = TOL["expert_gemm", torch.float32]

# Ends of the experts' rows, R = 21 rows in all.
ENDS = {
    "even": [4, 8, 13, 17, 21],
    "gaps": [0, 6, 6, 6, 21],
    "first": [21, 21, 21, 21, 21],
    "last": [0, 0, 0, 0, 21],
    "tail": [3, 3, 9, 9, 15],
    "nothing": [0, 0, 0, 0, 0],
}
each_ends = pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
each_backend = pytest.mark.parametrize("backend", expert_gemm.backends)
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=DTYPES)


def operands(ends: list[int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """(x_RD, w_EFD, ends_E), with NaN in the rows that belong to no expert."""
    x_RD = torch.randn(R, D)
    x_RD[ends[-1] :] = NAN
    w_EFD = torch.randn(E, F, D) * D**-0.5
    return x_RD.to(dtype), w_EFD.to(dtype), torch.tensor(ends, dtype=torch.int32)


def by_hand(x_RD: Tensor, w_EFD: Tensor, ends: list[int], bias_EF: Tensor | None = None) -> Tensor:
    """The specified rows, an expert at a time in double precision."""
    pieces, start = [], 0
    for e, end in enumerate(ends):
        y = x_RD[start:end].double() @ w_EFD[e].double().T
        pieces.append(y if bias_EF is None else y + bias_EF[e].double())
        start = end
    return torch.cat(pieces)


def run(backend: str, *args: Any) -> Tensor:
    """The op on a backend, or a skip with the reason why that refuses the call."""
    refusal = expert_gemm.refusals(*args)[backend]
    if refusal:
        pytest.skip(f"{backend} {refusal}")
    with using(backend, expert_gemm):
        return expert_gemm(*args)


@each_dtype
@each_ends
@each_backend
def test_multiplies_each_row_by_its_experts_weight(
    backend: str, ends: list[int], dtype: torch.dtype
) -> None:
    x, w, ends_E = operands(ends, dtype)
    got = run(backend, x, w, ends_E)
    assert (got.shape, got.dtype) == ((R, F), dtype)
    assert_close(got[: ends[-1]], by_hand(x, w, ends), TOL["expert_gemm", dtype])


@each_dtype
@each_ends
@each_backend
def test_adds_the_bias_of_each_rows_expert(
    backend: str, ends: list[int], dtype: torch.dtype
) -> None:
    x, w, ends_E = operands(ends, dtype)
    bias = torch.randn(E, F)
    got = run(backend, x, w, ends_E, bias)
    assert_close(got[: ends[-1]], by_hand(x, w, ends, bias), TOL["expert_gemm", dtype])


WRONG_ENDS = {
    "below_zero": ([-1, 4, 8, 13, 21], "ends_E[0] = -1"),
    "past_the_rows": ([4, 8, 13, 17, 22], "ends_E[4] = 22"),
    "far_past_the_rows": ([4, 8, 13, 17, 2**31 - 1], "ends_E[4] = 2147483647"),
    "past_and_back": ([4, 900, 13, 17, 21], "ends_E[1] = 900"),
    "descending": ([4, 13, 8, 17, 21], "ends_E[2] = 8"),
    "far_below_zero": ([4, 8, -(2**31), 17, 21], "ends_E[2] = -2147483648"),
}  # fmt: skip


@pytest.mark.parametrize("planned", [False, True], ids=["", "planned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("ends", "text"), WRONG_ENDS.values(), ids=WRONG_ENDS)
@each_backend
def test_rows_that_are_not_there_are_refused(
    backend: str, ends: list[int], text: str, dtype: torch.dtype, planned: bool
) -> None:
    x, w, _ = operands(ENDS["even"], dtype)
    ends_E = torch.tensor(ends, dtype=torch.int32)
    refusal = expert_gemm.refusals(x, w, ends_E)[backend]
    if refusal:
        pytest.skip(f"{backend} {refusal}")
    message = "ends_E must ascend within the 21 rows of x_RD, got "
    with pytest.raises(ValueError, match=re.escape(message + text)):
        if planned:
            expert_gemm.planned(x, w, ends_E, plan=backend)
        else:
            run(backend, x, w, ends_E)


@pytest.mark.parametrize("backend", ["reference", "dequantize"])
def test_they_are_refused_with_quantized_weights_too(backend: str) -> None:
    x, w, _ = operands(ENDS["even"])
    q, scale = quantize(w.flatten(0, 1), "float8_e4m3fn:row")
    call = {"w_scale_EFG": scale.view(E, F, 1), "w_format": "float8_e4m3fn:row"}
    ends_E = torch.tensor([4, 8, 13, 17, 22], dtype=torch.int32)
    with using(backend), pytest.raises(ValueError, match=r"21 rows of x_RD, got ends_E\[4\] = 22"):
        expert_gemm(x, q.view(w.shape), ends_E, **call)


@each_backend
def test_the_first_expert_may_begin_late_and_rows_be_none(backend: str) -> None:
    x, w, _ = operands(ENDS["even"])
    for rows, ends in ((0, [0] * E), (21, [0, 0, 0, 0, 1])):
        got = run(backend, x[:rows], w, torch.tensor(ends, dtype=torch.int32))
        assert got.shape == (rows, F)


def test_the_definition_is_traced_without_a_look_at_the_ends() -> None:
    x, w, ends_E = operands(ENDS["tail"])
    for mode in ("real", "fake", "symbolic"):
        graph = make_fx(lambda *a: expert_gemm.reference(*a), tracing_mode=mode)(x, w, ends_E)
        assert_close(graph(x, w, ends_E)[:15], by_hand(x, w, ENDS["tail"]), TIGHT)
        other = operands(ENDS["even"])
        assert_close(graph(*other), by_hand(other[0], other[1], ENDS["even"]), TIGHT)


# From `big` on the values of the dtype are the even numbers.
each_big = pytest.mark.parametrize(
    ("dtype", "big"),
    [(torch.bfloat16, 256.0), (torch.float16, 2048.0)],
    ids=["bfloat16", "float16"],
)


@each_big
@each_backend
def test_rounds_half_to_even(backend: str, dtype: torch.dtype, big: float) -> None:
    added = {0.5: 0.0, 1.0: 0.0, 1.5: 2.0, 2.5: 2.0, 3.0: 4.0, 3.5: 4.0}
    w = torch.tensor([[[big, a] for a in added]], dtype=dtype)
    got = run(backend, torch.ones(1, 2, dtype=dtype), w, torch.tensor([1], dtype=torch.int32))
    assert (got - big).tolist() == [list(added.values())]


@each_big
@pytest.mark.parametrize("backend", ["reference", "cpu"])  # `aten` is documented to round twice
def test_rounds_once_after_the_bias(backend: str, dtype: torch.dtype, big: float) -> None:
    w = torch.tensor([[[big, 1.0]]], dtype=dtype)
    one = torch.tensor([1], dtype=torch.int32)
    got = run(backend, torch.ones(1, 2, dtype=dtype), w, one, torch.ones(1, 1, dtype=dtype))
    assert got.tolist() == [[big + 2]]


@each_ends
@each_backend
def test_transposed_weights_give_the_same_product(backend: str, ends: list[int]) -> None:
    x, w, ends_E = operands(ends)
    want = by_hand(x, w, ends)
    flipped = w.transpose(1, 2)
    for name, weight in {"view": flipped, "copy": flipped.contiguous()}.items():
        got = run(backend, x, weight, ends_E, None, True)
        assert_close(got[: ends[-1]], want, TIGHT, name)


LAYOUTS = {
    "contiguous": lambda t: t,
    "strided": strided,
    "padded": padded,
    "column_major": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "reversed_axes": lambda t: t.permute(*reversed(range(t.dim()))).contiguous().permute(
        *reversed(range(t.dim()))
    ),
}  # fmt: skip


@pytest.mark.parametrize("w_layout", LAYOUTS)
@pytest.mark.parametrize("x_layout", LAYOUTS)
@each_backend
def test_strides_do_not_matter(backend: str, x_layout: str, w_layout: str) -> None:
    x, w, ends_E = operands(ENDS["tail"])
    got = run(backend, LAYOUTS[x_layout](x), LAYOUTS[w_layout](w), ends_E)
    assert_close(got[:15], by_hand(x, w, ENDS["tail"]), TIGHT)


@each_backend
def test_one_row_and_weight_shared_by_many(backend: str) -> None:
    x, w, ends_E = operands(ENDS["even"])
    x, w = x[:1].expand(R, D), w[:1].expand(E, F, D)
    assert_close(run(backend, x, w, ends_E), by_hand(x, w, ENDS["even"]), TIGHT)


@pytest.mark.filterwarnings("ignore:torch.searchsorted")  # says that it copies
@each_backend
def test_strided_ends_are_read_right(backend: str) -> None:
    x, w, ends_E = operands(ENDS["gaps"])
    assert_close(run(backend, x, w, strided(ends_E)), by_hand(x, w, ENDS["gaps"]), TIGHT)


@pytest.mark.parametrize(("D", "F"), [(1, 1), (1, 8), (8, 1), (17, 3), (67, 35)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@each_backend
def test_any_width_works(backend: str, dtype: torch.dtype, D: int, F: int) -> None:
    x, w = torch.randn(6, D).to(dtype), torch.randn(2, F, D).to(dtype)
    got = run(backend, x, w, torch.tensor([1, 6], dtype=torch.int32))
    assert_close(got, by_hand(x, w, [1, 6]), TOL["expert_gemm", dtype])


@each_backend
def test_no_rows_give_an_empty_result(backend: str) -> None:
    _, w, ends_E = operands(ENDS["nothing"])
    assert run(backend, torch.empty(0, D), w, ends_E).shape == (0, F)


@each_backend
def test_nan_in_one_row_stays_in_that_row(backend: str) -> None:
    x, w, ends_E = operands(ENDS["even"])
    x[5] = NAN
    got = run(backend, x, w, ends_E)
    assert got.isnan().any(-1).nonzero().flatten().tolist() == [5]


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_a_weight_that_needs_grad_goes_to_a_differentiable_backend() -> None:
    x, w, ends_E = operands(ENDS["gaps"])
    w.requires_grad_()
    assert expert_gemm.refusals(x, w, ends_E)["cpu"] == (
        "is not differentiable, and an argument requires grad"
    )
    expert_gemm(x, w, ends_E).square().sum().backward()
    got, w.grad = w.grad, None
    by_hand(x, w, ENDS["gaps"]).square().sum().backward()
    assert_close(got, w.grad, TIGHT)


GOOD = {
    "x_RD": torch.ones(6, 4),
    "w_EFD": torch.ones(2, 3, 4),
    "ends_E": torch.tensor([2, 6], dtype=torch.int32),
}
EXPERTS = "2 (the experts of w_EFD)"
BAD = {
    "x_rank": wrong_rank("x_RD", (4,), 2),
    "x_dtype": wrong_dtype("x_RD", (6, 4), "int32", FIRST_FLOAT_NAMES),
    "w_rank": wrong_rank("w_EFD", (3, 4), 3),
    "w_dtype": wrong_dtype("w_EFD", (2, 3, 4), "float16", "float32"),
    "w_width": wrong_size("w_EFD", (2, 3, 5), 2, "4 (the width of x_RD)"),
    "w_device": wrong_device("w_EFD", (2, 3, 4)),
    "transposed_width": Bad(
        {"transposed": True},
        "w_EFD must have 4 (the width of x_RD) on axis 1, got shape (2, 3, 4)",
    ),
    "no_experts": Bad(
        {"w_EFD": torch.ones(0, 3, 4)}, "w_EFD holds no expert, got shape (0, 3, 4); give"
    ),
    "ends_rank": wrong_rank("ends_E", (2, 1), 1),
    "ends_dtype": wrong_dtype("ends_E", (2,), "int64", "int32"),
    "ends_size": wrong_size("ends_E", (1,), 0, EXPERTS, torch.int32),
    "ends_device": wrong_device("ends_E", (2,), torch.int32),
    "bias_rank": wrong_rank("bias_EF", (3,), 2),
    "bias_dtype": wrong_dtype("bias_EF", (2, 3), "int32"),
    "bias_experts": wrong_size("bias_EF", (3, 3), 0, EXPERTS),
    "bias_width": wrong_size("bias_EF", (2, 4), 1, "3 (the rows of one expert's weight)"),
    "bias_device": wrong_device("bias_EF", (2, 3)),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_refuses_a_bad_call(bad: Bad) -> None:
    assert_refused(expert_gemm, GOOD, bad)

"""Linear layers of few rows on a GPU: their kernels, captured, and what the pass makes of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.nn.functional import linear

import moe_ops
from moe_ops.decode_ops import linears, normed_linears
from moe_ops.testing import Tol, assert_close
from tests.generation.steps import check_steps
from tests.gpu.captures import captured

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16]
TOL = {
    torch.bfloat16: Tol(8e-3, "one rounding to 8 bits of mantissa"),
    torch.float16: Tol(1e-3, "one rounding to 11 bits of mantissa"),
}
# Rows of the weights, and columns.
SHAPES = [
    ((4096, 512, 512), 2048), ((2048,), 4096), ((128,), 2048), ((33, 7, 1), 77), ((100,), 1),
    ((640, 128, 128), 720), ((5, 6, 7, 8, 9), 200), ((70001,), 64),
]  # fmt: skip


def tensors(T: int, sizes: tuple[int, ...], K: int, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    make: Any = {"device": "cuda", "dtype": dtype}
    weights = [torch.randn(n, K, **make) * K**-0.5 for n in sizes]
    biases = [torch.randn(n, **make) if g % 2 else None for g, n in enumerate(sizes)]
    return torch.randn(T, K, **make), weights, biases


def definition(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    pairs = zip(weights, biases, strict=True)
    return [
        linear(x.double(), w.double(), None if b is None else b.double()).float() for w, b in pairs
    ]


def check(got: list[Tensor], *given: Any) -> None:
    for y, want in zip(got, definition(*given), strict=True):
        assert_close(y.float(), want, TOL[y.dtype], f"T={given[0].shape[0]}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_number_of_rows(shape: tuple[tuple[int, ...], int], dtype: torch.dtype) -> None:
    for T in (1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 63, 64):
        given = tensors(T, *shape, dtype)
        got = linears(*given)
        check(got, *given)
        assert all(torch.equal(a, b) for a, b in zip(got, linears(*given), strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("residual", "shift"), [(False, None), (True, None), (False, 0.0), (True, 1.0)]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_norm_first(
    shape: tuple[tuple[int, ...], int], residual: bool, shift: float | None, dtype: torch.dtype
) -> None:
    x, weights, biases = tensors(1, *shape, dtype)
    gain = torch.randn(shape[1], device="cuda", dtype=dtype)
    added = torch.randn_like(x) if residual else None
    given = x, added, gain, 1e-6, weights, biases, shift
    normed_linears(*given)
    graph, out = captured(lambda: normed_linears(*given))
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        for t in out:
            t.fill_(float("nan"))
        graph.replay()
        *sums, n = out[: 1 + residual]
        s = x if added is None else x + added
        assert all(torch.equal(t, s) for t in sums)
        wide = s.double()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        wide = wide * (gain.double() + (shift or 0.0))
        assert_close(n.float(), wide.float(), Tol(2 * TOL[dtype].rel, "two roundings"))
        check(out[1 + residual :], n, weights, biases)
        assert all(torch.equal(a, b) for a, b in zip(out, normed_linears(*given), strict=True))


@pytest.mark.usefixtures("overlapping")
@pytest.mark.parametrize("T", [1, 8, 40])
def test_chains_of_launches_that_overlap_in_a_graph(T: int) -> None:
    """Each reads what the one before it writes, as soon as that has ended and no sooner."""
    weights = [torch.randn(1024, 1024, device="cuda").bfloat16() / 32 for _ in range(24)]
    x = torch.randn(T, 1024, device="cuda").bfloat16()

    def chain(x: Tensor) -> Tensor:
        for w in weights:
            (x,) = linears(x, [w], [None])
        return x

    chain(x)
    graph, out = captured(lambda: chain(x))
    for _ in range(20):
        x.copy_(torch.randn_like(x))
        out.fill_(float("nan"))
        graph.replay()
        got = out.clone()
        want = x
        for w in weights:
            want = linear(want.double(), w.double()).bfloat16()
        assert_close(got.float(), want.float(), Tol(5e-2, "24 roundings to 8 bits of mantissa"))
        assert torch.equal(got, chain(x))


class Layer(nn.Module):
    """Three products of one input and one of another, with a nonlinearity between."""

    def __init__(self, D: int, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, n, bias=bias) for n in (2 * D, D, D))
        self.o = nn.Linear(D, D, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.q(x).float().softmax(-1), self.o(self.k(x).sigmoid() * self.v(x)) + x


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 8, 33, 64])
def test_the_pass(rows: int, tuned: bool, bias: bool) -> None:
    """Inductor makes sums of products with one row, if it is told to tune."""
    torch._dynamo.reset()
    model = Layer(256, bias).cuda().bfloat16().requires_grad_(False)
    x = torch.randn(rows, 1, 256, device="cuda").bfloat16()
    options = moe_ops.inductor_options(extra={"coordinate_descent_tuning": tuned})
    with torch.inference_mode():
        compiled = torch.compile(model, options=options, dynamic=False)
        got, (code,) = run_and_get_code(compiled, x)
        want = copy.deepcopy(model).double()(x.double())
    assert code.count("moe_ops.linears.planned(") == 2
    for g, w in zip(got, want, strict=True):
        assert_close(g.float(), w.float(), Tol(2e-2, "several roundings to 8 bits of mantissa"))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_of_a_model(family: str, batch: int) -> None:
    """The logits of captured steps are those of the model's own code, but for roundings."""
    check_steps(family, batch, "merge_linears", least=2, times=2)

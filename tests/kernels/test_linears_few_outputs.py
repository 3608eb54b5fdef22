"""Linear layers with few outputs, by torch: see `gluon_in_torch.py`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.decode_ops import normed_linears
from moe_ops.decode_ops.normed_linears import NormedLinearsCall
from moe_ops.kernels.triton.decode import linears as kernels
from moe_ops.testing import BF16, DEVICE, F16, Tol, assert_close
from tests.chosen import in_turn
from tests.kernels import gluon_in_torch

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernel itself")

NORMED = {F16: Tol(4e-3, "rounded three times"), BF16: Tol(3e-2, "rounded three times")}
TOL = {F16: Tol(1e-3, "one rounding to 11 bits"), BF16: Tol(8e-3, "one rounding to 8 bits")}


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(kernels, "is_hopper", lambda _: True)
    return gluon_in_torch.take_over(kernels, monkeypatch)


@in_turn(
    pytest.mark.parametrize("T", [2, 5, 8]),
    pytest.mark.parametrize("K", [2048, 352, 1024, 40]),
    pytest.mark.parametrize("sizes", [(128,), (33, 1, 20), (5, 16, 7, 31, 9)], ids=str),
    pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"]),
    pytest.mark.parametrize("dtype", [F16, BF16], ids=str),
)
def test_against_float64(
    dtype: torch.dtype, biases: bool, sizes: tuple[int, ...], K: int, T: int, launched: list[str]
) -> None:
    x = torch.randn(T, K).to(dtype)
    weights = [torch.randn(n, K).to(dtype) for n in sizes]
    added = [torch.randn(n).to(dtype) if biases and i != 1 else None for i, n in enumerate(sizes)]
    got = kernels.run(x, weights, added)
    assert set(launched) == {"linears_few_outputs"}
    for y, w, b in zip(got, weights, added, strict=True):
        want = x.double() @ w.double().T + (0 if b is None else b.double())
        assert y.dtype is dtype and y.shape == want.shape
        assert_close(y.float(), want.float(), TOL[dtype])


def test_rows_do_not_depend_on_how_many_there_are() -> None:
    x, w = torch.randn(8, 2048).to(F16), [torch.randn(64, 2048).to(F16)]
    (want,) = kernels.run(x, w, [None])
    for T in (2, 7):
        assert torch.equal(kernels.run(x[:T], w, [None])[0], want[:T])


def test_rows_of_a_wider_input_stay_apart() -> None:
    w = [torch.randn(24, 96).to(F16)]
    wide = torch.full((3, 208), float("nan"), dtype=F16)
    wide[:, 48:144] = torch.randn(3, 96)
    (want,) = kernels.run(wide[:, 48:144].contiguous(), w, [None])
    wide[1, 60] = float("nan")
    (got,) = kernels.run(wide[:, 48:144], w, [None])
    assert torch.equal(got[[0, 2]], want[[0, 2]]) and bool(got[1].isnan().all())


@in_turn(
    pytest.mark.parametrize("T", [2, 7, 8]),
    pytest.mark.parametrize("K", [2048, 352, 40]),
    pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"]),
    pytest.mark.parametrize("shift", [None, 1.0], ids=str),
    pytest.mark.parametrize("dtype", [F16, BF16], ids=str),
)
def test_a_norm_in_the_launch(
    dtype: torch.dtype, shift: float | None, residual: bool, K: int, T: int, launched: list[str]
) -> None:
    x, gain = torch.randn(T, K).to(dtype), torch.randn(K).to(dtype)
    wide = torch.full((T, K + 8), float("nan"), dtype=dtype)
    wide[:, :K] = torch.randn(T, K)
    weights = [torch.randn(n, K).to(dtype) for n in (33, 1, 20, 7, 9)]
    given = (x, wide[:, :K] if residual else None, gain, 1e-5, weights, [None] * 5, shift)
    got = kernels.run_normed(*given)
    assert launched == ["linears_few_outputs"] * 2
    call = NormedLinearsCall(*given)
    for y, want in zip(got, normed_linears.body(call), strict=True):
        assert_close(y.float(), want.float(), NORMED[dtype])


def test_what_it_is_for() -> None:
    def streams(T: int, N: int, K: int, normed: bool = False) -> bool:
        w = [torch.empty(N, K, dtype=BF16, device="meta")]
        x = torch.empty(T, K, dtype=BF16, device="meta")
        return kernels.outputs_stream(x, w, normed) is not None

    assert streams(2, 128, 2048) and streams(8, 2112, 2048) and streams(8, 32, 4096)
    assert streams(8, 128, 2048, True) and not streams(8, 128, 2056, True)
    assert not streams(1, 128, 2048) and not streams(9, 128, 2048)
    assert not streams(8, 2113, 2048) and not streams(8, 128, 4104) and not streams(8, 128, 1996)


@pytest.mark.parametrize("T", [2, 8])
@pytest.mark.parametrize("K", [2880, 4096])
def test_two_steps(K: int, T: int, launched: list[str]) -> None:
    x, w = torch.randn(T, K).to(F16), torch.randn(24, K).to(F16)
    (got,) = kernels.run(x, [w], [None])
    assert launched == ["linears_few_outputs"]
    assert_close(got.float(), (x.double() @ w.double().T).float(), TOL[F16])

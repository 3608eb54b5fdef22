"""Codes of six bits in tiles of many rows, by torch: what a consumer of `grouped_registers.py`
loads, decodes, multiplies and stores. Its barriers, copies and layouts are not looked at.
"""

from __future__ import annotations

import functools
from dataclasses import astuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops import activate
from moe_ops.backends.triton_formats import weight_of
from moe_ops.kernels.triton import LINEAR, Act, activation
from moe_ops.kernels.triton.experts.formats import order
from moe_ops.kernels.triton.experts.products import fragments, grouped_registers, skeleton
from moe_ops.testing import BF16, DEVICE, F16
from tests.chosen import in_turn
from tests.kernels.codes import Weights, any_codes
from tests.kernels.gluon_in_torch import DECODERS, functions_of, pointer, value

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")

E, T = 2, 32
SILU = Act("silu")
INTERLEAVED = Act("silu", True, True, 1.702, 7.0, 1.0)
UNGATED = Act("relu2", gated=False)
each_width = pytest.mark.parametrize("K", [288, 512], ids=lambda K: f"K{K}")


@functools.cache
def functions() -> dict[str, Any]:
    """Those of the kernel."""
    modules = (activation, *DECODERS, order, fragments, skeleton, grouped_registers)
    names = functions_of(modules, FACTORS=None, ROWS=128)
    names["fragments"] = SimpleNamespace(**names)
    return names


def rows_of_consumer(w: Weights, at: tuple[Any, ...], LOWER: int, act: Act, dtype: Any) -> Tensor:
    """A consumer's rows of W [64, K arranged], step by step."""
    f, (tile, sizes) = functions(), at
    W = weight_of(w.format, "")
    scales = (pointer(w.scale), None)
    codes_at = f["sixes_at"](pointer(w.values.view(torch.int64)), tile, sizes, LOWER, W, act)
    factors = f["factors_at"](tile, sizes, LOWER, W, act)
    values = []
    for i in range(f["steps_of"](sizes[1], f["columns_of"](W), f["at_once"](W))):
        less, *pairs = f["factor_pairs"](f["load_factors"](scales, factors, i, W), W, dtype)
        words = f["words_of_sixes"](f["load_sixes"](codes_at, i))
        for half, pair in zip(words, pairs, strict=True):
            values.append(f["operand_of"](f["unscaled"](half, less, W, dtype), pair, W, dtype))
    return torch.cat(values, 1)


def arranged(x_TK: Tensor, columns: int) -> Tensor:
    """Tokens as `arrange` stores them, and zeros up to so many columns."""
    places = functions()["place_of"](torch.arange(x_TK.shape[1]), 6)
    out = x_TK.new_zeros(x_TK.shape[0], columns)
    out[:, places] = x_TK
    return out


def product(w: Weights, x_TK: Tensor, out_n: int, bias_EN: Tensor, act: Act, expert: int) -> Any:
    """All tiles of an expert's product with tokens, as they are stored."""
    f, W, dtype = functions(), weight_of(w.format, ""), x_TK.dtype
    N, K = w.values.shape[1], x_TK.shape[1]
    width = out_n if act.kind is None else -(-out_n // 128) * 128
    out = torch.full((T, width), torch.nan, dtype=dtype)
    sizes, each = (N, K, out_n, width), 64 if act.gated else 128
    for n in range(-(-width // each)):
        tile = (value(expert), T, 0, n)
        for LOWER in range(2):
            rows = rows_of_consumer(w, (tile, sizes), LOWER, act, dtype).float()
            x = arranged(x_TK, rows.shape[1]).float()
            sums = f["rescaled"](value(rows @ x.T), W, dtype)
            store = (None, None, pointer(bias_EN), pointer(out))
            f["_store"](sums, store, tile, sizes, LOWER, W, act)
    return out


def weights(format: str, N: int, K: int) -> tuple[Weights, Tensor]:
    """Of two experts, with their values."""
    torch.manual_seed(0)
    parts = [any_codes(format, N, K) for _ in range(E)]
    w = Weights(
        values=torch.cat([p.values for p in parts]), scale=torch.cat([p.scale for p in parts]),
        zero=None, format=format,
    )  # fmt: skip
    return w, torch.stack([p.decoded() for p in parts])


@in_turn(
    pytest.mark.parametrize("dtype", [BF16, F16], ids=str),
    pytest.mark.parametrize("format", ["mxfp6_e3m2", "mxfp6_e2m3"]),
    pytest.mark.parametrize(
        "act", [SILU, INTERLEAVED, UNGATED, LINEAR], ids=lambda a: f"{a.kind}{a.interleaved}"
    ),
    each_width,
)
def test_every_row_is_multiplied_and_stored_in_its_place(
    K: int, act: Act, format: str, dtype: torch.dtype
) -> None:
    out_n = 160
    N = 2 * out_n if act.gated else out_n
    w, w_ENK = weights(format, N, K)
    x_TK = (torch.randn(T, K) * K**-0.5 / 16).to(dtype)
    bias_EN = torch.randn(E, N).to(dtype)
    want = x_TK.float() @ w_ENK[1].T + bias_EN[1].float()
    if act.kind is not None:
        want = arranged(activate(want, *astuple(act)), 256)
    got = product(w, x_TK, out_n, bias_EN, act, 1)
    # Rounded once, after sums of float32 in another order.
    torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)


@in_turn(
    pytest.mark.parametrize("format", ["mxfp6_e3m2", "mxfp6_e2m3", "float6_e2m3:row:float32"]),
    each_width,
)
def test_codes_are_decoded_to_the_bit(K: int, format: str) -> None:
    w, w_ENK = weights(format, 128, K)
    at = ((value(1), T, 0, 0), (128, K, 128, 128))
    exponents = {"float6_e3m2": -60, "float6_e2m3": -62}  # what `rescaled` makes up for
    for LOWER in range(2):
        got = rows_of_consumer(w, at, LOWER, LINEAR, BF16).double()
        m = torch.arange(64)
        rows = m // 16 * 32 + 16 * LOWER + m % 16
        want = arranged(w_ENK[1, rows], got.shape[1]).double()
        places = arranged(torch.ones(1, K), got.shape[1])[0] > 0
        scale = 2.0 ** exponents[weight_of(format, "").element]
        assert torch.equal(got[:, places], want[:, places] * scale)


def test_places_are_those_of_columns() -> None:
    f, columns = functions(), torch.arange(384)
    assert torch.equal(f["column_at"](f["place_of"](columns, 6), 6), columns)

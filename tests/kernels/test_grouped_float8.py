"""Weights of four bits with tokens of float8 in tiles of many rows, by torch: what a consumer of
`grouped_float8_tokens.py` loads, decodes, multiplies and stores. Its barriers, copies and layouts
are not looked at.
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
from moe_ops.kernels.triton.experts.formats import order, to_float8
from moe_ops.kernels.triton.experts.formats.codes import POWERS
from moe_ops.kernels.triton.experts.operands.float8_groups import quantize_in_order
from moe_ops.kernels.triton.experts.products import (
    float8_sums,
    fragments_float8,
    grouped_float8_tokens,
    skeleton,
)
from moe_ops.kernels.triton.experts.products.grouped_float8_tokens import as_long_words
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import BF16, DEVICE
from tests.chosen import in_turn
from tests.kernels.codes import Weights, any_codes
from tests.kernels.gluon_in_torch import DECODERS, functions_of, pointer, value

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")

E, T = 2, 32
SILU = Act("silu")
INTERLEAVED = Act("silu", True, True, 1.702, 7.0, 1.0)
UNGATED = Act("relu2", gated=False)
# Formats, and by how many powers of two some scales of some rows are less.
FORMATS = (
    ("mxfp4", 0), ("mxfp4", 7), ("mxfp4", 18), ("mxfp4", 40), *((f, 0) for f in (
    "int4:1x128:bfloat16", "int4:row", "uint4:1x128:float16", "uint4:row:bfloat16",
    )),
)  # fmt: skip


def permuted(a: Tensor, b: Tensor, selector: int) -> Tensor:
    """As `to_float8.permuted`, which is PTX."""
    return looked_up(a, b, torch.full_like(a, selector))


def looked_up(low: Tensor, high: Tensor, nibbles: Tensor) -> Tensor:
    """As `to_float8.looked_up`, which is PTX."""
    low, high, nibbles = torch.broadcast_tensors(low, high, nibbles)
    of_both = torch.stack([low, high], -1).view(torch.uint8)
    named = torch.stack([(nibbles >> (4 * i)) & 7 for i in range(4)], -1).long()
    return value(of_both.gather(-1, named).view(torch.int32)[..., 0])


def distance(a: Tensor, b: Tensor) -> Tensor:
    """As `to_float8.distance`, which is PTX."""
    a, b = torch.broadcast_tensors(a, value(torch.as_tensor(b, dtype=torch.int32)))
    apart = a.contiguous().view(torch.uint8).int() - b.contiguous().view(torch.uint8).int()
    return value(apart.abs().to(torch.uint8).view(torch.int32))


def codes_of(w: Tensor, dtype: torch.dtype) -> Tensor:
    """As `fragments_float8.codes_of`, which is PTX."""
    return value(w.contiguous()[..., None].view(dtype).float())


@functools.cache
def functions() -> dict[str, Any]:
    """Those of the kernel."""
    modules = (activation, *DECODERS, order, to_float8, fragments_float8, float8_sums, skeleton)
    names = functions_of(
        (*modules, grouped_float8_tokens), ROWS=128, STEP=256, HALF=128, UNITS=4, FOLDED=26,
        UNIT=None, WORDS=None, PART_WORDS=None, OF_ROWS=None,
    )  # fmt: skip
    names |= {"permuted": permuted, "looked_up": looked_up, "codes_of": codes_of}
    names |= {"distance": distance, "not_and_or": lambda a, mask, b: (~a & mask) | b}
    names["of_rows"] = lambda x, T: x[:, None]
    names["as_held"] = lambda x, dtype: x.to(dtype).float()
    names["quotient"] = lambda x, scale: x / scale
    names["fragments"] = names["to_float8"] = SimpleNamespace(**names)
    return names


class Ring:
    """A stage of codes, of its two boxes."""

    def __init__(self, boxes: tuple[Tensor, ...]) -> None:
        self.boxes = boxes

    def index(self, at: int) -> Ring:
        return Ring((self.boxes[at],))

    def slice(self, first: int, count: int, dim: int = 0) -> Ring:
        return Ring((self.boxes[0].narrow(dim, first, count),))

    def permute(self, order: list[int]) -> Ring:
        return Ring((self.boxes[0].permute(order),))

    def load(self, layout: Any) -> Tensor:
        return value(self.boxes[0])


def boxes_of(w: Weights, tile: Any, sizes: Any, step: int, act: Act) -> tuple[Tensor, ...]:
    """The boxes that are copied of a step; zeros where there is nothing."""
    how = (weight_of(w.format, ""), SimpleNamespace(tokens=T), act)
    left, right, _ = functions()["_boxes_of_tile"](0, tile, None, None, sizes, how)
    rows = w.values.view(torch.int32).flatten(0, 1)
    pair = (rows[::2], rows[1::2]) if act.interleaved else (rows, rows)
    boxes = []
    for first, of in zip((left, right), pair, strict=True):
        box = of[int(first) : int(first) + 64, step * 32 : step * 32 + 32]
        boxes.append(torch.nn.functional.pad(box, (0, 32 - box.shape[1], 0, 64 - box.shape[0])))
    return tuple(boxes)


def units_of(w: Weights, at: Any, step: int, LOWER: int, act: Act, near: Any) -> list[Tensor]:
    """What the units of a step multiply [64, 32], of which scales are a part if rows are near."""
    f, (tile, sizes) = functions(), at
    W = weight_of(w.format, "")
    factors = f["factors_at"](tile, sizes, LOWER, W, act)
    ring = Ring(boxes_of(w, tile, sizes, step, act))
    if near is not None:
        stored = f["load_factors"](pointer(as_long_words(w.scale)), factors, step, W)
        more = f["_above"](stored, (near - 27) * 0x01010101, W)
        codes = f["_signed"](f["_decode_folded"](ring, 0, more, LOWER, act))
        return [f["operand_of"](c, None, torch.float8_e5m2) for c in codes]
    zero_ptr = None if w.zero is None else pointer(w.zero)
    less = f["_load_zeros"](zero_ptr, factors, step, W)
    codes = ()
    for half in range(2):
        codes += f["_bytes"](f["_decode"](ring, 0, less, half, LOWER, W, act), W)
    return [f["operand_of"](c, None, torch.float8_e4m3fn) for c in codes]


def sums_of_consumer(w: Weights, x: Tensor, at: Any, LOWER: int, act: Act) -> Tensor:
    """A consumer's sums [64, T] of tokens [T, K] in the order of codes, step by step."""
    f, (tile, sizes) = functions(), at
    W = weight_of(w.format, "")
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % 256))
    near = None
    if f["in_words"](W):
        near = f["row_references"](pointer(references_of(w)), tile, sizes, LOWER, act)
        near = near if near.min() > 0 else None
    ptr = pointer(as_long_words(w.scale) if f["in_words"](W) else w.scale)
    factors = f["factors_at"](tile, sizes, LOWER, W, act)
    sums, groups, seen = torch.zeros(64, T), f["groups_of"](W), factors[1] * 0
    for i in range(f["steps_of"](sizes[1], 256, 1)):
        stored = f["as_words"](f["load_factors"](ptr, factors, i, W), W)
        seen = f["nan_words"](seen, stored, W)
        for u, unit in enumerate(units_of(w, at, i, LOWER, act, near)):
            part = unit @ x[:, i * 256 + u * 32 :][:, :32].T
            if W.across != -1 and near is None:
                part = part * f["scale_at"](stored, u * groups // 4, groups, W)[:, None]
            sums += part
    if near is not None:
        return value(sums * (2.0**-13 * torch.exp2(near - 1.0 - 127))[:, None])
    if W.across == -1:
        sums *= f["scale_at"](f["load_factors"](ptr, factors, 0, W), 0, 1, W)[:, None]
    elif f["in_words"](W):
        sums = torch.where(((seen & -0x7F7F7F80) != 0)[:, None], torch.nan, sums)
    return value(sums * f["of_one"](W))


def sums_of_groups(
    w: Weights, x_TK: Tensor, scale_TP: Tensor, at: Any, LOWER: int, act: Act
) -> Tensor:
    """`sums_of_consumer` of codes of tokens with scales for as many columns as share one of W."""
    f, (tile, sizes) = functions(), at
    W, parts = weight_of(w.format, ""), (T,)
    x_TK = torch.nn.functional.pad(x_TK, (0, -x_TK.shape[1] % 256))
    groups = f["groups_of"](W)
    ptr = pointer(as_long_words(w.scale) if f["in_words"](W) else w.scale)
    factors = f["factors_at"](tile, sizes, LOWER, W, act)
    accs = (value(torch.zeros(64, T)),)
    for i in range(f["steps_of"](sizes[1], 256, 1)):
        stored = f["as_words"](f["load_factors"](ptr, factors, i, W), W)
        rings = None, (None, Ring((scale_TP[:, 8 * i : 8 * i + 8],)))
        units = [
            unit @ x_TK[:, i * 256 + u * 32 :][:, :32].T
            for u, unit in enumerate(units_of(w, at, i, LOWER, act, None))
        ]
        each = len(units) // (2 * groups)
        for g in range(2 * groups):
            where = g // groups, g % groups, groups, parts
            done = value(sum(units[g * each : (g + 1) * each]))
            of_tokens = f["_of_tokens"](rings, 0, *where, "groups")
            accs = f["_add"](accs, done, stored, of_tokens, *where, W, "groups")
    return f["_scaled"](accs[0], None, None, 0, T, "groups", f["of_one"](W))


def references_of(w: Weights) -> Tensor:
    """As `references` has them."""
    codes = w.scale.int()
    largest, least = codes.amax(2), codes.amin(2)
    near = (largest - least <= 26) & (largest < 255)
    return torch.where(near, largest + 1, 0).to(torch.uint8)


def arranged(x: Tensor) -> Tensor:
    """Columns as `in_float8_order` has them."""
    pairs = x.reshape(len(x), -1, 16, 2)
    return pairs.transpose(2, 3).reshape(x.shape)


def product(
    w: Weights, x_TK: Tensor, out_n: int, bias_EN: Tensor, act: Act, expert: int,
    static: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """All tiles of an expert's product with tokens, as they are stored: codes by a static scale if
    there is one."""
    f = functions()
    N, K = w.values.shape[1], x_TK.shape[1]
    out = torch.full((T, out_n), torch.nan, dtype=BF16)
    if static is not None:
        out = out.to(torch.float8_e4m3fn)
    sizes, each = (N, K, out_n, out_n), 64 if act.gated else 128
    output = pointer(bias_EN), None if static is None else pointer(static), pointer(out)
    for n in range(-(-out_n // each)):
        tile = (value(expert), value(T), value(0), n)
        for LOWER in range(2):
            sums = sums_of_consumer(w, arranged(x_TK), (tile, sizes), LOWER, act)
            f["_store"](sums, output, tile, sizes, LOWER, BF16, act)
    return out


def weights(format: str, N: int, K: int, apart: int) -> tuple[Weights, Tensor]:
    """Of two experts, with their values; of some rows some scales are so much less, in bits."""
    torch.manual_seed(0)
    parts = [any_codes(format, N, K) for _ in range(E)]
    for part in parts if apart else ():
        part.scale[:, 70:150:3, 1::2] -= apart
    zero = None if parts[0].zero is None else torch.cat([p.zero for p in parts])
    w = Weights(
        values=torch.cat([p.values for p in parts]), scale=torch.cat([p.scale for p in parts]),
        zero=zero, format=format,
    )  # fmt: skip
    return w, torch.stack([p.decoded() for p in parts])


@in_turn(
    pytest.mark.parametrize(("format", "apart"), FORMATS),
    pytest.mark.parametrize(
        "act", [SILU, INTERLEAVED, UNGATED, LINEAR], ids=lambda a: f"{a.kind}{a.interleaved}"
    ),
    pytest.mark.parametrize("K", [288, 512], ids=lambda K: f"K{K}"),
)
def test_every_row_is_multiplied_and_stored_in_its_place(
    K: int, act: Act, format: str, apart: int
) -> None:
    out_n = 160
    N = 2 * out_n if act.gated else out_n
    if "128" in format:
        K = 512
    w, w_ENK = weights(format, N, K, apart)
    x_TK = (torch.randn(T, K) * 8).to(torch.float8_e4m3fn).float() / 8 / K**0.5
    bias_EN = torch.randn(E, N).to(BF16)
    want = x_TK @ w_ENK[1].T.float() + bias_EN[1].float()
    if act.kind is not None:
        want = arranged(activate(want, *astuple(act)))
    got = product(w, x_TK, out_n, bias_EN, act, 1)
    # Rounded once, after sums of float32 in another order.
    torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("format", "inputs", "K"),
    [
        ("mxfp4", "mxfp8", 288), ("mxfp4", "mxfp8", 544),
        ("int4:1x128:bfloat16", "float8_e4m3fn:1x128", 384),
        ("uint4:1x128:float16", "float8_e4m3fn:1x128", 640),
    ],
)  # fmt: skip
def test_groups_of_columns_of_a_token_have_scales(format: str, inputs: str, K: int) -> None:
    """As the launch lays them out that makes codes of tokens."""
    N, scaled = 128, POWERS if inputs == "mxfp8" else "group"
    w, w_ENK = weights(format, N, K, 0)
    x_TK = torch.randn(T, K) * torch.logspace(-2, 2, T)[:, None]
    x_TK[:, :32] *= 100
    codes = SimpleNamespace(scaled=scaled, weight=weight_of(format, ""))
    rows = torch.arange(T, dtype=torch.int32)
    values_TK, scale_TP = quantize_in_order(x_TK, codes, rows)
    at = (value(1), value(T), value(0), 0), (N, K, N, N)
    both = [sums_of_groups(w, values_TK.float(), scale_TP, at, LOWER, LINEAR) for LOWER in range(2)]
    done = packing.quantize(x_TK, Format.of(inputs))
    rounded_TK = packing.dequantize(done.values, done.scale, format=Format.of(inputs))
    want = w_ENK[1].float() @ rounded_TK.float().T
    torch.testing.assert_close(torch.cat(both), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("act", [SILU, UNGATED], ids=lambda a: a.kind)
def test_h_is_stored_as_codes_by_a_static_scale(act: Act) -> None:
    """Those of what bfloat16 holds of it."""
    out_n, K = 160, 256
    w, _ = weights("int4:1x128:bfloat16", 2 * out_n if act.gated else out_n, K, 0)
    x_TK = (torch.randn(T, K) * 8).to(torch.float8_e4m3fn).float() / 8 / K**0.5
    bias_EN, scale = torch.randn(E, w.values.shape[1]).to(BF16), torch.tensor([0.011])
    h = product(w, x_TK, out_n, bias_EN, act, 0)
    got = product(w, x_TK, out_n, bias_EN, act, 0, scale)
    assert got.view(torch.uint8).equal((h.float() / scale).to(got.dtype).view(torch.uint8))
    assert got.float().abs().max() > 100

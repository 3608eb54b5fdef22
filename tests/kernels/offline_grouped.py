"""Compile for a Hopper GPU that is not here the warp-specialised grouped products; a script.

    python offline_grouped.py KERNEL ACTIVATION...

compiles those of floats (KERNEL _grouped), of float8 (_grouped_float8), of codes with inputs of 16
bits (_grouped_codes) or of 8 bits with scales of rows (by_row), of codes of four bits with inputs
of float8 (_grouped_float8_tokens), and of weights whose columns lie (by_columns): the first product
with these activations, and with "silu" the second one, which has none; with "silu" alone those of
floats whose results training keeps (kept); those with adapters (adapted); and whatever the
activations are, gradients of weights (wgrad). It prints one JSON line for each variant: its
activation, whether there are biases, of floats whether K has only whole steps, of others the
format, registers, the bytes of shared memory and those that it spills, instructions of the matrix
unit, and those that wait for it.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from moe_ops.backends.triton_formats import EIGHT_BITS, SIX_BITS
from moe_ops.backends.triton_tiles import CODES_TILES, codes_tile
from moe_ops.kernels.triton import LINEAR, Act, Weight, wgrad
from moe_ops.kernels.triton.experts.adapters import Added
from moe_ops.kernels.triton.experts.formats.order import arranged
from moe_ops.kernels.triton.experts.products import (
    grouped,
    grouped_blocks,
    grouped_registers,
    grouped_wgmma,
)
from moe_ops.kernels.triton.experts.products.grouped_tile import CodesTile
from moe_ops.kernels.triton.experts.products.grouped_wgmma import Scales
from moe_ops.kernels.triton.experts.schedule.tile_map import TileMap
from moe_ops.ops.activate import Activation
from moe_ops.testing import ACTIVATIONS
from tests.kernels.cubins import usage, waits_of
from tests.kernels.gated import grouped_gated
from tests.kernels.offline_float8_tokens import float8_tokens_products
from tests.kernels.offline_sizes import FORMATS, PLAIN, TILES, D, E, I, K, empty
from tests.kernels.offline_types import TYPES, type_of

Tell = Callable[[Any], dict[str, Any]]
MANY_TOKENS = CODES_TILES[-1][1]


def source_of(kernel: JITFunction, args: tuple[Any, ...]) -> GluonASTSource:
    """What Triton would compile for a launch with these arguments."""
    signature, constants, attributes = {}, {}, {}
    for index, (param, value) in enumerate(zip(kernel.params, args, strict=True)):
        if param.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[param.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, TensorDescriptor):
            signature[param.name] = type_of(value)
        else:
            signature[param.name] = TYPES[value.dtype] if isinstance(value, Tensor) else "i32"
            if isinstance(value, Tensor) or value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return GluonASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def compile_launch(
    self: JITFunction, args: tuple[Any, ...], options: dict[str, Any], tell: Tell
) -> dict[str, Any]:
    """Compile what is launched; its variant, and what is told of it."""
    made = triton.compile(source_of(self, args), target=GPUTarget("cuda", 90, 32), options=options)
    given = dict(zip(self.arg_names, args, strict=True))
    scaling = given.get("S")
    weight = given.get("W") if scaling is None else replace(scaling, dtype=str(scaling.dtype))
    act = given.get("ACT")
    variant = {"ACT": None if act is None else asdict(act), "EVEN_K": given.get("EVEN_K")}
    variant["W"] = None if weight is None else asdict(weight)
    return variant | {"bias": given.get("bias_ptr") is not None} | tell(made)


def used(made: Any) -> dict[str, Any]:
    cubin = made.asm["cubin"]
    return {"shared": made.metadata.shared, **waits_of(cubin), **usage(cubin)}


def float8_product(N: int, K: int, out_n: int, act: Act, bias: bool, kind: str, down: int) -> None:
    """`act` without a kind: the second product, whose output is no code."""
    R, codes, first = 4096, torch.float8_e4m3fn, act.kind is not None
    groups = -(-N // down) if down > 0 else 1
    w_scale = torch.uint8 if kind == "e8m0" else torch.float32
    grouped_blocks.launch(
        empty(R, K, dtype=codes),
        empty(-(-K // 128), R, dtype=torch.float32),
        empty(E, N, K, dtype=codes),
        empty(E, groups, -(-K // 128), dtype=w_scale),
        empty(E, N) if bias else None,
        empty(R, out_n, dtype=codes if first else torch.bfloat16),
        empty(-(-out_n // 128), R, dtype=torch.float32) if first else None,
        TileMap(empty(99, 8, dtype=torch.int32), 128),
        Weight("float8_e4m3fn", down, 128, kind, True, 8),
        torch.bfloat16,
        act,
    )


def float8_products(names: list[str]) -> None:
    """Of every activation with a scale for 128 rows; of one with others, too."""
    for name, bias in itertools.product(names, (False, True)):
        act = Activation(**{"kind": "silu"} | ACTIVATIONS[name])
        rows = 2 * I if act.gated else I
        float8_product(rows, D, I, Act(*act.args), bias, "float32", 128)
        if name == "silu":
            float8_product(D, I, D, LINEAR, bias, "float32", 128)
            float8_product(rows, D, I, Act(*act.args), bias, "e8m0", -1)


def codes_product(
    N: int,
    K: int,
    out_n: int,
    act: Act,
    bias: bool,
    format: tuple[str, int, str],
    dtype: torch.dtype,
    tile: CodesTile = MANY_TOKENS,
) -> None:
    """`act` without a kind: the second product, whose output is not arranged."""
    element, group, kind = format
    groups = K // group if group > 0 else 1
    bits = 8 if element in EIGHT_BITS else 6 if element in SIX_BITS else 4
    weight = Weight(element, 1, group, kind, False, bits)
    stored = torch.uint8 if kind in ("e8m0", "float8_e4m3fn") else getattr(torch, kind)
    grouped_registers.launch(
        empty(4096, arranged(K, weight), dtype=dtype),
        empty(E, N, K * bits // 32, dtype=torch.int32),
        empty(E, N, groups, dtype=stored),
        empty(E, N, groups, dtype=torch.uint8) if element in ("uint4", "uint8") else None,
        empty(E, dtype=torch.float32) if group == 16 else None,
        empty(E, N, dtype=dtype) if bias else None,
        empty(4096, arranged(out_n, weight) if act.kind else out_n, dtype=dtype),
        TileMap(empty(99, 8, dtype=torch.int32), tile.tokens),
        codes_tile(tile, weight),
        weight,
        act,
    )


def codes_products(names: list[str]) -> None:
    """Of every activation in int4; "plain" stands for the first product of one of them without
    biases, "formats" for one in other formats, and "tiles" for both products in smaller tiles."""
    int4 = ("int4", 128, "bfloat16")
    if PLAIN in names:
        codes_product(2 * I, D, I, Act("silu"), False, int4, torch.bfloat16)
    for name, bias in itertools.product((n for n in names if n in ACTIVATIONS), (False, True)):
        act = Activation(**{"kind": "silu"} | ACTIVATIONS[name])
        rows = 2 * I if act.gated else I
        codes_product(rows, D, I, Act(*act.args), bias, int4, torch.bfloat16)
        if name == "silu":
            codes_product(D, I, D, LINEAR, bias, int4, torch.bfloat16)
    if TILES in names:
        smaller = [tile for _, tile in CODES_TILES if tile != MANY_TOKENS]
        formats = (int4, ("float4_e2m1", 16, "float8_e4m3fn"), ("float8_e4m3fn", 32, "e8m0"))
        for format, tile in itertools.product(formats, smaller):
            codes_product(2 * I, D, I, Act("silu"), True, format, torch.bfloat16, tile)
            codes_product(D, I, D, LINEAR, True, format, torch.bfloat16, tile)
    more = (
        ("float4_e2m1", 32, "e8m0"), ("float4_e2m1", 16, "float8_e4m3fn"),
        ("uint4", 32, "float16"), ("int4", -1, "float32"), ("float6_e3m2", 32, "e8m0"),
    )  # fmt: skip
    others = [*itertools.product(more, (torch.bfloat16, torch.float16))]
    others += [
        (("uint8", 64, "float32"), torch.bfloat16), (("int8", -1, "float32"), torch.float16),
        (("float8_e4m3fn", 32, "e8m0"), torch.bfloat16),
    ]  # fmt: skip
    for format, dtype in others if FORMATS in names else ():
        codes_product(D, I, D, LINEAR, True, format, dtype)
        if format[1] == 16 or format[0] in SIX_BITS:
            silu = Act("silu")
            codes_product(2 * I, D, I, silu, False, format, dtype)


def by_row_product(
    N: int, K: int, out_n: int, act: Act, bias: bool, w: tuple[str, int, str], static: int
) -> None:
    """static: as many scales of the output of the first product, and of the input of the second."""
    element, down, kind = w
    codes = torch.int8 if element == "int8" else torch.float8_e4m3fn
    first, R = act.kind is not None, 4096
    made = empty(static, dtype=torch.float32) if static else None
    scales = Scales(
        a=empty(R, dtype=torch.float32) if first or made is None else made,
        a_each="row" if first or made is None else grouped_wgmma.each(made),
        w=empty(E, N if down == 1 else 1, 1, dtype=getattr(torch, kind)),
        weight=Weight(element, down, -1, kind, True, 8),
        out=made if first else None,
    )
    grouped_wgmma.launch(
        empty(R, K, dtype=codes),
        None,
        empty(E, N, K, dtype=codes),
        empty(E, N) if bias else None,
        empty(R, out_n, dtype=codes if scales.out is not None else torch.bfloat16),
        TileMap(empty(99, 8, dtype=torch.int32), 128),
        None,
        act,
        scales,
    )


def by_row_products(names: list[str]) -> None:
    """Of every activation with a scale a row, of float8 and of int8; of one with others, too."""
    for name, bias in itertools.product(names, (False, True)):
        act = Activation(**{"kind": "silu"} | ACTIVATIONS[name])
        rows = 2 * I if act.gated else I
        for element in ("float8_e4m3fn", "int8"):
            by_row = (element, 1, "float32")
            by_row_product(rows, D, I, Act(*act.args), bias, by_row, 0)
            if name == "silu":
                by_row_product(D, I, D, LINEAR, bias, by_row, 0)
            if name == "silu" or (act.interleaved and bias):
                by_row_product(rows, D, I, Act(*act.args), bias, (element, -1, "bfloat16"), 1)
                by_row_product(rows, D, I, Act(*act.args), bias, by_row, E)
            if name == "silu":
                by_row_product(D, I, D, LINEAR, bias, by_row, E)


def products(names: list[str]) -> None:
    rows, ends = empty(4096, dtype=torch.int32), empty(E, dtype=torch.int32)
    for name, bias in itertools.product(names, (False, True)):
        args = ACTIVATIONS[name]
        act = Activation(**{"kind": "silu"} | args)
        F = 2 * I if act.gated else I
        b13 = empty(E, F) if bias else None
        for width in (D, D + 16) if args == {} else (D,):
            x, w13 = empty(2048, width), empty(E, F, width)
            grouped_gated(x, rows, ends, w13, b13, K, Act(*act.args), wgmma=True)
    for bias in (False, True) if "silu" in names else ():
        b2 = empty(E, D) if bias else None
        grouped.grouped_rows(empty(4096, I), ends, empty(E, D, I), b2, wgmma=True)
    if "silu" in names:  # of batches, whose rows lie in their slots
        x, out, silu = empty(4096, D), empty(4096, I), Act("silu")
        args = (x, None, ends, empty(E, 2 * I, D), None, out, None, silu, None, True)
        grouped.product(*args, slots=512)


def products_by_columns(names: list[str]) -> None:
    """Without an activation, and with each that has no interleaved rows."""
    rows, ends = empty(4096, dtype=torch.int32), empty(E, dtype=torch.int32)
    x, h = empty(2048, D), empty(4096, I)
    for name in names:
        act = Activation(**{"kind": "silu"} | ACTIVATIONS[name])
        if not act.interleaved:
            F = 2 * I if act.gated else I
            w13, out = empty(E, D, F).transpose(1, 2), empty(4096, I)
            grouped.product(x, rows, ends, w13, None, out, K, Act(*act.args), None, True)
    w2, out = empty(E, I, D).transpose(1, 2), empty(4096, D)
    for bias in (None, empty(E, D)):
        grouped.product(h, None, ends, w2, bias, out, None, LINEAR, None, True)
        grouped.product(x[:, :I], rows, ends, w2, bias, out, K, LINEAR, None, True)


def weight_gradients(names: list[str]) -> None:
    ends, rows = empty(E, dtype=torch.int32), empty(4096, dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float16):
        x, dy, h = (empty(n, width, dtype=dtype) for n, width in ((512, D), (4096, I), (4096, I)))
        wgrad.wgrad(dy, x, ends, None, rows, dtype, True)
        wgrad.wgrad(x, h, ends, rows, None, dtype, True)


def kept_products(names: list[str]) -> None:
    """As in training: rows are gathered, and their products kept without an activation."""
    rows, ends = empty(4096, dtype=torch.int32), empty(E, dtype=torch.int32)
    for bias in (False, True) if "silu" in names else ():
        b13, y = empty(E, 2 * I) if bias else None, empty(4096, 2 * I)
        x, w13 = empty(2048, D), empty(E, 2 * I, D)
        grouped.product(x, rows, ends, w13, b13, y, K, LINEAR, None, True)


def adapted_products(names: list[str]) -> None:
    """With adapters of two ranks: both products, and the first one's rows kept."""
    rows, ends = empty(4096, dtype=torch.int32), empty(E, dtype=torch.int32)
    for name, rank in itertools.product(names, (16, 128)):
        act = Activation(**{"kind": "silu"} | ACTIVATIONS[name])
        F = 2 * I if act.gated else I
        x, w13, h = empty(2048, D), empty(E, F, D), empty(4096, I)
        added = Added(u=empty(4096, rank), b_GFr=empty(E, F, rank))
        args = (x, rows, ends, w13, None, h, K, Act(*act.args), None, True)
        grouped.product(*args, added=added)
        if name == "silu":
            y = empty(4096, F)
            grouped.product(x, rows, ends, w13, None, y, K, LINEAR, None, True, added=added)
            added = Added(u=empty(4096, rank), b_GFr=empty(E, D, rank))
            args = (h, None, ends, empty(E, D, I), None, empty(4096, D), None, LINEAR, None, True)
            grouped.product(*args, added=added)
            # Of weights whose columns lie, as in a backward.
            w_EID = empty(E, D, I).transpose(1, 2)
            added = Added(u=empty(4096, rank), b_GFr=empty(E, I, rank))
            args = (x, rows, ends, w_EID, None, h, K, LINEAR, None, True)
            grouped.product(*args, added=added)


KERNELS = {
    "adapted": adapted_products,
    "_grouped": products, "_grouped_float8": float8_products,
    "_grouped_codes": codes_products, "by_row": by_row_products,
    "_grouped_float8_tokens": float8_tokens_products,
    "kept": kept_products, "by_columns": products_by_columns, "wgrad": weight_gradients,
}  # fmt: skip


KERNELS_COMPILED = (
    "_grouped", "_grouped_float8", "_grouped_codes", "_grouped_float8_tokens", "wgrad_kernel"
)  # fmt: skip


def variants(kernel: str, names: list[str], tell: Tell = used) -> list[dict[str, Any]]:
    """Compile a kernel's variants for these activations; `tell` says what is wanted of each."""
    found = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if self.__name__ in KERNELS_COMPILED:
            found.append(compile_launch(self, args, options, tell))

    with patch.object(JITFunction, "run", run):
        KERNELS[kernel](names)
    return found


def main() -> None:
    kernel, *names = sys.argv[1:]
    for variant in variants(kernel, names):
        print(json.dumps(variant), flush=True)


if __name__ == "__main__":
    main()

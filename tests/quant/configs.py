"""A legal configuration of every kind, with the shapes and names written out by hand."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_ops.quant.config import QuantConfig
from tests.quant.builders import (
    Sizes,
    biased,
    fp8_w8a8,
    fp8_w8a16,
    int4_w4a16,
    int8_w8a8,
    int8_w8a16,
    mxfp4_w4a16,
    mxfp8,
    nvfp4_w4a4,
    nvfp4_w4a16,
    ocp_mx,
    unquantized,
)

E = 3
SQUARE = Sizes(E=E, D=256, I=128)  # w13 [3, 256, 256], w2 [3, 256, 128]
UNGATED = Sizes(E=E, D=256, I=128, gated=False)  # w13 [3, 128, 256]
RAGGED = Sizes(E=E, D=200, I=72)  # w13 [3, 144, 200], w2 [3, 200, 72]
ONE, ROWS = ((1, 1), (1, 1)), ((256, 1), (256, 1))
THREES = ((256, 8), (256, 4))  # groups of 32 columns
Shape = tuple[int, ...]


def fill_value(name: str, dtype: torch.dtype) -> float:
    """Zero points 7, e8m0 codes 120, everything else 1.5."""
    if dtype != torch.uint8:
        return 1.5
    return 7.0 if "zero" in name else 120.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call of a builder, and what the configuration must answer."""

    name: str
    builder: Callable[..., QuantConfig]
    scheme: str
    weights: str = ""
    inputs: str = ""
    groups: tuple[Shape, Shape] | None = None  # scale shapes of one expert: w13, w2
    dtype: torch.dtype = torch.float32  # of the weight scales
    more: dict[str, tuple[Shape, torch.dtype]] = field(default_factory=dict)  # other tensors
    options: dict[str, str] = field(default_factory=dict)
    sizes: Sizes = SQUARE
    block: tuple[int, int] | None = None
    input_scales: Shape | None = None  # for 5 tokens of width 256

    def tensors(self) -> dict[str, Tensor]:
        """Fresh tensors for the builder."""
        shapes = dict(self.more)
        if self.groups is not None:
            for name, shape in zip(("w13_scale", "w2_scale"), self.groups, strict=True):
                shapes[name] = ((self.sizes.E, *shape), self.dtype)
        return {
            name: torch.full(shape, fill_value(name, dtype)).to(dtype)
            for name, (shape, dtype) in shapes.items()
        }

    def build(self, tensors: dict[str, Tensor] | None = None) -> QuantConfig:
        given = self.tensors() if tensors is None else tensors
        return self.builder(self.sizes, **given, **self.options)


def with_bias(sizes: Sizes, w13_bias: Tensor, w2_bias: Tensor, **rest: Any) -> QuantConfig:
    """A configuration with biases: of mxfp4 if there are scales, else not quantised."""
    config = mxfp4_w4a16(sizes, **rest) if rest else unquantized(sizes)
    return biased(config, w13_bias, w2_bias)


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
E4M3, U8 = torch.float8_e4m3fn, torch.uint8
STATIC = {"x_scale": ((), F32), "h_scale": ((1,), F32)}
BIASES = {"w13_bias": ((E, 256), BF16), "w2_bias": ((E, 256), F32)}
GLOBALS = {"w13_global_scale_E": ((E,), F32), "w2_global_scale_E": ((E,), F32)}
INPUT_GLOBALS = {"x_global_scale": ((1,), F32), "h_global_scale": ((), F32)}
FP8 = "float8_e4m3fn"


def _w8a8() -> Iterator[Case]:
    for builder, element, scheme in (
        (fp8_w8a8, FP8, "fp8_w8a8"),
        (int8_w8a8, "int8", "int8_w8a8"),
    ):
        for weights, inputs, groups, more in (
            ("tensor", "tensor", ONE, {}),
            ("tensor", "tensor", ONE, STATIC),
            ("tensor", "row", ONE, {}),
            ("row", "row", ROWS, {}),
            ("row", "tensor", ROWS, STATIC),
        ):
            yield Case(
                name=f"{scheme}-{weights}-{inputs}-{'static' if more else 'dynamic'}",
                builder=builder,
                scheme=scheme,
                weights=f"{element}:{weights}",
                inputs=f"{element}:{inputs}",
                groups=groups,
                more=more,
                options={
                    "group": weights,
                    **({} if weights == inputs else {"input_group": inputs}),
                },
                input_scales=(1, 1) if inputs == "tensor" else (5, 1),
            )
    for name, sizes, groups in (
        ("blocks", SQUARE, ((2, 2), (2, 1))),
        ("ragged", RAGGED, ((2, 2), (2, 1))),
        ("ungated", UNGATED, ((1, 2), (2, 1))),
    ):
        yield Case(
            name=f"fp8_w8a8-{name}",
            builder=fp8_w8a8,
            scheme="fp8_w8a8",
            weights=f"{FP8}:128x128",
            inputs=f"{FP8}:1x128",
            groups=groups,
            sizes=sizes,
            block=(128, 128),
            input_scales=(5, 2),
        )


def _integers() -> Iterator[Case]:
    for bits, builder in ((4, int4_w4a16), (8, int8_w8a16)):
        for group, dtype, groups in (
            ("1x32", F32, THREES),
            ("1x64", BF16, ((256, 4), (256, 2))),
            ("1x128", F16, ((256, 2), (256, 1))),
            ("row", F32, ROWS),
        ):
            for sign in ("", "u"):
                scale = str(dtype).removeprefix("torch.")
                zeros = {
                    f"{w}_zero": ((E, *shape), U8)
                    for w, shape in zip(("w13", "w2"), groups, strict=True)
                }
                yield Case(
                    name=f"{sign}int{bits}-{group}-{scale}",
                    builder=builder,
                    scheme=f"int{bits}_w{bits}a16",
                    weights=f"{sign}int{bits}:{group}" + ("" if dtype == F32 else f":{scale}"),
                    groups=groups,
                    dtype=dtype,
                    more=zeros if sign else {},
                    options={"group": group},
                    block=None if group == "row" else (1, int(group[2:])),
                )


def _mx() -> Iterator[Case]:
    for weights, bits in (("mxfp4", 4), ("mxfp6_e3m2", 6), ("mxfp6_e2m3", 6)):
        for inputs, scheme, input_scales in (
            ("", f"{weights}_w{bits}a16", None),
            (f"{FP8}:row", f"{weights}_w_fp8_a", (5, 1)),
            (f"{FP8}:tensor", f"{weights}_w_fp8_a", (1, 1)),
            ("mxfp4", f"{weights}_w_mxfp4_a", (5, 8)),
            ("mxfp6_e3m2", f"{weights}_w_mxfp6_e3m2_a", (5, 8)),
            ("mxfp6_e2m3", f"{weights}_w_mxfp6_e2m3_a", (5, 8)),
            ("mxfp8", f"{weights}_w_mxfp8_a", (5, 8)),
        ):
            yield Case(
                name=f"{weights}-{inputs or '16bit'}",
                builder=ocp_mx,
                scheme=scheme,
                weights=weights,
                inputs=inputs,
                groups=THREES,
                dtype=U8,
                more=STATIC if "tensor" in inputs else {},
                options={"weights": weights, "inputs": inputs},
                block=(1, 32),
                input_scales=input_scales,
            )
    for name, builder, scheme, weights, inputs, options in (
        ("mxfp4_w4a16", mxfp4_w4a16, "mxfp4_w4a16", "mxfp4", "", {}),
        ("mxfp8", mxfp8, "mxfp8", "mxfp8", "mxfp8", {}),
        ("mxfp8_w8a16", mxfp8, "mxfp8_w8a16", "mxfp8", "", {"inputs": ""}),
    ):
        yield Case(
            name=name,
            builder=builder,
            scheme=scheme,
            weights=weights,
            inputs=inputs,
            groups=THREES,
            dtype=U8,
            options=options,
            block=(1, 32),
            input_scales=(5, 8) if inputs else None,
        )


def _rest() -> Iterator[Case]:
    yield Case(name="none", builder=unquantized, scheme="none")
    yield Case(name="none-ungated", builder=unquantized, scheme="none", sizes=UNGATED)
    yield Case(name="none-biased", builder=with_bias, scheme="none", more=BIASES)
    yield Case(
        name="mxfp4-biased",
        builder=with_bias,
        scheme="mxfp4_w4a16",
        weights="mxfp4",
        groups=THREES,
        dtype=U8,
        more=BIASES,
        block=(1, 32),
    )
    for group, groups, block in (
        ("tensor", ONE, None),
        ("row", ROWS, None),
        ("128x128", ((2, 2), (2, 1)), (128, 128)),
    ):
        yield Case(
            name=f"fp8_w8a16-{group}",
            builder=fp8_w8a16,
            scheme="fp8_w8a16",
            weights=f"{FP8}:{group}",
            groups=groups,
            options={"group": group},
            block=block,
        )
    for scheme, builder, inputs, more in (
        ("nvfp4_w4a4", nvfp4_w4a4, "nvfp4", GLOBALS | INPUT_GLOBALS),
        ("nvfp4_w4a16", nvfp4_w4a16, "", GLOBALS),
    ):
        yield Case(
            name=scheme,
            builder=builder,
            scheme=scheme,
            weights="nvfp4",
            inputs=inputs,
            groups=((256, 16), (256, 8)),
            dtype=E4M3,
            more=more,
            block=(1, 16),
            input_scales=(5, 16) if inputs else None,
        )


CASES = tuple(case for cases in (_rest, _w8a8, _integers, _mx) for case in cases())
BY_NAME = {case.name: case for case in CASES}

"""How experts are quantised: builders of configurations, words of checkpoints, scales."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_ops.quant.checkpoints import from_awq, from_gptq
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.packing import Quantized
from moe_ops.quant.resolve import Multiplier, Reciprocal, alphas
from tests.fuzz.attempts import (
    FLAG,
    NAN,
    NO_INT,
    NO_NAME,
    NO_OBJECT,
    NO_SIZE,
    NO_TENSOR,
    Attempt,
    Slot,
    Target,
    attempt_of,
    optional,
    tensors,
    worded,
)
from tests.fuzz.constructors import NO_FORMAT, one_of
from tests.quant.builders import (
    Sizes,
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
)

E, D, I = 4, 64, 32  # noqa: E741  the legend's letter

SIZES = Sizes(E=E, D=D, I=I)


def scales(rows13: int, cols13: int, rows2: int, cols2: int, dtype: torch.dtype) -> dict[str, Slot]:
    """Scales of these groups, of both weights; and the sizes, which may not be others."""

    def scale(rows: int, cols: int) -> Slot:
        fill = 100 if dtype == torch.uint8 else 0.5
        t = torch.full((E, rows, cols), fill).to(dtype)
        bad = torch.full((E, rows, cols), 255 if dtype == torch.uint8 else NAN).to(dtype)
        return tensors((t,), t[:-1], t.double(), t[..., None], bad)

    other = (Sizes(E=2, D=D, I=I), Sizes(E=E, D=256, I=I))
    return {
        "sizes": Slot(
            legal=(SIZES,), illegal=(*NO_OBJECT, Sizes, *other), words=("scale", "global_scale")
        ),
        "w13_scale": worded(scale(rows13, cols13), "w13"),
        "w2_scale": worded(scale(rows2, cols2), "w2"),
    }


STATIC = worded(
    optional(tensors((torch.ones(1),), torch.zeros(1), -torch.ones(1), torch.ones(2))), "x", "h"
)
GLOBAL_E = tensors((torch.ones(E),), torch.zeros(E), torch.full((E,), NAN), torch.ones(E + 1))
GLOBAL = Slot(
    legal=(torch.ones(1), torch.full((), 2.0)),
    illegal=(None, *NO_TENSOR, torch.zeros(1), torch.ones(3), torch.ones(1).double()),
)
ZERO = torch.full((E, D, 2), 7, dtype=torch.uint8)
NO_GROUP = (*NO_NAME, "rows", "1x0", "0x1", "1x-1", "tensor row")
GROUP = Slot(legal=("row",), illegal=NO_GROUP, words=("format",))
ZERO_ROW = torch.full((E, D, 1), 7, dtype=torch.uint8)
BUILDERS: dict[str, tuple[Callable[..., QuantConfig], dict[str, Slot]]] = {
    "int8_w8a8": (
        int8_w8a8,
        {
            **scales(D, 1, D, 1, torch.float32),
            "group": Slot(legal=("row",), illegal=NO_GROUP, words=("format",)),
            "input_group": Slot(
                legal=("", "row"), illegal=tuple(g for g in NO_GROUP if g != ""), words=("format",)
            ),
            "x_scale": worded(optional(Slot(legal=(), illegal=STATIC.illegal)), "x"),
        },
    ),
    "int4_w4a16": (
        int4_w4a16,
        {
            **scales(D, 2, D, 1, torch.float32),
            "group": Slot(legal=("1x32",), illegal=NO_GROUP),
            "w13_zero": worded(optional(tensors((ZERO,), ZERO[:-1], ZERO + 9)), "w13", "w2"),
        },
    ),
    "fp8_w8a8": (
        fp8_w8a8,
        {
            **scales(1, 1, 1, 1, torch.float32),
            "group": Slot(legal=("128x128",), illegal=NO_GROUP, words=("format",)),
            "input_group": Slot(
                legal=("", "1x128"), illegal=tuple(g for g in NO_GROUP if g), words=("format",)
            ),
            "h_scale": worded(optional(Slot(legal=(), illegal=STATIC.illegal)), "h"),
        },
    ),
    "fp8_w8a16": (fp8_w8a16, {**scales(D, 1, D, 1, torch.float32), "group": GROUP}),
    "int8_w8a16": (
        int8_w8a16,
        {
            **scales(D, 1, D, 1, torch.float32),
            "group": GROUP,
            "w13_zero": worded(optional(tensors((), ZERO_ROW[:-1])), "w13", "w2"),
            "w2_zero": worded(optional(tensors((), ZERO_ROW.float())), "w13", "w2"),
        },
    ),
    "mxfp4_w4a16": (mxfp4_w4a16, scales(D, 2, D, 1, torch.uint8)),
    "mxfp8": (
        mxfp8,
        {
            **scales(D, 2, D, 1, torch.uint8),
            "inputs": Slot(
                legal=("", "mxfp8"), illegal=tuple(f for f in NO_FORMAT if f), words=("format",)
            ),
        },
    ),
    "nvfp4_w4a16": (
        nvfp4_w4a16,
        {
            **scales(D, 4, D, 2, torch.float8_e4m3fn),
            "w13_global_scale_E": worded(GLOBAL_E, "w13"),
            "w2_global_scale_E": worded(GLOBAL_E, "w2"),
        },
    ),
    "ocp_mx": (
        ocp_mx,
        {
            **scales(D, 2, D, 1, torch.uint8),
            "weights": one_of("mxfp4", "mxfp6_e3m2", "mxfp6_e2m3"),
            "inputs": Slot(
                legal=("", "mxfp8", "mxfp4"),
                illegal=tuple(f for f in NO_FORMAT if f),
                words=("format",),
            ),
            "x_scale": worded(optional(Slot(legal=(), illegal=STATIC.illegal)), "x"),
        },
    ),
    "nvfp4_w4a4": (
        nvfp4_w4a4,
        {
            **scales(D, 4, D, 2, torch.float8_e4m3fn),
            "w13_global_scale_E": worded(GLOBAL_E, "w13"),
            "w2_global_scale_E": worded(GLOBAL_E, "w2"),
            "x_global_scale": worded(GLOBAL, "x"),
            "h_global_scale": worded(GLOBAL, "h"),
        },
    ),
}


def right_config(got: QuantConfig, given: dict[str, Any]) -> None:
    """It is quantised, and its scales are those that were given."""
    assert got.quantized and (got.E, got.D, got.I) == (E, D, I)
    assert got.w13.scale is given["w13_scale"] and got.w2.scale is given["w2_scale"]


def built(name: str) -> Target:
    run, slots = BUILDERS[name]
    parameters = inspect.signature(run).parameters
    needed = (key for key in slots if parameters[key].default is inspect.Parameter.empty)
    base = {key: slots[key].legal[0] for key in needed}
    # The group that the scales have, whatever the default.
    group = {"group": slots["group"].legal[0]} if "group" in slots else {}
    return Target(
        run=lambda **given: run(**{**group, **given}), slots=slots, base=base, right=right_config
    )


G = torch.Generator().manual_seed(0)
WORDS_DF = torch.randint(-(2**31), 2**31 - 1, (4, 16), dtype=torch.int32, generator=G)
GPTQ = {
    "qweight": tensors((WORDS_DF,), WORDS_DF.long(), WORDS_DF[0]),
    "scales": tensors((torch.ones(2, 16),), torch.ones(2, 15), torch.ones(16)),
    "qzeros": optional(tensors((WORDS_DF[:2, :2].contiguous(),), WORDS_DF, WORDS_DF[:2].float())),
    "bits": Slot(legal=(4,), illegal=(*NO_INT, 0, 2, 3, -4)),
    "plus_one": FLAG,
}
AWQ = {
    "qweight": tensors((WORDS_DF[:, :2].contiguous(),), WORDS_DF[:, :2].long(), WORDS_DF[0]),
    "scales": tensors((torch.ones(2, 16),), torch.ones(2, 15), torch.ones(16)),
    "qzeros": tensors((WORDS_DF[:2, :2].contiguous(),), WORDS_DF, WORDS_DF[:2, :2].float()),
}


def right_words_of(columns: int) -> Callable[[Quantized, dict[str, Any]], None]:
    """Sixteen rows of four-bit values, and the scales beside each."""

    def right(got: Quantized, given: dict[str, Any]) -> None:
        assert got.values.shape == (16, columns // 2)
        assert torch.equal(got.scale, given["scales"].T)

    return right


def right_alphas(got: Tensor, given: dict[str, Any]) -> None:
    """Scales that multiply are 1, those that divide 2."""
    half = sum(isinstance(scale, Reciprocal) for scale in (given["weight"], given["input"]))
    assert got.tolist() == [0.5**half] * E


SCALE = Slot(
    legal=(Multiplier(torch.ones(E)), Reciprocal(torch.tensor(2.0))),
    illegal=(
        *NO_OBJECT, torch.ones(E), Multiplier(torch.ones(3)), Multiplier(torch.full((E,), NAN)),
        Reciprocal(torch.zeros(E)), Multiplier(torch.ones(E, dtype=torch.int32)),
    ),
    words=("scale",),
)  # fmt: skip

TARGETS: dict[str, Target] = {
    **{name: built(name) for name in BUILDERS},
    "from_gptq": Target(
        run=from_gptq,
        slots=GPTQ,
        base={"qweight": WORDS_DF, "scales": torch.ones(2, 16)},
        right=right_words_of(32),
    ),
    "from_awq": Target(
        run=from_awq,
        slots=AWQ,
        base={name: slot.legal[0] for name, slot in AWQ.items()},
        right=right_words_of(4),
    ),
    "alphas": Target(
        run=alphas,
        slots={
            "weight": SCALE,
            "input": optional(SCALE),
            "experts": Slot(legal=(E,), illegal=NO_SIZE, words=("scale",)),
        },
        base={"weight": SCALE.legal[0], "input": None, "experts": E},
        right=right_alphas,
    ),
}


def attempt(name: str, number: int) -> Attempt:
    return attempt_of(TARGETS, __name__, name, number)

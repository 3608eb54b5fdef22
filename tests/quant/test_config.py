"""What a configuration answers, and the rules that hold whoever makes it."""

import re
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from moe_ops.fake_impls.formats import PUBLISHED
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.formats import Format, Layout, Operand
from moe_ops.quant.schemes import SCHEMES

from .configs import BY_NAME, CASES, E4M3, F32, Case, E

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@each_case
def test_formats_and_scheme(case: Case) -> None:
    config = case.build()
    assert config.scheme == case.scheme
    assert (config.w13.name, config.w2.name) == (case.weights, case.weights)
    assert (config.x.name, config.h.name) == (case.inputs, case.inputs)
    assert config.quantized is bool(case.weights)
    assert config.per_token is case.inputs.endswith(":row")
    assert config.per_tensor is case.inputs.endswith(":tensor")
    assert config.block_shape == case.block


@each_case
def test_sizes(case: Case) -> None:
    config, sizes = case.build(), case.sizes
    assert (config.E, config.D, config.I, config.gated) == (E, sizes.D, sizes.I, sizes.gated)
    F = {(128, True): 256, (128, False): 128, (72, True): 144}[sizes.I, sizes.gated]
    assert config.F == F


@each_case
def test_scale_shapes(case: Case) -> None:
    config = case.build()
    w13, w2 = case.groups or (None, None)
    assert config.weight_scale_shape("w13") == (w13 and (E, *w13))
    assert config.weight_scale_shape("w2") == (w2 and (E, *w2))
    shape = case.input_scales
    assert config.input_scale_shape(5, 256) == shape
    assert config.batched_input_scale_shape(7, 5, 256) == (shape and (7, *shape))


def test_the_last_group_of_an_input_may_be_short_and_there_may_be_no_tokens() -> None:
    config = BY_NAME["fp8_w8a8-ragged"].build()
    assert config.input_scale_shape(4, 200) == (4, 2)
    assert config.input_scale_shape(4, 72) == (4, 1)
    assert config.input_scale_shape(0, 200) == (0, 2)
    assert BY_NAME["fp8_w8a8-row-row-dynamic"].build().input_scale_shape(0, 200) == (0, 1)


def test_weight_scale_shape_refuses_another_name() -> None:
    with pytest.raises(ValueError, match="which='w1' is unknown; choose one of w13, w2"):
        BY_NAME["none"].build().weight_scale_shape("w1")


def test_every_scheme_has_a_case() -> None:
    assert {case.scheme for case in CASES} == set(SCHEMES)


def test_table_names_are_plain_and_tell_formats_apart() -> None:
    names: dict[str, tuple[str, str]] = {}
    for case in CASES:
        name = case.build().table_name
        assert re.fullmatch("[a-z0-9_]+", name)
        assert name == case.build().table_name
        assert name.startswith(case.scheme)
        assert names.setdefault(name, (case.weights, case.inputs)) == (case.weights, case.inputs)
    assert len(names) == len({(case.weights, case.inputs) for case in CASES})


@pytest.mark.parametrize(
    ("case", "name"),
    {
        "none": "none",
        "mxfp8": "mxfp8__mxfp8__mxfp8",
        "fp8_w8a8-blocks": "fp8_w8a8__float8_e4m3fn_128x128__float8_e4m3fn_1x128",
        "uint4-1x64-bfloat16": "int4_w4a16__uint4_1x64_bfloat16",
    }.items(),
)
def test_table_names_stay_as_they_are(case: str, name: str) -> None:
    assert BY_NAME[case].build().table_name == name


def test_a_configuration_is_frozen_and_equal_to_itself_alone() -> None:
    config = BY_NAME["mxfp8"].build()
    with pytest.raises(FrozenInstanceError):
        config.E = 4  # type: ignore[misc]
    assert config == config  # and does not compare tensors
    assert config != replace(config)
    assert len({config, replace(config)}) == 2


SIZES = {
    "no_experts": ({"E": 0}, "E=0 must be at least 1"),
    "negative": ({"D": -8}, "D=-8 must be at least 1"),
    "gated": ({"F": 128}, r"F=128 does not fit I=128: gated=True wants F = 2 \* I = 256"),
    "ungated": ({"gated": False}, "F=256 does not fit I=128: gated=False wants F = I = 128"),
}


@pytest.mark.parametrize(("change", "found"), SIZES.values(), ids=SIZES)
def test_sizes_that_do_not_fit(change: dict[str, int], found: str) -> None:
    config = BY_NAME["none"].build()
    with pytest.raises(ValueError, match=found):
        replace(config, **change)


def make(weights: str, inputs: str, D: int = 256, I: int = 128, E: int = E) -> QuantConfig:  # noqa: E741
    """A configuration of any two formats, with the tensors that they need."""
    w, x = (Format.of(name) if name else None for name in (weights, inputs))

    def weight(rows: int, columns: int) -> Operand:
        if w is None:
            return Operand()
        shape = (E, *w.parsed.scale_shape(rows, columns))
        scale = torch.ones(shape).to(w.parsed.scale_dtype)
        return Operand(
            format=w,
            scale=scale,
            zero=torch.zeros(shape, dtype=torch.uint8) if w.has_zero else None,
            global_scale=torch.ones(E) if w.has_global_scale else None,
        )

    given = torch.ones(()) if x is not None and x.has_global_scale else None
    into = Operand(format=x, global_scale=given)
    return QuantConfig(
        x=into, h=into, w13=weight(2 * I, D), w2=weight(D, I), E=E, F=2 * I, D=D, I=I, gated=True
    )


FP8, PLAIN_GROUPS = "float8_e4m3fn", ("tensor", "row")
ALL_FORMATS = (
    "",
    *PUBLISHED,
    "float4_e2m1:1x64:e8m0",
    *(
        f"{element}:{group}"
        for element in (FP8, "float8_e5m2", "int8", "uint8", "int4", "uint4")
        for group in ("tensor", "row", "column", "1x32", "1x128", "32x32", "128x128")
    ),
)


def legal(weights: str, inputs: str) -> bool:
    """The same by words: which inputs go with which weights."""
    w, _, w_group = weights.partition(":")
    x, _, x_group = inputs.partition(":")
    if w_group == "column":
        return False
    if weights in ("", "nvfp4"):
        return inputs in ("", weights)
    if weights == "mxfp8":
        return inputs in ("", "mxfp8")
    if weights in ("mxfp4", "mxfp6_e3m2", "mxfp6_e2m3"):
        mx = inputs in ("", "mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8")
        return mx or (x == FP8 and x_group in PLAIN_GROUPS)
    if w not in (FP8, "int8", "uint8", "int4", "uint4"):
        return False
    if not inputs:
        return True
    if x != w or w not in (FP8, "int8"):
        return False
    if x_group in PLAIN_GROUPS:
        return w_group in PLAIN_GROUPS
    return x_group.startswith("1x") and x_group[2:] == w_group.partition("x")[2]


@pytest.mark.parametrize("weights", ALL_FORMATS)
def test_which_weights_go_with_which_inputs(weights: str) -> None:
    for inputs in ALL_FORMATS:
        if legal(weights, inputs):
            assert make(weights, inputs).scheme in SCHEMES
            continue
        with pytest.raises(ValueError, match=r"no scheme has|inputs are|weights are"):
            make(weights, inputs)


PAIRS = {
    "token_with_blocks": (f"{FP8}:128x128", f"{FP8}:row", "weights in groups of tensor or row"),
    "blocks_with_rows": (f"{FP8}:row", f"{FP8}:1x128", "blocks of as many columns"),
    "unequal_blocks": (f"{FP8}:128x64", f"{FP8}:1x128", "in groups of 128 columns go with"),
    "mx_with_fp8_groups": ("mxfp4", f"{FP8}:1x32", "inputs of mxfp4 weights have one scale"),
    "mx_inputs_alone": (f"{FP8}:1x32", "mxfp8", "no scheme has float8_e4m3fn:1x32 weights with mx"),
    "inputs_alone": ("", f"{FP8}:row", "no scheme has 16-bit weights with float8_e4m3fn:row"),
    "columns": (f"{FP8}:column", "", "a scale per column cannot leave the sum"),
    "tall_inputs": (f"{FP8}:128x128", f"{FP8}:128x128", "a scale of inputs is for all"),
    "float8_scales": (f"{FP8}:row:{FP8}", "", f"no scheme has {FP8}:row:{FP8} weights"),
}


@pytest.mark.parametrize(("weights", "inputs", "found"), PAIRS.values(), ids=PAIRS)
def test_pairs_are_refused_for_their_reason(weights: str, inputs: str, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        make(weights, inputs)


WIDTHS = {
    "int4:row": (255, 128, "w13 has 255 columns, but int4 is packed in 2s"),
    "int8:1x32": (250, 128, "w13 has 250 columns, which do not fill int8:1x32 groups of 32"),
    "int4:1x64": (256, 96, "w2 has 96 columns, which do not fill int4:1x64 groups of 64"),
    "int4:32x32": (272, 128, "w13 has 272 columns, which do not fill int4:32x32"),
    "int8:32x4": (256, 8, "w13 has 16 rows, which do not fill int8:32x4 groups of 32"),
    "mxfp4": (256, 80, "w2 has 80 columns, which do not fill mxfp4 groups of 32"),
    "mxfp6_e2m3": (66, 128, "w13 has 66 columns, but float6_e2m3 is packed in 4s"),
    "mxfp8": (240, 128, "w13 has 240 columns, which do not fill mxfp8 groups of 32"),
    "nvfp4": (256, 24, "w2 has 24 columns, which do not fill nvfp4 groups of 16"),
}


@pytest.mark.parametrize("weights", WIDTHS)
def test_sizes_must_fill_groups(weights: str) -> None:
    D, I, found = WIDTHS[weights]  # noqa: E741
    with pytest.raises(ValueError, match=found):
        make(weights, "", D, I)
    assert make(weights, "", 256, 128).quantized


def test_float8_blocks_may_be_ragged() -> None:
    assert make(f"{FP8}:128x128", f"{FP8}:1x128", 200, 72).weight_scale_shape("w2") == (E, 2, 1)


OPERANDS = {
    "h_format": ("mxfp8", {"h": Operand()}, ValueError, "x is mxfp8 and h 16-bit; both must have"),
    "w2_format": ("mxfp8", {"w2": Operand()}, ValueError, "w13 is mxfp8 and w2 16-bit; both must"),
    "format_name": ("none", {"x": Operand(format="mxfp8")}, TypeError, "x.format must be a Format"),  # type: ignore[arg-type]
    "scale_number": (
        "none",
        {"x": Operand(scale=1.0)},  # type: ignore[arg-type]
        TypeError,
        "x.scale must be a Tensor, got float",
    ),
    "loose_scale": (
        "none",
        {"w13": Operand(scale=torch.ones(E))},
        ValueError,
        "w13.scale is given, but w13 is not quantised",
    ),
    "loose_global": (
        "none",
        {"h": Operand(global_scale=torch.ones(1))},
        ValueError,
        "h.global_scale is given, but h is not quantised",
    ),
    "loose_zero": (
        "none",
        {"w2": Operand(zero=torch.ones(1))},
        ValueError,
        "w2.zero is given, but w2 is not quantised",
    ),
    "input_bias": (
        "none",
        {"x": Operand(bias=torch.ones(E, 256))},
        ValueError,
        "x.bias is given, but inputs have none",
    ),
    "two_values": (
        "fp8_w8a8-tensor-tensor-static",
        {"x": Operand(format=Format.of(f"{FP8}:tensor"), scale=torch.ones(E))},
        ValueError,
        r"x.scale must be one value, got shape \(3,\)",
    ),
}


@pytest.mark.parametrize(("case", "change", "error", "found"), OPERANDS.values(), ids=OPERANDS)
def test_operands_that_do_not_fit(case, change, error, found) -> None:
    config = BY_NAME[case].build()
    with pytest.raises(error, match=found):
        replace(config, **change)


@pytest.mark.parametrize("which", ["x", "h", "w13", "w2"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("order", "interleaved"),
        ("transposed", True),
        ("packing", "gptq"),
        ("scales", "swizzled_128x4"),
    ],
)
def test_layouts_of_checkpoints_are_refused(which: str, field: str, value: object) -> None:
    config = BY_NAME["mxfp8"].build()
    operand = replace(getattr(config, which), layout=Layout(**{field: value}))
    found = f"{which} has the layout {field}={value!r}, but .* quant.resolve convert it"
    with pytest.raises(ValueError, match=found):
        replace(config, **{which: operand})


def test_extreme_scales_are_legal() -> None:
    codes = torch.tensor([0, 254], dtype=torch.uint8).repeat(4)
    config = BY_NAME["mxfp8"].build()
    w13 = replace(config.w13, scale=codes.expand(E, 256, 8))
    assert replace(config, w13=w13).w13.scale is w13.scale
    config = BY_NAME["nvfp4_w4a16"].build()
    least = torch.tensor([2.0**-9, 448.0]).repeat(8).to(E4M3)
    assert replace(config, w13=replace(config.w13, scale=least.expand(E, 256, 16))).quantized
    config = BY_NAME["fp8_w8a8-tensor-row-dynamic"].build()
    least = torch.tensor([2.0**-149, 1.0, torch.finfo(F32).max]).view(E, 1, 1)
    assert replace(config, w13=replace(config.w13, scale=least)).quantized

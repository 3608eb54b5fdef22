"""What a configuration answers, and which formats go together."""

from dataclasses import FrozenInstanceError

import pytest

import moe_ops
import moe_ops.layer
from moe_ops.fake_impls.formats import PUBLISHED
from moe_ops.quant.arguments import check_divides
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.formats import Format
from moe_ops.quant.schemes import SCHEMES, check_groups, format_of, scheme_of

FP8, PLAIN_GROUPS = "float8_e4m3fn", ("tensor", "row")
PAIRS_OF_SCHEMES = [
    (info.name, *pair) for info in SCHEMES.values() for pair in info.pairs() if info.name != "none"
]


@pytest.mark.parametrize(("scheme", "weights", "inputs"), PAIRS_OF_SCHEMES)
def test_formats_of_a_scheme(scheme: str, weights: str, inputs: str) -> None:
    config = QuantConfig(weights=weights, inputs=inputs)
    assert config.scheme == scheme
    assert (config.format.name, config.input_format) == (weights, format_of(inputs))
    assert scheme in str(config) and weights in str(config)


def test_every_format_of_a_scheme_is_in_a_pair() -> None:
    for name, scheme in SCHEMES.items():
        assert name == scheme.name
        weights, inputs = zip(*scheme.pairs(), strict=True)
        assert set(weights) == set(scheme.weight_formats)
        assert set(inputs) == set(scheme.input_formats)


SUFFIXES = ("", ":bfloat16", ":float16")


@pytest.mark.parametrize("element", ["int4", "uint4", "int8", "uint8"])
@pytest.mark.parametrize("scale", SUFFIXES)
def test_integers_have_any_group_and_three_types_of_scales(element: str, scale: str) -> None:
    for group in ("row", "1x16", "1x48", "1x96", "1x256", "2x16"):
        config = QuantConfig(weights=f"{element}:{group}{scale}")
        assert config.scheme == {4: "int4_w4a16", 8: "int8_w8a16"}[int(config.format.bits)]


def test_a_configuration_is_a_frozen_value() -> None:
    config, same = (QuantConfig(weights="mxfp4", inputs="mxfp8") for _ in range(2))
    with pytest.raises(FrozenInstanceError):
        config.weights = "mxfp8"  # type: ignore[misc]
    assert {config: 1}[same] == 1
    assert config != QuantConfig(weights="mxfp4")
    assert not hasattr(config, "__dict__")


def test_it_is_public() -> None:
    assert moe_ops.QuantConfig is QuantConfig
    assert "QuantConfig" in moe_ops.__all__


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
    if weights in ("nf4", "q4_k", "q5_k", "q6_k"):
        return not inputs
    if weights == "mxfp8":
        return inputs in ("", "mxfp8")
    if weights in ("mxfp4", "mxfp6_e3m2", "mxfp6_e2m3"):
        mx = inputs in ("", "mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8")
        return mx or (x == FP8 and x_group in PLAIN_GROUPS)
    if w not in (FP8, "int8", "uint8", "int4", "uint4"):
        return False
    if not inputs:
        return True
    if x != (FP8 if w in ("int4", "uint4") else w) or w == "uint8":
        return False
    if x_group in PLAIN_GROUPS:
        return w_group in PLAIN_GROUPS or w in ("int4", "uint4")
    return x_group.startswith("1x") and x_group[2:] == w_group.partition("x")[2]


def make(weights: str, inputs: str) -> str:
    """The scheme of two formats, of which the one of weights may be none."""
    if weights:
        return QuantConfig(weights=weights, inputs=inputs).scheme
    check_groups(format_of(inputs), None)
    return scheme_of(None, format_of(inputs))


@pytest.mark.parametrize("weights", ALL_FORMATS)
def test_which_weights_go_with_which_inputs(weights: str) -> None:
    for inputs in ALL_FORMATS:
        if legal(weights, inputs):
            assert make(weights, inputs) in SCHEMES
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
    "int4:row": (256, 255, "w has 255 columns, but int4 is packed in 2s"),
    "int8:1x32": (256, 250, "w has 250 columns, which do not fill int8:1x32 groups of 32"),
    "int4:1x64": (256, 96, "w has 96 columns, which do not fill int4:1x64 groups of 64"),
    "int4:32x32": (256, 272, "w has 272 columns, which do not fill int4:32x32"),
    "int8:32x4": (16, 256, "w has 16 rows, which do not fill int8:32x4 groups of 32"),
    "mxfp4": (256, 80, "w has 80 columns, which do not fill mxfp4 groups of 32"),
    "mxfp6_e2m3": (256, 66, "w has 66 columns, but float6_e2m3 is packed in 4s"),
    "mxfp8": (256, 240, "w has 240 columns, which do not fill mxfp8 groups of 32"),
    "nvfp4": (256, 24, "w has 24 columns, which do not fill nvfp4 groups of 16"),
}


@pytest.mark.parametrize("weights", WIDTHS)
def test_sizes_must_fill_groups(weights: str) -> None:
    rows, columns, found = WIDTHS[weights]
    with pytest.raises(ValueError, match=found):
        check_divides("w", Format.of(weights), rows, columns)
    check_divides("w", Format.of(weights), 256, 256)


def test_float8_blocks_may_be_ragged() -> None:
    check_divides("w", Format.of(f"{FP8}:128x128"), 144, 200)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"weights": "mxfp4_w_mxfp8_a"},
         "it is a scheme, of the weights mxfp4 and the inputs mxfp8; "
         "QuantConfig.of('mxfp4_w_mxfp8_a') has them"),
        ({"weights": "int4_w4a16"},
         "it is a scheme, of the weights int4:row, int4:1x32, int4:1x64, int4:1x128, uint4:row, "
         "uint4:1x32, uint4:1x64, uint4:1x128; name one of them"),
        ({"weights": "mxfp4", "inputs": "int8_w8a8"},
         "it is a scheme, of the weights int8:row, int8:tensor and the inputs int8:row, "
         "int8:tensor; name one of each"),
        ({"weights": "int4"},
         "did you mean 'int4:row', 'int4:1x32', 'int4:1x64' or 'int4:1x128'?"),
        ({"weights": "fp8:row"}, "did you mean 'float8_e4m3fn'?"),
        ({"weights": "int5:row"}, "did you mean 'int8'?"),
        ({"weights": "mxpf4"}, "did you mean 'mxfp4'?"),
        ({"weights": "int4:128"}, "choose tensor, row, column or rows x columns such as 1x128"),
        ({"weights": "xx"}, f"one of {', '.join(PUBLISHED)}"),
    ],
)  # fmt: skip
def test_what_may_be_meant_by_no_format_is_told(given: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError) as raised:
        QuantConfig(**given)
    assert str(raised.value).endswith(said)
    name = "inputs" if "inputs" in given else "weights"
    assert str(raised.value).startswith(f"{name}: format {given[name]!r} ")


@pytest.mark.parametrize(
    ("scheme", "meant"),
    [("int4", "'int4_w4a16' or 'int4_w_fp8_a'"), ("INT4_w4a16", "'int4_w4a16'")],
)
def test_what_may_be_meant_by_no_scheme_is_told(scheme: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"is unknown; .*; did you mean {meant}\?$"):
        QuantConfig.of(scheme)

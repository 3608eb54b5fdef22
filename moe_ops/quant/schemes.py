"""Schemes: which formats of weights and of inputs go together, and what the pair is called."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moe_ops.fake_impls.formats import PUBLISHED
from moe_ops.quant.formats import COLUMN, ROW, TENSOR, Format


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeInfo:
    """A scheme: its name, and the formats of weights and inputs in which it is built.

    "" is a 16-bit operand. Element types decide the scheme; `check_groups` says which groups of
    weights go with which groups of inputs.
    """

    name: str
    weight_formats: tuple[str, ...]
    input_formats: tuple[str, ...] = ("",)

    def pairs(self) -> Iterator[tuple[str, str]]:
        """The weight formats with the input formats whose groups go with theirs."""
        for weights in self.weight_formats:
            for inputs in self.input_formats:
                try:
                    check_groups(format_of(inputs), format_of(weights))
                except ValueError:
                    continue
                yield weights, inputs


def _formats(elements: str, groups: str) -> tuple[str, ...]:
    return tuple(f"{element}:{group}" for element in elements.split() for group in groups.split())


FP8_WEIGHTS = _formats("float8_e4m3fn", "row tensor 128x128")
FP8_INPUTS = _formats("float8_e4m3fn", "row tensor 1x128")
INT8 = _formats("int8", "row tensor")
INTEGER_GROUPS = "row 1x32 1x64 1x128"
INT4 = _formats("int4 uint4", INTEGER_GROUPS)
MX_BITS = {"mxfp4": 4, "mxfp6_e3m2": 6, "mxfp6_e2m3": 6}
MX_INPUTS = ("mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8")

# By name, and by the kinds of the formats of weights and inputs; `add` fills both.
SCHEMES: dict[str, SchemeInfo] = {}
BY_KIND: dict[tuple[str, str], str] = {}

# A name is ELEMENT_wBITSaBITS where weights and inputs share their element type or inputs have 16
# bits, the name of the format where that says it all, and else WEIGHTS_w_INPUTS_a.
BUILT_IN = (
    SchemeInfo(name="none", weight_formats=("",)),
    SchemeInfo(name="fp8_w8a8", weight_formats=FP8_WEIGHTS, input_formats=FP8_INPUTS),
    SchemeInfo(name="fp8_w8a16", weight_formats=FP8_WEIGHTS),
    SchemeInfo(name="int8_w8a8", weight_formats=INT8, input_formats=INT8),
    SchemeInfo(name="int8_w8a16", weight_formats=_formats("int8 uint8", INTEGER_GROUPS)),
    SchemeInfo(name="int4_w4a16", weight_formats=INT4),
    SchemeInfo(name="int4_w_fp8_a", weight_formats=INT4, input_formats=FP8_INPUTS[:2]),
    *(SchemeInfo(name=f"{w}_w{n}a16", weight_formats=(w,)) for w, n in MX_BITS.items()),
    *(
        SchemeInfo(name=f"{w}_w_fp8_a", weight_formats=(w,), input_formats=FP8_INPUTS[:2])
        for w in MX_BITS
    ),
    *(
        SchemeInfo(name=f"{w}_w_{x}_a", weight_formats=(w,), input_formats=(x,))
        for w in MX_BITS
        for x in MX_INPUTS
    ),
    SchemeInfo(name="mxfp8", weight_formats=("mxfp8",), input_formats=("mxfp8",)),
    SchemeInfo(name="mxfp8_w8a16", weight_formats=("mxfp8",)),
    SchemeInfo(name="nvfp4_w4a4", weight_formats=("nvfp4",), input_formats=("nvfp4",)),
    SchemeInfo(name="nvfp4_w4a16", weight_formats=("nvfp4",)),
    SchemeInfo(name="nf4_w4a16", weight_formats=("nf4",)),
    *(SchemeInfo(name=f"q{n}_k_w{n}a16", weight_formats=(f"q{n}_k",)) for n in (4, 5, 6)),
)


def format_of(name: str) -> Format | None:
    """The format of a string; None for the empty one."""
    return Format.of(name) if name else None


def _kind(format: Format | None) -> str:
    """What of a format decides the scheme: its published name, else its element type."""
    if format is None:
        return ""
    if format.name in PUBLISHED:
        return format.name
    return f"{format.element}:{format.scale}" if format.has_global_scale else format.element


def _kinds(scheme: SchemeInfo) -> Iterator[tuple[str, str]]:
    for w in scheme.weight_formats:
        for x in scheme.input_formats:
            yield _kind(format_of(w)), _kind(format_of(x))


def add(scheme: SchemeInfo) -> None:
    """Let configurations have a scheme. Raises ValueError for a name that is taken, for formats
    that are none, and for formats that another scheme joins.
    """
    if scheme.name in SCHEMES:
        raise ValueError(f"there is a scheme {scheme.name!r} already; take another name")
    kinds = dict.fromkeys(_kinds(scheme), scheme.name)
    other = next((BY_KIND[kind] for kind in kinds if kind in BY_KIND), None)
    if other is not None:
        raise ValueError(
            f"the scheme {scheme.name!r} has formats of the scheme {other!r}, whose elements "
            "decide it; leave them out"
        )
    SCHEMES[scheme.name] = scheme
    BY_KIND.update(kinds)


def remove(scheme: SchemeInfo) -> None:
    """Forget a scheme."""
    del SCHEMES[scheme.name]
    for kind in set(_kinds(scheme)):
        del BY_KIND[kind]


for _scheme in BUILT_IN:
    add(_scheme)


def scheme_of(weights: Format | None, inputs: Format | None) -> str:
    """The name of the scheme with these formats. Raises ValueError if there is none."""
    name = BY_KIND.get((_kind(weights), _kind(inputs)))
    if name is None:
        w, x = (_spelled(format) for format in (weights, inputs))
        raise ValueError(
            f"no scheme has {w} weights with {x} inputs; choose one of {', '.join(SCHEMES)}"
        )
    return name


def _spelled(format: Format | None) -> str:
    return "16-bit" if format is None else format.name


def check_groups(inputs: Format | None, weights: Format | None) -> None:
    """Scales of inputs and weights can be taken out of the sums of the product together."""
    if weights is not None and weights.group == COLUMN:
        raise ValueError(
            f"weights are {weights.name}, but a scale per column cannot leave the sum over columns;"
            " choose tensor, row, or rows x columns"
        )
    if inputs is None or weights is None:
        return
    if inputs.group not in (TENSOR, ROW) and inputs.group[0] != 1:
        raise ValueError(
            f"inputs are {inputs.name}, but a scale of inputs is for all (tensor), for one token "
            "(row), or for some columns of one (such as 1x128)"
        )
    if inputs.group in (TENSOR, ROW):
        # Fewer bits are decoded before they are multiplied, with scales of groups.
        whole = weights.group in (TENSOR, ROW) or weights.name in PUBLISHED
        if not whole and weights.bits >= 8:
            raise ValueError(
                f"inputs are {inputs.name} and weights {weights.name}: inputs with one scale per "
                "token or tensor go with weights in groups of tensor or row, or of fewer than 8 "
                "bits"
            )
    elif weights.name in PUBLISHED and inputs.name not in PUBLISHED:
        raise ValueError(
            f"inputs are {inputs.name} and weights {weights.name}: inputs of {weights.name} weights"
            " have one scale per token or tensor, or are in a published format"
        )
    elif inputs.group[1] != weights.group[1]:
        raise ValueError(
            f"inputs are {inputs.name} and weights {weights.name}: inputs in groups of "
            f"{inputs.group[1]} columns go with weights in blocks of as many columns"
        )

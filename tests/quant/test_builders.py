"""Builders take what is legal as it is, and refuse every breach of a rule for its reason."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_ops.fake_impls.formats import parse
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.formats import Layout, Operand
from moe_ops.quant.resolve import merge_gate_up
from moe_ops.quant.schemes import SCHEMES
from tests.quant.builders import fp8_w8a8, int4_w4a16, ocp_mx

from .configs import BY_NAME, CASES, E4M3, SQUARE, U8, Case, E

Tensors = dict[str, Tensor | None]
Data = st.DataObject
quick = settings(max_examples=60)


@dataclass(frozen=True)
class Breach:
    """An attempt to make a configuration that breaks one rule, and how it is refused."""

    found: str
    error: type[Exception] = ValueError
    patch: Callable[[QuantConfig], QuantConfig] = lambda config: config  # after building
    options: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Mutation:
    """How to break a rule. `change` may replace tensors of the dictionary, not write to them."""

    applies: Callable[[Case], bool]
    change: Callable[[Data, Case, Any], Breach]


MUTATIONS: dict[str, Mutation] = {}


def mutation(applies: Callable[[Case], bool]) -> Callable[[Any], Any]:
    def register(change: Callable[[Data, Case, Any], Breach]) -> Any:
        MUTATIONS[change.__name__] = Mutation(applies, change)
        return change

    return register


def field_of(argument: str) -> str:
    """The name in messages of a builder's argument: w13_global_scale_E is w13.global_scale."""
    return argument.removesuffix("_E").replace("_", ".", 1)


def some(data: Data, names: Any, *parts: str) -> str:
    """One of the names that hold one of the parts."""
    return data.draw(st.sampled_from([n for n in names if any(part in n for part in parts)]))


def having(*parts: str, dtype: torch.dtype | None = None) -> Callable[[Case], bool]:
    """Whether a case has a tensor with one of these parts in its name, and of this dtype."""

    def applies(case: Case) -> bool:
        found = [t for n, t in case.tensors().items() if any(part in n for part in parts)]
        return any(dtype in (None, t.dtype) for t in found)

    return applies


def with_entry(data: Data, t: Tensor, value: float) -> tuple[Tensor, list[int]]:
    """A copy with one entry of its own, and where it is."""
    flat = data.draw(st.integers(0, t.numel() - 1))
    copy = t.clone(memory_format=torch.contiguous_format)
    copy.view(-1)[flat] = value
    return copy, [int(i) for i in torch.unravel_index(torch.tensor(flat), t.shape)]


def floating_scales(tensors: Any) -> list[str]:
    return [n for n, t in tensors.items() if "scale" in n and t.dtype != U8]


@mutation(lambda case: bool(floating_scales(case.tensors())))
def a_scale_is_not_positive_and_finite(data: Data, case: Case, tensors: Any) -> Breach:
    name = data.draw(st.sampled_from(floating_scales(tensors)))
    values, least = [-1.0, float("nan")], "from"
    if tensors[name].dtype != E4M3:  # of a block near zero; and it has no infinity
        values, least = [*values, 0.0, -0.0, float("inf"), float("-inf")], "above"
    tensors[name], place = with_entry(data, tensors[name], data.draw(st.sampled_from(values)))
    found = f"{field_of(name)} must hold finite values {least} 0; 1 of {tensors[name].numel()} "
    return Breach(re.escape(found) + f".* at {re.escape(str(place))};")


@mutation(having("scale", dtype=U8))
def a_scale_is_the_nan_of_e8m0(data: Data, case: Case, tensors: Any) -> Breach:
    name = some(data, tensors, "w13_scale", "w2_scale")
    tensors[name], place = with_entry(data, tensors[name], 255)
    return Breach(f"{field_of(name)} must hold codes below 255, .* at {re.escape(str(place))};")


@mutation(having(""))
def a_dtype(data: Data, case: Case, tensors: Any) -> Breach:
    name = some(data, tensors, "")
    dtype = data.draw(st.sampled_from([torch.float64, torch.int16]))
    tensors[name] = tensors[name].to(dtype)
    got = str(dtype).removeprefix("torch.")
    return Breach(f"{field_of(name)} must be .*; got {got}; convert it first", TypeError)


@mutation(having("w13_scale"))
def a_weight_scale_of_another_shape(data: Data, case: Case, tensors: Any) -> Breach:
    name = some(data, tensors, "w13_scale", "w2_scale")
    axis = data.draw(st.integers(0, 2))
    tensors[name] = torch.cat([tensors[name].view(U8)] * 3, axis).view(tensors[name].dtype)
    got = re.escape(str(list(tensors[name].shape)))
    return Breach(rf"{field_of(name)} must have shape .* got {got}")


@mutation(having("w13_scale"))
def a_weight_scale_of_another_rank(data: Data, case: Case, tensors: Any) -> Breach:
    name = some(data, tensors, "w13_scale", "w2_scale")
    flat = data.draw(st.booleans())
    tensors[name] = tensors[name].flatten() if flat else tensors[name][None]
    return Breach(f"{field_of(name)} must have 3 axes, got shape")


@mutation(having("w13_bias", "w13_global", "w13_zero"))
def another_tensor_of_another_shape(data: Data, case: Case, tensors: Any) -> Breach:
    name = some(data, tensors, "bias", "w13_global", "w2_global", "zero")
    tensors[name] = tensors[name][:-1]
    return Breach(rf"{field_of(name)} must have shape \[3.* got \[2")


@mutation(having("x_scale", "x_global"))
def two_values_for_an_input(data: Data, case: Case, tensors: Any) -> Breach:
    name = some(data, tensors, "x_", "h_")
    tensors[name] = tensors[name].expand(2)
    return Breach(rf"{field_of(name)} must be one value, got shape \(2,\)")


@mutation(having("w13_scale"))
def a_scale_is_missing(data: Data, case: Case, tensors: Any) -> Breach:
    name = some(data, tensors, "w13_scale", "w2_scale")
    tensors[name] = None
    return Breach(f"{field_of(name)} is missing; .* weights need")


@mutation(having("global"))
def a_global_scale_is_missing(data: Data, case: Case, tensors: Any) -> Breach:
    name = some(data, tensors, "global")
    tensors[name] = None
    want = r"\[3\]" if name.startswith("w") else "one value"
    return Breach(f"{field_of(name)} is missing; nvfp4 needs float32, {want}")


@mutation(having("zero"))
def a_zero_point_is_missing(data: Data, case: Case, tensors: Any) -> Breach:
    name = some(data, tensors, "zero")
    tensors[name] = None
    return Breach(f"{field_of(name)} is missing; uint[48] needs one zero point per scale")


@mutation(lambda case: case.weights.startswith("uint4"))
def a_zero_point_above_the_codes(data: Data, case: Case, tensors: Any) -> Breach:
    name, value = some(data, tensors, "zero"), data.draw(st.integers(16, 255))
    tensors[name], _ = with_entry(data, tensors[name], value)
    return Breach(f"{field_of(name)} must lie in 0 to 15, the codes of uint4, got {value}")


def patched(data: Data, names: tuple[str, ...], **fields: Any) -> tuple[str, Any]:
    """An operand's name and a function that replaces fields of it."""
    name = data.draw(st.sampled_from(names))
    return name, lambda config: replace(config, **{name: replace(getattr(config, name), **fields)})


@mutation(lambda case: bool(case.weights) and not case.weights.startswith("u"))
def a_zero_point_without_use(data: Data, case: Case, tensors: Any) -> Breach:
    name, patch = patched(data, ("w13", "w2"), zero=torch.zeros(E, 1, 1, dtype=U8))
    return Breach(f"{name}.zero is given, but {parse(case.weights).element} has no", patch=patch)


@mutation(lambda case: "nvfp4" not in case.weights and bool(case.inputs))
def a_global_scale_without_use(data: Data, case: Case, tensors: Any) -> Breach:
    name, patch = patched(data, ("x", "h", "w13", "w2"), global_scale=torch.ones(E))
    return Breach(rf"{name}.global_scale is given, but .* has none", patch=patch)


@mutation(lambda case: bool(case.inputs) and not case.inputs.endswith("tensor"))
def a_static_scale_without_use(data: Data, case: Case, tensors: Any) -> Breach:
    name, patch = patched(data, ("x", "h"), scale=torch.ones(1))
    return Breach(f"{name}.scale is given, but {case.inputs} inputs get scales at", patch=patch)


@mutation(lambda case: True)
def a_layout_of_a_checkpoint(data: Data, case: Case, tensors: Any) -> Breach:
    layouts = {"order": "up_gate", "transposed": True, "packing": "awq", "scales": "swizzled_128x4"}
    field = data.draw(st.sampled_from(sorted(layouts)))
    name, patch = patched(data, ("x", "h", "w13", "w2"), layout=Layout(**{field: layouts[field]}))
    return Breach(f"{name} has the layout {field}=.* quant.resolve convert it", patch=patch)


@mutation(lambda case: bool(case.weights))
def one_format_differs(data: Data, case: Case, tensors: Any) -> Breach:
    name = data.draw(st.sampled_from(("h", "w2") if case.inputs else ("w13", "w2")))
    first, second = ("x", "h") if name == "h" else ("w13", "w2")
    return Breach(
        f"{first} is .* and {second} .*; both must have the same format",
        patch=lambda config: replace(config, **{name: Operand()}),
    )


@mutation(lambda case: "group" in case.options or case.name.startswith("fp8_w8a8"))
def another_group(data: Data, case: Case, tensors: Any) -> Breach:
    group = case.options.get("group", "128x128")
    others = {"1x32", "1x64", "1x128", "row"} if case.weights[0] in "ui" else {"tensor", "row"}
    if case.name.startswith("int8_w8a8"):
        others = {"tensor", "row"}
    other = data.draw(st.sampled_from(sorted(others - {group})))
    options = {"group": other}
    if case.inputs and case.block is None:
        options["input_group"] = case.inputs.partition(":")[2]
    return Breach(r"w13.scale must have shape", options=tuple(options.items()))


@mutation(lambda case: "_w8a8" in case.name)
def inputs_that_do_not_go_with_the_weights(data: Data, case: Case, tensors: Any) -> Breach:
    if case.block is None:
        return Breach("weights in blocks of as many col", options=(("input_group", "1x128"),))
    wrong = data.draw(st.sampled_from(["tensor", "row", "1x64"]))
    found = "groups of 64 columns" if wrong == "1x64" else "weights in groups of tensor or row"
    return Breach(found, options=(("input_group", wrong),))


@mutation(lambda case: case.weights.endswith(":tensor"))
def unequal_gate_and_up_scales(data: Data, case: Case, tensors: Any) -> Breach:
    gate_up = torch.full((E, 2), 1.5)
    first = data.draw(st.integers(0, E - 1))
    gate_up[first:, data.draw(st.integers(0, 1))] = 2.0
    tensors["w13_scale"] = gate_up[:, :, None] if data.draw(st.booleans()) else gate_up
    return Breach(f"expert {first} has the gate scale .* quantise its weights again")


@mutation(lambda case: len(case.tensors()) > 1)
def another_device(data: Data, case: Case, tensors: Any) -> Breach:
    name = some(data, tensors, "")
    tensors[name] = tensors[name].to("meta")
    return Breach(r"is on (cpu|meta), but the first argument is on (meta|cpu); move one")


def test_every_mutation_has_cases_and_every_quantised_case_has_mutations() -> None:
    reached = {name: [c for c in CASES if m.applies(c)] for name, m in MUTATIONS.items()}
    assert all(reached.values())
    quantised = [case for case in CASES if case.weights]
    assert all(sum(case in cases for cases in reached.values()) >= 6 for case in quantised)


def snapshot(tensors: Tensors) -> dict[str, bytes]:
    """The bytes of every tensor, NaN and all, and its shape."""
    return {
        name: repr((t.shape, t.dtype)).encode()
        + (b"" if t.is_meta else bytes(t.contiguous().reshape(-1).view(U8).tolist()))
        for name, t in tensors.items()
        if t is not None
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
@quick
@given(data=st.data())
def test_a_broken_rule_is_refused_for_its_reason(name: str, data: Data) -> None:
    rule = MUTATIONS[name]
    case = data.draw(st.sampled_from([case for case in CASES if rule.applies(case)]))
    tensors: Tensors = {**case.tensors()}
    breach = rule.change(data, case, tensors)
    before = snapshot(tensors)
    with pytest.raises(breach.error, match=breach.found):
        breach.patch(
            case.builder(case.sizes, **tensors, **{**case.options, **dict(breach.options)})
        )
    assert snapshot(tensors) == before


@quick
@given(data=st.data())
def test_legal_tensors_are_kept_as_they_are(data: Data) -> None:
    case = data.draw(st.sampled_from(CASES))
    tensors = case.tensors()
    for name, t in tensors.items():
        top = {"zero": 15, "scale": 254}["zero" if "zero" in name else "scale"]
        codes = torch.randint(0, top + 1, t.shape, dtype=U8)
        tensors[name] = codes if t.dtype == U8 else (codes.float() / 16 + 2.0**-9).to(t.dtype)
    before = snapshot({**tensors})
    config = case.build(tensors)
    for name, t in tensors.items():
        operand, field = field_of(name).split(".")
        assert getattr(getattr(config, operand), field) is t
    assert snapshot({**tensors}) == before


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tensors_on_meta_are_taken_by_shape(case: Case) -> None:
    config = case.build({name: t.to("meta") for name, t in case.tensors().items()})
    assert config.scheme == case.scheme


def test_schemes_list_what_the_builders_make() -> None:
    for case in CASES:
        scheme = SCHEMES[case.scheme]
        weights = case.weights.removesuffix(":bfloat16").removesuffix(":float16")
        assert weights in scheme.weight_formats
        assert case.inputs in scheme.input_formats
    for name, scheme in SCHEMES.items():
        made = [c for c in CASES if c.scheme == name]
        assert name == scheme.name
        assert set(scheme.input_formats) == {c.inputs for c in made}
        assert len(scheme.weight_formats) == len(
            {c.weights.removesuffix(":bfloat16").removesuffix(":float16") for c in made}
        )


@pytest.mark.parametrize("shape", [(E, 2), (E, 2, 1)])
def test_equal_gate_and_up_scales_become_one(shape: tuple[int, ...]) -> None:
    gate_up = torch.tensor([0.5, 1.0, 2.0])[:, None].expand(E, 2).reshape(shape)
    before = gate_up.clone()
    config = fp8_w8a8(SQUARE, gate_up, torch.ones(E, 1, 1), group="tensor")
    assert config.w13.scale is not None
    assert torch.equal(config.w13.scale, torch.tensor([[[0.5]], [[1.0]], [[2.0]]]))
    assert torch.equal(gate_up, before)
    config.w13.scale.zero_()
    assert torch.equal(gate_up, before), "the merged scale shares memory with the checkpoint's"


def test_a_configuration_itself_takes_no_gate_and_up_scales() -> None:
    config = BY_NAME["fp8_w8a8-tensor-tensor-dynamic"].build()
    for scale, found in (
        (torch.ones(E, 2, 1), r"shape \[3, 2, 1\]; merge_gate_up makes it \[3, 1, 1\]"),
        (torch.tensor([[1.0, 1], [1, 2], [3, 1]]), "expert 1 has the gate scale 1.0 and the up"),
    ):
        with pytest.raises(ValueError, match=found):
            replace(config, w13=replace(config.w13, scale=scale))


@pytest.mark.parametrize("shape", [(2,), (E, 1, 1), (E, 3), (E, 1, 2), (E, 2, 1, 1)])
def test_merging_wants_two_scales_per_expert(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must be \[E, 2\] or \[E, 2, 1\], got shape"):
        merge_gate_up(torch.ones(shape))


def test_an_ungated_layer_has_no_gate_and_up_scales() -> None:
    sizes = replace(SQUARE, gated=False)
    with pytest.raises(ValueError, match=r"w13.scale must have shape \[3, 1, 1\]"):
        fp8_w8a8(sizes, torch.ones(E, 2, 1), torch.ones(E, 1, 1), group="tensor")


def test_names_that_builders_do_not_know() -> None:
    scale = torch.ones(E, 1, 1)
    with pytest.raises(ValueError, match="group='1x48' is unknown; choose one of 1x32"):
        int4_w4a16(SQUARE, scale, scale, group="1x48")
    with pytest.raises(ValueError, match="weights='nvfp4' is unknown; choose one of mxfp4"):
        ocp_mx(SQUARE, scale, scale, weights="nvfp4")
    with pytest.raises(ValueError, match="has the group 'rows'"):
        fp8_w8a8(SQUARE, scale, scale, group="rows")

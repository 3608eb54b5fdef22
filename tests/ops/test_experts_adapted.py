"""`experts_adapted`: the same as experts whose weights are W + scale * B A, in results and
gradients; which tokens have which adapter; its errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops import OPS
from moe_ops.conformance.adapter_samples import FORMS, PAIRS, adapters
from moe_ops.conformance.samples import samples
from moe_ops.quant.formats import Format
from moe_ops.quant.packing import dequantize, quantize
from moe_ops.testing import BF16, CASES, F32, TOL, Case, Tol, assert_close, make_layer

BY_NAME = {case.name: case for case in CASES}
FORMS_BY_NAME = {f"{a}_{b}_of_{n}": ((a, b), n) for a, b, n in FORMS}
SUMS = Tol(2e-5, "W + BA is rounded, and sums are in another order")
each_form = pytest.mark.parametrize("form", FORMS_BY_NAME)


def call_of(case: str, form: str, dtype: torch.dtype = F32, **changes: Any) -> dict[str, Any]:
    layer = make_layer(BY_NAME[case], dtype, gated=changes.get("gated", True))
    names = ("x_TD", "weights_TK", "ids_TK", "w13_EFD", "w2_EDI", "b13_EF", "b2_ED")
    call = {name: getattr(layer, name) for name in names} | changes
    torch.manual_seed(1)
    return call | adapters(call, *FORMS_BY_NAME[form])


def merged(call: dict[str, Any]) -> Tensor:
    """The result by `experts` on W + scale * B A, of each adapter apart, in float32."""
    plain = {n: v for n, v in call.items() if n not in ADAPTERS}
    adapter_T, scale_N, E = call.get("adapter_T"), call["scale_N"], call["w13_EFD"].shape[0]
    if adapter_T is None:
        adapter_T = torch.zeros(call["x_TD"].shape[0], dtype=torch.int32)
    out = moe_ops.experts(**plain)
    for n in range(scale_N.shape[0]):
        weights = dict(plain)
        for name, (a, b) in zip(("w13_EFD", "w2_EDI"), PAIRS, strict=True):
            if a in call:
                groups = slice(n * E, (n + 1) * E)
                delta = scale_N[n] * (call[b][groups] @ call[a][groups])
                weights[name] = plain[name] + (
                    delta.transpose(1, 2) if call.get("transposed") else delta
                )
        out = torch.where((adapter_T == n)[:, None], moe_ops.experts(**weights), out)
    return out


ADAPTERS = ("scale_N", "adapter_T", *(name for pair in PAIRS for name in pair))


def transposed(call: dict[str, Any]) -> dict[str, Any]:
    flipped = {n: call[n].transpose(1, 2).contiguous() for n in ("w13_EFD", "w2_EDI")}
    return {**call, **flipped, "transposed": True}


@each_form
@pytest.mark.parametrize("case", ["plain", "one_token", "odd_unaligned", "no_tokens", "many_rows"])
def test_it_is_the_layer_of_merged_weights(case: str, form: str) -> None:
    call = call_of(case, form)
    assert_close(moe_ops.experts_adapted(**call), merged(call), SUMS)


@each_form
def test_weights_that_are_transposed_and_interleaved(form: str) -> None:
    call = transposed(call_of("odd", form, interleaved=True, alpha=1.702, limit=7.0, up_shift=1.0))
    assert_close(moe_ops.experts_adapted(**call), merged(call), SUMS)


def test_experts_without_a_gate() -> None:
    layer = make_layer(BY_NAME["odd"], gated=False)
    weights = {"w13_EFD": layer.w13_EFD, "b13_EF": layer.b13_EF, "w2_EDI": layer.w2_EDI}
    call = call_of("odd", "2_6_of_3", gated=False, kind="relu2", **weights)
    assert_close(moe_ops.experts_adapted(**call), merged(call), SUMS)


def test_experts_that_are_elsewhere_have_no_adapters() -> None:
    call = call_of("plain", "4_4_of_0")
    here = slice(2, 6)
    expert_map = torch.full((8,), -1, dtype=torch.int32)
    expert_map[here] = torch.arange(4, dtype=torch.int32)
    own = ("w13_EFD", "w2_EDI", "b13_EF", "b2_ED", *(n for pair in PAIRS for n in pair))
    call = {n: v[here] if n in own else v for n, v in call.items()} | {"expert_map": expert_map}
    assert_close(moe_ops.experts_adapted(**call), merged(call), SUMS)


@pytest.mark.parametrize("format", ["int4:1x32", "float8_e4m3fn:128x128", "mxfp4", "nvfp4"])
@each_form
def test_codes_are_as_the_values_that_they_stand_for(format: str, form: str) -> None:
    call = call_of("plain", form)
    codes, values = dict(call), dict(call)
    for name, scales in (("w13_EFD", "w13_scale_EFG"), ("w2_EDI", "w2_scale_EDG")):
        done = quantize(call[name], Format.of(format))
        codes |= {name: done.values, scales: done.scale, "w_format": format}
        values[name] = dequantize(done.values, done.scale, Format.of(format), done.zero)
    got = moe_ops.experts_adapted(**codes)
    assert_close(got, moe_ops.experts_adapted(**values), TOL["experts_adapted", F32])
    assert_close(got, merged(values), SUMS)


def test_adapters_multiply_inputs_that_are_not_rounded() -> None:
    """What rounding the inputs changes is what it changes without adapters."""
    format = "float8_e4m3fn:row"
    call = call_of("plain", "0_5_of_0")
    w13, w2 = (quantize(call[n], Format.of(format)) for n in ("w13_EFD", "w2_EDI"))
    call |= {"w13_EFD": w13.values, "w13_scale_EFG": w13.scale, "w2_EDI": w2.values}
    call |= {"w2_scale_EDG": w2.scale, "w_format": format, "x_format": format}
    plain = {n: v for n, v in call.items() if n not in ADAPTERS}
    small = {**call, "scale_N": call["scale_N"] * 1e-6}
    bound = TOL["experts", torch.float8_e4m3fn]
    assert_close(moe_ops.experts_adapted(**small), moe_ops.experts(**plain), bound)
    none = {**call, "adapter_T": torch.full((call["x_TD"].shape[0],), -1)}
    assert torch.equal(moe_ops.experts_adapted(**none), moe_ops.experts.reference(**plain))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_token_without_an_adapter_has_the_bits_of_experts(dtype: torch.dtype) -> None:
    """By the same stages; neither -1 nor an index that is none of the adapters' is one, and what
    adapters of others hold, even NaN, changes nothing."""
    call = call_of("odd", "2_6_of_3", dtype)
    call["adapter_T"] = torch.arange(13, dtype=torch.int32) % 5 - 1
    for name in ("a13_GrD", "b2_GDr"):
        call[name][:5] = float("nan")  # of the first adapter
    plain = {n: v for n, v in call.items() if n not in ADAPTERS}
    got, want = moe_ops.experts_adapted(**call), moe_ops.experts.reference(**plain)
    none = (call["adapter_T"] == -1) | (call["adapter_T"] == 3)
    assert torch.equal(got[none], want[none]) and int(none.sum()) == 5
    first = call["adapter_T"] == 0
    assert bool(got[first].isnan().all()) and not got[~first].isnan().any()


def test_tokens_in_another_order_have_the_same_results() -> None:
    call = call_of("odd", "2_6_of_3")
    order = torch.randperm(13)
    of_tokens = ("x_TD", "weights_TK", "ids_TK", "adapter_T")
    moved = {n: v[order] if n in of_tokens else v for n, v in call.items()}
    got, want = moe_ops.experts_adapted(**moved), moe_ops.experts_adapted(**call)[order]
    assert_close(got, want, TOL["experts_adapted", F32])


GRADIENTS = ("x_TD", "weights_TK", "w13_EFD", "w2_EDI", "b13_EF", "b2_ED")


def gradients(function: Any, call: dict[str, Any], names: tuple[str, ...]) -> dict[str, Tensor]:
    leaves = {n: call[n].detach().clone().requires_grad_() for n in names if n in call}
    out = function(**{**call, **leaves})
    torch.manual_seed(2)
    found = torch.autograd.grad(out, [*leaves.values()], torch.randn(out.shape))
    return dict(zip(leaves, found, strict=True))


@each_form
@pytest.mark.parametrize("case", ["odd", "no_tokens"])
def test_gradients_are_those_of_merged_weights(case: str, form: str) -> None:
    call, names = call_of(case, form), (*GRADIENTS, *(n for pair in PAIRS for n in pair))
    got = gradients(moe_ops.experts_adapted, call, names)
    want = gradients(lambda **given: merged(given), call, names)
    for name, g in got.items():
        assert_close(g, want[name], Tol(5e-5, "as results, through two more products"), name)
    (a, _), N = FORMS_BY_NAME[form]
    if a and N and case == "odd":
        assert all(got["a13_GrD"].unflatten(0, (N, -1)).flatten(1).any(1))


@pytest.mark.parametrize("names", [("a13_GrD", "b2_GDr"), ("a2_GrI",), ("x_TD", "b13_GFr")])
def test_only_what_is_wanted_is_differentiated(names: tuple[str, ...]) -> None:
    """And it is the same as where all is."""
    call = call_of("odd", "2_6_of_3")
    every = gradients(moe_ops.experts_adapted, call, (*GRADIENTS, *ADAPTERS[2:]))
    for name, grad in gradients(moe_ops.experts_adapted, call, names).items():
        assert torch.equal(grad, every[name])


def test_codes_stay_codes_while_their_adapters_train() -> None:
    call, format = call_of("plain", "4_4_of_0"), "int4:1x32"
    values = dict(call)
    for name, scales in (("w13_EFD", "w13_scale_EFG"), ("w2_EDI", "w2_scale_EDG")):
        done = quantize(call[name], Format.of(format))
        call |= {name: done.values, scales: done.scale, "w_format": format}
        values[name] = dequantize(done.values, done.scale, Format.of(format))
    names = ("x_TD", "weights_TK", *(n for pair in PAIRS for n in pair))
    want = gradients(moe_ops.experts_adapted, values, names)
    for name, grad in gradients(moe_ops.experts_adapted, call, names).items():
        assert_close(grad, want[name], TOL["experts_adapted_backward", F32], name)


def test_a_factor_that_is_trained_has_its_gradient() -> None:
    """By the definition, which autograd takes apart."""
    call = call_of("odd", "2_6_of_3")
    got = gradients(moe_ops.experts_adapted, call, ("scale_N",))["scale_N"]
    want = gradients(lambda **given: merged(given), call, ("scale_N",))["scale_N"]
    assert_close(got, want, Tol(5e-5, "as results, through two more products"))


def test_no_tensor_of_a_step_is_as_large_as_a_weight_times_a_row() -> None:
    """Neither W + B A nor a weight for each row is made, forward or backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    case = Case(name="wide", T=64, E=4, K=2, D=64, I=32)
    layer = make_layer(case)
    names = ("x_TD", "weights_TK", "ids_TK", "w13_EFD", "w2_EDI")
    call = {name: getattr(layer, name) for name in names}
    call |= adapters(call, (4, 4), 0)
    leaves = [call[n].requires_grad_() for n in ("x_TD", *(n for pair in PAIRS for n in pair))]
    sizes: list[int] = []

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and not func.is_view:
                sizes.append(out.numel())
            return out

    out = moe_ops.experts_adapted(**call)
    with Largest():
        torch.autograd.grad(out.sum(), leaves)
    E, F, D, R = case.E, 2 * case.I, case.D, case.T * case.K
    assert sizes and max(sizes) <= max(E * F * D, R * (F + D))


def test_an_adapted_layer_compiles_with_its_gradients() -> None:
    call = call_of("odd", "2_6_of_3")
    names = ("x_TD", *(n for pair in PAIRS for n in pair))
    torch._dynamo.reset()
    compiled = torch.compile(lambda **given: moe_ops.experts_adapted(**given), backend="aot_eager")
    want = gradients(moe_ops.experts_adapted, call, names)
    for name, grad in gradients(compiled, call, names).items():
        assert_close(grad, want[name], TOL["experts_adapted_backward", F32], name)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no factor": ({"scale_N": torch.ones(0)}, "scale_N holds no adapter"),
    "factors of another dtype": ({"scale_N": torch.ones(1).half()}, "scale_N must be float32"),
    "no adapter": (dict.fromkeys(n for pair in PAIRS for n in pair), "got none"),
    "half a pair": ({"b2_GDr": None}, "a2_GrI was given without b2_GDr"),
    "the other half": ({"a13_GrD": None}, "b13_GFr was given without a13_GrD"),
    "of other experts": ({"scale_N": torch.ones(2)}, "a13_GrD must have 16 .2 adapters in scale_N"),
    "of another width": ({"a2_GrI": torch.ones(8, 4, 31)}, "a2_GrI must have 32"),
    "of other rows": ({"b13_GFr": torch.ones(8, 32, 4)}, "b13_GFr must have 64"),
    "of another rank": ({"b2_GDr": torch.ones(8, 64, 5)}, "b2_GDr must have 4 .the rank of a2_GrI"),
    "of rank 0": (
        {"a2_GrI": torch.ones(8, 0, 32), "b2_GDr": torch.ones(8, 64, 0)}, "a2_GrI has rank 0",
    ),
    "of another dtype": (
        {"a13_GrD": torch.ones(8, 4, 64, dtype=BF16)}, "a13_GrD must be float32; .* of x_TD",
    ),
    "indices of other tokens": (
        {"adapter_T": torch.zeros(15, dtype=torch.int32)}, "adapter_T must have 16 .the tokens",
    ),
    "indices that are floats": ({"adapter_T": torch.zeros(16)}, "adapter_T must be one of int32"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_an_adapter_that_does_not_fit_is_refused(what: str) -> None:
    changes, said = WRONG[what]
    call = call_of("plain", "4_4_of_0") | changes
    with pytest.raises((ValueError, TypeError), match=said):
        moe_ops.experts_adapted(**call)


def test_a_compiler_is_told_of_a_wrong_adapter() -> None:
    call = call_of("plain", "4_4_of_0") | {"a2_GrI": torch.ones(8, 4, 31)}
    op = OPS["experts_adapted"]
    with pytest.raises(ValueError, match="a2_GrI must have 32"):
        op.overload(*op.arguments.in_order({n: v.to("meta") for n, v in call.items()}))


def test_samples_have_every_form() -> None:
    found = samples("experts_adapted", replace(BY_NAME["plain"], T=5), F32)
    names = {name for name, _ in found}
    assert {f"ranks_{a}_{b}_of_{n}" for a, b, n in FORMS} | {"no_adapter"} <= names

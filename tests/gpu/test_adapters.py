"""Experts with adapters on a GPU: each path beside the definition, what a token without an adapter
has, launches that overlap in a graph, and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

import moe_ops
from moe_ops import experts, experts_adapted, using
from moe_ops.conformance.adapter_samples import PAIRS, adapters
from moe_ops.ops.adapters import ADAPTER
from moe_ops.quant.formats import Format
from moe_ops.quant.packing import quantize
from moe_ops.testing import BF16, F16, TOL, Case, Tol, assert_close, float32, make_layer
from tests.gpu.captures import captured

pytestmark = pytest.mark.gpu
PATHS = {
    "triton.tiny/tiny": (1, 4, 8), "triton.rows/rows": (1, 16, 300),
    "triton.grouped/plain": (5, 600), "triton.grouped/wgmma": (5, 600, 3000),
}  # fmt: skip
STREAMS = {"triton.tiny/stream": (1,), "triton.rows/stream": (2, 8, 16)}
# Ranks of both pairs, and adapters that tokens choose among (0: all have the first).
FORMS = ((16, 16, 0), (8, 0, 0), (0, 40, 0), (16, 16, 3), (128, 64, 2))
FORMATS = ("int4:1x128", "uint4:1x32", "mxfp4", "nvfp4", "mxfp6_e3m2", "int8:1x128",
           "float8_e4m3fn:128x128")  # fmt: skip
each_form = pytest.mark.parametrize("form", FORMS, ids=str)


def call_of(T: int, form: tuple[int, int, int], dtype: torch.dtype = BF16) -> dict[str, Any]:
    layer = make_layer(Case(name="gpu", T=T, E=16, K=4, D=512, I=384), dtype)
    names = ("x_TD", "weights_TK", "ids_TK", "w13_EFD", "w2_EDI", "b13_EF", "b2_ED")
    call = {name: getattr(layer, name) for name in names}
    torch.manual_seed(1)
    return here(call | adapters(call, form[:2], form[2]))


def here(call: dict[str, Any]) -> dict[str, Any]:
    return {n: v.cuda() if isinstance(v, Tensor) else v for n, v in call.items()}


def run(path: str, call: dict[str, Any]) -> Tensor:
    args = experts_adapted.arguments.in_order(call)
    refusal = experts_adapted.named(path).refusal("cuda", len(args[0]), experts_adapted.call(*args))
    if refusal is not None:
        pytest.skip(f"{path}: {refusal}")
    with using(path, experts_adapted), torch.no_grad():
        out: Tensor = experts_adapted(*args)
    return out


def definition(call: dict[str, Any]) -> Tensor:
    """In float32, stage by stage."""
    with torch.no_grad():
        out: Tensor = experts_adapted.reference(**{n: float32(v) for n, v in call.items()})
    return out


def coded(call: dict[str, Any], format: str) -> dict[str, Any]:
    for name, scale, zero in (
        ("w13_EFD", "w13_scale_EFG", "w13_zero_EFG"),
        ("w2_EDI", "w2_scale_EDG", "w2_zero_EDG"),
    ):
        done = quantize(call[name], Format.of(format))
        call |= {name: done.values, scale: done.scale, zero: done.zero, "w_format": format}
    return call


@each_form
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize(("path", "T"), [(p, T) for p, Ts in PATHS.items() for T in Ts])
def test_each_path_is_the_definition(
    path: str, T: int, dtype: torch.dtype, form: tuple[int, int, int]
) -> None:
    call = call_of(T, form, dtype)
    assert_close(run(path, call), definition(call), TOL["experts_adapted", dtype], path)


@each_form
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("path", "T"), [*((p, T) for p, Ts in STREAMS.items() for T in Ts), ("triton.tiny/tiny", 4),
                    ("triton.rows/rows", 64), ("triton.grouped/wgmma", 600)],
)  # fmt: skip
def test_codes(path: str, T: int, format: str, form: tuple[int, int, int]) -> None:
    call = coded(call_of(T, form), format)
    assert_close(run(path, call), definition(call), TOL["experts_adapted", BF16], path)


@pytest.mark.parametrize("format", ["", "int4:1x128"])
@pytest.mark.parametrize(
    ("path", "T"), [(p, max(Ts)) for p, Ts in (PATHS | STREAMS).items()]
)  # fmt: skip
def test_a_token_without_an_adapter_has_the_bits_of_experts(path: str, T: int, format: str) -> None:
    call = call_of(T, (16, 16, 3))
    call = coded(call, format) if format else call
    call["adapter_T"] = (torch.arange(T, device="cuda") % 4 - 1).int()
    got = run(path, call)
    plain = {n: v for n, v in call.items() if n not in ADAPTER}
    with using(path, experts), torch.no_grad():
        want = experts(**plain)
    none = call["adapter_T"] == -1
    if path == "triton.grouped/wgmma":
        # Whose products run by the plain kernel where rows have adapters of their own.
        assert_close(got[none], want[none], TOL["experts", BF16])
    else:
        assert torch.equal(got[none], want[none])


@pytest.mark.usefixtures("overlapping")
@pytest.mark.parametrize("format", ["", "int4:1x128"])
@pytest.mark.parametrize("T", [1, 4, 8, 64])
def test_layers_whose_launches_overlap_in_a_graph(T: int, format: str) -> None:
    call = call_of(T, (16, 16, 0 if T == 1 else 3))
    call = coded(call, format) if format else call
    x = call.pop("x_TD")

    def chain(x: Tensor, wait: Any) -> Tensor:
        for _ in range(12):
            # A gated layer squares its tokens: of 12 of them large ones end beyond all numbers, and
            # small ones all alike.
            x = rms_norm(experts_adapted(x, **call), x.shape[1:])
            wait()
        return x

    with torch.no_grad():
        chain(x, torch.cuda.synchronize)
        graph, out = captured(lambda: chain(x, lambda: None))
        for _ in range(20):
            x.copy_(torch.randn_like(x))
            out.fill_(float("nan"))
            graph.replay()
            assert torch.isfinite(out).all()
            assert torch.equal(out, chain(x, torch.cuda.synchronize))


GRADIENTS = Tol(3.2e-2, "products of rows that were rounded to 16 bits, and sums of them")
FORMS_TRAINED = ((16, 16, 0), (8, 0, 0), (0, 24, 0), (16, 16, 3))


@pytest.mark.parametrize("form", FORMS_TRAINED, ids=str)
@pytest.mark.parametrize("stored", ["rows", "columns", "int4:1x128"])
@pytest.mark.parametrize("T", [40, 1500])
def test_gradients(T: int, stored: str, form: tuple[int, int, int]) -> None:
    call = call_of(T, form)
    if stored == "columns":
        for name in ("w13_EFD", "w2_EDI"):
            call[name] = call[name].transpose(1, 2).contiguous()
        call["transposed"] = True
    elif stored != "rows":
        call = coded(call, stored)
    names = [n for n in ("x_TD", "weights_TK", *(n for pair in PAIRS for n in pair)) if n in call]
    grad = torch.randn_like(call["x_TD"])

    def grads(function: Any, given: dict[str, Any]) -> tuple[Tensor, ...]:
        leaves = {n: given[n].detach().clone().requires_grad_() for n in names}
        out = function(**{**given, **leaves})
        return torch.autograd.grad(out, [*leaves.values()], grad.to(out.dtype))

    got = grads(experts_adapted, call)
    want = grads(experts_adapted.reference, {n: float32(v) for n, v in call.items()})
    for name, g, w in zip(names, got, want, strict=True):
        assert_close(g, w, GRADIENTS, name)
    for first, again in zip(got, grads(experts_adapted, call), strict=True):
        assert torch.equal(first, again)


def test_each_token_has_its_adapter_in_a_compiled_layer() -> None:
    call = call_of(8, (16, 16, 3))
    compiled = torch.compile(
        lambda **given: experts_adapted(**given), options=moe_ops.inductor_options()
    )
    with torch.no_grad():
        assert torch.equal(compiled(**call), experts_adapted(**call))

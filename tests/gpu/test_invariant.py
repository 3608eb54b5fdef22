"""Invariant calls on a GPU: a row has the same bits alone and in any batch, in every format, by
every backend that runs some number of rows, and captured."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops.backends import triton_paths
from moe_ops.backends.triton import run_experts
from moe_ops.decode_ops import linears, normed_linears, quantized_linears
from moe_ops.kernels.triton.decode import one_query
from moe_ops.ops import expert_gemm, experts, route
from moe_ops.ops.experts import ExpertsCall
from moe_ops.registry.invariance import Refused, invariant
from moe_ops.testing import BF16, F16, F32, Case, make_layer
from tests.decode_ops import test_quantized_linears as of_the_op
from tests.hf import families
from tests.independent_rows import PAIRS, call_of
from tests.layer.shards import randomize
from tests.random_batches import batches, bits

pytestmark = pytest.mark.gpu
# Between them every pair, and weights in codes alone.
FORMATS = [
    *PAIRS, *((w, "") for w in ("int4:1x128:bfloat16", "uint4:1x32", "mxfp4", "nvfp4", "mxfp8")),
    *((w, "") for w in ("int8:row", "float8_e4m3fn:row", "mxfp6_e3m2", "q4_k", "q6_k", "nf4")),
]  # fmt: skip
COUNT, MOST = 200, 700
CASE = Case(name="two", T=2, E=8, K=2, D=512, I=512)
LONG = Case(name="long", T=96, E=8, K=2, D=2048, I=1536)
ids = partial("-".join)


def call_for(formats: tuple[str, str], case: Case, dtype: torch.dtype = BF16) -> ExpertsCall:
    if formats[1]:
        return call_of(*formats, dtype, case, "cuda")
    if not formats[0]:
        layer = make_layer(case, dtype, "cuda")
        return ExpertsCall(layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI)
    # Of weights alone; the format of inputs only says which static scales there are.
    return replace(call_of(formats[0], "float8_e4m3fn:row", dtype, case, "cuda"), x_format="")


def run(call: ExpertsCall) -> Tensor:
    return experts.pick(call).run(call)


def check(call: ExpertsCall, count: int = COUNT, most: int = MOST) -> None:
    with invariant():
        want = run(call)
        for name, batch, at_T in batches(call, count, most):
            assert torch.equal(bits(run(batch)[at_T.cuda()]), bits(want)), name


@pytest.mark.parametrize("formats", [("", ""), *FORMATS], ids=ids)
def test_rows_in_any_batch(formats: tuple[str, str]) -> None:
    check(call_for(formats, CASE))


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_floats_of_other_dtypes(dtype: torch.dtype) -> None:
    check(call_for(("", ""), CASE, dtype))


@pytest.mark.parametrize("formats", [("", ""), *FORMATS], ids=ids)
@pytest.mark.parametrize("T", [1, 5, 96])
def test_paths_of_one_arithmetic_give_equal_bits(T: int, formats: tuple[str, str]) -> None:
    """Of long sums, by each path that a layer's rows may be computed by."""
    check_paths(call_for(formats, replace(LONG, T=T)))


@pytest.mark.parametrize("w_format", ["", "int4:1x128:bfloat16", "mxfp4", "q4_k", "q6_k", "nf4"])
@pytest.mark.parametrize("T", [1, 96])
def test_paths_without_gates_give_equal_bits(T: int, w_format: str) -> None:
    call = call_for((w_format, ""), replace(LONG, T=T))
    rows = {
        name: getattr(call, name)[:, : LONG.I].contiguous()
        for name in ("w13_EFD", "w13_scale_EFG", "w13_zero_EFG")
        if getattr(call, name) is not None
    }
    check_paths(replace(call, kind="relu2", gated=False, **rows))


def check_paths(call: ExpertsCall) -> None:
    with invariant():
        name = triton_paths.arithmetic_of(call)
        assert not isinstance(name, Refused)
        paths = [
            p for k in ("tiny", "rows", "grouped") for p in triton_paths.paths_by(name, k, call)
        ]
        found = {
            path.name: run_experts(path.forced.removeprefix("triton."), call)
            for path in paths
            if path.refuses(call) is None
        }
    first, want = found.popitem()
    for other, got in found.items():
        assert torch.equal(bits(got), bits(want)), f"{other} and {first}, {name}"


@pytest.mark.parametrize("formats", [("", ""), ("mxfp4", "")], ids=ids)
def test_layers_with_biases_and_sizes_that_fill_no_tile(formats: tuple[str, str]) -> None:
    call = call_for(formats, replace(CASE, D=2880, I=2880))
    b13_EF = torch.randn(8, 2 * 2880, device="cuda", dtype=BF16)
    b2_ED = torch.randn(8, 2880, device="cuda", dtype=BF16)
    check(replace(call, b13_EF=b13_EF, b2_ED=b2_ED), 50)


@pytest.mark.parametrize(
    "formats", [("", ""), ("mxfp4", "mxfp8"), ("int8:row", "int8:row")], ids=ids
)
def test_captured_and_padded(formats: tuple[str, str]) -> None:
    """What a graph of a padded batch gives is what rows give alone."""
    call = call_for(formats, CASE)
    for rows in (8, 64, 512):
        for _, batch, at_T in batches(call, 3, rows, seed=rows):
            padded = {
                name: torch.cat([t, torch.full((rows - len(t), *t.shape[1:]), fill).to(t)])
                for name, fill in (("x_TD", float("nan")), ("weights_TK", 1.0), ("ids_TK", -1))
                for t in (getattr(batch, name),)
            }
            batch = replace(batch, **padded)
            with invariant():
                want = run(call)
                for _ in range(3):
                    run(batch)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    out = run(batch)
            graph.replay()
            assert torch.equal(bits(out[at_T.cuda()]), bits(want))


@pytest.mark.parametrize("E", [8, 60, 128, 256])
def test_routes(E: int) -> None:
    logits_TE = torch.randn(6000, E, device="cuda", dtype=BF16)
    with invariant():
        want = route(logits_TE, 4)
        for rows in (1, 2, 33, 500, 5000):
            for got, of_all in zip(route(logits_TE[:rows].clone(), 4), want, strict=True):
                assert torch.equal(bits(got), bits(of_all[:rows]))


SHAPES = [((4096, 512, 512), 2048), ((128,), 2048), ((33, 7, 1), 720), ((2880,), 4096)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_layers(shape: tuple[tuple[int, ...], int]) -> None:
    sizes, K = shape
    make = partial(torch.randn, device="cuda", dtype=BF16)
    weights, biases, x_TK, gain = (
        [make(n, K) for n in sizes],
        [None] * len(sizes),
        make(64, K),
        make(K),
    )
    with invariant():
        want = linears(x_TK, weights, biases)
        normed = normed_linears(x_TK, x_TK, gain, 1e-6, weights, biases)
        for rows in (1, 2, 7, 8, 9, 31, 32, 33, 64):
            few = x_TK[64 - rows :].clone()
            got = linears(few, weights, biases)
            got_normed = normed_linears(few, few, gain, 1e-6, weights, biases)
            for y, of_all in zip((*got, *got_normed), (*want, *normed), strict=True):
                assert torch.equal(bits(y), bits(of_all[64 - rows :])), rows


@pytest.mark.parametrize("format", ["float8_e4m3fn:row", "int4:1x128:bfloat16", "mxfp4", "int8:row",
                                    "uint4:1x32", "nvfp4", "mxfp6_e3m2", "q4_k"])  # fmt: skip
def test_linear_layers_in_codes(format: str) -> None:
    call, _ = of_the_op.call_of(300, 2048, (512, 128), format, BF16, device="cuda")
    rest = [getattr(call, n) for n in ("weights", "scales", "zeros", "global_scales", "biases")]
    with invariant():
        want = quantized_linears(call.x_TK, *rest, call.w_format)
        for rows in (1, 2, 9, 16, 17, 32, 33, 64, 65, 299):
            got = quantized_linears(call.x_TK[300 - rows :].clone(), *rest, call.w_format)
            for y, of_all in zip(got, want, strict=True):
                assert torch.equal(bits(y), bits(of_all[300 - rows :])), rows


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("sizes", [(8, 4, 128), (4, 8, 64), (1, 16, 128)], ids=str)
def test_attention_of_a_sequence(sizes: tuple[int, int, int], sinks: bool) -> None:
    """In caches of any number of slots, behind any padding, beside any sequences."""
    N, G, D = sizes
    make = partial(torch.randn, device="cuda", dtype=BF16)
    sink = make(N * G) if sinks else None
    for seen in (1, 63, 700, 5000):
        q, k, v = make(1, N * G, D), make(N, seen, D), make(N, seen, D)
        outs = []
        for slots, before, B in ((seen, 0, 1), (8192, 0, 3), (8192, 777, 17), (16384, 5001, 2)):
            keys, values, queries = make(B, N, slots, D), make(B, N, slots, D), make(B, N * G, D)
            mask = torch.rand(B, slots, device="cuda") < 0.5
            mask[-1] = False
            mask[-1, before : before + seen] = True
            keys[-1, :, before : before + seen], values[-1, :, before : before + seen] = k, v
            queries[-1] = q[0]
            of = (queries, keys, values, mask, D**-0.5, sink)
            outs.append(one_query.attend(*of, invariant=True)[-1])
        assert all(torch.equal(bits(out), bits(outs[0])) for out in outs[1:]), seen


def test_a_path_runs_more_rows_than_are_best_for_it() -> None:
    """As where a table of measured times says so."""
    call = call_for(("float8_e4m3fn:row", ""), replace(LONG, T=512))
    with invariant():
        assert triton_paths.pick("rows", call).path.name == "rows/stream"
        want = run_experts("grouped", call)
        assert torch.equal(bits(run_experts("rows", call)), bits(want))


@pytest.mark.parametrize("E", [1, 4])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_products_of_sorted_rows(E: int, dtype: torch.dtype) -> None:
    """Those of one expert are linear layers, which few rows have kernels of their own for."""
    make = partial(torch.randn, device="cuda", dtype=dtype)
    x_RD, w_EFD, bias_EF = make(400, 2048), make(E, 1040, 2048), make(E, 1040)

    def product(x_RD: Tensor) -> Tensor:
        ends_E = torch.full((E,), len(x_RD), device="cuda", dtype=torch.int32)
        return expert_gemm(x_RD, w_EFD, ends_E, bias_EF)

    with invariant():
        want = product(x_RD)
        for rows in (1, 2, 17, 64, 65, 130, 399):
            got = product(x_RD[400 - rows :].clone())
            assert torch.equal(bits(got), bits(want[400 - rows :])), rows


@pytest.mark.parametrize("quant", [None, "int4:1x128", "int8:row"], ids=str)
def test_layers_compiled_and_in_eager_code(quant: str | None) -> None:
    with torch.no_grad():
        layer = moe_ops.MoELayer(
            16, 4, 512, 256, internal_gate=True, quant=quant, dtype=BF16, batch_invariant=True
        )
        layer = randomize(layer).cuda()
    x_TD = torch.randn(300, 512, device="cuda", dtype=BF16)
    with torch.inference_mode():
        want = layer(x_TD[:1].clone())
        for run_layer in (layer, moe_ops.compile(layer, batch_invariant=True)):
            for rows in (1, 2, 40, 300):
                got = run_layer(x_TD[:rows].clone())[:1]
                assert torch.equal(bits(got), bits(want)), rows


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_training_forward_has_the_bits_of_generate(compiled: bool) -> None:
    """Of a layer with its gate; the graph of one that trains has the option of `compile`."""
    options = {"internal_gate": True, "dtype": BF16, "batch_invariant": not compiled}
    layer = randomize(moe_ops.MoELayer(16, 4, 512, 256, **options)).cuda()
    run_layer = moe_ops.compile(layer, batch_invariant=True) if compiled else layer
    x_TD = torch.randn(300, 512, device="cuda", dtype=BF16)
    with torch.no_grad():
        want = run_layer(x_TD)
    for rows in (1, 2, 40, 300):
        got = run_layer(x_TD[300 - rows :].clone())
        assert got.requires_grad
        assert torch.equal(bits(got.detach()), bits(want[300 - rows :])), rows
        got.float().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters())


@pytest.mark.parametrize("formats", [("", ""), *(f for f in FORMATS if not f[1])], ids=ids)
def test_tokens_that_train_on_frozen_experts(formats: tuple[str, str]) -> None:
    call = call_for(formats, LONG)
    with moe_ops.using(batch_invariant=True):
        want = run(call)
        for rows in (1, 5, 96):
            routed = {n: getattr(call, n)[:rows].clone() for n in ("x_TD", "weights_TK", "ids_TK")}
            few = replace(call, **routed)
            few.x_TD.requires_grad_()
            got = experts(*experts.arguments.flat(few))
            assert got.requires_grad
            assert torch.equal(bits(got.detach()), bits(want[:rows])), rows


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_tokens_and_logits_of_a_prompt(family: str) -> None:
    """Alone, and beside prompts that are as long."""
    model = families.build(family).model.to("cuda", BF16)
    twin = moe_ops.compile(model, batch_invariant=True)
    ids_BT = torch.randint(16, 90, (9, 12), device="cuda")
    asked = {
        "max_new_tokens": 24, "pad_token_id": 0, "eos_token_id": None, "do_sample": False,
        "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    want = twin.generate(ids_BT[:1], **asked)
    for rows in (2, 9):
        got = twin.generate(ids_BT[:rows], **asked)
        assert torch.equal(got.sequences[:1], want.sequences)
        for step, of_one in zip(got.logits, want.logits, strict=True):
            assert torch.equal(bits(step[:1]), bits(of_one))

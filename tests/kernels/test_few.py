"""Codes that stream through registers, by torch: see `gluon_in_torch.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops import experts, experts_adapted, experts_batched
from moe_ops.backends import triton_batched, triton_hopper
from moe_ops.backends.triton import run_experts
from moe_ops.backends.triton_streams import one_streams
from moe_ops.conformance.adapter_samples import FORMS, adapters
from moe_ops.kernels.triton.experts.products import register_stream
from moe_ops.kernels.triton.experts.products.register_stream import Stream, Streams
from moe_ops.ops.adapters import Adapter
from moe_ops.ops.experts import ExpertsCall
from moe_ops.ops.experts_adapted import ExpertsAdaptedCall
from moe_ops.registry.invariance import invariant
from moe_ops.testing import ACTIVATIONS, BF16, DEVICE, F16, TOL, Case, assert_close
from tests.chosen import in_turn, one_in, those_of
from tests.kernels import gluon_in_torch
from tests.kernels.codes import unfilled
from tests.kernels.test_quantized_experts import BLOCK_FLOAT8, F8, call_of, definition

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")

FORMATS = (
    ("int4:1x32:bfloat16", ""), ("uint4:1x64:float16", ""), ("uint4:1x128", ""), ("int4:row", ""),
    ("mxfp4", ""), ("float8_e4m3fn:128x128", ""), ("float8_e4m3fn:tensor", ""), BLOCK_FLOAT8,
    ("nvfp4", ""), ("mxfp6_e3m2", ""), ("mxfp6_e2m3", ""), ("float6_e3m2:1x64:float16", ""),
    ("int8:row", ""), ("int8:1x128", ""),
    ("float8_e4m3fn:row", "float8_e4m3fn:row"), ("int8:tensor", "int8:row"),
    ("int8:row", "int8:tensor"),
)  # fmt: skip
SOME = (
    FORMATS[0],
    FORMATS[4],
    BLOCK_FLOAT8,
    ("nvfp4", ""),
    ("mxfp6_e2m3", ""),
    ("int8:tensor", "int8:row"),
)
USUAL = (FORMATS[0], FORMATS[4], BLOCK_FLOAT8, ("int8:tensor", "int8:row"))
EMULATED = (
    ("mxfp4", "mxfp6_e2m3"),
    ("nvfp4", "nvfp4"),
    ("mxfp4", "float8_e4m3fn:tensor"),
    ("mxfp6_e3m2", "mxfp6_e3m2"),
)
# What fills no step, no tile of rows, and leaves parts without columns; one expert or more.
SIZES = ((1, 1, 96, 160), (3, 3, 288, 96), (7, 6, 32, 32), (11, 10, 160, 288))
TOKENS = {"tiny": 1, "rows": 5}
# One function activates the products of every format: pairs in both orders, and no pairs.
QUICK = {"gpt_oss": USUAL, "silu": USUAL[:1], "ungated_relu2": USUAL[:1]}
EACH_ACTIVATION = [
    pytest.param(
        formats, name,
        marks=[] if formats in QUICK.get(name, ()) else [pytest.mark.slow, pytest.mark.every],
    )
    for formats in SOME for name in ACTIVATIONS
]  # fmt: skip
each_kernel = pytest.mark.parametrize("kernel", TOKENS)
each_format = pytest.mark.parametrize("formats", FORMATS, ids=str)
formats_first = pytest.mark.parametrize("formats", those_of(USUAL, FORMATS), ids=str)
some_formats = pytest.mark.parametrize("formats", those_of(USUAL, SOME), ids=str)


@pytest.fixture(autouse=True)
def by_torch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were launched; a test whose calls launch no streams is none."""
    monkeypatch.setattr(triton_hopper, "refuse_hopper", lambda _: None)
    return gluon_in_torch.take_over(register_stream, monkeypatch)


def check(kernel: str, call: ExpertsCall, tiles: Any = None) -> torch.Tensor:
    got = run_experts(kernel, call, tiles=tiles)
    dtype = F8 if call.x_format else call.x_TD.dtype
    assert_close(got, definition(call), TOL["experts", dtype], kernel)
    return got


@pytest.mark.parametrize("sizes", those_of(SIZES[:3:2], SIZES), ids=str)
@formats_first
@each_kernel
def test_sizes_that_fill_nothing(
    kernel: str, formats: tuple[str, str], sizes: tuple[int, ...], by_torch: list[str]
) -> None:
    E, K, *widths = sizes
    if "1x64" in formats[0] or formats[0] == "uint4:1x128":  # whose groups divide columns
        widths = [-(-width // 128) * 128 for width in widths]
    case = Case(name="odd", T=TOKENS[kernel], E=E, K=K, D=widths[0], I=widths[1])
    check(kernel, call_of(case, *formats, dtype=BF16 if K == 3 else F16, biases=True))
    names = ["one_up", "one_down"] if kernel == "tiny" else ["few_up", "few_down"]
    assert by_torch == names


def small(kernel: str, formats: tuple[str, str], **more: Any) -> ExpertsCall:
    case = Case(name="small", T=TOKENS[kernel], E=6, K=3, D=160, I=96)
    return call_of(case, *formats, **more)


@in_turn(pytest.mark.parametrize(("formats", "name"), EACH_ACTIVATION, ids=str), each_kernel)
def test_every_activation(kernel: str, formats: tuple[str, str], name: str) -> None:
    check(kernel, small(kernel, formats, biases=True, **ACTIVATIONS[name]))


@in_turn(
    pytest.mark.parametrize(
        ("formats", "index"),
        [
            pytest.param(f, i, marks=[] if f in USUAL[n % 2 :: 2] else [pytest.mark.every])
            for f in SOME
            for n, i in enumerate((torch.int32, torch.int64))
        ],
        ids=str,
    ),
    each_kernel,
)
def test_experts_elsewhere_add_nothing(
    kernel: str, formats: tuple[str, str], index: torch.dtype
) -> None:
    """Whatever memory holds in the place of their h, and their weights: here NaN."""
    call = small(kernel, formats, biases=True)
    for ids in ([-1, 6, 2], [-1, -1, -1]):
        call = replace(call, ids_TK=torch.tensor([ids], dtype=index).repeat(len(call.x_TD), 1))
        call.weights_TK[:, :2] = float("nan")
        got = check(kernel, call)
        assert max(ids) > 0 or not bool(got.any())


@some_formats
@one_in(2, each_kernel)
def test_an_expert_map_and_a_residual(kernel: str, formats: tuple[str, str]) -> None:
    call = small(kernel, formats)
    expert_map = torch.tensor([5, -1, 4, -1, 3, -1, 2, -1, 1, -1, 0], dtype=torch.int32)
    ids_TK = torch.tensor([[0, 1, 11]]).repeat(len(call.x_TD), 1)
    call = replace(call, ids_TK=ids_TK, expert_map=expert_map)
    got = check(kernel, call)
    residual_TD = torch.randn(got.shape).to(F16)
    assert torch.equal(run_experts(kernel, call, residual_TD), residual_TD + got)


@one_in(2, pytest.mark.parametrize("formats", EMULATED, ids=str))
def test_inputs_that_are_emulated(formats: tuple[str, str], by_torch: list[str]) -> None:
    call = small("rows", formats, biases=True)
    assert_close(run_experts("rows", call), experts.body(call), TOL["experts", torch.uint8])
    assert by_torch == ["few_up", "few_down"]


@some_formats
def test_batches_of_more_rows_than_are_expected(
    formats: tuple[str, str], by_torch: list[str]
) -> None:
    """In their slots, of which those past a count hold NaN; but for those that are sorted first."""
    call, M = small("rows", formats, biases=True), 20
    counts_E = torch.tensor([3, 20, 0, 9, -1, 25], dtype=torch.int32)
    x_EMD = torch.randn(len(counts_E), M, 160).to(call.x_TD.dtype)
    x_EMD[torch.arange(M) >= counts_E[:, None]] = float("nan")
    by_name = {n: getattr(call, n) for n in experts_batched.arguments.paths if hasattr(call, n)}
    given = {"x_EMD": x_EMD, "counts_E": counts_E, "expected": 1, **by_name}
    batched = experts_batched.call(**given)
    got, want = triton_batched.run(batched), experts_batched.body(batched)
    assert by_torch == ["few_up", "few_down"]
    dtype = F8 if call.x_format else call.x_TD.dtype
    for e, count in enumerate(counts_E.clamp(min=0).tolist()):
        assert_close(got[e, :count], want[e, :count], TOL["experts", dtype])
        assert bool(got[e, count:].isnan().all())


@some_formats
def test_a_token_that_is_no_number_stays_alone(formats: tuple[str, str]) -> None:
    call = small("rows", formats)
    want = run_experts("rows", call)
    call.x_TD[1, 3] = float("nan")
    got = run_experts("rows", call)
    assert bool(got[1].isnan().all())
    assert torch.equal(got[[0, 2, 3, 4]], want[[0, 2, 3, 4]])


# Each with every format of USUAL, by one kernel or the other.
STREAMS = (
    Stream(S=8, C=4, ahead=3), Stream(MW=4, MT=2, NT=2), Stream(S=8, C=8, ahead=1),
    Stream(S=2, C=2, MW=2, ahead=6, tokens_ahead=3), Stream(S=4, C=2, MT=2),
    Stream(MW=4, ahead=4, tokens_ahead=2), Stream(MW=2, tokens_ahead=2, late=True),
)  # fmt: skip
EACH_STREAM = [
    pytest.param(
        kernel, formats, stream,
        marks=[] if formats in USUAL[(n + k) % 2 :: 2] and n < 2 else [pytest.mark.every],
    )
    for k, kernel in enumerate(TOKENS) for formats in SOME for n, stream in enumerate(STREAMS)
]  # fmt: skip


@pytest.mark.slow
@one_in(2, pytest.mark.parametrize(("kernel", "formats", "stream"), EACH_STREAM, ids=str))
def test_every_shape_of_a_tile(kernel: str, formats: tuple[str, str], stream: Stream) -> None:
    case = Case(name="wide", T=1 if kernel == "tiny" else 11, E=2, K=2, D=480, I=352)
    whole = replace(stream, C=stream.S)
    streams = Streams(up=whole, down=stream if kernel == "tiny" else whole)
    check(kernel, call_of(case, *formats), streams)


@each_format
def test_parts_divide_shares(formats: tuple[str, str]) -> None:
    for sizes in ((8, 128, 64), (8, 4096, 14336)):
        layer = unfilled(formats, sizes)
        for K in range(1, 65):
            streams = one_streams(K, layer)
            assert streams.up.S == streams.up.C
            assert streams.down.S % streams.down.C == 0


CODES = (*USUAL[:2], ("float8_e4m3fn:128x128", ""), ("nvfp4", ""), ("mxfp6_e2m3", ""))
ADAPTED = [
    pytest.param(f, form, marks=[] if f == CODES[0] or form == FORMS[3] else [pytest.mark.every])
    for f in CODES for form in FORMS
]  # fmt: skip


@each_kernel
@pytest.mark.parametrize(("formats", "form"), ADAPTED, ids=str)
def test_adapters(
    kernel: str, formats: tuple[str, str], form: tuple[int, int, int], by_torch: list[str]
) -> None:
    """A token without one has the bits that it has without adapters at all."""
    call = small(kernel, formats, biases=True)
    *ranks, N = form
    torch.manual_seed(0)
    given = adapters(experts.arguments.by_name(call), (ranks[0], ranks[1]), N)
    adapter = Adapter(**given)
    got = run_experts(kernel, call, adapter=adapter)
    names = ["one_up", "one_down"] if kernel == "tiny" else ["few_up", "few_down"]
    assert by_torch == names
    floats = {n: getattr(call, n).float() for n in ("x_TD", "weights_TK", "b13_EF", "b2_ED")}
    wide = Adapter(**{n: v.float() if v.is_floating_point() else v for n, v in given.items()})
    want = experts_adapted.body(ExpertsAdaptedCall(replace(call, **floats), wide))
    assert_close(got, want, TOL["experts_adapted", call.x_TD.dtype], kernel)
    if adapter.adapter_T is not None:
        adapter.adapter_T.fill_(-1)
        assert torch.equal(run_experts(kernel, call, adapter=adapter), run_experts(kernel, call))


@each_kernel
def test_a_wide_rank_and_many_choices(kernel: str) -> None:
    case = Case(name="choices", T=TOKENS[kernel], E=12, K=11, D=128, I=96)
    call = call_of(case, *USUAL[0])
    given = adapters(experts.arguments.by_name(call), (40, 20), 2)
    got = run_experts(kernel, call, adapter=Adapter(**given))
    floats = {n: getattr(call, n).float() for n in ("x_TD", "weights_TK")}
    wide = Adapter(**{n: v.float() if v.is_floating_point() else v for n, v in given.items()})
    want = experts_adapted.body(ExpertsAdaptedCall(replace(call, **floats), wide))
    assert_close(got, want, TOL["experts_adapted", F16], kernel)


INVARIANT = (
    ("int4:1x32:bfloat16", ""), ("uint4:1x128", ""), ("int4:row", ""), ("mxfp4", ""),
    ("float8_e4m3fn:128x128", ""), ("nvfp4", ""), ("mxfp6_e2m3", ""), ("int8:row", ""),
)  # fmt: skip


@pytest.mark.parametrize("formats", those_of(INVARIANT[2:3], INVARIANT), ids=str)
@each_kernel
def test_invariant_calls_multiply_scales_into_values(
    kernel: str, formats: tuple[str, str], by_torch: list[str]
) -> None:
    """Rows of one token and of several are the same to the bit where no product is rounded."""
    widths = 256 if formats[0] == "int8:row" or "float8" in formats[0] else 128
    for biases in (False, True):
        case = Case(name="small", T=TOKENS[kernel], E=4, K=3, D=widths, I=widths)
        call = call_of(case, *formats, biases=biases and "nvfp4" not in formats)
        with invariant():
            got = run_experts(kernel, call)
        assert_close(got, definition(call), TOL["experts", call.x_TD.dtype], kernel)
        assert by_torch[-1] == ("one_down" if kernel == "tiny" else "few_down")
        assert bool(got.any())


@pytest.mark.parametrize("formats", those_of([("mxfp4", "")], INVARIANT[:4]), ids=str)
@pytest.mark.parametrize("K", those_of([2], [1, 2, 10]))
def test_choices_of_one_token_are_summed_as_those_of_several(
    formats: tuple[str, str], K: int
) -> None:
    """Where products are exact, so that it does not matter how torch sums them."""
    call = call_of(Case(name="whole", T=2, E=12, K=K, D=128, I=128), *formats, biases=True)
    call.x_TD.copy_(torch.randint(-2, 3, call.x_TD.shape))
    call.x_TD[:, 3:] = 0
    call.ids_TK[1, 0] = -1
    with invariant():
        want = run_experts("rows", call)
        for t in range(2):
            x_TD, weights_TK, ids_TK = (
                v[t, None] for v in (call.x_TD, call.weights_TK, call.ids_TK)
            )
            one = replace(call, x_TD=x_TD, weights_TK=weights_TK, ids_TK=ids_TK)
            assert torch.equal(run_experts("tiny", one), want[t, None])

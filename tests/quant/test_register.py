"""A format that moe_ops does not have, int2, registered from outside: what takes or refuses it."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.compiler.config
from torch import Tensor

import moe_ops
from moe_ops import OPS, expert_gemm, experts
from moe_ops.backends import available
from moe_ops.fake_impls import formats as grammar
from moe_ops.fake_impls.formats import Storage
from moe_ops.layer import MoELayer
from moe_ops.quant import packing, schemes
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.elements import table
from moe_ops.quant.elements.kinds import Integer, Minifloat
from moe_ops.quant.formats import Format
from moe_ops.quant.register import forget_format, register_format
from moe_ops.quant.schemes import SchemeInfo
from moe_ops.registry.backend import ONLY_INVARIANT
from moe_ops.testing import TOL, Case, assert_close, make_layer
from tests.docs import formats as page
from tests.docs.served import DEVICES, calls, machine, refusals
from tests.docs.test_formats import PAGE
from tests.hf.test_quantize import decoded, experts_of, logits, qwen

FOUR_IN_A_BYTE = Storage(dtype=torch.uint8, values=4)
INT2 = Integer(name="int2", storage=FOUR_IN_A_BYTE, lowest=-2, highest=1, offset=2)
NAME = "int2:1x32"
SCHEMES = (
    SchemeInfo(name="int2_w2a16", weight_formats=(NAME, "int2:row", "q2")),
    SchemeInfo(name="int2_w2a8", weight_formats=("int2:row",), input_formats=("int8:row",)),
)
PUBLISHED = {"q2": "int2:1x16:float16"}
CASE = Case(name="small", T=6, E=3, K=2, D=64, I=32)
TIGHT = TOL["expert_gemm", torch.float32]
RUN_IT = {"reference", "dequantize"}  # backends that take every format
OF_MACHINES = re.compile("needs a (tensor on|GPU of)")  # reasons that are found before formats


@pytest.fixture
def int2() -> Iterator[None]:
    """The format, for one test."""
    with torch.compiler.config.patch(cache_key_tag=""):
        register_format(INT2, published=PUBLISHED, schemes=SCHEMES)
        try:
            yield
        finally:
            forget_format("int2")


def weights() -> tuple[dict[str, Any], Tensor, Tensor]:
    """Two stacked weights as arguments of `experts`, and what they decode to in float64."""
    layer, format = make_layer(CASE), Format.of(NAME)
    w13, w2 = (packing.quantize(w, format) for w in (layer.w13_EFD, layer.w2_EDI))
    given = {
        "w13_EFD": w13.values, "w2_EDI": w2.values, "w_format": NAME,
        "w13_scale_EFG": w13.scale, "w2_scale_EDG": w2.scale,
    }  # fmt: skip
    of_13, of_2 = (by_hand(q.values, q.scale) for q in (w13, w2))
    return given, of_13, of_2


def by_hand(stored: Tensor, scale: Tensor) -> Tensor:
    """Bytes of four codes, the first in the lowest bits, and their scales in float64."""
    values = torch.stack([(stored >> 2 * i & 3).double() - 2 for i in range(4)], -1).flatten(-2)
    return values * scale.double().repeat_interleave(32, -1)


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    ids_TK = torch.stack([torch.randperm(CASE.E)[: CASE.K] for _ in range(CASE.T)])
    return torch.randn(CASE.T, CASE.D), torch.rand(CASE.T, CASE.K), ids_TK


@pytest.mark.usefixtures("int2")
def test_four_values_lie_in_a_byte_and_come_back() -> None:
    assert packing.pack(torch.tensor([0, 1, 2, 3], dtype=torch.uint8), "int2").tolist() == [0xE4]
    stored = torch.arange(256, dtype=torch.uint8)
    codes = packing.unpack(stored, "int2")
    assert codes.shape == (1024,) and int(codes.max()) == 3
    assert torch.equal(packing.pack(codes, "int2"), stored)
    assert packing.decode(codes[:4], "int2").tolist() == [-2.0] * 4
    assert packing.encode(torch.tensor([-9.0, -0.5, 0.4, 7.0]), "int2").tolist() == [0, 2, 2, 3]


@pytest.mark.usefixtures("int2")
@pytest.mark.parametrize("name", [NAME, "int2:row", "q2"])
def test_a_matrix_is_rounded_to_the_nearest_codes(name: str) -> None:
    x, format = torch.randn(5, 64), Format.of(name)
    done = packing.quantize(x, format)
    assert done.values.shape == (5, 16) and done.zero is None
    back = packing.dequantize(done.values, done.scale, format)
    step = packing.expand(packing.decode_scale(done.scale, format.scale), format.group, 5, 64)
    assert bool(((back - x).abs() <= step * 0.5001).all())
    assert set((back / step).unique().tolist()) == {-1.0, 0.0, 1.0}
    again = packing.quantize(back, format, done.scale)
    assert torch.equal(again.values, done.values)


@pytest.mark.usefixtures("int2")
@pytest.mark.parametrize("backend", sorted(RUN_IT))
def test_a_product_is_that_of_a_plain_loop(backend: str) -> None:
    given, w13, _ = weights()
    x_RD, ends = torch.randn(9, CASE.D), [4, 4, 9]
    call = (x_RD, given["w13_EFD"], torch.tensor(ends, dtype=torch.int32))
    with moe_ops.using(backend, expert_gemm):
        got = expert_gemm(*call, w_scale_EFG=given["w13_scale_EFG"], w_format=NAME)
    want = torch.cat([x_RD[:4].double() @ w13[0].T, x_RD[4:].double() @ w13[2].T])
    assert_close(got, want, TIGHT)


@pytest.mark.usefixtures("int2")
def test_a_layer_is_that_of_a_plain_loop() -> None:
    (x, weights_TK, ids), (given, w13, w2) = tokens(), weights()
    want = torch.zeros(CASE.T, CASE.D, dtype=torch.float64)
    for t in range(CASE.T):
        for k, e in enumerate(ids[t].tolist()):
            gate, up = (w13[e] @ x[t].double()).chunk(2)
            h = torch.nn.functional.silu(gate) * up
            want[t] += weights_TK[t, k].double() * (w2[e] @ h)
    tol = TOL["experts", torch.float32]
    with moe_ops.using("reference"):
        assert_close(experts(x, weights_TK, ids, **given), want, tol)
    assert_close(experts(x, weights_TK, ids, **given), want, tol)  # by what is picked


@pytest.mark.usefixtures("int2")
@pytest.mark.parametrize(
    "test", ["test_schema", "test_faketensor", pytest.param("test_aot_dispatch_dynamic")]
)
def test_schema_and_fakes_are_true(test: str) -> None:
    given, _, _ = weights()
    torch.library.opcheck(experts.overload, tokens(), given, test_utils=(test,))
    quantize = (torch.randn(3, CASE.D), "int2:row")
    torch.library.opcheck(OPS["quantize"].overload, quantize, test_utils=(test,))


@pytest.mark.usefixtures("int2")
@pytest.mark.parametrize(
    ("w", "x"), [(NAME, ""), ("int2:row", "int8:row"), ("int8:row", "int2:row")]
)
def test_what_has_no_kernel_says_so_by_the_name_of_the_format(w: str, x: str) -> None:
    asked, unnamed = set(), []
    with machine():
        for name, call in calls(w, x).items():
            if name == "quantize" and "int2" not in x:
                continue
            for device in DEVICES.values():
                for backend, reason in refusals(OPS[name], call, device).items():
                    asked.add(backend)
                    if reason is None:
                        assert backend in RUN_IT, f"{backend} runs {name} of {w} and {x}"
                    elif not (
                        "int2" in reason or OF_MACHINES.match(reason) or reason == ONLY_INVARIANT
                    ):
                        unnamed.append(f"{backend} of {name}: {reason}")
    assert not unnamed, "\n".join(unnamed)
    assert {"cpu", "aten", "triton", "triton.tiny", "triton.rows", "triton.grouped"} <= asked


@pytest.mark.usefixtures("int2")
def test_configurations_and_layers_take_it() -> None:
    config = QuantConfig.of(NAME)
    assert config is not None and (config.scheme, config.format.bits) == ("int2_w2a16", 2)
    assert QuantConfig(weights="q2").format == Format.of("int2:1x16:float16")
    assert QuantConfig(weights="int2:row", inputs="int8:row").scheme == "int2_w2a8"
    layer = MoELayer(
        num_experts=CASE.E, top_k=CASE.K, hidden_size=CASE.D, intermediate_size=CASE.I, quant=config
    )
    assert layer.w13_weight.shape == (CASE.E, 2 * CASE.I, CASE.D // 4)
    assert set(layer.w13_weight.unique().tolist()) == {0b10101010}  # zeros, until weights come
    x, weights_TK, ids = tokens()
    given = {"w13_scale_EFG": layer.w13_scale, "w2_scale_EDG": layer.w2_scale, "w_format": NAME}
    out = experts(x, weights_TK, ids, layer.w13_weight, layer.w2_weight, **given)
    assert not out.any()


@pytest.mark.usefixtures("int2")
def test_a_model_is_quantized_to_it_and_saved(tmp_path: Path) -> None:
    model, stock = qwen(), qwen()
    report = moe_ops.quantize_model(model, "int2_w2a16", progress=False)
    assert (report.modules, report.kept) == (2, ())
    for module, plain in zip(experts_of(model), experts_of(stock), strict=True):
        for name in ("gate_up_proj", "down_proj"):
            getattr(plain, name).copy_(decoded(module, name))
    want = logits(model)
    assert_close(want, logits(stock), TOL["moe", torch.float32])
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path)), want)


@pytest.mark.slow
@pytest.mark.usefixtures("int2")
def test_a_quantized_model_compiles_into_one_graph() -> None:
    model = qwen()
    moe_ops.quantize_model(model, NAME, progress=False)
    want = logits(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(logits(compiled), want, TOL["moe", torch.float32])


@pytest.mark.slow
@pytest.mark.usefixtures("int2")
def test_the_page_and_the_command_line_list_it() -> None:
    made = page.fill(PAGE.read_text())
    assert "| `int2` | 2 | 4 in uint8 | -2 to 1 | 2^0 | neither | 1, 0 |" in made
    assert "`int2_w2a16`" in made and "`q2`" in made
    assert "int2" not in available.text()  # which is of machines, not of formats


def test_nothing_is_left_of_it(request: pytest.FixtureRequest) -> None:
    def known() -> list[Any]:
        tables = (table.ELEMENTS, grammar.ELEMENTS, grammar.PUBLISHED, schemes.SCHEMES)
        return [dict(t) for t in (*tables, schemes.BY_KIND)]

    before = known()
    with torch.compiler.config.patch(cache_key_tag=""):
        register_format(INT2, published=PUBLISHED, schemes=SCHEMES)
        assert Format.of(NAME).name == NAME and known() != before
        assert torch.compiler.config.cache_key_tag.startswith("moe_ops+")
        forget_format("int2")
    assert known() == before
    for name in (NAME, "q2"):
        with pytest.raises(ValueError, match=f"format '{name}' "):
            Format.of(name)


def test_cached_graphs_are_told_by_the_definition() -> None:
    tags = []
    for highest in (1, 0):
        with torch.compiler.config.patch(cache_key_tag=""):
            register_format(replace(INT2, highest=highest))
            tags.append(torch.compiler.config.cache_key_tag)
            forget_format("int2")
    assert tags[0] != tags[1] and "" not in tags


FLOAT3 = {"exponent_bits": 1, "mantissa_bits": 1, "bias": 0, "largest": 3.0, "top_exponent": 1}
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "values_of_no_size": (
        lambda: Storage(dtype=torch.uint8, values=3),
        "3 values in 1 bytes do not have 1 to 7 bits each; give numbers whose quotient is that",
    ),
    "one_value": (lambda: Storage(dtype=torch.uint8, values=1, units=2), "1 values in 2 bytes do"),
    "words": (
        lambda: Storage(dtype=torch.int32, values=16),
        "values are packed in torch.uint8, got torch.int32; leave out values and units",
    ),
    "range": (
        lambda: Integer(name="int2", storage=FOUR_IN_A_BYTE, lowest=-2, highest=1),
        "int2 stores -2 to 1 with the offset 0 in codes from 0 to 3; give a range and an offset",
    ),
    "offset_and_zero": (
        lambda: Integer(
            name="x", storage=FOUR_IN_A_BYTE, lowest=-1, highest=2, offset=1, zero_point=True
        ),
        "x has zero points, so its values are its codes, from 0 on; got lowest=-1 and offset=1",
    ),
    "fields": (
        lambda: Minifloat(name="float3", storage=FOUR_IN_A_BYTE, **FLOAT3),
        "float3 has 3 bits of sign, exponent and mantissa, but 2 in its storage",
    ),
    "no_element": (lambda: register_format("int2"), "element must be an Integer or a Minifloat"),
    "known": (
        lambda: register_format(Integer(name="int4", storage=FOUR_IN_A_BYTE, lowest=0, highest=3)),
        "the element 'int4' is known already; give another name",
    ),
    "no_name": (
        lambda: register_format(Integer(name="a:b", storage=FOUR_IN_A_BYTE, lowest=0, highest=3)),
        "the element 'a:b' is no name; give another name",
    ),
    "decoder": (
        lambda: register_format(replace(INT2, triton_decoder="mine.decode")),
        "the triton_decoder 'mine.decode' of int2 is no place of a function; give one as "
        "'module:function'",
    ),
    "no_decoder": (
        lambda: register_format(replace(INT2, triton_decoder=len)),  # type: ignore[arg-type]
        "triton_decoder must be a str, got a builtin_function_or_method",
    ),
    "short_name": (
        lambda: register_format(INT2, published={"mxfp4": "int2:row"}),
        "'mxfp4' is no name that is free for a format; give another one",
    ),
    "short_name_of_another": (
        lambda: register_format(INT2, published={"q2": "int4:row"}),
        "the format 'int4:row' is not one of int2; leave its name out",
    ),
    "short_name_of_none": (
        lambda: register_format(INT2, published={"q2": "int2:0x1"}),
        "format 'int2:0x1' has the group '0x1'",
    ),
    "scheme": (
        lambda: register_format(INT2, schemes=[SchemeInfo(name="none", weight_formats=(NAME,))]),
        "there is a scheme 'none' already; take another name",
    ),
    "formats_of_a_scheme": (
        lambda: register_format(
            INT2, schemes=[SchemeInfo(name="mine", weight_formats=(NAME, "int4:row"))]
        ),
        "the scheme 'mine' has formats of the scheme 'int4_w4a16', whose elements decide it",
    ),
    "not_registered": (lambda: forget_format("int4"), "the element 'int4' was not registered"),
}


@pytest.mark.parametrize(("call", "text"), BAD.values(), ids=BAD)
def test_what_is_refused_leaves_nothing(call: Callable[[], Any], text: str) -> None:
    before = list(table.ELEMENTS), list(schemes.SCHEMES), list(grammar.PUBLISHED)
    with pytest.raises((ValueError, TypeError), match=re.escape(text)):
        call()
    assert (list(table.ELEMENTS), list(schemes.SCHEMES), list(grammar.PUBLISHED)) == before

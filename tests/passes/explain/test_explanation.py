"""The data of an explanation: as tables, as JSON, and how equal things are put together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

from moe_ops.passes.explain.codes import LinearsInCodes
from moe_ops.passes.explain.explanation import (
    At,
    Explanation,
    LayerText,
    LeftAlone,
    PassTotal,
    Region,
    Run,
    microseconds,
    names,
    paths,
    runs,
    si,
    span,
)
from moe_ops.passes.explain.html import page
from moe_ops.passes.explain.regions import grouped, left_alone
from moe_ops.passes.explain.trace import Break
from moe_ops.passes.rewriting.context import Note
from moe_ops.planning.cost import Device
from moe_ops.planning.plan import Plan, Range

LIMITED = Range(upto=40, backend="cpu", source="tuned", at=32, predicted_us=10.5, measured_us=2100)
REGION = Region(
    op="moe",
    layers=tuple(f"model.layers.{n}.mlp.experts" for n in (0, 1, 2, 4)),
    shapes={"E": 128, "K": 8, "D": 2048, "I": 768},
    dtype="bfloat16",
    format="mxfp4",
    rows=(2, None),
    lifted_from=("lift_grouped_mm: two products", "lift_router: top_k=8, score=softmax"),
    runs=(
        Run(
            op="route", ranges=(Range(upto=None, backend="reference", source="limit"),), refusals={}
        ),
        Run(
            op="experts",
            ranges=(LIMITED, Range(upto=None, backend="aten", source="tuned")),
            refusals={"triton": "needs a tensor on cuda, got cpu"},
        ),
    ),
    at=(
        At(tokens=1, backend="cpu", bytes=75.5e6, flops=75e6, floor_us=2500.0, bound="memory"),
        At(tokens=128, backend="aten", bytes=1.21e9, flops=9.66e9, floor_us=5e4, bound="compute"),
        At(tokens=4096, backend=""),
    ),
    curve=(
        At(tokens=1, backend="cpu", bytes=75.5e6, flops=75e6, floor_us=2500.0, bound="memory"),
        At(tokens=2, backend="cpu", bytes=140e6, flops=140e6, floor_us=4700.0, measured_us=9000),
        At(tokens=128, backend="aten", bytes=1.21e9, flops=9.66e9, floor_us=5e4, bound="compute"),
    ),
)
OTHER = replace(REGION, op="experts", layers=("",), lifted_from=(), rows=(7, 7), at=(), format="")
EXPLANATION = Explanation(
    title="Model",
    summary="Model: 4 of 4 MoE layers and 4 of 4 routers run on moe_ops; cpu to 40 tokens",
    device=Device(
        name="a CPU",
        bytes_per_second=30e9,
        flops_per_second={"float32": 1e11, "bfloat16": 2e11, "float16": 2e11},
        launch_us=5.0,
    ),
    regions=(REGION, OTHER),
    left_alone=(
        LeftAlone(
            rule="lift_router",
            reason="the scores of <all> the experts, which are added up before the choice, are not "
            "those that the experts are chosen by",
            layers=("model.layers.3.mlp",),
        ),
    ),
    instead=(),
    passes=(PassTotal(name="fuse_moe", rewrites=4, ms=12.345),),
    plan=Plan(device="a CPU", choices=()),
    graphs=2,
    breaks=(Break(reason="data-dependent branch", where="model.py:7"),),
    stopped="aten.nonzero.default",
    linears=(
        LinearsInCodes(
            layers=tuple(f"model.layers.{n}.self_attn.q_proj" for n in range(4)),
            rows=4096,
            columns=2048,
            format="float8_e4m3fn:row",
            bytes=4 * 4096 * 2052,
            runs="triton to 64 rows, then triton.decoded",
        ),
    ),
    layer=LayerText(
        module="model.layers.0.mlp",
        before="x = aten.mm(a, b)  # float32[7, 4]\ntopk = aten.topk(x, 2)",
        after="x = aten.mm(a, b)  # float32[7, 4]\nmoe = moe_ops.moe(x, a<b)  # float32[7, 16]",
    ),
)


def test_the_tables_of_an_explanation() -> None:
    text = str(EXPLANATION).replace("µ", "u")  # what expecttest can write
    assert max(map(len, text.splitlines())) <= 100
    assert_expected_inline(
        text,
        """\
Model on a CPU
  30 GB/s; 100 GFLOP/s float32; 200 GFLOP/s bfloat16, float16

  Model: 4 of 4 MoE layers and 4 of 4 routers run on moe_ops; cpu to 40 tokens

1. moe, 4 layers: model.layers.{0-2,4}.mlp.experts
   sizes        E=128 K=8 D=2048 I=768, bfloat16, mxfp4
   rows         2 or more
   lifted from  lift_grouped_mm: two products
                lift_router: top_k=8, score=softmax
   runs on      experts: cpu up to 40 rows, aten beyond
                route: its definition, compiled with what is around it
   refused      experts on triton: needs a tensor on cuda, got cpu
   tokens  backend    bytes       flops    floor  bound by
        1  cpu      75.5 MB    75 MFLOP  2.50 ms  memory
      128  aten     1.21 GB  9.66 GFLOP    50 ms  compute
     4096  -              -           -        -  -
   op       rows        backend  why    at    floor  measured
   experts  0-40        cpu      tuned  32  10.5 us   2.10 ms
   experts  41 or more  aten     tuned   -        -         -

2. experts, 1 layer
   sizes        E=128 K=8 D=2048 I=768, bfloat16
   rows         7
   lifted from  the model calls the op itself
   runs on      experts: cpu up to 40 rows, aten beyond
                route: its definition, compiled with what is around it
   refused      experts on triton: needs a tensor on cuda, got cpu
   op       rows        backend  why    at    floor  measured
   experts  7-40        cpu      tuned  32  10.5 us   2.10 ms
   experts  41 or more  aten     tuned   -        -         -

E: experts (P: of all ranks), K of them for each token. D: the model's width, I: an expert's. Rows:
    tokens, or K for each token after dispatch. Floor: the least time this device needs.

Linear layers in codes
  model.layers.{0-3}.self_attn.q_proj: float8_e4m3fn:row [4096, 2048], 33.6 MB, by triton to 64
      rows, then triton.decoded

Left as it was
  model.layers.3.mlp: lift_router: the scores of <all> the experts, which are added up before the
      choice, are not those that the experts are chosen by

pass      rewrites    ms
fuse_moe         4  12.3

2 graphs, breaks at 1 place
  model.py:7: data-dependent branch
Not explained further: aten.nonzero.default""",
    )


def test_who_emulates_inputs_is_named() -> None:
    route, own = REGION.runs
    found = runs(replace(REGION, runs=(route, replace(own, emulated=("aten", "other")))))
    assert found[0] == "experts: cpu up to 40 rows, aten beyond; inputs emulated in 16 bits"
    assert found != runs(REGION)
    assert runs(replace(REGION, runs=(route, replace(own, emulated=("other",))))) == runs(REGION)


def test_the_path_of_a_backend_is_told() -> None:
    route, own = REGION.runs
    told = {"triton.grouped": "grouped/plain; grouped/wgmma needs contiguous weights"}
    region = replace(REGION, runs=(route, replace(own, paths=told)))
    said = "experts on triton.grouped: grouped/plain; grouped/wgmma needs contiguous weights"
    assert paths(region) == [said] and paths(REGION) == []
    text = str(replace(EXPLANATION, regions=(region,)))
    assert f"   path         {said}\n" in text
    assert f"<dt>path</dt><dd>{said}</dd>" in page(replace(EXPLANATION, regions=(region,)))


def test_layers_in_short() -> None:
    assert names(["a.1.b"]) == "a.1.b"
    assert names([f"a.{n}.b" for n in (0, 2, 1, 5)]) == "a.{0-2,5}.b"
    assert names(["a.0.b.1", "a.1.b.2"]) == "a.0.b.1, a.1.b.2"
    assert names(["a", "a.b", "c", "d", "e"]) == "a, a.b, c and 2 more"
    assert names(["layers.0", "layers.x"]) == "layers.0, layers.x"


def test_numbers_in_short() -> None:
    assert [si(v, "B") for v in (7, 999, 1.25e3, 123456, 2e15)] == [
        "7 B", "999 B", "1.25 kB", "123 kB", "2 PB",
    ]  # fmt: skip
    assert [microseconds(v) for v in (None, 0.5, 1500, 2.5e6)] == [
        "-", "0.500 µs", "1.50 ms", "2.50 s",
    ]  # fmt: skip
    assert [span(0, None), span(2, None), span(3, 3), span(3, 9)] == [
        "any", "2 or more", "3", "3-9",
    ]  # fmt: skip


def test_an_explanation_goes_through_json() -> None:
    assert Explanation.from_json(EXPLANATION.to_json()) == EXPLANATION
    with pytest.raises(ValueError, match="has version 0"):
        Explanation.from_json(EXPLANATION.to_json().replace('"version": 5', '"version": 0', 1))
    with pytest.raises(ValueError, match="explanation's At has no token"):
        Explanation.from_json(EXPLANATION.to_json().replace('"tokens"', '"token"', 1))


def test_equal_regions_and_reasons_are_put_together() -> None:
    one, two = (replace(REGION, layers=(name,)) for name in "ab")
    other = replace(one, layers=("c",), dtype="float32")
    assert grouped([one, other, two]) == (replace(one, layers=("a", "b")), other)
    notes = [
        Note(rule="r", node="n", layer=layer, text=f"mul_{n} is used by {user}")
        for n, (layer, user) in enumerate((("a", "add_3"), ("b", "add_7"), ("c", "sub")))
    ]
    assert [(left.reason, left.layers) for left in left_alone(notes)] == [
        ("mul_0 is used by add_3", ("a", "b")),
        ("mul_2 is used by sub", ("c",)),
    ]

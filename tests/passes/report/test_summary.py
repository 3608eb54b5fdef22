"""What is said of a compiled model, by what the model and its graphs have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import moe_ops
from moe_ops.passes.report.found import Found, Layer, keep, kept
from moe_ops.passes.report.sightings import Sighting
from moe_ops.passes.report.summary import Place, experts_of, summarize
from tests.hf import families

CPU = "cpu to 128 tokens, then aten"


class Experts(nn.Module):
    """Experts by its name, as models write them."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(2, 4)
        self.experts = Experts()
        self.shared_experts = nn.Linear(2, 2)


class Decoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": Sparse()}) for _ in range(layers))


def layer(n: int | str, **values: str) -> Layer:
    name = f"layers.{n}.mlp.experts" if isinstance(n, int) else n
    return Layer(module=name, **(values or {"runs_on": CPU}))


def line(*layers: Layer, of: int = 2, **values: object) -> str:
    return str(summarize("M", Decoder(of), [Found(model="Decoder", layers=layers, **values)]))  # type: ignore[arg-type]


def test_the_layers_of_a_model_are_its_experts() -> None:
    assert [e.name for e in experts_of(Decoder(2))] == [f"layers.{n}.mlp.experts" for n in (0, 1)]
    assert [e.name for e in experts_of(moe_ops.MoELayer(4, 2, 16, 16))] == [""]
    for none in (nn.Linear(2, 2), print, nn.ModuleDict({"experts": nn.Identity()})):
        assert not list(experts_of(none))
    two = nn.ModuleDict({"moe": nn.ModuleDict({"a": Experts(), "b": Experts()})})
    assert [e.name for e in experts_of(two)] == ["moe"], "a module for each product is one layer"


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "ernie4_5_vl_moe"])
def test_the_layers_of_families_are_their_experts(family: str) -> None:
    model = families.build(family).model
    assert [e.name for e in experts_of(model)] == list(families.experts(model))


def test_one_line_counts_layers_and_routers() -> None:
    n = "M: {} of 2 MoE layers and {} of 2 routers run on moe_ops; "
    assert line(layer(0), layer(1)) == n.format(2, 2) + CPU
    other = layer(1, runs_on="aten for 7 tokens")
    assert line(layer(0), other) == n.format(2, 2) + f"{CPU} (1); aten for 7 tokens (1)"
    assert line(layer(0), layer(1, router="odd", runs_on=CPU)) == n.format(2, 1) + CPU
    assert line(layer(0)) == n.format(1, 1) + f"{CPU}; 1 in no graph yet"
    assert line(layer(0), layer(1, reason="odd")) == n.format(1, 1) + CPU
    assert line(of=0) == "M: no MoE layer was found"
    seen = Sighting(module="top", what="topk of 2 of 8, then x", of=8)
    assert line(of=0, sightings=(seen,)) == (
        "M: no MoE layer was found; seen instead: topk of 2 of 8, then x (top)"
    )


@pytest.mark.parametrize(
    ("module", "count"),
    [
        ("layers.1.mlp.experts", 1),
        ("layers.1.mlp.experts.base_layer", 1),  # in an adapter
        ("layers.1.mlp", 1),  # the block itself calls an op
        ("mlp.experts", 12),  # one graph of a decoder layer serves all
        ("experts", 12),
        ("experts.w1", 12),  # a module for each product
        ("1.mlp.experts", 1),
        ("my.layers.1.mlp.experts", 1),  # a cached graph of a model that holds such a one
    ],
)
def test_graphs_of_parts_belong_to_their_layers(module: str, count: int) -> None:
    assert f": {count} of 12 MoE" in line(layer(module), of=12)


def test_a_graph_of_the_experts_alone_is_known_by_its_class() -> None:
    found = Found(model="Sparse", layers=(layer(""),))
    assert ": 2 of 2 MoE" in str(summarize("M", Decoder(2), [found]))
    assert ": 1 of 3 MoE" in str(
        summarize("M", Decoder(2), [Found(model="X", layers=(layer(""),))])
    )


def test_a_region_compiled_once_stands_for_its_like() -> None:
    assert ": 2 of 2 MoE" in line(layer(0), shares=True)
    assert ": 0 of 2 MoE" in line(shares=True)


def test_what_was_left_is_told_by_reason_and_names() -> None:
    found = [
        Found(model="M", layers=(layer(0, reason="cat_4 is odd"), layer(1, reason="cat_8 is odd")))
    ]
    summary = summarize("M", Decoder(2), found)
    (complaint,) = summary.complaints()
    assert complaint.startswith(
        "M: moe_ops leaves 2 of 2 MoE layers as they were, which is slower "
        "(layers.{0-1}.mlp.experts): cat_4 is odd. strict=True"
    )
    routers = [Found(model="M", layers=tuple(layer(n, router="odd", runs_on=CPU) for n in (0, 1)))]
    summary = summarize("M", Decoder(2), routers)
    assert not list(summary.complaints())
    assert list(summary.remarks()) == [
        "M: moe_ops leaves 2 of 2 routers as they were (layers.{0-1}.mlp.experts): odd"
    ]


def test_a_graph_that_ends_in_the_code_of_experts_is_why_they_are_in_none() -> None:
    inside = Experts.forward.__code__.co_firstlineno + 1
    for reason, told in (("Dynamic shape operator", "sizes that depend on values"), ("odd", "odd")):
        place = Place(reason=reason, stack=((__file__, 1), (__file__, inside)))
        (said,) = summarize("M", Decoder(2), [], [place]).complaints()
        assert f"its code ends the graph: {told}" in said and f"{__file__}:{inside}" in said
    for stack in (((__file__, 1),), (("other.py", inside),)):
        elsewhere = summarize("M", Decoder(2), [], [Place(reason="odd", stack=stack)])
        assert not list(elsewhere.complaints()) and len(elsewhere.unseen) == 2


def test_what_is_found_is_kept_with_the_counts_of_a_graph() -> None:
    sighting = Sighting(module="a", what="b", of=8, is_sure=True)
    one = Found(model="M", layers=(layer(0), layer(1, reason="é")), sightings=(sighting,))
    with kept() as found:
        keep(one)
        before = counters["inductor"].copy()
        keep(one)
    assert found == [one]
    counters["inductor"] = before
    with kept() as again:
        counters["inductor"] += counters["inductor"] - before
        keep(one)
    assert again == [one]

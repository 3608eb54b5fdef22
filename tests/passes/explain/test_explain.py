"""`explain`: what it finds in models, and that it leaves no trace."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import moe_ops
from moe_ops.passes.explain.explanation import Explanation
from tests.hf import families
from tests.passes.blocks import OTHER_ACTIVATIONS, Block, D, E, I, K

pytestmark = pytest.mark.slow  # compiles many graphs


class Layer(nn.Module):
    """A router and experts as models write them."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block
        self.gate = nn.Linear(D, E, bias=False)
        self.w13 = nn.Parameter(torch.randn(E, 2 * I, D))
        self.w2 = nn.Parameter(torch.randn(E, D, I))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(K)
        return self.block.batched(x, weights, ids, self.w13, self.w2, x, x)


class Model(nn.Module):
    """Layers in a row, with something in between: the first ends a graph if `between` does."""

    def __init__(self, *blocks: Block, between: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.first, self.between = Layer(blocks[0]), between
        self.layers = nn.ModuleList(map(Layer, blocks[1:]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(x + self.first(x))
        for layer in self.layers:
            x = x + layer(x)
        return x


def broken(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x.relu()


def branching(x: Tensor) -> Tensor:
    return x.relu() if x.sum() > 0 else x


PLAIN = Block()
NORMED = Block(act=OTHER_ACTIVATIONS["normed"])


@pytest.fixture(scope="module")
def qwen() -> Iterator[tuple[families.TinyModel, Explanation]]:
    """A tiny stock model, and what is made of it."""
    tiny = families.build("qwen3_moe")
    inputs = {**tiny.inputs, "use_cache": False}
    yield tiny, moe_ops.explain(tiny.model, inputs, tokens=(1, 128))


def test_a_stock_model_is_explained(qwen) -> None:
    tiny, found = qwen
    (region,) = found.regions
    assert region.op == "moe"
    assert region.layers == tuple(families.experts(tiny.model))
    assert region.lifted_from == (
        "lift_grouped_mm: sort, two grouped products, weighted sum",
        "lift_router: top_k=2, score=softmax",
    )
    assert (region.dtype, region.format, region.rows[1]) == ("float32", "", None)
    assert [at.tokens for at in region.at] == [1, 128]
    assert all(at.backend and at.bytes and at.flops and at.floor_us for at in region.at)
    w13_EFD, ends = tiny.model.model.layers[0].mlp.experts.gate_up_proj, region.shapes
    assert [ends["E"], 2 * ends["I"], ends["D"]] == list(w13_EFD.shape)
    assert (found.graphs, found.breaks, found.stopped, found.left_alone) == (1, (), "", ())
    away = {backend for run in region.runs for backend in run.elsewhere}
    assert away == {f"flashinfer_{name}" for name in ("cutlass", "b12x", "cute_dsl", "trtllm")}
    assert "elsewhere    experts on flashinfer_cutlass: needs " in str(found)
    assert {p.name: p.rewrites for p in found.passes}["lift_grouped_mm"] == 2
    assert found.layer is not None
    assert found.layer.module == "model.layers.0.mlp"
    assert "aten.topk" in found.layer.before
    assert "moe_ops" not in found.layer.before
    assert "moe_ops." in found.layer.after
    assert "aten.topk" not in found.layer.after
    assert len(found.plan.choices) >= 2
    assert Explanation.from_json(found.to_json()) == found


def test_floors_are_those_of_the_layer(qwen) -> None:
    _, found = qwen
    (region,) = found.regions
    E, K, D, I = (region.shapes[letter] for letter in "EKDI")  # noqa: E741
    one, many = region.at
    assert one.flops == 2 * K * D * 3 * I
    assert many.flops == 128 * one.flops
    touched = 4 * K * (3 * D * I)  # the weights of one token's experts
    assert touched <= one.bytes <= touched + 4 * (2 * D + E)
    assert one.floor_us == pytest.approx(
        found.device.launch_us
        + 1e6 * max(
            one.bytes / found.device.bytes_per_second,
            one.flops / found.device.flops_per_second["float32"],
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "ours"),
    [
        pytest.param("mxfp4_w4a16", "cpu", marks=pytest.mark.every),
        pytest.param("mxfp6_e3m2_w6a16", "dequantize", marks=pytest.mark.every),
        ("mxfp4_w_mxfp8_a", "dequantize"),  # also has inputs that are quantised
    ],
)
def test_quantized_experts_are_explained(
    scheme: str, ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("hidden_size", "moe_intermediate_size"):
        monkeypatch.setitem(families.SIZES, name, 64)  # which every group divides
    tiny = families.build("qwen3_moe")
    moe_ops.quantize_model(tiny.model, scheme, progress=False)
    found = moe_ops.explain(tiny.model, {**tiny.inputs, "use_cache": False}, tokens=(1,))
    (region,) = found.regions
    assert [region.shapes[letter] for letter in "DI"] == [64, 64]  # values, not bytes
    assert region.at[0].backend == ours
    left = [part.reason.partition(" runs on its reference")[0] for part in found.left_alone]
    assert [run.op for run in region.runs if run.opaque] == left
    assert all(f"{op}: its definition, not compiled" in str(found) for op in left)
    assert Explanation.from_json(found.to_json()) == found


def test_the_model_and_compiled_code_stay_as_they_are() -> None:
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    model, x = Model(PLAIN, PLAIN, between=broken), torch.randn(7, D)
    before = copy.deepcopy(model.state_dict())
    want = model(x)
    compiled = torch.compile(model, backend=backend, dynamic=False)
    compiled(x)
    counted, made = copy.deepcopy(counters), len(graphs)
    moe_ops.explain(model, (x,))
    moe_ops.explain(compiled, (x[:3],))
    assert counters == counted
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(compiled(x), want)
    assert len(graphs) == made
    torch.testing.assert_close(model(x), want)
    torch.testing.assert_close(dict(model.state_dict()), dict(before))
    assert not [name for name in vars(x) if "dynamo" in name]


def test_frames_compiled_only_to_explain_are_forgotten() -> None:
    torch._dynamo.reset()
    moe_ops.explain(Model(PLAIN, PLAIN, between=broken), (torch.randn(7, D),))
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    assert entries(Model.forward.__code__) == []


def test_what_is_left_alone_has_a_reason() -> None:
    found = moe_ops.explain(Model(PLAIN, NORMED, NORMED), (torch.randn(7, D),))
    (region,) = found.regions
    assert region.layers == ("first",)
    (left,) = [left for left in found.left_alone if left.rule == "lift_batched_mm"]
    assert left.layers == ("layers.0", "layers.1")
    assert left.reason


def test_breaks_are_listed_with_their_places() -> None:
    found = moe_ops.explain(Model(PLAIN, PLAIN, between=broken), (torch.randn(7, D),))
    assert found.graphs == 3
    (place,) = found.breaks
    assert "graph_break" in place.reason
    assert place.where.startswith(f"{__file__}:")
    assert [layer for region in found.regions for layer in region.layers] == ["first", "layers.0"]
    assert "3 graphs, breaks at 1 place\n" in str(found)


def test_code_that_needs_values_ends_an_explanation() -> None:
    found = moe_ops.explain(Model(PLAIN, PLAIN, between=branching), (torch.randn(7, D),))
    assert len(found.regions) == 1
    assert "needs values, not shapes" in found.stopped


def test_the_model_itself_may_call_an_op() -> None:
    w13, w2 = torch.randn(E, 2 * I, D), torch.randn(E, D, I)

    def function(x: Tensor, logits: Tensor) -> Tensor:
        return moe_ops.moe(x, logits, w13, w2, K)

    found = moe_ops.explain(function, (torch.randn(7, D), torch.randn(7, E)))
    (region,) = found.regions
    assert region.lifted_from == ()
    assert [at.tokens for at in region.at] == [7]
    assert "the model calls the op itself" in str(found)
    assert found.title == "function"


def test_weights_may_be_fake_and_larger_than_the_machine() -> None:
    with FakeTensorMode():
        model, x = Model(PLAIN), torch.randn(7, D)
        model.first.gate = nn.Linear(D, 2**12)
        model.first.w13 = nn.Parameter(torch.empty(2**12, 2 * 2**20, D))  # half a terabyte
        model.first.w2 = nn.Parameter(torch.empty(2**12, D, 2**20))
    found = moe_ops.explain(model, (x,), tokens=(1,))
    (region,) = found.regions
    assert (region.shapes["E"], region.shapes["I"]) == (2**12, 2**20)
    with pytest.raises(ValueError, match="weights of this Model are fake"):
        moe_ops.explain(model, (x,), depyf="unused")


def test_one_shape_has_one_number_of_tokens() -> None:
    x = torch.randn(7, D)
    found = moe_ops.explain(Model(PLAIN), (x,), tokens=(7, 8), dynamic=False)
    (region,) = found.regions
    assert region.rows == (7, 7)
    assert [bool(at.backend) for at in region.at] == [True, False]


def test_options_are_those_of_compile() -> None:
    x = torch.randn(7, D)
    found = moe_ops.explain(Model(PLAIN), (x,), stop_after="lift_batched_mm")
    assert [p.name for p in found.passes] == ["lift_grouped_mm", "lift_batched_mm"]
    assert found.regions == ()
    assert "No MoE region was found. Looked for: " in str(found)
    with pytest.raises(TypeError, match="unknown options: strickt"):
        moe_ops.explain(Model(PLAIN), (x,), strickt=True)


def test_without_depyf_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "depyf", None)
    with pytest.raises(ImportError, match=r"pip install 'torch-moe-ops\[debug\]'"):
        moe_ops.explain(Model(PLAIN), (torch.randn(7, D),), depyf="unused")


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*(trying to debug|compiled cache entries):UserWarning")
def test_depyf_writes_our_stages(tmp_path: Path) -> None:
    pytest.importorskip("depyf", reason="depyf is not installed")
    x = torch.randn(7, D)
    found = moe_ops.explain(Model(PLAIN), (x,), depyf=str(tmp_path))
    assert len(found.regions) == 1
    files = " ".join(path.name for path in tmp_path.glob("*.py"))
    assert "moe_ops_02_before_lift_batched_mm" in files
    assert "moe_ops_02_after_lift_batched_mm" in files
    (code,) = tmp_path.glob("full_code_for_explained_*.py")
    assert "__compiled_fn" in code.read_text()  # what Dynamo made of the call
    assert not [name for name in vars(x) if "dynamo" in name]


@pytest.mark.every
@pytest.mark.slow
def test_an_unsupported_stock_layer_is_named() -> None:
    if "muse_spark" not in families.discover():
        pytest.skip("this transformers has no muse_spark")
    tiny = families.build("muse_spark")
    found = moe_ops.explain(tiny.model, {**tiny.inputs, "use_cache": False})
    assert found.regions == ()
    (left,) = found.left_alone
    assert set(left.layers) == set(families.experts(tiny.model))
    assert "weights" in left.reason

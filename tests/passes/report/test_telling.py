"""What is told of a compiled model: one line, a warning where experts or routers are left alone,
and under `strict` an error; fresh and from caches."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops.passes.explain.trace import Backend
from moe_ops.passes.inductor.compiled import pipeline_of
from moe_ops.passes.inductor.pipeline import HOOK, OWN_ROUTERS, TRAINING
from tests.chosen import one_in
from tests.hf import families
from tests.moe_block import Block
from tests.passes.explain.test_unfound import AllTokens, ChosenTokens, Model, OneHot

ROOT = Path(__file__).resolve().parents[3]
CPU = "cpu to 128 tokens, then aten"

pytestmark = pytest.mark.slow  # compiles many graphs, without code generation at first


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Told]:
    """What is logged, as pairs of level and text, but for what is said while a compilation takes
    long, as on a slow machine. Graphs run node by node."""

    def run(wrapper: object, module: torch.fx.GraphModule, inputs: list, **_: object) -> object:
        ours, inference = wrapper.config[HOOK], not torch.is_grad_enabled()  # type: ignore[attr-defined]
        return Backend(lambda graph: ours(graph, inference))(module, inputs)

    torch._dynamo.reset()
    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", run)

    def take() -> list[tuple[str, str]]:
        records = [r for r in caplog.records if r.name == "moe_ops"]
        caplog.clear()
        said = [(r.levelname, r.getMessage()) for r in records]
        return [one for one in said if not one[1].startswith(("compiling ", "done after "))]

    with caplog.at_level(logging.INFO, "moe_ops"):
        yield take
    torch._dynamo.reset()


Told = Callable[[], list[tuple[str, str]]]


def plain(model: nn.Module, **options: object) -> nn.Module:
    return torch.compile(model, options=moe_ops.inductor_options(**options))  # type: ignore


WAYS = pytest.mark.parametrize("way", [moe_ops.compile, plain], ids=["twin", "plain"])


SIZES = ((3, 16), (3, 2), (3, 16, 16), (3, 16, 8))  # x, weights, w13, w2 of three experts


class Blocks(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.first, self.between, self.second = Block(), between, Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


def broken(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x.relu()


@WAYS
@torch.inference_mode()
def test_one_line_for_a_model_whatever_is_compiled_again(
    way: Callable[..., nn.Module], told: Told
) -> None:
    fast = way(Blocks(), **({"dynamic": False} if way is moe_ops.compile else {}))
    for T in (2, 1, 5):
        fast(torch.randn(T, 16))
    ((level, text),) = told()
    assert level == "INFO"
    assert text.startswith("Blocks: 2 of 2 MoE layers and 2 of 2 routers run on moe_ops; cpu for 2")


@torch.inference_mode()
def test_a_method_of_a_model_is_told_of_as_the_model(told: Told) -> None:
    """So transformers compiles with a compile_config. A function is not known by its class."""
    model, x = Blocks(), torch.randn(3, 16)
    options = moe_ops.inductor_options()
    torch.compile(model.forward, options=options)(x)
    ((_, text),) = told()
    assert text.startswith("Blocks: 2 of 2 MoE layers and 2 of 2 routers")
    torch._dynamo.reset()
    torch.compile(lambda x: model(x), options=options)(x)
    ((_, text),) = told()
    assert text.startswith("A function: 2 of 2 MoE layers and 2 of 2 routers")


@torch.inference_mode()
def test_each_model_has_its_line(told: Told) -> None:
    for _ in range(2):  # Dynamo takes the graph of the first for the second
        moe_ops.compile(Blocks())(torch.randn(3, 16))
    lines = [text for _, text in told()]
    assert len(lines) == 2 and lines[0] == lines[1]


@torch.inference_mode()
def test_graphs_that_break_off_are_counted_together(told: Told) -> None:
    moe_ops.compile(Blocks(broken))(torch.randn(3, 16))
    ((_, text),) = told()
    assert text.startswith("Blocks: 2 of 2 MoE layers and 2 of 2 routers")


@WAYS
@torch.inference_mode()
def test_a_dense_model_has_no_layer_and_no_warning(
    way: Callable[..., nn.Module], told: Told
) -> None:
    class Sampler(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).topk(2, -1).values

    way(nn.Sequential(nn.Linear(16, 16)), strict=True)(torch.randn(3, 16))
    assert told() == [("INFO", "Sequential: no MoE layer was found")]
    way(Sampler(16, 16), strict=True)(torch.randn(3, 16))
    ((level, text),) = told()
    assert level == "INFO" and "seen instead: topk of 2 of 16" in text


OTHERS = {
    OneHot: "topk of 2 of 8, then a one-hot mask over 8 experts, all of which run all tokens",
    AllTokens: "topk of 2 of 8, then a loop over 8 experts, each of which runs all tokens",
    ChosenTokens: "topk of 2 of 8, then experts in no form that a pass knows, or in another graph",
}


@one_in(
    2,
    pytest.mark.parametrize(
        ("kind", "way"),
        [*((kind, moe_ops.compile) for kind in OTHERS), (OneHot, plain)],
    ),
)
@torch.inference_mode()
def test_layers_in_another_form_are_warned_of_with_the_reason(
    kind: Callable[[], nn.Module], way: Callable[..., nn.Module], told: Told
) -> None:
    way(Model(kind()))(torch.randn(16, 32))
    info, warning = told()
    assert info == ("INFO", "Model: 0 of 2 MoE layers and 0 of 2 routers run on moe_ops")
    assert warning[0] == "WARNING" and OTHERS[kind] in warning[1]  # type: ignore[index]
    assert "leaves 2 of 2 MoE layers as they were, which is slower (layers.{0,2}" in warning[1]


class Apart(nn.Module):
    """Experts behind the end of a graph."""

    def __init__(self, known: bool) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 4), Known() if known else Unknown()

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2)
        torch._dynamo.graph_break()
        return self.experts(x, weights, ids)


class Known(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w13, self.w2 = (nn.Parameter(torch.randn(s)) for s in ((4, 16, 16), (4, 16, 8)))

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return moe_ops.experts(x, weights, ids, self.w13, self.w2)


class Unknown(Known):
    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x


@WAYS
@torch.inference_mode()
def test_experts_behind_a_break_are_found(way: Callable[..., nn.Module], told: Told) -> None:
    way(Apart(True))(torch.randn(3, 16))
    lines = told()
    assert lines[0][1].startswith("Apart: 1 of 1 MoE layers and 0 of 1 routers run on moe_ops")
    ((level, text),) = lines[1:]
    assert level == "WARNING" and "leaves 1 of 1 routers" in text and "not in this graph" in text


@WAYS
@torch.inference_mode()
def test_experts_whose_code_ends_a_graph_are_told_with_the_line(
    way: Callable[..., nn.Module], told: Told
) -> None:
    way(Apart(False))(torch.randn(3, 16))
    texts = [text for level, text in told() if level == "WARNING"]
    at = Unknown.forward.__code__.co_firstlineno + 1
    assert len(texts) == 1 and "its code ends the graph: " in texts[0]
    assert f"{__file__}:{at}" in texts[0]


@one_in(3, pytest.mark.parametrize("kind", OTHERS))
@torch.inference_mode()
def test_strict_raises_there(kind: Callable[[], nn.Module], told: Told) -> None:
    fast = moe_ops.compile(Model(kind()), strict=True)
    for _ in range(2):
        with pytest.raises(Exception, match="strict: Model: moe_ops leaves 2 of 2 MoE layers"):
            fast(torch.randn(16, 32))


def test_training_is_a_reason_too(told: Told) -> None:
    fast = moe_ops.compile(Blocks())
    for _ in range(2):
        fast(torch.randn(3, 16)).sum().backward()
    info, (level, text) = told()
    assert info[1].startswith("Blocks: 2 of 2 MoE layers and 0 of 2 routers run on moe_ops; their")
    assert level == "WARNING" and "leaves 2 of 2 routers" in text and OWN_ROUTERS in text
    with torch.no_grad():
        fast(torch.randn(3, 16))
    assert told() == [] and len(pipeline_of(fast).runs) > 1


def test_stock_code_is_left_in_a_training_graph_with_the_reason(told: Told) -> None:
    """Of plain torch.compile: a twin has our ops from the start."""
    tiny = families.build("qwen3_moe")
    plain(tiny.model)(**families.inputs_for(tiny, 1, 5, 0), use_cache=False)
    *_, info, (level, text) = told()
    assert info[1].endswith("0 of 2 MoE layers and 0 of 2 routers run on moe_ops")
    assert level == "WARNING" and TRAINING in text


def test_experts_that_train_without_a_router_are_told_of_without_one(told: Told) -> None:
    x, weights, w13, w2 = (torch.randn(*s, requires_grad=True) for s in SIZES)
    ids = torch.tensor([[0, 1], [2, 0], [1, 2]])
    plain(lambda *a: moe_ops.experts(a[0], a[1], ids, *a[2:]))(x, weights, w13, w2).sum().backward()
    ((level, text),) = told()
    assert level == "INFO" and text.startswith("A function: 1 of 1 MoE layers")


def test_a_layer_that_trains_is_in_the_graph(told: Told) -> None:
    layer = nn.Sequential(moe_ops.MoELayer(4, 2, 16, 16, internal_gate=True))
    for t in layer.parameters():
        t.data.normal_(0, 0.1)
    fast = moe_ops.compile(layer, fullgraph=True)
    fast(torch.randn(3, 16)).sum().backward()
    info, (level, text) = told()
    assert info[1].startswith("Sequential: 1 of 1 MoE layers and 0 of 1 routers")
    assert level == "WARNING" and OWN_ROUTERS in text
    with torch.inference_mode():
        moe_ops.compile(layer)(torch.randn(3, 16))
    ((_, text),) = told()
    assert text.startswith("Sequential: 1 of 1 MoE layers and 1 of 1 routers")


FAMILIES = [
    ("qwen3_moe", "2 of 2 MoE layers and 2 of 2 routers", ""),
    ("deepseek_v3", "1 of 1 MoE layers and 1 of 1 routers", ""),
    ("gpt_oss", "2 of 2 MoE layers and 2 of 2 routers", ""),
    (
        "phimoe", "2 of 2 MoE layers and 0 of 2 routers", "leaves 2 of 2 routers as they were (",
    ),
    (
        "muse_spark", "0 of 1 MoE layers and 0 of 1 routers",
        "leaves 1 of 1 MoE layers as they were",
    ),
]  # fmt: skip


@pytest.mark.every
@pytest.mark.parametrize(("family", "counts", "left"), FAMILIES)
@torch.inference_mode()
def test_families(family: str, counts: str, left: str, told: Told) -> None:
    if family not in families.discover():
        pytest.skip(f"this transformers has no {family}")
    tiny = families.build(family)
    name, inputs = type(tiny.model).__name__, {**tiny.inputs, "use_cache": False}
    moe_ops.compile(tiny.model)(**inputs)
    others = ("generate of", f"{name} is compiled as a whole")
    lines = [(level, text) for level, text in told() if not text.startswith(others)]
    assert lines[0][1].startswith(f"{name}: {counts} run on moe_ops")
    assert [level for level, _ in lines[1:]] == ["WARNING"] * bool(left)
    assert all(left in text for _, text in lines[1:])
    explained = " ".join(str(moe_ops.explain(tiny.model, inputs)).split())
    assert lines[0][1] in explained, "explain has the same words"


@pytest.mark.every
@pytest.mark.slow
@torch.inference_mode()
def test_generate_tells_of_the_layers_that_share_a_graph(told: Told) -> None:
    tiny = families.build("qwen3_moe")
    fast = moe_ops.compile(tiny.model)
    for _ in range(2):
        fast.generate(tiny.inputs["input_ids"], max_new_tokens=3, do_sample=False)
    (text,) = (text for _, text in told() if not text.startswith("generate"))
    assert (
        text == f"Qwen3MoeForCausalLM: 2 of 2 MoE layers and 2 of 2 routers run on moe_ops; {CPU}"
    )


# From here on in processes of their own, with Inductor and its caches. Ops alone are called, so no
# C++ is compiled.

PROGRAM = """
import logging, sys
import torch
import moe_ops
from torch import nn
from torch._dynamo.utils import counters

logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stdout)
logging.getLogger("moe_ops").setLevel(logging.INFO)


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.w13, self.w2 = (nn.Parameter(torch.randn(s)) for s in ((4, 16, 16), (4, 16, 8)))

    def forward(self, x, logits):
        return moe_ops.moe(x, logits, self.w13, self.w2, 2)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 3, 16))

    def forward(self, x, logits):
        return torch.bmm(x.expand(4, *x.shape), self.w.mT)


for kind in (Moe, Experts):
    model = nn.ModuleDict({"block": kind()})
    model.forward = lambda x, logits: model["block"](x, logits)
    with torch.no_grad():
        moe_ops.compile(kind())(torch.randn(3, 16), torch.randn(3, 4))
        plain = torch.compile(kind(), options=moe_ops.inductor_options())
        plain(torch.randn(5, 16), torch.randn(5, 4))
print(counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.every
@pytest.mark.slow
def test_a_warm_start_says_the_same(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    env.pop("TORCHINDUCTOR_FORCE_DISABLE_CACHES", None)
    env["TORCHINDUCTOR_FX_GRAPH_CACHE_DEFAULT"] = "1"
    said, missed = [], []
    (tmp_path / "program.py").write_text(PROGRAM)
    for _ in range(2):
        program = [sys.executable, str(tmp_path / "program.py")]
        done = subprocess.run(program, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        *lines, misses = done.stdout.splitlines()
        said.append([line for line in lines if "MoE" in line])
        missed.append(int(misses))
    assert missed[0] and not missed[1]
    assert said[0] == said[1]
    assert [line.split(";")[0] for line in said[0] if line.startswith("INFO")] == [
        "INFO Moe: 1 of 1 MoE layers and 1 of 1 routers run on moe_ops",
        "INFO Moe: 1 of 1 MoE layers and 1 of 1 routers run on moe_ops",
        "INFO Experts: 0 of 1 MoE layers and 0 of 1 routers run on moe_ops",
        "INFO Experts: 0 of 1 MoE layers and 0 of 1 routers run on moe_ops",
    ]
    assert sum(line.startswith("WARNING Experts: moe_ops leaves 1 of 1") for line in said[0]) == 2

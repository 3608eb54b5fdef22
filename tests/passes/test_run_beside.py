"""`run_beside`: a shared expert that is added to routed ones is begun behind its tokens and awaited
before the sum, where a second stream pays; and nothing else is."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

import moe_ops
from moe_ops import experts, streams
from moe_ops.passes.pick_backend import pick_backend
from moe_ops.testing import BF16, F32, Tol, assert_close
from tests.absent_gpu import absent_gpu
from tests.hf import real
from tests.passes.planned import Hook
from tests.passes.post_grad import Compiled, text

pytestmark = pytest.mark.slow  # compiles many graphs
E, K, D, I, S = 4, 2, 32, 16, 24  # noqa: E741
ROUNDED = Tol(2e-2, "the activation is rounded to 8 bits of mantissa, or not")
pass_file = importlib.import_module("moe_ops.passes.run_beside")
run_beside = pass_file.run_beside


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no second stream; there the ops run in order, in the same graph."""
    monkeypatch.setattr(pass_file, "has_streams", lambda device: True)


@dataclass
class Change:
    """How a layer is another than the usual one."""

    act: Callable[[Tensor], Tensor] = F.silu
    merged: bool = False  # gate and up in one weight
    bias: bool = False
    gate: Callable[[Tensor], Tensor] | None = None
    after: Callable[[Tensor, Tensor], Any] = field(default=lambda y, x: y)
    also: bool = False  # what the shared expert returns is returned, too
    shared: Callable[[Block, Tensor], Tensor] | None = None


class Block(nn.Module):
    """Routed experts and a shared one, as models write them."""

    def __init__(self, change: Change, dtype: torch.dtype = BF16, device: str = "cpu") -> None:
        super().__init__()
        self.change = change
        made: Any = {"dtype": dtype, "device": device}
        self.w13 = nn.Parameter(torch.randn(E, 2 * I, D, **made) / 8)
        self.w2 = nn.Parameter(torch.randn(E, D, I, **made) / 8)
        widths = (2 * S,) if change.merged else (S, S)
        self.first = nn.ModuleList(nn.Linear(D, w, bias=change.bias, **made) for w in widths)
        self.down, self.score = (nn.Linear(*n, bias=False, **made) for n in ((S, D), (D, 1)))
        self.requires_grad_(False)

    def expert(self, x: Tensor) -> Tensor:
        ys = [w(x) for w in self.first]
        gate, up = ys[0].chunk(2, -1) if self.change.merged else ys
        return self.down(self.change.act(gate) * up)

    def forward(self, x: Tensor, w: Tensor, ids: Tensor) -> Any:
        flat = x.reshape(-1, D)
        routed = experts(flat, w, ids, self.w13, self.w2).view(x.shape)
        y = (self.change.shared or Block.expert)(self, x)
        if self.change.gate is not None:
            y = self.change.gate(self.score(x)) * y
        out = self.change.after(routed + y, x)
        return (out, y.relu()) if self.change.also else out


def given(T: int = 6, dtype: torch.dtype = BF16, axes: tuple[int, ...] = (2,)) -> list[Tensor]:
    x = torch.randn(*axes, T // (axes[0] if axes else 1), D).to(dtype)
    return [x, torch.rand(T, K), torch.rand(T, E).argsort(1)[:, :K]]


def rewritten(
    change: Change,
    dtype: torch.dtype = BF16,
    dynamic: bool = False,
    beside: bool | None = True,
    T: int = 6,
) -> tuple[Hook, Any, fx.Graph, Any]:
    """The hook with what it said, the result of the graph, the graph, and what is wanted."""
    hook, block, args = (
        Hook(pick_backend, run_beside, beside=beside),
        Block(change, dtype),
        given(T),
    )
    args[0] = args[0].to(dtype)
    if dynamic:
        torch._dynamo.maybe_mark_dynamic(args[0], 1)
        for t in args[1:]:
            torch._dynamo.maybe_mark_dynamic(t, 0)
    compiled = Compiled(block, hook)
    got = compiled(*args)
    (graph,) = compiled.graphs
    graph.eliminate_dead_code()
    return hook, got, graph, block(*args)


def begun(graph: fx.Graph) -> list[str]:
    """The ops of ours, in order."""
    names = [str(n.target) for n in graph.nodes if getattr(n.target, "namespace", "") == "moe_ops"]
    return [name.split(".")[1] for name in names]


@pytest.mark.usefixtures("asked")
def test_golden() -> None:
    hook, _, graph, _ = rewritten(Change(gate=torch.sigmoid, after=lambda y, x: (x + y).relu()))
    assert hook.counts == [1, 1]
    assert_expected_inline(
        text(graph),
        """\
arg0_1: bfloat16[2, 3, 32]
arg1_1: bfloat16[4, 32, 32]
arg2_1: bfloat16[4, 32, 16]
arg3_1: float32[6, 2]
arg4_1: int64[6, 2]
arg5_1: bfloat16[24, 32]
arg6_1: bfloat16[24, 32]
arg7_1: bfloat16[32, 24]
arg8_1: bfloat16[1, 32]
begin_shared_default = moe_ops.begin_shared(arg0_1, [arg5_1, arg6_1], arg7_1, arg8_1, silu)  # bfloat16[2, 3, 32]
view = aten.reshape(arg0_1, [-1, 32])  # bfloat16[6, 32]
experts_planned = moe_ops.experts.planned(view, arg3_1, arg4_1, arg1_1, arg2_1, plan=cpu)  # bfloat16[6, 32]
view_1 = aten.reshape(experts_planned, [2, 3, 32])  # bfloat16[2, 3, 32]
await_shared_default = moe_ops.await_shared(begin_shared_default, arg0_1, experts_planned)  # None
add_1 = aten.add.Tensor(view_1, begin_shared_default)  # bfloat16[2, 3, 32]
add_2 = aten.add.Tensor(arg0_1, add_1)  # bfloat16[2, 3, 32]
relu = aten.relu(add_2)  # bfloat16[2, 3, 32]
return [relu]""",  # noqa: E501
    )


SHAPES = {
    "two weights": Change(),
    "one weight": Change(merged=True),
    "gelu": Change(act=F.gelu),
    "gelu_tanh": Change(act=lambda x: F.gelu(x, approximate="tanh")),
    "gated": Change(gate=torch.sigmoid),
    "a residual follows": Change(after=lambda y, x: x + y),
    "a norm follows": Change(gate=torch.sigmoid, after=lambda y, x: F.rms_norm(y + x, (D,))),
}


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("change", SHAPES.values(), ids=SHAPES)
def test_numbers_stay(change: Change, dtype: torch.dtype) -> None:
    hook, got, graph, want = rewritten(change, dtype)
    assert hook.counts == [1, 1], hook.context.refusals
    assert begun(graph) == ["begin_shared", "experts", "await_shared"]
    assert_close(got, want, ROUNDED if dtype is BF16 else Tol(1e-5, "sums in another order"))


@pytest.mark.usefixtures("asked")
def test_any_number_of_tokens() -> None:
    hook, got, graph, want = rewritten(Change(gate=torch.sigmoid), dynamic=True)
    assert begun(graph) == ["begin_shared", "experts", "await_shared"] and hook.guards == 0
    assert_close(got, want, ROUNDED)


def _another_input(block: Block, x: Tensor) -> Tensor:
    return block.down(F.silu(block.first[0](x)) * block.first[1](x.flip(0)))


def _weight_is_computed(block: Block, x: Tensor) -> Tensor:
    h = F.silu(block.first[0](x)) * block.first[1](x)
    return F.linear(h, block.down.weight * 2) * torch.sigmoid(block.score(x))


NEAR_MISSES: dict[str, tuple[Change, str]] = {
    "biases": (Change(bias=True), "its linear layers have biases"),
    "another activation": (Change(act=torch.tanh), "the activation between its products is not"),
    "another gate": (Change(gate=torch.tanh), "its gate is not a sigmoid of a product"),
    "scaled": (Change(shared=lambda b, x: b.expert(x) * 0.5), "its result is scaled by a number"),
    "two inputs": (Change(shared=_another_input), "its products are of several inputs"),
    "read by others": (Change(also=True), "is also used by relu"),
    "a factor": (Change(shared=lambda b, x: b.expert(x) * x), "is multiplied with is no gate"),
    "a weight that is computed": (
        Change(shared=_weight_is_computed),
        "the weight mul_1 is no parameter",
    ),
    "more products": (
        Change(shared=lambda b, x: b.down(F.silu(b.first[0](x)) * b.first[1](x) * b.score(x))),
        "it is made of 3 products",
    ),
}


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(("change", "reason"), NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_what_is_no_shared_expert_is_left_with_its_reason(change: Change, reason: str) -> None:
    hook, got, graph, want = rewritten(change)
    assert hook.counts == [1, 0] and begun(graph) == ["experts"]
    if change.also:
        got, want = got[0], want[0]
    said = [note.text for note in hook.context.refusals if note.rule == "run_beside"]
    assert said and re.search(reason, said[0]), said
    assert_close(got, want, ROUNDED)


@pytest.mark.usefixtures("asked")
def test_a_gate_of_columns_is_none_of_tokens() -> None:
    """There are as many tokens as columns, so that either may be meant."""

    def shared(block: Block, x: Tensor) -> Tensor:
        return torch.sigmoid(block.score(x)).reshape(-1) * block.expert(x)

    hook, got, graph, want = rewritten(Change(shared=shared), T=D)
    assert begun(graph) == ["experts"]
    assert "is multiplied with is no gate" in hook.context.refusals[0].text
    assert_close(got, want, ROUNDED)


@pytest.mark.usefixtures("asked")
def test_nothing_for_which_the_host_waits_is_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = monkeypatch.setattr
    waits(pass_file, "waiting", lambda node: "experts" in str(node.target) or None)
    hook, _, graph, _ = rewritten(Change())
    assert begun(graph) == ["experts"]
    text = "the host waits for the device in experts_planned, which is beside it"
    assert hook.context.refusals[0].text == text


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("shared", [lambda b, x: x, lambda b, x: x.relu() * 2], ids=["x", "f(x)"])
def test_a_residual_is_passed_over(shared: Any) -> None:
    hook, _, graph, _ = rewritten(Change(shared=shared))
    assert hook.counts == [1, 0] and begun(graph) == ["experts"]
    assert not [note for note in hook.context.refusals if note.rule == "run_beside"]


def test_a_cpu_has_no_second_stream() -> None:
    hook, _, graph, _ = rewritten(Change())
    note, *_ = [note for note in hook.context.refusals if note.rule == "run_beside"]
    assert note.text == "a cpu has no second stream" and begun(graph) == ["experts"]


@pytest.mark.parametrize("beside", [False, None])
def test_what_nobody_wants_is_not_told(beside: bool | None) -> None:
    hook, _, _, _ = rewritten(Change(), beside=beside)
    assert not [note for note in hook.context.refusals if note.rule == "run_beside"]


def test_explain_shows_it_or_why_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    block, args = Block(Change(gate=torch.sigmoid), F32), given(dtype=F32)
    refused = moe_ops.explain(block, args, beside=True)
    (left,) = [left for left in refused.left_alone if left.rule == "run_beside"]
    assert left.reason == "a cpu has no second stream" and refused.regions[0].shared == ""
    monkeypatch.setattr(pass_file, "has_streams", lambda device: True)
    page = tmp_path / "page.html"
    done = moe_ops.explain(block, args, beside=True, html=str(page))
    assert done.regions[0].shared == "0.0 MiB on a second stream: it is asked for"
    assert f"shared       {done.regions[0].shared}" in str(done)
    assert done.regions[0].shared in page.read_text()


def test_by_default_a_graph_of_a_gpu_stays_in_order_and_says_why() -> None:
    with absent_gpu():
        options = moe_ops.inductor_options()
        block = Block(Change(), device="cuda")
        torch._dynamo.reset()
        torch.compile(block, options=options, dynamic=False)(*(t.to("cuda") for t in given(8)))
    (run,) = options["post_grad_custom_post_pass"].runs
    (note,) = [note for note in run.refusals if note.rule == "run_beside"]
    assert note.text == streams.SLOWER


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layers"),
    [("qwen2_moe", 1), pytest.param("deepseek_v3", 2, marks=pytest.mark.every)],  # one is dense
)
def test_code_for_a_gpu_holds_the_tokens_that_are_read(family: str, layers: int) -> None:
    """Both ops have one buffer, no view or copy of it: else its memory may be given away."""
    with absent_gpu() as codes:
        model = real.build(family, device="cuda", dtype=BF16, layers=layers)
        ids = torch.full((1, 3), real.FIRST_PLAIN_TOKEN, device="cuda")
        with torch.inference_mode():
            moe_ops.compile(model, beside=True)(input_ids=ids, use_cache=False)
    found = [re.findall(r"(begin|await)_shared.default\(([^\[\n]*)", code) for code in codes]
    pairs = [pair for pair in found if pair]
    assert pairs
    for (begin, tokens), (join, given) in pairs:
        assert (begin, join) == ("begin", "await")
        assert given.split(", ")[1] == tokens.split(",")[0]
    for code in codes:
        if "begin_shared" in code:
            places = [code.index(f"{op}.") for op in ("begin_shared", "experts", "await_shared")]
            assert places == sorted(places)

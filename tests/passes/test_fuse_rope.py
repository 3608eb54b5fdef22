"""`fuse_rope`: from projections to attention is one op, where it is what the op computes."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from moe_ops.decode_ops.one_query import one_query
from moe_ops.passes.fuse_rope import fuse_rope
from moe_ops.passes.rewriting.context import Context
from moe_ops.passes.rewriting.graph import arg, ops
from moe_ops.testing import BF16, F16, Tol, assert_close
from tests import decoding
from tests.chosen import in_turn
from tests.passes.post_grad import Compiled, text

pytestmark = pytest.mark.slow  # compiles many graphs
H, N, D, S = 4, 2, 16, 8
TOL = {BF16: Tol(2e-2, "roundings to 8 bits of mantissa"), F16: Tol(3e-3, "and to 11 bits")}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding.on_any_device(monkeypatch)


class Fuse:
    """The pass as a hook that keeps what it said."""

    def __init__(self) -> None:
        self.context, self.count = Context(), 0

    def __call__(self, graph: fx.Graph) -> None:
        self.count = fuse_rope(graph, self.context)
        if self.count:
            graph.eliminate_dead_code()
        assert fuse_rope(graph, Context()) == 0 or not self.count


def norm(x: Tensor, gain: Tensor) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return gain * wide.to(x.dtype)


def turn(x: Tensor, cos: Tensor, sin: Tensor, change: str) -> Tensor:
    """As transformers does it, unless there is a change."""
    first, second = x.chunk(2, -1) if change == "halves" else (x[..., : D // 2], x[..., D // 2 :])
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if change == "halves":
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    if change == "interleaved":
        first, second = x[..., ::2], x[..., 1::2]
        return x * cos + torch.stack([-second, first], -1).flatten(-2) * sin
    if change == "partial":
        part = x[..., :8]
        other = torch.cat([-part[..., 4:], part[..., :4]], -1)
        return torch.cat([part * cos[..., :8] + other * sin[..., :8], x[..., 8:]], -1)
    if change == "sign":
        return x * cos + torch.cat([second, -first], -1) * sin
    if change == "scaled":
        return (x * cos + torch.cat([-second, first], -1) * sin) * 2
    if change == "unswapped":
        first, second = second, first
    return x * cos + torch.cat([-second, first], -1) * sin


class Step:
    """What a layer does to projections of one token per sequence; `change` says what else."""

    def __init__(self, change: str = "", dtype: torch.dtype = BF16, rows: int = 1) -> None:
        self.change, self.rows = change, rows
        torch.manual_seed(0)
        heads = (H * D, N * D, N * D)
        self.projected = [torch.randn(rows, 1, n).to(dtype) for n in heads]
        angles = torch.randn(rows, 1, D // 2).repeat(1, 1, 1 if change == "halves" else 2)
        self.angles = angles.cos().to(dtype), angles.sin().to(dtype)
        gains = [torch.randn(D).to(dtype) for _ in range(2)]
        self.gains = [nn.Parameter(gain, requires_grad=False) for gain in gains]
        self.caches = [torch.randn(rows, N, S, D).to(dtype) for _ in range(2)]
        self.rest = torch.tensor(5), torch.ones(rows, S, dtype=torch.bool)

    def args(self) -> list[Tensor]:
        before, after = (*self.projected, *self.angles), (*self.caches, *self.rest)
        return [*(t.clone() for t in before), *self.gains, *(t.clone() for t in after)]

    def __call__(self, *args: Tensor) -> Any:
        q, k, v, cos, sin, q_gain, k_gain, keys, values, filled, mask = args
        if self.change != "inputs":
            q, k, v = (x + 1 for x in (q, k, v))
        q, k, v = (x.view(self.rows, 1, -1, D) for x in (q, k, v))
        if "normed" in self.change:
            q, k = norm(q, q_gain), norm(k, k_gain)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        q = turn(q, cos, sin, self.change)
        if self.change == "two angles":
            cos, sin = sin, cos
        k = k if self.change == "key as it is" else turn(k, cos, sin, self.change)
        slot = filled.view(1) - 1 if self.change == "slot" else filled.view(1)
        more = keys.sum() if self.change == "cache before" else None
        if self.change == "added":
            keys.index_add_(2, slot, k)
        else:
            keys.index_copy_(2, slot, k)
        values.index_copy_(2, slot + 1 if self.change == "slots" else slot, v)
        if self.change == "mask":
            mask = ~mask
        if self.change == "sinks":
            out = one_query(q.reshape(self.rows, H, D), keys, values, mask, 0.25, q_gain[:H])
        else:
            out = one_query(q.reshape(self.rows, H, D), keys, values, mask, 0.25)
        return out, keys.sum() if self.change == "cache after" else more


def fused(step: Step) -> tuple[Fuse, list[Tensor], Any, fx.Graph]:
    hook, args = Fuse(), step.args()
    compiled = Compiled(step, hook)
    got = compiled(*args)
    return hook, args, got, compiled.graphs[0]


def wrapped(graph: str) -> str:
    """Calls of many arguments on several lines."""
    return "\n".join("\n    ".join(textwrap.wrap(line, 90)) for line in graph.splitlines())


def test_golden() -> None:
    hook, _, _, graph = fused(Step("normed"))
    assert hook.count == 1
    assert_expected_inline(
        wrapped(text(graph)),
        """\
arg0_1: bfloat16[1, 1, 64]
arg1_1: bfloat16[1, 1, 32]
arg2_1: bfloat16[1, 1, 32]
arg3_1: bfloat16[16]
arg4_1: bfloat16[16]
arg5_1: bfloat16[1, 1, 16]
arg6_1: bfloat16[1, 1, 16]
arg7_1: int64[]
arg8_1: bfloat16[1, 2, 8, 16]
arg9_1: bfloat16[1, 2, 8, 16]
arg10_1: bool[1, 8]
add = aten.add.Tensor(arg0_1, 1)  # bfloat16[1, 1, 64]
view = aten.reshape(add, [1, 1, -1, 16])  # bfloat16[1, 1, 4, 16]
unsqueeze = aten.unsqueeze(arg5_1, 1)  # bfloat16[1, 1, 1, 16]
unsqueeze_1 = aten.unsqueeze(arg6_1, 1)  # bfloat16[1, 1, 1, 16]
view_3 = aten.reshape(arg7_1, [1])  # int64[1]
add_1 = aten.add.Tensor(arg1_1, 1)  # bfloat16[1, 1, 32]
view_1 = aten.reshape(add_1, [1, 1, -1, 16])  # bfloat16[1, 1, 2, 16]
add_2 = aten.add.Tensor(arg2_1, 1)  # bfloat16[1, 1, 32]
view_2 = aten.reshape(add_2, [1, 1, -1, 16])  # bfloat16[1, 1, 2, 16]
reshape_default = aten.reshape(view, [1, 4, 16])  # bfloat16[1, 4, 16]
reshape_default_1 = aten.reshape(view_1, [1, 2, 16])  # bfloat16[1, 2, 16]
reshape_default_2 = aten.reshape(view_2, [1, 2, 16])  # bfloat16[1, 2, 16]
reshape_default_3 = aten.reshape(unsqueeze, [-1, 16])  # bfloat16[1, 16]
reshape_default_4 = aten.reshape(unsqueeze_1, [-1, 16])  # bfloat16[1, 16]
reshape_default_5 = aten.reshape(view_3, [1])  # int64[1]
rope_attention_planned = moe_ops.rope_attention.planned(reshape_default,
    reshape_default_1, reshape_default_2, reshape_default_3, reshape_default_4,
    reshape_default_5, arg8_1, arg9_1, arg10_1, 0.25, plan=triton, q_gain_D=arg3_1,
    k_gain_D=arg4_1, eps=1e-06)  # bfloat16[1, 4, 16]
return [rope_attention_planned]""",
    )


@in_turn(
    pytest.mark.parametrize("rows", [1, 3]),
    pytest.mark.parametrize("dtype", [BF16, F16], ids=str),
    pytest.mark.parametrize("change", ["", "normed", "halves", "sinks"]),
)
def test_numbers_stay(change: str, dtype: torch.dtype, rows: int) -> None:
    step = Step(change, dtype, rows)
    wide = [t.float() if t.is_floating_point() else t for t in step.args()]
    want = step(*wide)
    hook, args, got, _ = fused(step)
    assert hook.count == 1, hook.context.refusals
    assert_close(got[0].float(), want[0].float(), TOL[dtype], "attention")
    for cache, exact in zip(args[7:9], wide[7:9], strict=True):
        assert_close(cache.float(), exact.float(), TOL[dtype], "cache")


NEAR_MISSES = {
    "interleaved": "",
    "partial": "",
    "sign": "",
    "two angles": "q and k have two positions",
    "unswapped": "they are turned in another way",
    "scaled": "",
    "key as it is": "",
    "added": "",
    "slots": "the key and the value go into two slots",
    "mask": "the mask is no input",
    "slot": "the slot is no input",
    "inputs": "queries, keys and values are inputs, so nothing is launched before",
    "cache before": "something else reads the cache as it was",
    "cache after": "something else reads the cache",
}


@pytest.mark.parametrize(("change", "reason"), NEAR_MISSES.items(), ids=NEAR_MISSES)
def test_near_misses(change: str, reason: str) -> None:
    hook, _, _, _ = fused(Step(change))
    assert hook.count == 0
    (note,) = hook.context.refusals
    assert reason in note.text


def test_a_gain_that_is_no_parameter_stays_outside() -> None:
    """Something before it in the step may write it, and the kernel reads it early."""
    step = Step("normed")
    step.gains = [gain.data for gain in step.gains]
    hook, _, got, graph = fused(step)
    assert hook.count == 1
    (call,) = graph.find_nodes(op="call_function", target=ops.rope_attention.planned)
    assert arg(call, "q_gain_D") is None and arg(call, "k_gain_D") is None
    want = step(*[t.float() if t.is_floating_point() else t for t in step.args()])
    assert_close(got[0].float(), want[0].float(), TOL[BF16])


def test_compiled_code_changes_the_caches_where_they_are() -> None:
    step = Step("normed")
    plain, ours = step.args(), step.args()
    places = [t.data_ptr() for t in ours[7:9]]
    hook = Fuse()
    with torch.no_grad(), config.patch(fx_graph_cache=False):
        torch._dynamo.reset()
        want = torch.compile(step, fullgraph=True)(*plain)
        torch._dynamo.reset()
        with config.patch(post_grad_custom_post_pass=hook):
            compiled = torch.compile(step, fullgraph=True)
            got, (code,) = run_and_get_code(compiled, *ours)
    assert hook.count == 1 and code.count("moe_ops.rope_attention.planned(") == 1
    body = code[code.index("def call") :]
    assert "copy" not in body and body.count("= empty_strided_cpu(") == 3  # the projections
    assert places == [t.data_ptr() for t in ours[7:9]]
    assert_close(got[0].float(), want[0].float(), TOL[BF16])
    for a, b in zip(plain[7:9], ours[7:9], strict=True):
        assert_close(a.float(), b.float(), TOL[BF16])

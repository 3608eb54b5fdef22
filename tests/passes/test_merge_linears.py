"""`merge_linears`: products of few rows with parameters become one op, and nothing else does."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from torch._decomp.decompositions import pw_cast_for_opmath
from torch._inductor import decomposition
from torch.nn.functional import linear

import moe_ops
from moe_ops.passes.merge_linears import merge_linears
from moe_ops.passes.rewriting.context import Context, Options
from moe_ops.passes.rewriting.graph import FUNCTIONAL
from moe_ops.testing import BF16, F16, F32, Tol, assert_close
from tests import decoding
from tests.chosen import in_turn
from tests.hf import families
from tests.passes.post_grad import Compiled, text

pytestmark = pytest.mark.slow  # compiles many graphs
ROUNDED = Tol(1e-2, "roundings to 8 bits of mantissa, one more or one less")
pass_file = importlib.import_module("moe_ops.passes.merge_linears")


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding.on_any_device(monkeypatch)


class Merge:
    """The pass as a hook that keeps what it said."""

    def __init__(self, options: Options | None = None) -> None:
        self.context, self.count = Context(options=options or Options()), 0

    def __call__(self, graph: fx.Graph) -> None:
        self.count = merge_linears(graph, self.context)
        graph.eliminate_dead_code()
        assert merge_linears(graph, Context()) == 0 or not self.context.options.linears


class Attention(nn.Module):
    """Three layers of one input, and one of another."""

    def __init__(self, dtype: torch.dtype = BF16, bias: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, n, bias=bias) for n in (32, 24, 24))
        self.o = nn.Linear(24, 16, bias=bias)
        self.to(dtype).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.k(x).sigmoid(), self.v(x).tanh()
        return self.q(x), self.o(k * v)


def merged(
    model: Callable[..., Any], *args: Tensor, options: Options | None = None
) -> tuple[Merge, Any, fx.Graph]:
    hook = Merge(options)
    compiled = Compiled(model, hook)
    got = compiled(*args)
    return hook, got, compiled.graphs[0]


@pytest.fixture
def decomposed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products with one row become what Inductor makes of them for a GPU."""

    @pw_cast_for_opmath
    def product(x: Tensor, w: Tensor) -> Any:
        if x.shape[0] != 1:
            return NotImplemented
        return (x.unsqueeze(2) * w.unsqueeze(0)).sum(dim=1)

    monkeypatch.setitem(decomposition.decompositions, torch.ops.aten.mm.default, product)
    decomposition.fast_random_decomps.cache_clear()
    yield
    monkeypatch.undo()
    decomposition.fast_random_decomps.cache_clear()


def test_golden() -> None:
    hook, _, graph = merged(Attention(), torch.randn(2, 3, 16, dtype=BF16))
    assert hook.count == 2
    assert_expected_inline(
        text(graph),
        """\
arg0_1: bfloat16[24, 16]
arg1_1: bfloat16[2, 3, 16]
arg2_1: bfloat16[24, 16]
arg3_1: bfloat16[32, 16]
arg4_1: bfloat16[16, 24]
view_4 = aten.reshape(arg1_1, [6, 16])  # bfloat16[6, 16]
linears_planned = moe_ops.linears.planned(view_4, [arg3_1, arg0_1, arg2_1], [None, None, None], plan=triton)
getitem = getitem(linears_planned, 0)  # bfloat16[6, 32]
getitem_1 = getitem(linears_planned, 1)  # bfloat16[6, 24]
getitem_2 = getitem(linears_planned, 2)  # bfloat16[6, 24]
view_5 = aten.reshape(getitem, [2, 3, 32])  # bfloat16[2, 3, 32]
view_1 = aten.reshape(getitem_1, [2, 3, 24])  # bfloat16[2, 3, 24]
sigmoid = aten.sigmoid(view_1)  # bfloat16[2, 3, 24]
view_3 = aten.reshape(getitem_2, [2, 3, 24])  # bfloat16[2, 3, 24]
tanh = aten.tanh(view_3)  # bfloat16[2, 3, 24]
mul = aten.mul.Tensor(sigmoid, tanh)  # bfloat16[2, 3, 24]
view_6 = aten.reshape(mul, [6, 24])  # bfloat16[6, 24]
linears_planned_1 = moe_ops.linears.planned(view_6, [arg4_1], [None], plan=triton)
getitem_3 = getitem(linears_planned_1, 0)  # bfloat16[6, 16]
view_7 = aten.reshape(getitem_3, [2, 3, 16])  # bfloat16[2, 3, 16]
return [view_5, view_7]""",  # noqa: E501
    )


@pytest.mark.usefixtures("decomposed")
def test_golden_of_one_row() -> None:
    weight = nn.Parameter(torch.randn(24, 16, dtype=BF16), requires_grad=False)
    x = torch.randn(1, 16, dtype=BF16)
    hook, _, graph = merged(lambda x, w: linear(x, w).relu(), x, weight)
    assert hook.count == 1
    assert_expected_inline(
        text(graph),
        """\
arg0_1: bfloat16[1, 16]
arg1_1: bfloat16[24, 16]
linears_planned = moe_ops.linears.planned(arg0_1, [arg1_1], [None], plan=triton)
getitem = getitem(linears_planned, 0)  # bfloat16[1, 24]
relu = aten.relu(getitem)  # bfloat16[1, 24]
return [relu]""",
    )


@pytest.mark.usefixtures("decomposed")
def test_one_row_whose_rounding_inductor_drops() -> None:
    weight = nn.Parameter(torch.randn(24, 16, dtype=BF16), requires_grad=False)
    x = torch.randn(1, 16, dtype=BF16)
    hook, got, _ = merged(lambda x, w: linear(x, w).float().softmax(-1), x, weight)
    assert hook.count == 1
    assert_close(got, linear(x, weight).float().softmax(-1), ROUNDED)


@pytest.mark.usefixtures("decomposed")
def test_one_row_of_two_products_whose_rounding_inductor_drops() -> None:
    gate, up = (nn.Parameter(torch.randn(24, 16, dtype=BF16)).requires_grad_(False) for _ in "gu")
    x = torch.randn(1, 16, dtype=BF16)

    def model(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return linear(x, gate).float().sigmoid() * linear(x, up).float()

    hook, got, _ = merged(model, x, gate, up)
    assert hook.count == 1
    assert_close(got, model(x, gate, up), ROUNDED)


def test_a_product_of_a_product() -> None:
    model = nn.Sequential(nn.Linear(16, 24, bias=False), nn.Linear(24, 8)).bfloat16()
    x = torch.randn(4, 16, dtype=BF16)
    hook, got, _ = merged(model.requires_grad_(False), x)
    assert hook.count == 2
    assert_close(got.float(), model(x).float(), ROUNDED)


@in_turn(
    pytest.mark.parametrize("rows", [(1,), (1, 1), (1, 1, 1), (8, 1), (64,)], ids=str),
    pytest.mark.parametrize("bias", [False, True]),
    pytest.mark.parametrize("dtype", [BF16, F16], ids=str),
)
def test_numbers_stay(
    rows: tuple[int, ...], bias: bool, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    if rows in ((1,), (1, 1)):
        request.getfixturevalue("decomposed")
    model = Attention(dtype, bias)
    x = torch.randn(*rows, 16, dtype=dtype)
    hook, got, graph = merged(model, x)
    assert hook.count == 2, hook.context.refusals
    assert len(graph.find_nodes(op="call_function", target=torch.ops.moe_ops.linears.planned)) == 2
    for g, w in zip(got, model(x), strict=True):
        assert_close(g.float(), w.float(), ROUNDED)


def product_of(change: str) -> tuple[Any, tuple[Tensor, ...]]:
    """A product that is not for the op, and what it takes."""
    w = nn.Parameter(torch.randn(24, 16, dtype=F32 if change == "dtype" else BF16))
    w.requires_grad_(False)
    x = torch.randn(65 if change == "rows" else 4, 16, dtype=w.dtype)
    if change == "activation":
        return (lambda x, w: x @ w.T), (x, w.data)
    if change == "computed":
        return (lambda x, w: x @ (w * 2).T), (x, w)
    if change == "untransposed":
        return (lambda x, w: x @ w), (x, nn.Parameter(w.T.contiguous(), requires_grad=False))
    if change == "strides":
        return linear, (x, nn.Parameter(w.T.contiguous().T, requires_grad=False))
    if change == "scaled":
        bias = nn.Parameter(torch.randn(24, dtype=BF16), requires_grad=False)
        return (lambda x, w, b: torch.addmm(b, x, w.T, alpha=2)), (x, w, bias)
    if change == "full bias":
        bias = nn.Parameter(torch.randn(4, 24, dtype=BF16), requires_grad=False)
        return (lambda x, w, b: torch.addmm(b, x, w.T)), (x, w, bias)
    return linear, (x, w)


NEAR_MISSES = {
    "activation": "is no parameter",
    "computed": "is no parameter",
    "untransposed": "the weight is",
    "strides": "strides",
    "scaled": "it scales its operands",
    "full bias": "bias 0 is [4, 24], not [24]",
    "dtype": "the input is torch.float32",
    "rows": "",
}


@pytest.mark.parametrize(("change", "reason"), NEAR_MISSES.items(), ids=NEAR_MISSES)
def test_near_misses(change: str, reason: str) -> None:
    model, args = product_of(change)
    hook, _, _ = merged(model, *args)
    assert hook.count == 0
    assert all(reason in note.text for note in hook.context.refusals)
    assert len(hook.context.refusals) == (1 if reason else 0)


@pytest.mark.usefixtures("decomposed")
def test_products_in_float32_stay() -> None:
    """They are not rounded, other than those of narrow numbers, which Inductor makes look alike."""
    w = nn.Parameter(torch.randn(24, 16, dtype=BF16), requires_grad=False)
    x = torch.randn(1, 16, dtype=BF16)

    def wide(x: Tensor, w: Tensor) -> Tensor:
        return x.float().unsqueeze(2) * w.T.float().unsqueeze(0)

    for model in (
        lambda x, w: linear(x.float(), w.float()).softmax(-1),
        lambda x, w: x.float() @ w.T.float(),
        lambda x, w: wide(x, w).sum(1),
        lambda x, w: wide(x, w).sum(1).bfloat16(),
        lambda x, w: wide(x, w).sum(2).bfloat16(),
    ):
        hook, _, _ = merged(model, x, w)
        assert hook.count == 0


@pytest.mark.usefixtures("decomposed")
def test_a_router_takes_logits_as_they_are() -> None:
    weight = nn.Parameter(torch.randn(24, 16, dtype=BF16), requires_grad=False)
    dtypes = []

    def route(x: Tensor, w: Tensor) -> Any:
        return moe_ops.route(linear(x, w), 2)

    def look(graph: fx.Graph) -> None:
        """Let it read what Inductor makes of logits that are converted, and merge."""
        (node,) = graph.find_nodes(op="call_function", target=torch.ops.moe_ops.route.default)
        node.replace_input_with(node.args[0], node.args[0].args[0])
        assert merge_linears(graph, Context()) == 1
        graph.eliminate_dead_code()
        dtypes.extend((node.args[0].meta["val"].dtype, node.meta["eager_input_vals"][0][0].dtype))

    x = torch.randn(1, 16, dtype=BF16)
    weights, ids = Compiled(route, look)(x, weight)
    assert dtypes == [BF16, BF16]
    want, places = moe_ops.route(linear(x, weight), 2)
    assert torch.equal(ids, places)
    assert_close(weights, want, ROUNDED)


@pytest.mark.usefixtures("decomposed")
def test_a_router_that_writes_to_rings_does_too() -> None:
    weight = nn.Parameter(torch.randn(24, 16, dtype=BF16), requires_grad=False)
    dtypes = []

    def route(x: Tensor, w: Tensor, ids: Tensor, at: Tensor) -> Any:
        return moe_ops.route_recording(linear(x, w), 2, ids, at)

    def look(graph: fx.Graph) -> None:
        (node,) = graph.find_nodes(op="call_function", target=FUNCTIONAL)
        logits = node.kwargs["logits_TE"]
        node.replace_input_with(logits, logits.args[0])
        assert merge_linears(graph, Context()) == 1
        graph.eliminate_dead_code()
        logits, (_, seen) = node.kwargs["logits_TE"], node.meta["eager_input_vals"]
        dtypes.extend((logits.meta["val"].dtype, seen["logits_TE"].dtype))

    x, ring = torch.randn(1, 16, dtype=BF16), torch.full((4, 2), -1, dtype=torch.int16)
    weights, ids = Compiled(route, look)(x, weight, ring, torch.tensor([3]))
    assert dtypes == [BF16, BF16]
    want, places = moe_ops.route(linear(x, weight), 2)
    assert torch.equal(ids, places)
    assert torch.equal(ring[3:].int(), places)
    assert_close(weights, want, ROUNDED)


def test_it_can_be_switched_off_and_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 16, dtype=BF16)
    assert merged(Attention(), x, options=Options(linears=False))[0].count == 0
    monkeypatch.undo()
    assert merged(Attention(), x)[0].count == 0


@pytest.mark.every
def test_a_step_of_generate_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    insert = pass_file.insert
    monkeypatch.setattr(pass_file, "insert", lambda *args: calls.append(args[1]) or insert(*args))
    model = families.build("qwen3_moe").model.to(BF16)
    ids = torch.randint(16, 90, (1, 5))
    with torch._inductor.config.patch(fx_graph_cache=False):
        plain, ours = (
            moe_ops.compile(copy.deepcopy(model), linears=on).generate(
                ids, max_new_tokens=4, pad_token_id=0, eos_token_id=None
            )
            for on in (False, True)
        )
    assert calls.count(torch.ops.moe_ops.linears.planned) >= 2
    assert torch.equal(plain, ours)

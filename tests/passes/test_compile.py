"""`compile` and `inductor_options`: what they set, the twin, and one graph for all token counts."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.fx.experimental._config as shape_config
import transformers
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options

import moe_ops
from moe_ops.passes.inductor import sizes
from moe_ops.passes.inductor.compiled import Compiled, pipeline_of, token_dims
from moe_ops.passes.inductor.net import Net
from moe_ops.passes.inductor.pipeline import HOOK, Pipeline
from moe_ops.passes.rewriting.context import Options
from moe_ops.testing import Tol, assert_close
from tests.chosen import in_turn
from tests.hf import attention, families
from tests.moe_block import Block
from tests.recompiling import counted_anew, graphs

needs_the_flag = pytest.mark.skipif(
    not sizes.HAS_OBLIVIOUS, reason="this torch compiles a size of 1 apart"
)
TOL = Tol(1e-4, "float32 sums in another order through a whole model")


@pytest.fixture
def fresh() -> Iterator[None]:
    """No graph was compiled before."""
    with counted_anew():
        yield


def hook(graph: torch.fx.Graph) -> None:
    pass


def test_options_hold_the_pipeline_and_what_else_is_given() -> None:
    options = moe_ops.inductor_options(strict=True, extra={"max_autotune": True})
    assert options == {"max_autotune": True, HOOK: Pipeline(Options(strict=True))}
    assert copy.deepcopy(options)[HOOK] is options[HOOK]
    assert moe_ops.inductor_options()[HOOK] == Pipeline()
    extra: dict[str, object] = {}
    moe_ops.inductor_options(extra=extra)
    assert extra == {}


def test_an_unknown_option_is_refused_with_the_names() -> None:
    with pytest.raises(
        TypeError, match=r"unknown options: max_autotune; there are .*stop_after.*ex"
    ):
        moe_ops.inductor_options(max_autotune=True)
    with pytest.raises(ValueError, match="stop_after='x' is no pass"):
        moe_ops.inductor_options(stop_after="x")


def test_a_hook_that_is_set_is_kept_and_a_pipeline_replaced() -> None:
    with inductor_config.patch({HOOK: hook}):
        assert moe_ops.inductor_options()[HOOK].chained == (hook,)
    assert moe_ops.inductor_options(extra={HOOK: hook})[HOOK].chained == (hook,)
    for held in (Pipeline(chained=hook), [Pipeline(), hook]):
        with inductor_config.patch({HOOK: held}):
            ours = moe_ops.inductor_options(strict=True)[HOOK]
        assert ours == Pipeline(Options(strict=True), chained=hook)


@pytest.mark.parametrize("mode", [None, "default", "max-autotune-no-cudagraphs"])
def test_compile_hands_on_what_it_is_given(
    mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {}
    monkeypatch.setattr(torch, "compile", lambda call, **kwargs: given.update(kwargs) or call)
    extra = {"coordinate_descent_tuning": False}
    twin = moe_ops.compile(Block(), fullgraph=True, mode=mode, extra=extra, strict=True)
    options = {**(list_mode_options(mode) if mode else {}), **extra, HOOK: pipeline_of(twin)}
    assert given == {"fullgraph": True, "dynamic": None, "backend": Net(options)}
    assert pipeline_of(twin) == Pipeline(Options(strict=True))


def test_what_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model must be an .*Module, got builtin_function"):
        moe_ops.compile(torch.sigmoid)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="mode='fast' is unknown; choose one of default"):
        moe_ops.compile(Block(), mode="fast")
    with pytest.raises(ValueError, match="this Block is not compiled by moe_ops"):
        pipeline_of(Block())


def test_the_twin_shares_all_but_the_call() -> None:
    block = Block()
    twin = moe_ops.compile(block)
    assert type(twin) is Block
    assert block._compiled_call_impl is None
    assert list(twin.state_dict()) == list(block.state_dict())
    assert all(a is b for a, b in zip(twin.parameters(), block.parameters(), strict=True))
    block.to(torch.bfloat16)
    assert {p.dtype for p in twin.parameters()} == {torch.bfloat16}
    assert moe_ops.compile(twin)._compiled_call_impl is not twin._compiled_call_impl


@pytest.mark.parametrize(
    ("shape", "dtype", "dims"),
    [
        ((3,), torch.int64, [0]),
        ((2, 3), torch.int64, [0, 1]),
        ((2, 3), torch.bool, [0, 1]),
        ((2, 1, 3), torch.int64, []),
        ((3, 8), torch.bfloat16, [0]),
        ((2, 3, 8), torch.float32, [0, 1]),
        ((8,), torch.float32, []),
        ((), torch.float32, []),
        ((2, 1, 3, 3), torch.float32, []),
    ],
)
def test_which_dims_count_tokens(shape: tuple[int, ...], dtype: torch.dtype, dims: list) -> None:
    assert list(token_dims(torch.zeros(shape, dtype=dtype))) == dims


def never(*args: object, **kwargs: object) -> None:
    raise AssertionError("this was not to be called")


@pytest.mark.parametrize(
    ("dynamic", "ids", "decode"),
    [(None, ({0, 1}, set()), ({0}, {1})), (True, ({0, 1}, set()), ({0, 1}, set())), (False, 0, 0)],
)
def test_marks(dynamic: bool | None, ids: object, decode: object) -> None:
    def marked(x: Tensor) -> object:
        names = ("_dynamo_weak_dynamic_indices", "_dynamo_static_indices")
        found = tuple(getattr(x, name, set()) for name in names)
        return found if any(found) else 0

    def given(*args: object, **kwargs: object) -> object:
        return args, kwargs

    call = Compiled(never, given, Pipeline(), dynamic)
    weight = nn.Parameter(torch.zeros(3, 4))
    a, b, c = torch.zeros(2, 3).long(), torch.zeros(2, 1).long(), torch.zeros(2, 1, 8)
    assert call(a, weight, 3, more=b, embeds=c) == ((a, weight, 3), {"more": b, "embeds": c})
    assert [marked(x) for x in (a, b, c)] == [ids, decode, decode]
    assert marked(weight) == 0


@needs_the_flag
def test_the_flag_is_on_during_a_call_alone() -> None:
    def call(fail: bool) -> None:
        assert shape_config.backed_size_oblivious
        if fail:
            raise KeyError

    compiled = Compiled(never, call, Pipeline())
    assert not shape_config.backed_size_oblivious
    compiled(False)
    assert not shape_config.backed_size_oblivious
    with pytest.raises(KeyError):
        compiled(True)
    assert not shape_config.backed_size_oblivious
    with shape_config.patch(backed_size_oblivious=True):
        compiled(False)
        assert shape_config.backed_size_oblivious


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_without_tokens_the_model_runs_uncompiled(shape: tuple[int, ...]) -> None:
    call = Compiled(lambda x, more: (x, more), never, Pipeline())
    x, more = torch.zeros(2, 3).long(), torch.zeros(shape).long()
    assert call(x, more=more) == (x, more)
    with pytest.raises(AssertionError):  # each shape has its graph
        Compiled(lambda x: x, never, Pipeline(), dynamic=False)(more)
    with pytest.raises(AssertionError):  # the width of [T, D] counts no tokens
        Compiled(lambda x: x, never, Pipeline())(torch.zeros(3, 0))


@pytest.mark.slow
def test_importing_the_package_loads_no_compiler() -> None:
    program = """
import sys, torch
before = set(sys.modules)
import moe_ops
assert not [m for m in set(sys.modules) - before if m.startswith(("torch._inductor", "sympy"))]
assert "moe_ops.passes" not in sys.modules
assert callable(moe_ops.compile) and callable(moe_ops.inductor_options)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# From here on with Inductor.

COUNTS = (0, 1, 5, 64, 300)


class Rows(nn.Module):
    """Rows by their place, which torch 2.13 takes to exist: compiled for none, x[-1:] crashes."""

    def forward(self, x_TD: Tensor) -> Tensor:
        return torch.cat([x_TD[-1:], x_TD[1:], x_TD[-3:], x_TD[:-2]]) * 2


@pytest.mark.slow
@needs_the_flag
@in_turn(pytest.mark.parametrize("first", COUNTS), pytest.mark.parametrize("kind", [Block, Rows]))
@torch.inference_mode()
def test_one_graph_serves_all_token_counts_in_any_order(
    kind: type[nn.Module], first: int, fresh
) -> None:
    model = kind().eval()
    twin = moe_ops.compile(model, fullgraph=True)
    for i, T in enumerate((first, *COUNTS)):
        x_TD = torch.randn(T, 16)
        assert_close(twin(x_TD), model(x_TD), TOL, f"{T} tokens")
        assert graphs() == int(any((first, *COUNTS[:i])))


@pytest.mark.slow
@torch.inference_mode()
def test_without_the_flag_1_costs_a_graph(fresh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "HAS_OBLIVIOUS", False)
    block = Block().eval()
    twin = moe_ops.compile(block, fullgraph=True)
    for T, most in zip((64, 5, 300, 0, 1), (1, 1, 1, 1, 2), strict=True):
        x_TD = torch.randn(T, 16)
        assert_close(twin(x_TD), block(x_TD), TOL, f"{T} tokens")
        assert graphs() == most


@pytest.mark.slow
@torch.inference_mode()
def test_without_dynamic_sizes_each_shape_has_its_graph(fresh) -> None:
    twin = moe_ops.compile(Block().eval(), dynamic=False)
    for i, T in enumerate((5, 64, 5, 7)):
        twin(torch.randn(T, 16))
        assert graphs() == (1, 2, 2, 3)[i]


@pytest.mark.slow
@torch.inference_mode()
def test_inside_a_larger_model_its_compiler_decides(fresh) -> None:
    block = Block().eval()
    model = nn.Sequential(moe_ops.compile(block), nn.ReLU())
    x_TD = torch.randn(5, 16)
    got = torch.compile(model, backend="eager", fullgraph=True)(x_TD)
    assert_close(got, block(x_TD).relu(), TOL)
    assert graphs() == 1


@pytest.mark.slow
@torch.inference_mode()
def test_the_pipeline_sees_each_graph(fresh) -> None:
    twin = moe_ops.compile(Block().eval())
    with inductor_config.patch(fx_graph_cache=False):
        twin(torch.randn(5, 16))
    (run,) = pipeline_of(twin).runs
    assert run.skipped is None
    assert run.nodes_before > 3


# Their attention branches on a sequence of one token, which makes the second graph.
LENGTHS = (1, 2, 7, 33)


def tiny(attend: str | None = None) -> transformers.PreTrainedModel:
    model = families.build("qwen3_moe").model
    if attend is not None:
        model.set_attn_implementation(attend)
    return model


def ids(*shape: int) -> Tensor:
    return torch.randint(3, 90, shape)


@pytest.mark.every
@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("optimized", [False, True], ids=["stock", "optimized"])
@pytest.mark.parametrize("order", [LENGTHS[::-1], LENGTHS], ids=["longest_first", "shortest_first"])
def test_two_graphs_serve_all_lengths_of_a_stock_model(
    order: tuple[int, ...], optimized: bool, fresh
) -> None:
    model = tiny()
    del model.model.layers[1:]  # which are as the first
    want = {S: (x := ids(1, S), model(input_ids=x, use_cache=False).logits) for S in LENGTHS}
    if optimized:
        moe_ops.optimize(model)
    twin = moe_ops.compile(model, fullgraph=True)
    assert isinstance(twin, transformers.Qwen3MoeForCausalLM)
    assert twin.config is model.config
    for S in (*order, *order):
        x, logits = want[S]
        got = twin(input_ids=x.clone(), use_cache=False).logits
        assert_close(got, logits, TOL, f"{S} tokens")
    assert graphs() == 2


@pytest.mark.every
@pytest.mark.slow
@needs_the_flag
@torch.inference_mode()
def test_dynamic_shares_the_graph_of_one_token_too(fresh) -> None:
    model = tiny(attention.register())
    twin = moe_ops.compile(model, fullgraph=True, dynamic=True)
    for S in (*LENGTHS, *LENGTHS):
        x = ids(1, S)
        want = model(input_ids=x.clone(), use_cache=False).logits
        assert_close(twin(input_ids=x, use_cache=False).logits, want, TOL, f"{S} tokens")
        assert graphs() == 1


@pytest.mark.slow
@pytest.mark.every  # tests/generation compiles once for all lengths
def test_generate_runs_compiled_code(fresh) -> None:
    model = tiny()
    twin = moe_ops.compile(model)
    counts = []
    for S, new in ((7, 6), (5, 9)):
        prompt = ids(1, S)
        asked = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        asked["attention_mask"] = torch.ones_like(prompt)
        want = model.generate(prompt, **asked)
        assert graphs() == (counts[-1] if counts else 0)
        assert torch.equal(twin.generate(prompt, **asked), want)
        counts.append(graphs())
    # Of prompts and steps: a layer, the last norm, the rotary embedding; and the masks of a step.
    assert counts == [7, 7]


@pytest.mark.slow
@torch.inference_mode()
def test_options_serve_torch_compile(fresh) -> None:
    block = Block().eval()
    options = moe_ops.inductor_options()
    x_TD = torch.randn(5, 16)
    with inductor_config.patch(fx_graph_cache=False):
        assert_close(torch.compile(block, options=options)(x_TD), block(x_TD), TOL)
    assert len(options[HOOK].runs) == 1


@pytest.mark.slow
def test_a_graph_without_hooks_is_not_that_of_a_model_with_one(fresh: None) -> None:
    """Dynamo does not look at hooks where it looks for a graph that is there."""
    block, x = Block().eval(), torch.randn(5, 16)

    def distance() -> float:
        with torch.inference_mode():
            return float((moe_ops.compile(block)(x) - block(x)).abs().max())

    assert distance() < 1e-4
    handle = block.gate.register_forward_hook(lambda module, args, out: -out)
    assert distance() < 1e-4
    handle.remove()
    made = graphs()
    assert distance() < 1e-4 and graphs() == made

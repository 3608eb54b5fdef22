"""Linear layers of transformers call our functions where a compiler reads them, and only there."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import logging
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from transformers import DynamicCache

import moe_ops
from moe_ops import compiler
from moe_ops.backends.triton_decode import supports_convolution, supports_state
from moe_ops.generation import linear_functions
from moe_ops.generation.linear_layers import WithOurFunctions, functions_of, give_ours, in_place_of
from moe_ops.registry.spec import DECODE_OPS
from moe_ops.testing import TOL, Tol, assert_close
from moe_ops.twin import Twin
from tests.chosen import those_of
from tests.hf import families
from tests.recompiling import Traced

NEAR = Tol(1e-5, "float32 sums in another order")
# What linear layers call, and the ops in its place.
RULE = {"delta_rule", "delta_rule_step"}
SPACE = {"state_space_scan", "state_space_step"}
FAMILIES = {
    "qwen3_next": RULE,
    "qwen3_5_moe": RULE,
    "kimi_linear": RULE,
    "nemotron_h": SPACE,
    "granitemoehybrid": SPACE,
    "lfm2_moe": set[str](),
    "bailing_hybrid": RULE,
    "glm5_next": RULE,
    "lara_mini": RULE,
    "qwen4_exp": RULE,
}
FIRST = ("qwen3_next", "nemotron_h", "lfm2_moe")
each_family = pytest.mark.parametrize("family", those_of(FIRST, FAMILIES))
LENGTHS = (5, 63, 64, 65, 130)


def twins(family: str) -> tuple[nn.Module, nn.Module]:
    """A linear layer, and that of a twin which calls our functions."""
    model = families.build(family).model
    twin = Twin(model).module
    give_ours(twin, model)
    path = next(n for n, m in twin.named_modules() if isinstance(m, WithOurFunctions))
    return model.get_submodule(path), twin.get_submodule(path)


def width(layer: Any) -> int:
    return next(m.in_features for m in layer.modules() if isinstance(m, nn.Linear))


def cache_of(family: str) -> DynamicCache:
    return DynamicCache(config=families.build(family).model.config.get_text_config())


def states(cache: Any, layer: Any) -> list[Tensor]:
    held = cache.layers[layer.layer_idx]
    found = (*held.conv_states.values(), *held.recurrent_states.values())
    return [t for t in found if t is not None]


class Graphs:
    """A backend that runs graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.seen: list[fx.GraphModule] = []

    def __call__(self, graph: fx.GraphModule, inputs: Any) -> Any:
        self.seen.append(graph)
        return graph

    def calls(self) -> list[tuple[str, tuple[Any, ...]]]:
        """The calls of our ops, with fake tensors."""
        nodes = [n for g in self.seen for n in g.graph.nodes if "moe_ops." in str(n.target)]
        given = (fx.node.map_arg(n.args, lambda x: x.meta["example_value"]) for n in nodes)
        return [(str(n.target).split(".")[1], args) for n, args in zip(nodes, given, strict=True)]

    def ops(self) -> set[str]:
        return {name for name, _ in self.calls()}


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(layer: nn.Module, graphs: Graphs) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return layer(*args)

    return torch.compile(call, backend=graphs, dynamic=False)


@each_family
@torch.no_grad()
def test_a_prompt_and_steps_are_those_of_the_layer(family: str) -> None:
    stock, ours = twins(family)
    theirs, own, graphs = cache_of(family), cache_of(family), Graphs()
    call = compiled(ours, graphs)
    for T in (70, 1, 1, 1):
        x = torch.randn(3, T, width(stock))
        mask = torch.ones(3, T, dtype=torch.bool)
        if T > 1:
            mask[0, :20] = False
        given = (mask,) if T > 1 else ()
        assert_close(call(x, own, *given), stock(x, theirs, *given), NEAR, f"{T} tokens")
        for a, b in zip(states(own, ours), states(theirs, stock), strict=True):
            assert_close(a, b, NEAR, "state")
    assert graphs.ops() == FAMILIES[family]


@each_family
@torch.no_grad()
def test_one_graph_serves_all_lengths(family: str) -> None:
    stock, ours = twins(family)
    graphs = Graphs()
    call = compiled(ours, graphs)
    for T in LENGTHS:
        x = torch.randn(2, T, width(stock))
        torch._dynamo.mark_dynamic(x, 1)
        assert_close(call(x, cache_of(family)), stock(x, cache_of(family)), NEAR, f"{T} tokens")
    assert len(graphs.seen) == 1


@each_family
@torch.no_grad()
def test_kernels_take_what_layers_give(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where the convolution of a step is an op, too."""
    monkeypatch.setattr(linear_functions, "has_kernels", lambda x: True)
    stock, ours = twins(family)
    theirs, own, graphs = cache_of(family), cache_of(family), Graphs()
    call = compiled(ours, graphs)
    for T in (9, 1, 1):
        x = torch.randn(2, T, width(stock))
        if T > 1:
            torch._dynamo.mark_dynamic(x, 1)
        assert_close(call(x, own), stock(x, theirs), NEAR, f"{T} tokens")
        for a, b in zip(states(own, ours), states(theirs, stock), strict=True):
            assert_close(a, b, NEAR, "state")
    assert graphs.ops() == FAMILIES[family] | {"convolution_step"}
    for name, args in graphs.calls():
        supports = supports_convolution if name == "convolution_step" else supports_state
        assert supports(DECODE_OPS[name].call(*args)) is None, name


@torch.no_grad()
def test_a_prompt_that_goes_on() -> None:
    """A filled state takes more tokens."""
    for family in ("qwen3_next", "kimi_linear", "nemotron_h"):
        stock, ours = twins(family)
        theirs, own = cache_of(family), cache_of(family)
        call = compiled(ours, Graphs())
        for T in (9, 70):
            x = torch.randn(2, T, width(stock))
            assert_close(call(x, own), stock(x, theirs), NEAR, family)


@each_family
def test_uncompiled_and_for_gradients_a_layer_calls_its_own(family: str) -> None:
    stock, ours = twins(family)
    x, graphs = torch.randn(2, 9, width(stock)), Graphs()
    with torch.no_grad():
        assert torch.equal(ours(x, cache_of(family)), stock(x, cache_of(family)))
    torch.testing.assert_close(compiled(ours, graphs)(x, None), stock(x, None))
    assert graphs.ops() == set()


def test_every_function_is_ours_but_that_of_the_first_mamba(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "moe_ops")
    for family in (*FIRST, "jamba"):
        stock, _ = twins(family)
        kept = {n for n, f in functions_of(type(stock)).items() if in_place_of(f) is None}
        assert kept == ({"mamba_selective_state_update"} if family == "jamba" else set())
    name = "mamba_selective_state_update"
    said = f"JambaMambaMixer keeps its {name}: ours is not known to compute the same"
    assert [r.message for r in caplog.records] == [said]


def test_the_model_stays_as_it_was() -> None:
    model = families.build("qwen3_next").model
    kinds = [type(m) for m in model.modules()]
    file = inspect.getmodule(type(model))
    before = dict(vars(file))
    twin = Twin(model).module
    give_ours(twin, model)
    give_ours(twin, model)
    assert [type(m) for m in model.modules()] == kinds and vars(file) == before
    layer = next(m for m in twin.modules() if isinstance(m, WithOurFunctions))
    assert type(layer).__mro__.count(WithOurFunctions) == 1
    assert isinstance(layer, kinds[[k.__name__ for k in kinds].index(type(layer).__name__)])
    for made in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(made) in kinds
        x = torch.randn(1, 3, width(layer))
        assert torch.equal(made(x), layer(x))


def of_package(function: Any) -> Any:
    """As transformers has a function where a package is installed: around its own."""

    @functools.wraps(inspect.unwrap(function))
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a package's function was called")

    return wrapped


def of_hub(function: Any) -> Any:
    """As it has one where it can be replaced by a kernel of the hub: as a module."""
    function = of_package(function)

    class Func(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    signature = inspect.signature(function)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [own, *signature.parameters.values()]
    Func.forward.__signature__ = signature.replace(parameters=parameters)
    return Func()


def replaced_by_hub(function: Any) -> Any:
    made = of_hub(function)
    made.forward = lambda *args, **kwargs: function(*args, **kwargs)
    return made


@pytest.mark.parametrize("wrap", [of_package, of_hub, replaced_by_hub])
@torch.no_grad()
def test_functions_of_others(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of packages are replaced as well; a kernel that was chosen stays."""
    stock, _ = twins("qwen3_next")
    method = inspect.unwrap(type(stock).forward)
    x = torch.randn(2, 9, width(stock))
    want = stock(x, cache_of("qwen3_next"))
    functions, graphs = functions_of(type(stock)), Graphs()
    assert len(functions) == 4
    with monkeypatch.context() as patch:
        for name, function in functions.items():
            patch.setitem(method.__globals__, name, wrap(function))
        functions_of.cache_clear()
        try:
            model = families.build("qwen3_next").model
            twin = Twin(model).module
            give_ours(twin, model)
        finally:
            functions_of.cache_clear()
        path = next(n for n, m in model.named_modules() if type(m) is type(stock))
        layer = twin.get_submodule(path)
        got = compiled(layer, graphs)(x, cache_of("qwen3_next"))
    kept = wrap is replaced_by_hub
    assert graphs.ops() == (set() if kept else {"delta_rule"})
    assert isinstance(layer, WithOurFunctions) is not kept
    assert_close(got, want, NEAR, "out")


def with_signature_of(function: Any, made: Any) -> Any:
    made.__signature__ = inspect.signature(function)
    return made


def test_a_function_that_computes_something_else_stays() -> None:
    for family in ("qwen3_next", "kimi_linear", "nemotron_h"):
        stock, _ = twins(family)
        for name, function in functions_of(type(stock)).items():
            own = inspect.unwrap(function)

            def other(*args: Any, own: Any = own, **kwargs: Any) -> Any:
                out = own(*args, **kwargs)
                return (out[0] * 1.01, *out[1:]) if isinstance(out, tuple) else out * 1.01

            def lacking(*args: Any, **kwargs: Any) -> Any:
                raise KeyError("a number that it needs")

            assert in_place_of(function) is not None
            for made in (other, lacking):
                assert in_place_of(with_signature_of(own, made)) is None, name


def test_a_layer_that_comes_later_calls_ours() -> None:
    model = families.build("lfm2_moe").model
    twin = Twin(model, give_ours)
    path = next(n for n, m in twin.module.named_modules() if isinstance(m, WithOurFunctions))
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, copy.copy(model.get_submodule(path)))
    before = twin.module.get_submodule(path)
    twin.follow()
    after = twin.module.get_submodule(path)
    assert after is not before and isinstance(after, WithOurFunctions)
    assert not isinstance(model.get_submodule(path), WithOurFunctions)


def hidden(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that looks what it decorates up elsewhere."""
    table = [function]

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return table[0](*args)

    return wrapper


def test_a_method_that_cannot_be_copied_stays(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "moe_ops")
    stock, _ = twins("lfm2_moe")
    kind = type("Hidden", (type(stock),), {"forward": hidden(type(stock).forward)})
    model = nn.Sequential(object.__new__(kind))
    vars(model[0]).update(vars(stock))
    twin = Twin(model).module
    give_ours(twin, model)
    assert type(twin[0]) is kind
    said = (
        f"Hidden keeps its functions: {kind.forward.__qualname__} does not hold what it decorates"
    )
    assert said in [r.message for r in caplog.records]


@torch.no_grad()
@pytest.mark.parametrize("name", ["cu_seqlens", "seq_idx"])
def test_packed_sequences_are_a_packages_matter(name: str) -> None:
    stock, _ = twins("qwen3_next")
    function = inspect.unwrap(functions_of(type(stock))["torch_chunk_gated_delta_rule"])

    @functools.wraps(function)
    def packed(*args: Any, **kwargs: Any) -> str:
        return "of the package"

    made = in_place_of(packed)
    assert made is not None
    q, gates = torch.randn(1, 9, 2, 4), torch.rand(1, 9, 2)
    call = torch.compile(lambda **packed: made(q, q, q, -gates, gates, **packed), backend="eager")
    assert isinstance(call(**{name: None}), tuple)
    assert call(**{name: torch.tensor([0, 4, 9])}) == "of the package"
    assert made(q, q, q, -gates, gates) == "of the package"  # uncompiled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("qwen3_next", "eager"),
        pytest.param("qwen3_next", "inductor", marks=pytest.mark.every),
        pytest.param("qwen3_5_moe", "inductor", marks=pytest.mark.every),
    ],
)
def test_a_compiled_forward_of_any_length(
    family: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Dynamo reads it, and compiled."""
    if backend == "eager":
        monkeypatch.setattr(compiler, "Net", Traced)
    model = families.build(family).model
    twin = moe_ops.compile(model)
    with torch.inference_mode():
        twin(torch.randint(16, 90, (2, LENGTHS[0])))
        with torch._dynamo.config.patch(error_on_recompile=True):
            for B, T in itertools.product((2, 3, 1), LENGTHS):
                ids = torch.randint(16, 90, (B, T))
                got, want = twin(ids).logits, model(ids).logits
                assert_close(got, want, TOL["model", torch.float32], f"{B} x {T}")
                assert torch.equal(got.argmax(-1), want.argmax(-1))

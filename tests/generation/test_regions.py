"""Code that layers share."""

from __future__ import annotations

from collections import UserDict
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import moe_ops
from moe_ops.forward import regions
from moe_ops.forward.regions import ByKind
from moe_ops.passes.inductor.layer_region import LayerRegion
from tests.hf import families


class Layer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x)


def test_layers_of_unlike_parts_have_code_of_their_own() -> None:
    compiled: list[Any] = []

    def compile_region(region: Any) -> Any:
        compiled.append(region)
        return region

    call = ByKind("prompt", compile_region)
    layers = [Layer(nn.Tanh()), Layer(nn.ReLU()), Layer(nn.Tanh()), Layer(nn.ReLU())]
    x = torch.tensor([-1.0, 2.0])
    for layer in layers + layers:
        assert torch.equal(call(layer, x), layer.inner(x))
    names = [region.__code__.co_name for region in compiled]
    assert names == ["prompt_Layer_0", "prompt_Layer_1"]


def test_each_kind_is_named_and_counted_when_it_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = []

    def waiting_for(text: str) -> AbstractContextManager[None]:
        said.append(text)
        return nullcontext()

    monkeypatch.setattr(regions, "waiting_for", waiting_for)
    call = ByKind("prompt", lambda region: region)
    layers = [Layer(nn.Tanh()), Layer(nn.ReLU()), Layer(nn.Tanh()), nn.Tanh()]
    call.expect(layers)
    for x in (torch.zeros(2, 3, 4), torch.zeros(2, 1, 4)):
        for layer in layers + layers:
            call(layer, x)
    call(nn.ReLU(), x)
    assert said == [
        "compiling Layer (1 of 3 kinds)",
        "compiling Layer (2 of 3 kinds)",
        "compiling Tanh (3 of 3 kinds)",
        "compiling Layer for one token (1 of 3 kinds)",
        "compiling Layer for one token (2 of 3 kinds)",
        "compiling Tanh for one token (3 of 3 kinds)",
        "compiling ReLU for one token (4 of 4 kinds)",
    ]


@pytest.mark.parametrize(("B", "S", "compiles"), [(1, 1, 2), (1, 7, 1), (3, 1, 2), (2, 2, 1)])
def test_one_graph_for_all_prompts_but_those_of_one_token(B: int, S: int, compiles: int) -> None:
    torch._dynamo.reset()
    graphs = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    def scaled(module: Any, x: Any) -> Any:
        """Branches on the number of tokens, as attention functions do."""
        return module(x) * (x.shape[0] if x.shape[1] > 1 else -x.shape[0])

    region = LayerRegion(torch.compile(scaled, backend=keep))
    layer = Layer(nn.Tanh())
    for shape in ((4, 5, 8), (2, 9, 8), (B, S, 8)):
        x = torch.randn(shape)
        assert torch.equal(region(layer, x), scaled(layer, x))
    assert len(graphs) == compiles


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_one_sequence_first_has_angles_of_any_kind(dtype: torch.dtype) -> None:
    """Of one graph for all numbers of sequences and tokens."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def turned(module: nn.Module, x: Any, angles: Any) -> Any:
        return module(x[:, None] * angles[:, None])

    region = LayerRegion(torch.compile(turned, backend=keep))
    layer = Layer(nn.Identity())
    for B, S in ((1, 5), (3, 4), (2, 9)):
        x, angles = torch.randn(2, B, S, 8, dtype=dtype)
        assert torch.equal(region(layer, x, angles), turned(layer, x, angles))
    assert len(graphs) == 1


@pytest.mark.parametrize("streams", [1, 2, 5, 9])
def test_one_sequence_first_may_have_states_of_several_streams(streams: int) -> None:
    """Of one graph for all numbers of sequences and tokens, also where streams are as many."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def weighed(module: nn.Module, x: Any) -> Any:
        return module(x * x.sum(1, keepdim=True))

    region = LayerRegion(torch.compile(weighed, backend=keep))
    layer = Layer(nn.Identity())
    for B, S in ((1, 5), (3, 4), (2, 9), (1, 7)):
        x = torch.randn(B, S, streams, 8)
        assert torch.equal(region(layer, x), weighed(layer, x))
    assert len(graphs) == 1


class Head(nn.Linear):
    """A head that notes how its inputs lie, in a list that its copies share."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes, bias=False)
        self.seen: list[Any] = []

    def forward(self, x: Any) -> Any:
        self.seen.append((tuple(x.shape), x.is_contiguous()))
        return super().forward(x)


def test_the_head_gets_rows_that_follow_each_other() -> None:
    model = families.build("qwen3_moe").model
    plain = model.lm_head
    model.lm_head = Head(plain.in_features, plain.out_features).eval()
    model.lm_head.load_state_dict(plain.state_dict())
    ids, how = torch.arange(12).view(3, 4), {"max_new_tokens": 2, "do_sample": False}
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        want = model.generate(ids, **how)
        assert model.lm_head.seen[0] == ((3, 1, plain.in_features), False)  # so that it can fail
        model.lm_head.seen.clear()
        assert torch.equal(moe_ops.compile(model).generate(ids, **how), want)
    assert [lie for _, lie in model.lm_head.seen] == [True, True]


class Shares(nn.Module):
    """A layer that reads keys which a layer before left for it, as those of gemma4 do."""

    def forward(self, x: Any, *, shared: Any) -> Any:
        keys, values = shared["sliding"]
        return x + torch.nn.functional.scaled_dot_product_attention(x[:, None], keys, values)[:, 0]


@pytest.mark.parametrize("B", [1, 3])
def test_keys_that_layers_share_may_be_of_any_length(B: int) -> None:
    torch._dynamo.reset()
    graphs = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    layer = Shares()
    call = LayerRegion(torch.compile(lambda module, *a, **kw: module(*a, **kw), backend=keep))
    for sequences, S, seen in ((B, 6, 6), (2, 9, 9), (4, 3, 11), (1, 5, 5)):
        keys, values = torch.randn(2, sequences, 1, seen, 8)
        shared = UserDict({"sliding": (keys, values)})
        x = torch.randn(sequences, S, 8)
        torch.testing.assert_close(call(layer, x, shared=shared), layer(x, shared=shared))
    assert len(graphs) == 1

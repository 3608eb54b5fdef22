"""A twin has modules of its own on the weights of its model: what is done to it stays with it, and
what is done to the model reaches it."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops.twin import Twin


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.drop = nn.Dropout(0.5)
        self.factor = 2.0
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.up(x)).relu()) * self.scale * self.factor


class Model(nn.Module):
    """With a module in two places, tied weights, a list beside the modules, and a parent."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Inner() for _ in range(3))
        self.again = self.layers[1]
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.order = [self.layers[2], self.layers[0]]
        self.layers[0].__dict__["parent"] = self
        self.missing = None
        self.register_module("nothing", None)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in (*self.layers, self.again, *self.order):
            x = layer(x)
        return self.head(x)


IDS = torch.arange(6).view(2, 3)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(2)
    return Model().eval()


@pytest.fixture
def twin(model: Model) -> Twin[Model]:
    return Twin(model)


def test_it_is_the_same_model_on_the_same_weights(model: Model, twin: Twin[Model]) -> None:
    made = twin.module
    assert type(made) is Model and str(made) == str(model)
    for named in ("named_modules", "named_parameters", "named_buffers"):
        ours, theirs = ([n for n, _ in getattr(m, named)()] for m in (made, model))
        assert ours == theirs
    tensors = zip(
        made.state_dict(keep_vars=True).values(),
        model.state_dict(keep_vars=True).values(),
        strict=True,
    )
    assert all(ours is theirs for ours, theirs in tensors)
    assert made.head.weight is made.embed.weight and made.again is made.layers[1]
    assert not {*made.modules()} & {*model.modules()}
    assert torch.equal(made(IDS), model(IDS))


def test_what_else_holds_its_modules_holds_the_twins(model: Model, twin: Twin[Model]) -> None:
    made = twin.module
    assert made.order == [made.layers[2], made.layers[0]] != model.order
    assert made.layers[0].__dict__["parent"] is made
    assert model.order == [model.layers[2], model.layers[0]]


def wrapped(module: nn.Module, x: Tensor, *, times: float) -> Tensor:
    return type(module).forward(module, x) * times


@pytest.mark.parametrize("way", ["method", "partial"])
def test_a_forward_that_was_replaced_runs_the_twins_parts(model: Model, way: str) -> None:
    """As libraries that move weights between devices replace it."""
    layer = model.layers[0]
    layer.old_forward = layer.forward
    replaced = functools.partial(wrapped, layer, times=3.0)
    if way == "partial":
        layer.forward = functools.update_wrapper(replaced, layer.old_forward)
    else:
        layer.forward = layer.old_forward
    made = Twin(model).module
    assert torch.equal(made(IDS), model(IDS))
    assert made.layers[0].old_forward.__self__ is made.layers[0]
    made.layers[0].up = nn.Identity()
    made.layers[0].down = nn.Identity()
    if way == "partial":
        assert made.layers[0].forward.__wrapped__ is layer.forward.__wrapped__
    x = torch.randn(2, 4)
    want = x.relu() * 2.0 * (3.0 if way == "partial" else 1.0)
    assert torch.equal(made.layers[0](x), want)
    assert not torch.equal(layer(x), want)


def swap(module: Any) -> None:
    module.layers[1].up = nn.Linear(4, 6)


def train(module: nn.Module) -> None:
    module.train()


def hook(module: Any) -> None:
    module.layers[0].down.register_forward_hook(lambda *_: torch.zeros(4))


def pre_hook(module: Any) -> None:
    module.layers[0].register_forward_pre_hook(lambda _, args: (args[0] * 0,))


def attribute(module: Any) -> None:
    module.layers[2].factor = 5.0


def weight(module: Any) -> None:
    module.layers[0].up.weight = nn.Parameter(torch.zeros(6, 4))


def parametrize(module: Any) -> None:
    class Double(nn.Module):
        def forward(self, t: Tensor) -> Tensor:
            return 2 * t

    nn.utils.parametrize.register_parametrization(module.layers[0].up, "weight", Double())


def drop(module: Any) -> None:
    module.layers[0].down = None
    module.layers[0].forward = lambda x: x


def assign(module: nn.Module) -> None:
    state = {name: t + 1 for name, t in module.state_dict().items() if "scale" not in name}
    module.load_state_dict(state, strict=False, assign=True)


CHANGES = [swap, train, hook, pre_hook, attribute, weight, parametrize, drop, assign]


def known(module: nn.Module) -> list[Any]:
    """All that modules hold."""
    found: list[Any] = []
    for name, part in module.named_modules(remove_duplicate=False):
        held = {n: v for n, v in vars(part).items() if not isinstance(v, dict)}
        tables = {n: dict(v) for n, v in vars(part).items() if isinstance(v, dict)}
        found.append((name, type(part), held, tables))
    return found


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_done_to_the_twin_stays_with_it(
    model: Model, twin: Twin[Model], change: Callable[[Any], None]
) -> None:
    before, want = known(model), model(IDS)
    change(twin.module)
    twin.follow()
    with torch.no_grad():
        torch.manual_seed(4)
        assert not torch.equal(twin.module(IDS), want)
        assert torch.equal(model(IDS), want)
    now = known(model)
    assert [x[:2] for x in now] == [x[:2] for x in before]
    for (*_, held, tables), (*_, held_before, tables_before) in zip(now, before, strict=True):
        assert held.keys() == held_before.keys() and tables.keys() == tables_before.keys()
        assert all(held[name] is value for name, value in held_before.items())
        for name, table in tables_before.items():
            assert list(tables[name]) == list(table)
            assert all(tables[name][key] is value for key, value in table.items())


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_done_to_the_model_reaches_the_twin(
    model: Model, twin: Twin[Model], change: Callable[[Any], None]
) -> None:
    before = twin.module(IDS)
    change(model)
    twin.follow()
    found = []
    for module in (model, twin.module):
        torch.manual_seed(4)
        found.append(module(IDS))
    assert torch.equal(*found) and not torch.equal(found[0], before)
    assert not {*twin.module.modules()} & {*model.modules()}
    assert [n for n, _ in twin.module.named_modules()] == [n for n, _ in model.named_modules()]


def test_what_was_done_to_both_holds_for_each(model: Model, twin: Twin[Model]) -> None:
    made = twin.module
    made.layers[0].up = mine = nn.Linear(4, 6)
    made.layers[2].train()
    attribute(model)
    twin.follow()
    assert made.layers[0].up is mine and made.layers[2].training
    assert made.layers[2].factor == 5.0 and not model.layers[2].training
    model.layers[0].up = nn.Linear(4, 6)
    twin.follow()
    assert made.layers[0].up.weight is model.layers[0].up.weight is not mine.weight


def test_a_hook_that_is_taken_away_is_gone(model: Model, twin: Twin[Model]) -> None:
    handles = [m.layers[0].register_forward_hook(lambda *_: None) for m in (model, twin.module)]
    twin.follow()
    assert len(twin.module.layers[0]._forward_hooks) == 2
    handles[0].remove()
    twin.follow()
    assert list(twin.module.layers[0]._forward_hooks) == [handles[1].id]
    handles[1].remove()
    assert not twin.module.layers[0]._forward_hooks


def test_values_dtypes_and_gradients_are_shared(model: Model, twin: Twin[Model]) -> None:
    made = twin.module
    for one, other in ((model, made), (made, model)):
        with torch.no_grad():
            one.head.weight.fill_(0.5)
        assert (other.embed.weight == 0.5).all()
        for dtype in (torch.float64, torch.float32):
            one.to(dtype)
            twin.follow()
            assert {t.dtype for t in (*other.parameters(), *other.buffers())} == {dtype}
        one.requires_grad_(False)
        assert not any(p.requires_grad for p in other.parameters())
        one.requires_grad_(True)
        one.load_state_dict({name: t * 2 for name, t in one.state_dict().items()})
        assert torch.equal(made(IDS), model(IDS))


def test_a_twin_of_a_twin_and_copies(model: Model, twin: Twin[Model]) -> None:
    second = Twin(twin.module)
    train(second.module)
    assert not any(m.training for m in (*model.modules(), *twin.module.modules()))
    attribute(model)
    twin.follow()
    second.follow()
    assert second.module.layers[2].factor == 5.0
    for made in (copy.deepcopy(twin.module), pickle.loads(pickle.dumps(twin.module))):
        assert torch.equal(made(IDS), model(IDS))
        assert made.head.weight is made.embed.weight is not model.embed.weight


def test_nothing_is_done_where_nothing_changed(
    model: Model, twin: Twin[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    monkeypatch.setattr(twin, "_take_over", lambda: taken.append(1))
    model(IDS)
    with torch.no_grad():
        model.head.weight.add_(1)
    twin.module.train()
    twin.follow()
    assert not taken
    model.layers[2].train()
    twin.follow()
    assert taken


class Growing(nn.Module):
    """As rotary embeddings that change with the length: a buffer and a number that belong together,
    both replaced by a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 1
        self.register_buffer("table", torch.ones(1), persistent=False)

    def forward(self, n: int) -> Tensor:
        if n > self.most:
            self.most = n
            self.register_buffer("table", torch.full((1,), float(n)), persistent=False)
        return self.table / self.most


def test_what_a_forward_keeps_is_each_ones_own() -> None:
    model = nn.ModuleList([Growing()])
    twin = Twin(model)
    made = twin.module
    assert made[0](3) == model[0](1) == 1
    twin.follow()
    assert made[0](2) == model[0](2) == 1 and (made[0].most, model[0].most) == (3, 2)
    twin.follow()  # the model's is the later change, of both
    assert made[0].most == 2 and made[0].table is model[0].table
    made.to(torch.float64)
    twin.follow()
    assert made[0].table is model[0].table and model[0].table.dtype == torch.float64


class Listed(nn.Module, list):  # type: ignore[type-arg]
    """More than attributes."""


def test_deep_and_odd_models() -> None:
    deep: nn.Module = nn.Linear(2, 2)
    for _ in range(3000):
        deep = nn.Sequential(deep)
    part: Any = Twin(deep).module
    while isinstance(part, nn.Sequential):
        part, deep = part[0], deep[0]  # type: ignore[index]
        assert part is not deep
    scripted, listed, lazy = torch.jit.script(nn.Linear(2, 2)), Listed(), nn.LazyLinear(2)
    mixed = nn.Sequential(scripted, nn.ReLU(), lazy)
    mixed.listed = listed
    made = Twin(mixed).module
    assert made[0] is scripted and made[1] is not mixed[1] and made.listed is listed
    made._modules.pop("listed"), mixed._modules.pop("listed")
    x = torch.randn(3, 2)
    for _ in range(2):
        assert torch.equal(made(x), mixed(x))


def test_compile_makes_such_a_twin(model: Model) -> None:
    fast = moe_ops.compile(model)
    fast.train()
    fast.layers[0].register_forward_hook(lambda *_: None)
    assert not any(m.training or m._forward_hooks for m in model.modules())
    calls = []
    fast._compiled_call_impl.call = lambda ids: calls.append(fast.layers[2].factor)
    attribute(model)
    fast(IDS)
    assert calls == [5.0]

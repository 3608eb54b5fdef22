"""`compile` of modules whose forward Dynamo does not look at by itself, and what is told where
nothing was compiled."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import moe_ops
from moe_ops.testing import Tol, assert_close
from tests.hf import families
from tests.recompiling import counted_anew, few_graphs, graphs

D, T = 256, 40
TOL = Tol(1e-4, "float32 sums in another order")
UNCOMPILED = "runs uncompiled, which is slower"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No graph was compiled before."""
    with counted_anew():
        yield


class Inherits(nn.Sequential):
    """A forward of torch's."""


class Owns(nn.Module):
    """A forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class OfTorch(nn.Linear):
    """A forward of torch's, which a decorator of torch's is around."""

    forward = torch.no_grad()(nn.Linear.forward)


class Listed(nn.ModuleList):
    """A list of torch's with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return functools.reduce(lambda x, part: part(x), self, x)


class CallsItself(nn.Linear):
    """Another way to call a forward of torch's."""

    def _call_impl(self, *args: Any) -> Any:
        return super()._call_impl(*args) + 1


def replaced(forward: Callable[[Owns], Any]) -> nn.Module:
    made = Owns()
    made.forward = forward(made)  # type: ignore[method-assign]
    return made


def with_hook() -> nn.Module:
    made = nn.Linear(D, D)
    made.register_forward_hook(lambda module, args, out: out + args[0])
    return made


def moe_layer() -> nn.Module:
    return moe_ops.MoELayer(4, 2, D, 32, internal_gate=True)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(D, D),
    "sequential": lambda: nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)),
    "around_a_layer": lambda: nn.Sequential(nn.Linear(D, D), moe_layer(), nn.Linear(D, D)),
    "inherited": lambda: Inherits(nn.Linear(D, D)),
    "own": Owns,
    "decorated": lambda: OfTorch(D, D),
    "list": lambda: Listed([nn.Linear(D, D)]),
    "own_call": lambda: CallsItself(D, D),
    "partial": lambda: replaced(lambda own: functools.partial(nn.Linear.forward, own.inner)),
    "bound": lambda: replaced(lambda own: own.inner.forward),
    "c": lambda: replaced(lambda own: torch.relu),
    "module": lambda: replaced(lambda own: own.inner),
    "hook": with_hook,
    "lazy": lambda: nn.LazyLinear(D),
    "fx": lambda: torch.fx.symbolic_trace(Owns()),
}
# In one graph with attention, whose bits nobody promises.
WITHOUT_BITS = {
    "encoder_layer": lambda: nn.TransformerEncoderLayer(D, 4, 64, batch_first=True),
    "norm": lambda: nn.LayerNorm(D),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, *WITHOUT_BITS])
@torch.no_grad()
def test_a_module_is_one_graph_wherever_its_forward_is(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = {**KINDS, **WITHOUT_BITS}[kind]().eval()
    twin, x = moe_ops.compile(model, batch_invariant=kind in KINDS), torch.randn(T, D)
    whole = twin(x)
    assert graphs() == 1
    assert_close(whole, model(x), TOL)
    if kind in KINDS:
        assert torch.equal(torch.cat([twin(x[t : t + 1].clone()) for t in range(T)]), whole)
    assert_close(twin(x), model(x), TOL)
    assert graphs() == 1
    assert UNCOMPILED not in caplog.text


@pytest.mark.slow
@torch.no_grad()
def test_modules_of_like_parts_share_a_graph_and_others_leave_them_the_whole_limit() -> None:
    with few_graphs(2):
        counters.clear()
        for width in (4, 8, 12, 16):
            for _ in range(2):
                model, x = nn.Sequential(nn.Linear(8, width), nn.ReLU()), torch.randn(3, 8)
                assert_close(moe_ops.compile(model, fullgraph=True)(x), model(x), TOL)
        assert graphs() == 4


@pytest.mark.slow
@torch.no_grad()
def test_what_is_done_to_the_module_is_followed() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(3, 8)
    twin = moe_ops.compile(model)
    assert_close(twin(x), model(x), TOL)
    model.append(nn.Linear(8, 4))
    assert_close(twin(x), model(x), TOL)
    model.forward = lambda x: x * 2  # type: ignore[method-assign]
    assert_close(twin(x), x * 2, TOL)
    del model.forward
    assert_close(twin(x), model(x), TOL)


@pytest.mark.slow
@torch.no_grad()
def test_inside_a_larger_model_it_is_part_of_that_graph() -> None:
    model, x = nn.Linear(8, 8), torch.randn(3, 8)
    whole = nn.Sequential(moe_ops.compile(model), nn.ReLU())
    assert_close(torch.compile(whole, backend="eager", fullgraph=True)(x), model(x).relu(), TOL)
    assert graphs() == 1


class Kept(Owns):
    """All of it is kept from Dynamo."""

    forward = torch.compiler.disable(Owns.forward)


class Ends(Owns):
    """A graph would end in a loop, which Dynamo leaves to Python."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.inner(x)
            torch._dynamo.graph_break()
        return x


class Yields(Owns):
    """A generator, which Dynamo leaves to Python, too."""

    def forward(self, x: Tensor) -> Any:
        yield self.inner(x)


def off() -> Any:
    return torch._dynamo.config.patch(disable=True)


UNSEEN: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], str]] = {
    "disabled": (Kept, functools.partial(few_graphs, 8), "Dynamo found nothing in it"),
    "around_disabled": (
        lambda: nn.Sequential(Kept()),
        functools.partial(few_graphs, 8),
        "Dynamo found nothing in it",
    ),
    "ends": (Ends, functools.partial(few_graphs, 8), "Dynamo found nothing in it"),
    "generator": (Yields, functools.partial(few_graphs, 8), "Dynamo found nothing in it"),
    "recurrent": (
        lambda: nn.LSTM(D, D),
        functools.partial(few_graphs, 8),
        "Dynamo found nothing in it",
    ),
    "stance": (
        Owns,
        lambda: torch.compiler.set_stance("force_eager"),
        "torch.compile is off .*; turn it on",
    ),
    "off": (lambda: nn.Linear(D, D), off, "torch.compile is off .*; turn it on"),
}


@pytest.mark.parametrize("name", UNSEEN)
@torch.no_grad()
def test_it_is_told_once_where_nothing_was_compiled(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, around, text = UNSEEN[name]
    model, x = make(), torch.randn(3, D)
    with around(), caplog.at_level(logging.WARNING, "moe_ops"):
        twin = moe_ops.compile(model)
        for _ in range(2):
            twin(x)
    told = [r.getMessage() for r in caplog.records if UNCOMPILED in r.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(type(model).__name__)
    assert graphs() == 0
    for asked in ("batch_invariant", "strict"):
        with around():
            twin = moe_ops.compile(model, **{asked: True})
            for _ in range(2):
                match = f"{asked}: a call of {type(model).__name__} ran uncompiled: {text}"
                with pytest.raises(RuntimeError, match=match):
                    twin(x)


@pytest.mark.slow
@torch.no_grad()
def test_a_stance_that_is_taken_later_is_seen_where_bits_depend_on_it() -> None:
    twin, x = moe_ops.compile(nn.Linear(D, D), batch_invariant=True), torch.randn(3, D)
    want = twin(x)
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(RuntimeError, match=r"torch.compile is off"),
    ):
        twin(x)
    assert torch.equal(twin(x), want)


@torch.no_grad()
def test_code_without_an_op_needs_no_graph(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(3, 8)
    for asked in ({}, {"batch_invariant": True}, {"strict": True}):
        assert moe_ops.compile(nn.Identity(), **asked)(x) is x
    assert UNCOMPILED not in caplog.text


@pytest.mark.slow
@torch.no_grad()
def test_calls_beyond_the_limit_are_refused_where_bits_depend_on_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with few_graphs(2):
        model = Owns()
        plain, twin = (
            moe_ops.compile(model, dynamic=False, batch_invariant=wanted)
            for wanted in (False, True)
        )
        twin(torch.randn(3, D))
        for rows in (5, 6):
            with pytest.raises(RuntimeError, match=r"batch_invariant: .*Dynamo has compiled it as"):
                [twin(torch.randn(n, D)) for n in (4, rows)]
        plain(torch.randn(3, D))  # that is slower, and said by Dynamo's own warning
        with pytest.raises(RuntimeError, match=r"Dynamo has compiled it as"):
            moe_ops.compile(Owns(), dynamic=False, batch_invariant=True)(torch.randn(9, D))


@pytest.mark.slow
@torch.inference_mode()
def test_layers_of_a_model_are_watched() -> None:
    model = families.build("qwen3_moe").model
    twin, ids = moe_ops.compile(model, batch_invariant=True), torch.randint(3, 90, (2, 5))
    with torch.compiler.set_stance("force_eager"):
        for call in (twin, functools.partial(twin.generate, max_new_tokens=2, pad_token_id=0)):
            with pytest.raises(RuntimeError, match=r"batch_invariant: .*torch.compile is off"):
                call(input_ids=ids)


def test_torchscript_is_refused() -> None:
    script = torch.jit.script(nn.Linear(8, 8))
    with pytest.raises(TypeError, match=r"does not trace TorchScript, got a .*; give the module"):
        moe_ops.compile(script)


STOPS = ("lift_grouped_mm", "fuse_moe", "invariant_linears")


@pytest.mark.parametrize("stop", STOPS)
def test_passes_that_make_a_graph_invariant_cannot_be_left_out(stop: str) -> None:
    left = "invariant_linears and pick_backend" if stop != STOPS[-1] else "pick_backend"
    message = f"stop_after='{stop}' leaves out {left}, .*; stop after pick_backend or a later"
    with pytest.raises(ValueError, match=message):
        moe_ops.compile(moe_layer(), batch_invariant=True, stop_after=stop)
    with pytest.raises(ValueError, match=message):
        moe_ops.backend(batch_invariant=True, stop_after=stop)
    with pytest.raises(ValueError, match=message):
        moe_ops.compile_config(batch_invariant=True, stop_after=stop)
    moe_ops.compile(moe_layer(), stop_after=stop)


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["pick_backend", "fuse_residual"])
@torch.no_grad()
def test_passes_behind_those_may_be_left_out(stop: str) -> None:
    model = nn.Sequential(moe_layer(), nn.Linear(D, D))
    twin, x = moe_ops.compile(model, batch_invariant=True, stop_after=stop), torch.randn(T, D)
    assert torch.equal(torch.cat([twin(x[t : t + 1].clone()) for t in range(T)]), twin(x))

"""Models that run a layer several times in one call, of which no record can be: they are refused
however they run, and nothing of such a call is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import moe_ops
from moe_ops.layer import MoELayer
from tests.forward.layered import Layered
from tests.graphs.recorder import Recorder, runner
from tests.hf import families
from tests.hf.twins import PLAIN, twin_of
from tests.layer.shards import randomize
from tests.recorded.records import random_record
from tests.recorded.test_bare_layers import SIZES, given

SAYS = r"layers?( run|\.\d.* runs?) several times in one call of this .*record and replay a part"


class Around(nn.Module):
    """A layer that runs so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([randomize(MoELayer(**SIZES))])
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x + self.layers[0](x)
        return x


def as_is(model: Any) -> Any:
    return model


def in_graphs(model: nn.Module) -> Callable[..., Any]:
    return runner(model, Recorder(), buckets=(16,))


def by_torch(model: nn.Module) -> Any:
    model.compile(backend=moe_ops.backend())
    return model


SLOW = pytest.mark.slow
WAYS = {
    "uncompiled": pytest.param(as_is, as_is),
    "captured": pytest.param(as_is, in_graphs),
    "compiled": pytest.param(moe_ops.compile, as_is, marks=SLOW),
    "backend": pytest.param(as_is, by_torch, marks=[SLOW, pytest.mark.every]),
}


@pytest.mark.parametrize("replayed", [False, True], ids=["recorded", "replayed"])
@pytest.mark.parametrize(("made", "called"), WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("times", [1, 2])
def test_a_layer_that_runs_twice_is_refused(
    times: int, made: Any, called: Any, replayed: bool
) -> None:
    torch._dynamo.reset()
    model = made(Around(times))
    record = random_record((1, 5), (1, 5), layers=1)
    context = moe_ops.replay_routing(model, record) if replayed else moe_ops.record_routing(model)
    with context as inside, torch.no_grad():
        call = called(model)
        for _ in range(2):
            if times == 1:
                call(given(5))
                continue
            with pytest.raises(ValueError, match=SAYS):
                call(given(5))
    left, calls = (2, ()) if times == 2 else (0, ((1, 5), (1, 5)))
    assert inside.calls_left == left if replayed else inside.take().calls == calls


class Through(nn.Module):
    """A module that is called through a checkpoint."""

    def __init__(self, module: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.module, self.reentrant = module, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.module, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_no_second_run(reentrant: bool) -> None:
    model, x = Around(1), given(5).requires_grad_()
    layer = model.layers[0]
    model.layers = nn.ModuleList([Through(layer, reentrant)])
    with moe_ops.record_routing(model) as recording:
        for _ in range(2):
            model(x).sum().backward()
    assert recording.take().calls == ((1, 5), (1, 5))


def tiny(*, again: bool) -> Any:
    """A model whose only layer stands in its list twice, or a layer and another."""
    model = families.build("qwen3_moe").model
    if again:
        model.model.layers = nn.ModuleList([model.model.layers[0]] * 2)
    return model


def looped() -> Any:
    """Of four layers the two in the middle run three times."""
    cls = families.model_class("inkling2_loop")
    config = families.tiny_config(cls.config_class, {"*": {"num_hidden_layers": 4}})
    text = getattr(config, "text_config", config)
    text.loop_layer_index_start, text.loop_layer_index_end, text.loop_num_passes = 1, 3, 3
    text.n_layers_per_attn_res_block = 1
    return families.build_class(cls, config).model


def text(batch: int, tokens: int) -> Tensor:
    return torch.randint(16, 90, (batch, tokens), generator=torch.Generator().manual_seed(0))


def test_a_family_that_loops_over_layers_is_refused() -> None:
    model = looped()
    says = r"model.layers.1.mlp.experts and 1 more layers run several times"
    with moe_ops.record_routing(model) as recording, torch.no_grad():
        with pytest.raises(ValueError, match=says):
            model(input_ids=text(2, 5), use_cache=False)
        with pytest.raises(ValueError, match=says):
            model.generate(text(2, 5), **PLAIN)
    assert recording.take().calls == ()
    record = random_record((2, 5), layers=4, weights=True)
    with moe_ops.replay_routing(model, record, weights=True) as replay, torch.no_grad():
        with pytest.raises(ValueError, match=says):
            model(input_ids=text(2, 5), use_cache=False)
        assert replay.calls_left == 1


@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
def test_captured_steps(again: bool) -> None:
    twin = twin_of(tiny(again=again))
    with moe_ops.record_routing(twin) as recording:
        for _ in range(4):  # the last prompt is captured
            if not again:
                twin.generate(text(2, 6), **PLAIN)
                continue
            with pytest.raises(ValueError, match=SAYS):
                twin.generate(text(2, 6), **PLAIN)
    calls = recording.take().calls
    assert not calls if again else len(calls) == 4 * PLAIN["max_new_tokens"]


@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
def test_captured_forwards(again: bool) -> None:
    """The third call of a size runs its layers, then as they would be captured, and captures."""
    run = Layered(tiny(again=again))
    with moe_ops.record_routing(run.twin) as recording, torch.no_grad():
        for _ in range(4):
            if not again:
                run.twin(input_ids=text(2, 37), use_cache=False)
                continue
            with pytest.raises(ValueError, match=SAYS):
                run.twin(input_ids=text(2, 37), use_cache=False)
    assert recording.take().calls == (() if again else ((2, 37),) * 4)
    assert (run.graphs.captures, run.graphs.replayed) == ((0, 0) if again else (1, 1))


def trained(model: Any) -> None:
    model(input_ids=text(2, 6), labels=text(2, 6)).loss.backward()


CALLS: dict[str, Callable[[Any], Any]] = {
    "forward": lambda model: model(input_ids=text(2, 6)),
    "generate": lambda model: model.generate(text(2, 6), **PLAIN),
    "training": trained,
    "compiled_call": lambda model: model.get_compiled_call(None)(input_ids=text(2, 6)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["generate", *(pytest.param(n, marks=pytest.mark.every) for n in CALLS if n != "generate")],
)
def test_compiled_models(name: str) -> None:
    torch._dynamo.reset()
    twin = moe_ops.compile(tiny(again=True))
    with moe_ops.record_routing(twin) as recording, torch.set_grad_enabled(name == "training"):
        for _ in range(2):
            with pytest.raises(ValueError, match=SAYS):
                CALLS[name](twin)
    assert recording.take().calls == ()


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
def test_compiled_training_with_checkpoints(again: bool) -> None:
    """Dynamo leaves code that changes something inside of a checkpoint: nothing does."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny(again=again).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.config.use_cache = False
    twin = moe_ops.compile(model)
    with moe_ops.record_routing(twin) as recording:
        if again:
            with pytest.raises(ValueError, match=SAYS):
                trained(twin)
        else:
            trained(twin)
    assert recording.take().calls == (() if again else ((2, 6),))
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert not [reason for reason in breaks if "side effect" in reason]

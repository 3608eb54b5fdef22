"""Models while they are recorded or replayed: their copies, calls that fail, what may not change,
and which tokens a call has."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops.hf.routed import RULE
from moe_ops.layer import MoELayer
from moe_ops.testing import TOL, assert_close
from tests.forward.layered import Layered
from tests.graphs.recorder import Recorder, runner
from tests.hf import families
from tests.hf.twins import PLAIN, twin_of
from tests.layer.shards import randomize
from tests.recorded.records import random_record
from tests.recorded.test_bare_layers import SIZES, Model, given, made, others, record_of

F32 = torch.float32


def layer() -> MoELayer:
    return randomize(MoELayer(**SIZES))


def tiny() -> Any:
    return families.build("qwen3_moe").model


def text(batch: int, tokens: int) -> Tensor:
    return torch.randint(16, 90, (batch, tokens), generator=torch.Generator().manual_seed(0))


def saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": saved,
}
MODELS: dict[str, Any] = {
    "layer": layer,
    "layers": made,
    "transformers": tiny,
    "compiled": lambda: moe_ops.compile(tiny()),
}


def inside(model: nn.Module, replayed: bool) -> Any:
    """A context in which a model is recorded, or replayed."""
    if not replayed:
        return moe_ops.record_routing(model)
    layers = sum(isinstance(m, MoELayer) for m in model.modules()) or 2
    return moe_ops.replay_routing(model, random_record((1, 3), layers=layers))


@pytest.mark.parametrize("replayed", [False, True], ids=["recorded", "replayed"])
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("name", MODELS)
def test_copies_are_what_the_model_was(name: str, copied: Any, replayed: bool) -> None:
    model = MODELS[name]()
    before = copied(model)
    with inside(model, replayed):
        other = copied(model)
        assert [type(m) for m in other.modules()] == [type(m) for m in before.modules()]
        for a, b in zip(other.modules(), before.modules(), strict=True):
            assert vars(a).keys() - {RULE} == vars(b).keys() - {RULE}
            held = (a._buffers, a._non_persistent_buffers_set, a._forward_pre_hooks)
            assert not a._forward_hooks and not a._forward_hooks_with_kwargs
            kept = (b._buffers, b._non_persistent_buffers_set, b._forward_pre_hooks)
            assert [set(x) for x in held] == [set(x) for x in kept]
        with moe_ops.record_routing(other):  # which nobody is told of
            pass


class Fails(Model):
    """Fails behind its first layer for one token."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if len(x) == 1:
            raise RuntimeError("one token")
        return self.layers[1](x)


WAYS: dict[str, Any] = {
    "uncompiled": lambda model: (model, model),
    "captured": lambda model: (model, runner(model, Recorder(), buckets=(1, 8))),
    "compiled": lambda model: (made := moe_ops.compile(model), made),
}


@pytest.mark.parametrize("way", [pytest.param(w, marks=pytest.mark.slow if w == "compiled" else ())
                                 for w in WAYS])  # fmt: skip
def test_a_call_that_failed_is_none(way: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Fails()
    recorded, call = WAYS[way](model)
    with moe_ops.record_routing(recorded, tokens=64) as recording, torch.no_grad():
        for T in (1, 5, 1, 1, 3, 1):
            if T > 1:
                call(given(T))
                continue
            with pytest.raises(RuntimeError, match="one token"):
                call(given(T))
        with pytest.raises(ValueError, match="does not fit into rings of 64"):
            call(given(65))
    record = recording.take()
    assert record.calls == ((1, 5), (1, 3)) and (record.ids_TLK >= 0).all()
    assert torch.equal(record.ids_TLK, record_of(model, given(5), given(3)).ids_TLK)
    with_one = random_record((1, 1), (1, 5), layers=2)
    with moe_ops.replay_routing(recorded, with_one) as replay, torch.no_grad():
        for _ in range(2):  # it comes again
            with pytest.raises(RuntimeError, match="one token"):
                call(given(1))
            assert replay.calls_left == 2
        with pytest.raises(ValueError, match="call 0 of the record has 1 x 1 tokens"):
            call(given(5))


def test_calls_behind_one_that_failed_take_their_own_experts() -> None:
    model = Fails()
    record = others(record_of(model, given(5), given(3)))
    with moe_ops.replay_routing(model, record), torch.no_grad():
        want = [model(given(T)) for T in (5, 3)]
    fails = model.layers[1].register_forward_pre_hook(failing)
    with moe_ops.replay_routing(model, record) as replay, torch.no_grad():
        for i, T in enumerate((5, 3)):
            for failed in (True, True, False):
                fails.remove()
                if failed:
                    fails = model.layers[1].register_forward_pre_hook(failing)
                    with pytest.raises(RuntimeError, match="not today"):
                        model(given(T))
                else:
                    assert torch.equal(model(given(T)), want[i])
        assert replay.calls_left == 0


def failing(module: nn.Module, args: Any) -> None:
    raise RuntimeError("not today")


def test_a_step_of_generate_that_failed_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    twin, ids = twin_of(tiny()), text(2, 5)
    norm, left = twin.model.norm, [7]
    own = type(norm).forward

    def sometimes(self: Any, x: Tensor) -> Tensor:
        left[0] -= self is norm
        if self is norm and left[0] == 0:
            raise RuntimeError("not today")
        return own(self, x)

    with moe_ops.record_routing(twin) as recording:
        monkeypatch.setattr(type(norm), "forward", sometimes)
        with pytest.raises(RuntimeError, match="not today"):
            twin.generate(ids, **PLAIN)
        failed = recording.take()
        twin.generate(ids, **PLAIN)
    calls = recording.take().calls
    assert len(calls) == PLAIN["max_new_tokens"] and (failed.ids_TLK >= 0).all()
    assert failed.calls == calls[: len(failed.calls)] and 0 < len(failed.calls) < len(calls)


def test_a_forward_that_runs_again_with_more_room_is_a_call() -> None:
    run, ids = Layered(tiny()), text(2, 37)
    with moe_ops.record_routing(run.model) as recording, torch.no_grad():
        run.model(input_ids=ids, use_cache=False)
    want, norm = recording.take(), run.twin.model.norm
    with moe_ops.record_routing(run.twin) as recording, torch.no_grad():
        for _ in range(4):
            run.twin(input_ids=ids, use_cache=False)
        assert run.graphs.replayed == 1
        own, left = type(norm).forward, [1]

        def once(self: Any, x: Tensor) -> Tensor:
            left[0] -= self is norm
            if self is norm and left[0] == 0:
                raise torch.OutOfMemoryError
            return own(self, x)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(norm), "forward", once)
            run.twin(input_ids=text(2, 9), use_cache=False)
    assert left[0] == -1
    record = recording.take()
    assert record.calls == ((2, 37),) * 4 + ((2, 9),)
    assert torch.equal(record.of_calls(3, 4).ids_TLK, want.ids_TLK)


SHAPES = {
    "tokens": ((6,), (1, 6)),
    "sequences": ((2, 3), (2, 3)),
    "four_dims": ((2, 3, 2), (6, 2)),
    "five_dims": ((2, 1, 3, 2), (6, 2)),
    "none": ((2, 0, 3), (0, 3)),
}


@pytest.mark.parametrize("graphs", [False, True], ids=["uncompiled", "captured"])
@pytest.mark.parametrize(("shape", "call"), SHAPES.values(), ids=SHAPES)
def test_all_dims_ahead_of_the_tokens_count_sequences(
    shape: tuple[int, ...], call: tuple[int, int], graphs: bool
) -> None:
    model, x = layer(), given(*shape)
    with torch.no_grad():
        want = model(x)
    with moe_ops.record_routing(model) as recording, torch.no_grad():
        run: Any = runner(model, Recorder(), buckets=(4, 8)) if graphs else model
        for _ in range(2):
            assert_close(run(x), want, TOL["moe", F32])
    record = recording.take()
    assert record.calls == (call, call)
    flat = record_of(model, x.view(-1, 32)).ids_TLK
    assert torch.equal(record.of_calls(1).ids_TLK, flat)
    with moe_ops.replay_routing(model, others(record.of_calls(1))), torch.no_grad():
        moved = model(x)
    with moe_ops.replay_routing(model, others(record)), torch.no_grad():
        run = runner(model, Recorder(), buckets=(4, 8)) if graphs else model
        for _ in range(2):
            assert_close(run(x), moved, TOL["moe", F32])


def test_a_record_of_fewer_tokens_is_refused_in_four_dims() -> None:
    model = layer()
    record, says = random_record((2, 3), layers=1), "has 2 x 3 tokens, and this one 6 x 2"
    with moe_ops.replay_routing(model, record), pytest.raises(ValueError, match=says):
        model(given(2, 3, 2))


def test_a_message_on_a_layer_without_a_name_has_a_subject() -> None:
    model = layer()
    with moe_ops.record_routing(model) as recording, torch.no_grad():
        model(given(4))
        model.choose(given(5), model.gate(given(5)))  # behind the back of who counts
    for _ in range(2):  # what was written stays
        with pytest.raises(RuntimeError, match=r"^the layer saw other tokens"):
            recording.take()


@pytest.mark.parametrize("compiled", [False, True], ids=["model", "twin"])
@pytest.mark.parametrize("replayed", [False, True], ids=["recorded", "replayed"])
def test_experts_stay_while_a_model_is_recorded(replayed: bool, compiled: bool) -> None:
    model = made()
    twin = moe_ops.compile(model) if compiled else model
    layer, keep, says = model.layers[0], [0, 2, 3, 6], "recorded or replayed, by the numbers"
    with torch.no_grad():
        want = model(given(3))
        for what in (model, layer):
            with inside(twin, replayed) as now:
                with pytest.raises(ValueError, match=f"cannot be restricted: .*{says}"):
                    moe_ops.restrict_experts(what, keep)
                assert torch.equal(model(given(3)), want) or replayed
            assert replayed or now.take().num_experts == layer.num_experts == 8
        done = moe_ops.restrict_experts(model, keep, removed="cpu")
        few = model(given(3))
        with inside(twin, False) as now:
            with pytest.raises(ValueError, match=f"cannot be undone: .*{says}"):
                done.undo()
            assert torch.equal(model(given(3)), few)
        assert now.take().num_experts == 4
        done.undo()
        assert torch.equal(model(given(3)), want)


def test_a_compiled_model_is_recorded_with_the_experts_that_its_model_has() -> None:
    model = made()
    twin = moe_ops.compile(model)
    for experts in (8, 4, 8):
        if experts == 4:
            done = moe_ops.restrict_experts(model, [0, 2, 3, 6], removed="cpu")
        with moe_ops.record_routing(twin) as recording:
            assert recording.take().num_experts == experts
        if experts == 4:
            done.undo()


def test_experts_of_other_models_may_change() -> None:
    with moe_ops.record_routing(made()):
        moe_ops.restrict_experts(made(), [0, 2, 3, 6], removed="cpu").undo()

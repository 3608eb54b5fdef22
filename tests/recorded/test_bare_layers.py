"""Routings of models that are not of transformers: those of their `MoELayer`s."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops import RecordedRouting
from moe_ops.layer import MoELayer, Routing
from moe_ops.testing import TOL, assert_close
from tests.graphs.recorder import Recorder, runner
from tests.layer.shards import randomize

F32 = torch.float32
SIZES: dict[str, Any] = {
    "num_experts": 8, "top_k": 2, "hidden_size": 32, "intermediate_size": 32, "internal_gate": True,
}  # fmt: skip


class Model(nn.Module):
    """Layers of experts around residuals."""

    def __init__(self, layers: int = 2, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            randomize(MoELayer(**{**SIZES, **options}), seed) for seed in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def first_two(x_TD: Tensor, logits_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The best experts, all as heavy."""
    ids = logits_TE.topk(top_k).indices
    return torch.full_like(ids, 0.5, dtype=F32), ids


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {
        "routing": Routing(
            score="sigmoid", n_group=4, topk_group=2, correction_bias=True, renormalize=True
        )
    },
    "fused_shared": {"shared_experts": 1},
    "custom": {"routing": Routing(custom=first_two)},
    "int4": {"quant": "int4:1x32"},
    "invariant": {"batch_invariant": True},
}  # fmt: skip


def made(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def given(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, 32, generator=torch.Generator().manual_seed(seed))


def record_of(model: nn.Module, *inputs: Tensor, **how: Any) -> RecordedRouting:
    with moe_ops.record_routing(model, **how) as recording, torch.no_grad():
        for x in inputs:
            model(x)
    return recording.take()


def others(record: RecordedRouting) -> RecordedRouting:
    """Experts that no router would choose, other ones for each token."""
    return dataclasses.replace(record, ids_TLK=(record.ids_TLK + 1) % record.num_experts)


def served(model: Model, x: Tensor) -> list[Tensor]:
    """The ids that each layer's experts are given, without fused shared ones."""
    found: list[Tensor] = []
    for layer in model.layers:
        run = layer.run_experts

        def note(x_TD: Tensor, weights: Tensor, ids: Tensor, run: Any = run) -> Tensor:
            found.append(ids[:, :2].clone())
            return run(x_TD, weights, ids)

        layer.run_experts = note
    with torch.no_grad():
        model(x)
    for layer in model.layers:
        del layer.run_experts
    return found


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_layers_write_down_what_they_choose(options: dict[str, Any]) -> None:
    model, x = made(**options), given(2, 3)
    with torch.no_grad():
        want = model(x)
    with moe_ops.record_routing(model, weights=True) as recording, torch.no_grad():
        assert torch.equal(model(x), want)
        chosen = served(model, x)
    record = recording.take()
    assert record.calls == ((2, 3), (2, 3)) and record.layers == ("layers.0", "layers.1")
    assert torch.equal(record.of_calls(1).ids_TLK, torch.stack(chosen, 1).short())
    assert torch.equal(record.of_calls(0, 1).ids_TLK, record.of_calls(1).ids_TLK)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_layers_take_what_was_recorded(options: dict[str, Any]) -> None:
    model, x = made(**options), given(5)
    with torch.no_grad():
        want = model(x)
    record = record_of(model, x, weights=True)
    with torch.no_grad():
        with moe_ops.replay_routing(model, record, weights=True):
            assert torch.equal(model(x), want)
        if "custom" in str(options):
            return
        with moe_ops.replay_routing(model, record):
            assert_close(model(x), want, TOL["moe", F32])
        with moe_ops.replay_routing(model, others(record)):
            moved = torch.stack(served(model, x), 1).short()
    assert torch.equal(moved, others(record).ids_TLK)


def test_a_layer_by_itself_is_a_model() -> None:
    layer = randomize(MoELayer(**SIZES))
    record = record_of(layer, given(4), given(2, 3, seed=1))
    assert record.calls == ((1, 4), (2, 3)) and record.layers == ("",)
    with moe_ops.replay_routing(layer, record.of_calls(1)), torch.no_grad():
        want = layer(given(2, 3, seed=1))
    with torch.no_grad():
        assert_close(layer(given(2, 3, seed=1)), want, TOL["moe", F32])


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_training_replays_and_routers_learn() -> None:
    model, x = made(), given(6)
    want = gradients(model, x)
    with moe_ops.record_routing(model) as recording:
        got = gradients(model, x)
    record = recording.take()
    assert all(torch.equal(got[n], want[n]) for n in want)
    with moe_ops.replay_routing(model, record):
        for name, t in gradients(model, x).items():
            assert_close(t, want[name], TOL["experts_backward", F32], name)
    with moe_ops.replay_routing(model, others(record)):
        moved = gradients(model, x)
    gates = [n for n in want if n.endswith("gate.weight")]
    assert len(gates) == 2 and all(float(moved[n].abs().max()) > 0 for n in gates)
    assert not all(torch.equal(moved[n], want[n]) for n in gates)


def test_training_is_recorded_where_it_has_to_be_batch_invariant() -> None:
    model, x = made(batch_invariant=True), given(9)
    want = gradients(model, x)
    with moe_ops.record_routing(model):
        got = gradients(model, x)
    assert got.keys() == want.keys()
    for name, grad in want.items():
        torch.testing.assert_close(got[name], grad)


def test_models_are_what_they_were_afterwards() -> None:
    model, x = made(), given(3)
    kinds, keys = [type(m) for m in model.modules()], list(model.state_dict())
    buffers = list(dict(model.named_buffers()))
    with moe_ops.record_routing(model) as recording, torch.no_grad():
        assert list(model.state_dict()) == keys
        copied = copy.deepcopy(model)
        copied(x)
    assert recording.take().tokens == 0 and [type(m) for m in copied.modules()] == kinds
    with moe_ops.replay_routing(model, record_of(model, x)):
        assert list(model.state_dict()) == keys
    assert [type(m) for m in model.modules()] == kinds
    assert list(dict(model.named_buffers())) == buffers
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_captured_calls_are_recorded_and_replayed() -> None:
    model = made()
    inputs = [given(T, seed=T) for T in (3, 5, 4, 2)]
    want = record_of(model, *inputs)
    with moe_ops.record_routing(model) as recording, torch.no_grad():
        recorder = Recorder()
        run = runner(model, recorder, buckets=(8,))
        for x in inputs:
            run(x)
    assert recorder.replayed > 0 and not run.refused
    got = recording.take()
    assert got.calls == want.calls and torch.equal(got.ids_TLK, want.ids_TLK)
    with moe_ops.replay_routing(model, others(want)), torch.no_grad():
        moved = [model(x) for x in inputs]
    with moe_ops.replay_routing(model, others(want)), torch.no_grad():
        run = runner(model, Recorder(), buckets=(8,))
        for x, expected in zip(inputs, moved, strict=True):
            assert_close(run(x), expected, TOL["moe", F32])


@pytest.mark.slow
def test_compiled_models_are_recorded_and_replayed() -> None:
    torch._dynamo.reset()
    model = made()
    twin = moe_ops.compile(model)
    inputs = [given(2, 7), given(3, 5, seed=1)]
    want, got = record_of(model, *inputs, weights=True), record_of(twin, *inputs, weights=True)
    assert got.calls == want.calls and torch.equal(got.ids_TLK, want.ids_TLK)
    with moe_ops.replay_routing(model, others(want)), torch.no_grad():
        expected = [model(x) for x in inputs]
    with moe_ops.replay_routing(twin, others(want)), torch.no_grad():
        for x, moved in zip(inputs, expected, strict=True):
            assert_close(twin(x), moved, TOL["moe", F32])


def custom_weights() -> None:
    model = made(routing=Routing(custom=first_two))
    with moe_ops.replay_routing(model, record_of(model, given(3))):
        pass


def differing() -> None:
    model = made()
    model.layers.append(MoELayer(**{**SIZES, "num_experts": 4}))
    record_of(model, given(2))


def warmed_up() -> None:
    model = made()
    with moe_ops.record_routing(model), torch.no_grad():
        runner(model, Recorder(), buckets=(8,)).warmup(given(2))


WRONG: dict[str, tuple[Any, str]] = {
    "warmed_up": (warmed_up, "leave it out, and the first call of a size captures its graph"),
    "no_layers": (lambda: record_of(nn.Linear(32, 32), given(2)), "has no MoELayer; in the place"),
    "custom": (custom_weights, "layers.0 cannot weigh given experts: its routing is a function"),
    "differing": (differing, "layers have other numbers of experts each"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused_with_a_remedy(name: str) -> None:
    call, says = WRONG[name]
    with pytest.raises(ValueError, match=says):
        call()

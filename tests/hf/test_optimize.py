"""`optimize` and `restore`, the registration in transformers, and the ways back to its own code."""

from __future__ import annotations

import copy
import io
import logging

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

import moe_ops
import moe_ops.hf.experts as adapter
from moe_ops.forward.regions import call_module
from moe_ops.hf.fp8 import fp8_experts_forward
from moe_ops.hf.optimize import OptimizedRouter
from moe_ops.interop.subclass import former_class
from moe_ops.testing import Tol, assert_close
from tests.chosen import one_in
from tests.hf import families
from tests.hf.test_quantize import logits, qwen
from tests.hf.twins import twin_of


@pytest.fixture
def tiny() -> families.TinyModel:
    return families.build("qwen3_moe")


@pytest.fixture
def warnings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> pytest.LogCaptureFixture:
    monkeypatch.setattr("moe_ops.hf.report._said", set())
    caplog.set_level(logging.WARNING, logger="moe_ops")
    return caplog


def ids(length: int = 7) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(3, 3 + length)[None]}


def snapshot(model: nn.Module) -> tuple[dict[str, torch.Tensor], list[set[str]]]:
    """The state of a model and the names of its modules' own attributes."""
    state = {k: v.clone() for k, v in model.state_dict().items()}
    return state, [set(vars(m)) for m in model.modules()]


def test_both_registries_know_the_implementation() -> None:
    assert ALL_EXPERTS_FUNCTIONS["moe_ops"] is adapter.experts_forward
    assert ALL_FP8_EXPERTS_FUNCTIONS["moe_ops"] is fp8_experts_forward


def test_optimize_is_idempotent_and_restore_undoes_it_bit_for_bit(
    tiny: families.TinyModel,
) -> None:
    state, attributes = snapshot(tiny.model)
    implementation = tiny.model.config._experts_implementation
    want = families.run(tiny, ids())
    assert moe_ops.optimize(tiny.model) is tiny.model
    assert tiny.model.config._experts_implementation == "moe_ops"
    once = families.run(tiny, ids())
    forwards = [m.forward for m in tiny.model.modules()]
    moe_ops.optimize(tiny.model)
    assert [m.forward for m in tiny.model.modules()] == forwards
    assert torch.equal(families.run(tiny, ids()), once)

    moe_ops.restore(tiny.model)
    assert tiny.model.config._experts_implementation == implementation
    assert torch.equal(families.run(tiny, ids()), want)
    state_after, attributes_after = snapshot(tiny.model)
    assert attributes_after == attributes
    assert all(torch.equal(state[k], v) for k, v in state_after.items())
    assert state.keys() == state_after.keys()
    moe_ops.restore(tiny.model)  # nothing left to undo


def test_optimize_copies_no_weight(tiny: families.TinyModel) -> None:
    before = {name: p.data_ptr() for name, p in tiny.model.named_parameters()}
    moe_ops.optimize(tiny.model)
    families.run(tiny, ids())
    assert {name: p.data_ptr() for name, p in tiny.model.named_parameters()} == before


def test_an_optimized_model_can_be_copied_and_saved(tiny: families.TinyModel) -> None:
    moe_ops.optimize(tiny.model)
    want = families.run(tiny, ids())
    twin = copy.deepcopy(tiny.model)
    router = twin.model.layers[1].mlp.gate
    assert isinstance(router, OptimizedRouter)
    moe_ops.restore(twin)
    assert type(router) is former_class(tiny.model.model.layers[1].mlp.gate)
    assert tiny.model.config._experts_implementation == "moe_ops"
    buffer = io.BytesIO()
    torch.save(tiny.model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    with torch.no_grad():
        assert torch.equal(loaded(**ids(), use_cache=False).logits, want)


def test_what_wraps_forwards_finds_methods(tiny: families.TinyModel) -> None:
    """So does compressed-tensors, in the first forward of a model that it quantised."""
    stock = families.run(tiny, ids())
    moe_ops.optimize(tiny.model)
    want = families.run(tiny, ids())
    calls: list[str] = []
    for module in tiny.model.modules():
        assert module.forward.__self__ is module

        def wrapped(self: nn.Module, *args: object, inner=module.forward.__func__, **kw: object):
            calls.append(type(self).__name__)
            return inner(self, *args, **kw)

        module.forward = wrapped.__get__(module)
    assert torch.equal(families.run(tiny, ids()), want)
    assert calls.count("Qwen3MoeTopKRouter") == 2
    moe_ops.restore(tiny.model)
    assert torch.equal(families.run(tiny, ids()), stock)


def test_optimize_refuses_what_is_not_a_transformers_model() -> None:
    with pytest.raises(TypeError, match=r"PreTrainedModel, got Linear; give what a wrapper h"):
        moe_ops.optimize(nn.Linear(2, 2))


def test_training_gives_stocks_gradients(tiny: families.TinyModel) -> None:
    def gradients(model: nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        model(**ids(), use_cache=False).logits.square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    want = gradients(tiny.model)
    moe_ops.optimize(tiny.model)
    got = gradients(tiny.model)
    assert len(got) == len(want) > 0
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, Tol(1e-5, "float32 sums in another order"))


def test_frozen_experts_still_pass_gradients_to_their_input(tiny: families.TinyModel) -> None:
    moe_ops.optimize(tiny.model)
    tiny.model.requires_grad_(False)
    embeddings = tiny.model.get_input_embeddings()(ids()["input_ids"]).detach()
    embeddings.requires_grad_(True)
    tiny.model(inputs_embeds=embeddings, use_cache=False).logits.sum().backward()
    assert embeddings.grad is not None and bool(embeddings.grad.abs().sum() > 0)


def test_autocast_runs_and_stays_close(tiny: families.TinyModel) -> None:
    want = families.run(tiny, ids())
    moe_ops.optimize(tiny.model)
    with torch.autocast("cpu", torch.bfloat16):
        got = families.run(tiny, ids())
    assert bool(got.isfinite().all())
    assert float((got.float() - want).abs().max()) < 0.2 * float(want.abs().max())


def test_an_unknown_gate_falls_back_with_one_reason(
    tiny: families.TinyModel, warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_gate(self: nn.Module, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up * 2

    experts = type(next(iter(families.experts(tiny.model).values())))
    monkeypatch.setattr(experts, "_apply_gate", other_gate)
    want = families.run(tiny, ids())
    moe_ops.optimize(tiny.model)
    assert_close(families.run(tiny, ids()), want, Tol(1e-5, "float32 routing weights"))
    assert [m.split(" (")[0] for m in warnings.messages] == [
        "Qwen3MoeExperts runs on transformers' grouped_mm: its gate is an unknown function"
    ]


def test_a_router_with_changed_code_keeps_it(
    tiny: families.TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = type(tiny.model.model.layers[1].mlp.gate)

    def changed(self: nn.Module, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = nn.functional.linear(hidden_states, self.weight) * 1.5
        weights, indices = logits.float().softmax(-1).topk(self.top_k, dim=-1)
        return logits, weights, indices

    monkeypatch.setattr(router, "forward", changed)
    moe_ops.optimize(tiny.model)
    assert tiny.model._moe_ops_state.routers == ()


class Experts(nn.Module):
    _apply_gate = adapter._default_apply_gate


def experts_module(**changes: object) -> nn.Module:
    """A bare experts module with the flags that transformers' decorator sets."""
    m = Experts()
    m.gate_up_proj = nn.Parameter(torch.randn(4, 16, 8), requires_grad=False)
    m.down_proj = nn.Parameter(torch.randn(4, 8, 8), requires_grad=False)
    m.act_fn = nn.SiLU()
    flags = {
        "has_gate": True,
        "has_bias": False,
        "has_post_expert_norm": False,
        "is_transposed": False,
        "is_concatenated": True,
        "_is_expert_parallel": True,
        "num_experts": 4,
    }
    for name, value in {**flags, **changes}.items():
        setattr(m, name, value)
    return m


REFUSED = {
    "post_norm": ({"has_post_expert_norm": True}, "normalises each expert's output"),
    "interleaved": ({"is_concatenated": False}, "interleaved, but its gate splits"),
    "activation": ({"act_fn": nn.Mish()}, r"its activation \(Mish\) is not one of"),
    "dtype": (
        {"gate_up_proj": nn.Parameter(torch.zeros(4, 16, 8, dtype=torch.int8), False)},
        "its weights are torch.int8",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_expressed_is_described(name: str) -> None:
    changes, reason = REFUSED[name]
    found = adapter.describe(experts_module(**changes))
    assert isinstance(found, str)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(found)


def test_sentinel_ids_of_expert_parallelism_add_nothing() -> None:
    module = experts_module()
    x, weights = torch.randn(5, 8), torch.rand(5, 2)
    routing = torch.tensor([[0, 4], [4, 4], [1, 2], [3, 4], [2, 0]])  # 4 = not on this rank
    masked = weights.masked_fill(routing == 4, 0.0)
    with torch.no_grad():
        got = adapter.experts_forward(module, x, routing, weights)
        want = grouped_mm_experts_forward(module, x, routing, masked)
    torch.testing.assert_close(got, want)
    assert bool((got[1] == 0).all())


def moe_nodes(exported: torch.export.ExportedProgram) -> list[str]:
    names = (str(n.target) for n in exported.graph.nodes if n.op == "call_function")
    return sorted(n for n in names if n.startswith(("moe_ops.", "transformers.")))


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


@one_in(
    2,
    pytest.mark.parametrize(
        ("strict", "scheme"),
        [
            *((True, "int8_w8a16"), (False, None)),
            pytest.param(True, None, marks=pytest.mark.every),
            pytest.param(False, "int8_w8a16", marks=pytest.mark.every),
        ],
    ),
)
def test_an_exported_model_keeps_the_ops(
    strict: bool, scheme: str | None, tiny: families.TinyModel, warnings: pytest.LogCaptureFixture
) -> None:
    if scheme is None:
        moe_ops.optimize(tiny.model)
    else:
        moe_ops.quantize_model(tiny.model, scheme, progress=False)
    want = families.run(tiny, ids())
    with torch.no_grad():
        exported = torch.export.export(Logits(tiny.model), tuple(ids().values()), strict=strict)
    layers = len(families.experts(tiny.model))
    assert moe_nodes(exported) == [
        *["moe_ops.experts.default"] * layers, *["moe_ops.route.default"] * layers
    ]  # fmt: skip
    assert warnings.messages == []
    with torch.no_grad():
        got = exported.module()(*ids().values())
    assert_close(got, want, Tol(1e-5, "float32 sums in another order"))


@pytest.mark.parametrize("mode", ["fake", "meta"])
def test_without_memory_the_ops_run_too(
    mode: str, tiny: families.TinyModel, warnings: pytest.LogCaptureFixture
) -> None:
    with FakeTensorMode() if mode == "fake" else torch.device("meta"), torch.no_grad():
        model = type(tiny.model)(tiny.model.config).eval()
        block = moe_ops.optimize(model).model.layers[1].mlp
        x = torch.empty(1, 5, model.config.hidden_size, dtype=model.dtype)
        with Counted() as counted:
            out = block(x)
    assert type(out) is type(x) and out.device == x.device and out.shape == x.shape
    assert counted.names == ["moe_ops.route.default", "moe_ops.experts.default"]
    assert warnings.messages == []


class Counted(TorchDispatchMode):
    """The ops of ours, and fallbacks of transformers, that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if str(func).startswith(("moe_ops.", "transformers.")):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scheme", ["", "int4_w4a16", "fp8_w8a8", "mxfp4_w4a16"])
def test_layers_of_an_optimized_model_share_what_is_compiled(
    tiny: families.TinyModel, scheme: str
) -> None:
    moe_ops.optimize(tiny.model)
    if scheme:
        moe_ops.quantize_model(tiny.model, scheme)
    layers = [layer.mlp for layer in tiny.model.model.layers if hasattr(layer.mlp, "experts")]
    assert len(layers) > 1
    counter = CompileCounter()
    call = torch.compile(call_module, backend=counter, fullgraph=True)
    x_BTD = torch.randn(1, 5, tiny.model.config.hidden_size)
    with torch.inference_mode():
        for layer in layers:
            call(layer, x_BTD)
    assert counter.frame_count == 1


def test_a_compiled_twin_follows_optimize_restore_and_quantize_model() -> None:
    """As they change classes and attributes of modules, not weights alone."""
    model = qwen()
    twin = twin_of(model)
    follow = twin._moe_ops_generation.follow

    def kinds(one: nn.Module) -> list[type]:
        return [type(module) for module in one.model.modules()]

    want = logits(model)
    for change in (moe_ops.optimize, moe_ops.restore):
        change(model)
        follow()
        assert kinds(twin) == kinds(model)
        assert torch.equal(logits(twin), logits(model))
        assert_close(logits(twin), want, Tol(1e-5, "float32 sums in another order"))
    moe_ops.quantize_model(model, "int8_w8a16", progress=False)
    follow()
    assert kinds(twin) == kinds(model)
    assert torch.equal(logits(twin), logits(model)) and not torch.equal(logits(twin), want)
    assert twin.state_dict().keys() == model.state_dict().keys()

"""Layers for Hugging Face's kernels: on modules of transformers, and in the package if it is
installed. It is not among what the tests install: most of what it depends on is for signatures."""

from __future__ import annotations

import copy
import importlib.metadata
import inspect
from collections.abc import Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from moe_ops.hf import experts as adapter
from moe_ops.integrations import kernels as ours
from moe_ops.testing import TOL, assert_close
from tests.hf import families

# By its distribution, as tests/kernels has the same name where a folder will do.
needs_kernels = pytest.mark.skipif(
    not list(importlib.metadata.distributions(name="kernels")),
    reason="the package kernels is not installed",
)
MODEL = TOL["model", torch.float32]
FAMILIES = ["qwen3_moe", "gpt_oss", pytest.param("mixtral", marks=pytest.mark.every)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each call of the op `experts` by a module of transformers."""
    made: list[int] = []
    op = adapter.experts

    def counting(*args: Any, **options: Any) -> torch.Tensor:
        made.append(1)
        return op(*args, **options)

    monkeypatch.setattr(adapter, "experts", counting)
    return made


def stand_in(model: nn.Module, replaced: dict[str, type[nn.Module]]) -> None:
    """What `kernelize` does with modules of these classes."""
    for module in model.modules():
        layer = replaced.get(type(module).__name__)
        if layer is not None:
            module.forward = MethodType(layer.forward, module)


REPLACED = {
    "experts": ("qwen3_moe", {"Qwen3MoeExperts": ours.Experts}),
    "interleaved_experts": ("gpt_oss", {"GptOssExperts": ours.Experts}),
    "block": ("gpt_oss", {"GptOssMLP": ours.Block}),
}


@pytest.mark.parametrize(("family", "replaced"), REPLACED.values(), ids=REPLACED)
def test_a_layer_computes_what_the_module_does(
    family: str, replaced: dict[str, type[nn.Module]], calls: list[int]
) -> None:
    tiny = families.build(family)
    want = families.run(tiny, tiny.inputs)
    assert not calls
    stand_in(tiny.model, replaced)
    assert_close(families.run(tiny, tiny.inputs), want, MODEL)
    assert len(calls) == len(families.experts(tiny.model))


@pytest.mark.parametrize("layer", ours.LAYERS.values(), ids=ours.LAYERS)
def test_a_layer_is_what_kernels_takes(layer: type[nn.Module]) -> None:
    own = {name for name, _ in inspect.getmembers(layer)}
    own -= {name for name, _ in inspect.getmembers(nn.Module)}
    assert own == {"can_torch_compile", "has_backward"}
    assert layer.__init__ is nn.Module.__init__


def test_a_mapping_has_the_layers_that_are_named() -> None:
    assert list(ours.mapping()) == [ours.EXPERTS, ours.BLOCK]
    (named,) = ours.mapping(ours.EXPERTS).items()
    assert named[0] == ours.EXPERTS
    assert {repo.load() for repo in named[1].values()} == {ours.Experts}
    with pytest.raises(ValueError, match="no layer Mixtral; take of MoeOpsExperts, MegaBlocks"):
        ours.mapping(ours.EXPERTS, "Mixtral")


def hooked(block: nn.Module) -> None:
    block.experts._is_hooked = True


def packed(block: nn.Module) -> None:
    block.experts = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [(hooked, "GptOssExperts: its experts are shared"), (packed, "Linear: it holds no stacked")],
    ids=["shared", "packed"],
)
def test_a_block_refuses_experts_by_name(change: Any, said: str) -> None:
    tiny = families.build("gpt_oss")
    block = next(m for m in tiny.model.modules() if type(m).__name__ == "GptOssMLP")
    change(block)
    stand_in(block, {"GptOssMLP": ours.Block})
    with pytest.raises(TypeError, match=said):
        block(torch.randn(1, 2, tiny.model.config.hidden_size))


@pytest.fixture
def named() -> Iterator[list[nn.Module]]:
    """Models whose classes lose their names again."""
    models: list[nn.Module] = []
    yield models
    for cls in {type(m) for model in models for m in model.modules()}:
        for name in ("kernel_layer_name", "kernel_condition"):
            if name in vars(cls):
                delattr(cls, name)


@needs_kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_kernelize_runs_experts_by_the_op(
    family: str, named: list[nn.Module], calls: list[int]
) -> None:
    import kernels

    tiny = families.build(family)
    want = families.run(tiny, tiny.inputs)
    named.append(tiny.model)
    assert ours.name_experts(tiny.model) == {}
    assert ours.name_experts(tiny.model) == {}  # again
    mode = kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE
    with kernels.use_kernel_mapping(ours.mapping()):
        kernels.kernelize(tiny.model, mode=mode, device="cpu", use_fallback=False)
    assert_close(families.run(tiny, tiny.inputs), want, MODEL)
    assert len(calls) == len(families.experts(tiny.model))


@needs_kernels
def test_kernelize_runs_the_block_by_the_name_of_transformers(
    named: list[nn.Module], calls: list[int]
) -> None:
    import kernels

    tiny = families.build("gpt_oss")
    want = families.run(tiny, tiny.inputs)
    named.append(tiny.model)
    for cls in {type(m) for m in tiny.model.modules() if type(m).__name__ == "GptOssMLP"}:
        # As transformers does where it finds a version of kernels that it takes.
        kernels.replace_kernel_forward_from_hub(cls, ours.BLOCK)
    with kernels.use_kernel_mapping(ours.mapping(ours.BLOCK)):
        kernels.kernelize(tiny.model, mode=kernels.Mode.INFERENCE, device="cpu", use_fallback=False)
    assert_close(families.run(tiny, tiny.inputs), want, MODEL)
    assert len(calls) == len(families.experts(tiny.model))


@needs_kernels
def test_a_kernelized_model_compiles_to_one_graph(named: list[nn.Module]) -> None:
    import kernels

    tiny = families.build("qwen3_moe")
    want = families.run(tiny, tiny.inputs)
    named.append(tiny.model)
    ours.name_experts(tiny.model)
    mode = kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE
    with kernels.use_kernel_mapping(ours.mapping()):
        kernels.kernelize(tiny.model, mode=mode, device="cpu", use_fallback=False)
    compiled = copy.copy(tiny.model)
    compiled.forward = torch.compile(tiny.model.forward, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        out = compiled.forward(**tiny.inputs, use_cache=False).logits
    assert_close(out, want, MODEL)


@needs_kernels
def test_training_keeps_the_forward_of_transformers(
    named: list[nn.Module], calls: list[int]
) -> None:
    import kernels

    tiny = families.build("qwen3_moe")
    named.append(tiny.model)
    ours.name_experts(tiny.model)
    with kernels.use_kernel_mapping(ours.mapping()):
        kernels.kernelize(tiny.model, mode=kernels.Mode.TRAINING, device="cpu")
        families.run(tiny, tiny.inputs)
        assert not calls
        with pytest.raises(ValueError, match="does not support"):
            kernels.kernelize(
                tiny.model, mode=kernels.Mode.TRAINING, device="cpu", use_fallback=False
            )


@needs_kernels
def test_experts_that_the_op_cannot_express_keep_their_forward(
    named: list[nn.Module], calls: list[int]
) -> None:
    import kernels

    tiny = families.build("muse_spark")
    want = families.run(tiny, tiny.inputs)
    named.append(tiny.model)
    kept = ours.name_experts(tiny.model)
    assert list(kept) == list(families.experts(tiny.model))
    assert all("normalises each expert's output" in reason for reason in kept.values())
    with kernels.use_kernel_mapping(ours.mapping()):
        kernels.kernelize(tiny.model, mode=kernels.Mode.INFERENCE, device="cpu", use_fallback=False)
    assert all("forward" not in vars(m) for m in families.experts(tiny.model).values())
    assert torch.equal(families.run(tiny, tiny.inputs), want)
    assert not calls


@needs_kernels
def test_a_class_that_has_another_name_keeps_it(named: list[nn.Module]) -> None:
    import kernels

    tiny = families.build("mixtral")
    named.append(tiny.model)
    module = next(iter(families.experts(tiny.model).values()))
    kernels.replace_kernel_forward_from_hub(type(module), "Theirs")
    kept = ours.name_experts(tiny.model)
    assert set(kept.values()) == {"its class has the name 'Theirs' for kernels already"}
    assert type(module).kernel_layer_name == "Theirs"

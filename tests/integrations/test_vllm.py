"""The plugin of vLLM on a stand-in: what switches it on, what layers compute, what is refused."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops.integrations import vllm as plugin
from moe_ops.testing import TOL, assert_close
from tests.integrations.vllm_layers import LAYERS, D, E, I, K, Layer
from tests.sources import ROOT

TOLERANCE = TOL["experts", torch.float32]
NAME = "model.layers.3.mlp.experts"
pytestmark = pytest.mark.usefixtures("vllm")


def registered() -> dict[str, type]:
    from vllm.model_executor.custom_op import op_registry_oot

    return op_registry_oot


def runner(
    layer: Layer, weights: dict[str, Tensor], dtype: torch.dtype = torch.float32, **parallel: Any
) -> torch.nn.Module:
    """What vLLM puts in place of an `experts` child, with its rank's weights."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.models.transformers.moe import TransformersMoERunner

    options = dict(layer.options)
    named = {n: options.pop(n) for n in ("is_lora_enabled", "in_dtype") if n in options}
    config = FusedMoEConfig(
        E, layer.top_k, D, I, MoEActivation(layer.activation), has_bias=layer.has_bias,
        moe_parallel_config=FusedMoEParallelConfig(**parallel), **named,
    )  # fmt: skip
    experts = RoutedExperts(NAME, dtype, config, **options)
    experts.load(**weights)
    experts.quant_method.process_weights_after_loading(experts)
    return TransformersMoERunner(experts)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_a_layer_computes_what_it_says(layer: Layer) -> None:
    plugin.register()
    weights, given = layer.weights(), layer.tokens()
    assert_close(runner(layer, weights)(*given), layer.loop(weights, *given), TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_layers_of_16_bits(dtype: torch.dtype) -> None:
    plugin.register()
    layer = LAYERS["silu_bias"]
    weights = {name: t.to(dtype) for name, t in layer.weights().items()}
    x_TD, ids_TK, scores_TK = layer.tokens()
    out = runner(layer, weights, dtype)(x_TD.to(dtype), ids_TK, scores_TK)
    wide = {name: t.float() for name, t in weights.items()}
    want = layer.loop(wide, x_TD.to(dtype).float(), ids_TK, scores_TK)
    assert out.dtype == dtype
    assert_close(out, want, TOL["experts", dtype])


SPLIT = {
    "two_of_columns": [{"tp_size": 2, "tp_rank": r} for r in range(2)],
    "two_of_experts": [{"ep_size": 2, "ep_rank": r} for r in range(2)],
    "four_of_experts": [{"ep_size": 4, "ep_rank": r} for r in range(4)],
}


@pytest.mark.parametrize("ranks", SPLIT.values(), ids=SPLIT)
@pytest.mark.parametrize("name", ["silu", "oai_halves", "silu_no_mul"])
def test_the_parts_of_ranks_sum_up_to_the_layer(name: str, ranks: list[dict[str, int]]) -> None:
    plugin.register()
    layer = LAYERS[name]
    weights, given = layer.weights(), layer.tokens()
    parts = [runner(layer, weights, **rank)(*given) for rank in ranks]
    assert_close(torch.stack(parts).sum(0), layer.loop(weights, *given), TOLERANCE)


def test_interleaved_experts_are_split_by_expert() -> None:
    plugin.register()
    layer = LAYERS["gpt_oss"]
    weights, given = layer.weights(), layer.tokens()
    parts = [runner(layer, weights, **rank)(*given) for rank in SPLIT["two_of_experts"]]
    assert_close(parts[0] + parts[1], layer.loop(weights, *given), TOLERANCE)


def test_no_tokens() -> None:
    plugin.register()
    layer = LAYERS["gpt_oss"]
    x_TD, ids_TK, scores_TK = layer.tokens()
    out = runner(layer, layer.weights())(x_TD[:0], ids_TK[:0], scores_TK[:0])
    assert out.shape == (0, D)


def test_a_layer_without_weights_is_told_apart() -> None:
    plugin.register()
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    from moe_ops.integrations.vllm.method import ExpertsMethod

    method = ExpertsMethod(FusedMoEConfig(E, K, D, I, MoEActivation.SILU))
    x_TD, ids_TK, scores_TK = LAYERS["silu"].tokens()
    with pytest.raises(RuntimeError, match="call create_weights first"):
        method.apply(None, x_TD, scores_TK, ids_TK, None, None)


REFUSED: dict[str, tuple[Layer, dict[str, Any], str]] = {
    "lora": (Layer(options={"is_lora_enabled": True}), {}, "LoRA adapters"),
    "data": (Layer(), {"dp_size": 2}, "dp_size=2 is not served"),
    "context": (Layer(), {"pcp_size": 4}, "pcp_size=4 is not served"),
    "sequence": (Layer(), {"sp_size": 2}, "sp_size=2 is not served"),
    "interleaved": (Layer("swigluoai"), {"tp_size": 2}, "'swigluoai' over tp_size=2"),
    "weight_on_input": (
        Layer(options={"apply_router_weight_on_input": True}), {},
        "with one expert a token, got 2",
    ),
    "dtype": (Layer(options={"in_dtype": torch.float64}), {}, "got torch.float64"),
    "situ": (Layer("situ"), {}, "activation 'situ' is not served, these are: silu, gelu"),
    "swiglustep": (Layer("swiglustep"), {}, "'swiglustep' is not served"),
    "relu2": (Layer("relu2"), {}, "'relu2' is not served"),
    "no_limit": (Layer("swigluoai_uninterleave"), {}, "needs a swiglu_limit"),
    "silu_alpha": (
        Layer(options={"swiglu_alpha": 1.702}), {},
        "'silu' is served without swiglu_alpha and swiglu_beta, got 1.702 and None",
    ),
    "gelu_beta": (Layer("gelu", options={"swiglu_beta": 1.0}), {}, "got None and 1.0"),
    "no_alpha": (
        Layer("relu2_no_mul", options={"swiglu_alpha": 0.0}), {}, "swiglu_beta, got 0.0 and None",
    ),
    "gelu_limit": (Layer("gelu", options={"swiglu_limit": 7.0}), {}, "without a swiglu_limit"),
}  # fmt: skip


@pytest.mark.parametrize(("layer", "parallel", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_served_is_named_before_weights_are_made(
    layer: Layer, parallel: dict[str, Any], said: str
) -> None:
    plugin.register()
    with pytest.raises(NotImplementedError, match=said) as raised:
        runner(layer, {}, **parallel)
    assert NAME in str(raised.value) and "VLLM_PLUGINS" in str(raised.value)


def test_all_that_is_not_served_is_named_at_once() -> None:
    plugin.register()
    with pytest.raises(NotImplementedError, match=r"dp_size=2.*sp_size=3.*'situ'"):
        runner(Layer("situ"), {}, dp_size=2, sp_size=3)


def test_vllms_log_says_once_that_the_op_runs(caplog: pytest.LogCaptureFixture) -> None:
    plugin.register()
    with caplog.at_level(logging.INFO, logger="vllm"):
        with pytest.raises(NotImplementedError):
            runner(Layer("situ"), {})
        assert not caplog.messages
        for layer in (LAYERS["silu"], LAYERS["gelu"]):
            runner(layer, layer.weights())
    assert caplog.messages == ["Experts that are not quantised run by moe_ops.experts"]


def test_vllm_refuses_to_move_experts() -> None:
    plugin.register()
    with pytest.raises(NotImplementedError, match="EPLB is not supported ExpertsMethod"):
        runner(Layer(), {}, enable_eplb=True)


def test_the_entry_point_is_the_plugin() -> None:
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11 to read pyproject.toml")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (found,) = project["entry-points"]["vllm.general_plugins"].items()
    module, _, function = found[1].partition(":")
    assert found[0] == plugin.PLUGIN
    assert getattr(sys.modules[module], function) is plugin.plugin


@pytest.mark.parametrize(
    ("plugins", "on"),
    [(None, False), ([], False), (["other"], False), (["other", "moe_ops"], True)],
    ids=["unset", "none", "other", "named"],
)
def test_it_is_on_where_it_is_named(plugins: list[str] | None, on: bool) -> None:
    from vllm import envs

    envs.VLLM_PLUGINS = plugins
    plugin.plugin()
    assert bool(registered()) is on


def test_it_may_be_registered_again() -> None:
    plugin.register()
    (ours,) = registered().values()
    plugin.register()
    assert list(registered().values()) == [ours]


def test_another_plugin_in_its_place_is_named() -> None:
    registered()["UnquantizedFusedMoEMethod"] = Path
    with pytest.raises(RuntimeError, match=r"pathlib\.Path is already in place"):
        plugin.register()


def test_a_vllm_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = plugin.contract.FUNCTIONS[-2]
    other = replace(wanted, parameters=(*wanted.parameters, "colour"))
    gone = replace(wanted, name="UnquantizedFusedMoEMethod.run")
    field = replace(plugin.contract.NAMES[-1], names=("colour",))
    monkeypatch.setattr(plugin.contract, "FUNCTIONS", (other, gone))
    monkeypatch.setattr(plugin.contract, "NAMES", (field,))
    with pytest.raises(RuntimeError, match=r"does not fit vLLM 0\.33\.0") as raised:
        plugin.register()
    for said in ("not layer, x, ", "there is no UnquantizedFusedMoEMethod.run", "no colour"):
        assert said in str(raised.value)
    assert not registered()

"""Quantised checkpoints: what the layer holds decodes to what the checkpoint stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops.layer import MoELayer
from moe_ops.ops.activate import Activation
from moe_ops.parallel.config import ParallelConfig
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.formats import Format
from moe_ops.weights import load_checkpoint
from tests.chosen import in_turn
from tests.two_scales import dequantize
from tests.weights import checkpoints
from tests.weights.checkpoints import (
    LAYOUTS,
    PREFIX,
    PROJECTIONS,
    D,
    E,
    I,
    Layout,
    store,
    write,
    write_gpt_oss,
)

SPLITS = {
    "one": [ParallelConfig()],
    "tp2": [ParallelConfig.of(tp=2, tp_rank=r) for r in range(2)],
    "ep2_uneven": [ParallelConfig.of(tp=2, tp_rank=r, expert_parallel=True) for r in range(2)],
    "dp2_ep": [ParallelConfig.of(dp=2, dp_rank=r, expert_parallel=True) for r in range(2)],
}


def layer_of(
    layout: Layout,
    config: ParallelConfig,
    *,
    per_expert_inputs: bool = False,
    two_global_scales: bool = False,
    **more: Any,
) -> MoELayer:
    quant = QuantConfig(
        weights=layout.weights,
        inputs=layout.inputs,
        static_inputs=layout.static,
        per_expert_inputs=per_expert_inputs,
        two_global_scales=two_global_scales,
    )
    return MoELayer(
        E, 2, D, I, quant=quant, parallel=config, tokens="replicated", dtype=torch.float32, **more
    )


def decoded(layer: MoELayer, name: str) -> Tensor:
    assert layer.quant is not None
    tensors = (getattr(layer, f"{name}_{what}") for what in ("weight", "scale"))
    zero, scale = (getattr(layer, f"{name}_{what}") for what in ("zero", "global_scale"))
    of = layer.activation.interleaved and name == "w13"
    format = Format.of(layer.quant.weights)
    return dequantize(*tensors, format, zero, scale, interleaved=of)


def check_values(layer: MoELayer, values: dict[str, Tensor]) -> None:
    """The layer's weights are this rank's part of the values, to the bit."""
    s = layer.sizes
    ids = [layer.placement.ids_of(layer.parallel.ep_rank)[i] for i in range(s.E)]
    cut = slice(s.first, s.first + s.used)
    w13, w2 = decoded(layer, "w13"), decoded(layer, "w2")
    D, n = s.hidden_size, s.used
    if layer.activation.interleaved:
        gate, up = w13[:, 0::2], w13[:, 1::2]
    else:
        gate, up = w13.chunk(2, 1)
    for got, want in (
        (gate[:, :n, :D], values["w1"][ids][:, cut]),
        (up[:, :n, :D], values["w3"][ids][:, cut]),
        (w2[:, :D, :n], values["w2"][ids][:, :, cut]),
    ):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


@pytest.mark.slow
@in_turn(pytest.mark.parametrize("split", SPLITS), pytest.mark.parametrize("name", LAYOUTS))
def test_a_layer_holds_what_the_checkpoint_stands_for(
    name: str, split: str, tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    made = write(tmp_path, layout)
    for config in SPLITS[split]:
        layer = layer_of(layout, config)
        report = load_checkpoint({PREFIX: layer}, tmp_path, style="qwen", progress=False)
        assert report.complete, str(report)
        assert len(report.loaded) + len(report.elsewhere) == len(made.entries)
        check_values(layer, made.values)


@pytest.mark.parametrize("name", [n for n, layout in LAYOUTS.items() if not layout.inputs])
def test_outputs_are_those_of_the_decoded_weights(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    values = write(tmp_path, layout).values
    plain = MoELayer(E, 2, D, I, dtype=torch.float32)
    with torch.no_grad():
        plain.w13_weight.copy_(torch.cat((values["w1"], values["w3"]), 1))
        plain.w2_weight.copy_(values["w2"])
        x, logits = torch.randn(9, D), torch.randn(9, E)
        want = plain(x, logits)
        for split in SPLITS.values():
            total = torch.zeros_like(want)
            for config in split:
                layer = layer_of(layout, config)
                load_checkpoint({PREFIX: layer}, tmp_path, style="qwen", progress=False)
                total += layer(x, logits)
            torch.testing.assert_close(total, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


@in_turn(
    pytest.mark.parametrize("group", [8, 16, 48, 96]),
    pytest.mark.parametrize(
        "name", ["gptq_int4", "gptq_uint4", "gptq_int8", "awq", "packed_uint4"]
    ),
)
def test_groups_of_other_sizes(
    name: str, group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "GROUP", group)
    layout, D, I = LAYOUTS[name], 96, 192  # noqa: E741
    made = write(tmp_path, layout, D, I)
    quant = QuantConfig(weights=layout.weights.replace("1x32", f"1x{group}"))
    for config in SPLITS["tp2"]:
        layer = MoELayer(E, 2, D, I, quant=quant, parallel=config)
        assert load_checkpoint({PREFIX: layer}, tmp_path, style="qwen", progress=False).complete
        check_values(layer, made.values)


SIZES: dict[str, dict[str, Any]] = {
    "as_it_is": {},
    "padded": {"hidden_multiple": 96, "intermediate_multiple": 96},
    "rows_kept_alternating": {"interleaved": True},
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("more", SIZES.values(), ids=SIZES)
def test_gpt_oss_blocks(more: dict[str, Any], tp: int, tmp_path: Path) -> None:
    made = write_gpt_oss(tmp_path)
    options = dict(more)
    activation = Activation(kind="silu", interleaved=options.pop("interleaved", False))
    x, logits = torch.randn(9, D), torch.randn(9, E)
    plain = MoELayer(E, 2, D, I, dtype=torch.float32, bias=True)
    v = made.values
    with torch.no_grad():
        plain.w13_weight.copy_(torch.cat((v["w1"], v["w3"]), 1))
        plain.w13_bias.copy_(torch.cat((v["b1"], v["b3"]), 1))
        plain.w2_weight.copy_(v["w2"])
        plain.w2_bias.copy_(v["b2"])
        want = plain(x, logits)
        total = torch.zeros_like(want)
        for rank in range(tp):
            layer = MoELayer(
                E, 2, D, I, dtype=torch.float32, bias=True, quant="mxfp4_w4a16",
                activation=activation, parallel=ParallelConfig.of(tp=tp, tp_rank=rank), **options,
            )  # fmt: skip
            report = load_checkpoint({PREFIX: layer}, tmp_path, style="gpt-oss", progress=False)
            assert report.complete, str(report)
            check_values(layer, v)
            total += layer(x, logits)
    torch.testing.assert_close(total, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


def test_one_scale_serves_all_inputs_and_every_rank_finds_it(tmp_path: Path) -> None:
    layout = LAYOUTS["modelopt_fp8"]
    entries = write(tmp_path, layout).entries
    for e in range(E):
        for projection in ("gate_proj", "up_proj"):
            entries[f"{PREFIX}.experts.{e}.{projection}.input_scale"] = torch.tensor(0.1 * (e + 1))
    store(tmp_path, entries, layout.config)
    for config in SPLITS["ep2_uneven"]:
        layer = layer_of(layout, config)
        load_checkpoint({PREFIX: layer}, tmp_path, style="qwen", progress=False)
        assert layer.x_scale.item() == pytest.approx(0.3)
        assert layer.h_scale.item() == pytest.approx(0.05)


@pytest.mark.parametrize("name", ["modelopt_fp8", "modelopt_nvfp4"])
@pytest.mark.parametrize("split", SPLITS)
def test_a_layer_that_has_one_for_each_expert_keeps_them(
    split: str, name: str, tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    entries = write(tmp_path, layout).entries
    want = {"x_scale": 0.1 * torch.arange(1, E + 1), "h_scale": 0.2 * torch.arange(1, E + 1)}
    for e in range(E):
        for shard, projection in PROJECTIONS.items():
            value = want["h_scale" if shard == "w2" else "x_scale"][e]
            entries[f"{PREFIX}.experts.{e}.{projection}.input_scale"] = value.clone()
    store(tmp_path, entries, layout.config)
    for config in SPLITS[split]:
        layer = layer_of(layout, config, per_expert_inputs=True)
        report = load_checkpoint({PREFIX: layer}, tmp_path, style="qwen", progress=False)
        assert report.complete, str(report)
        assert len(report.loaded) + len(report.elsewhere) == len(entries)
        ids = list(layer.placement.ids_of(config.ep_rank))
        for name, scale_E in want.items():
            assert torch.equal(getattr(layer, name), scale_E[ids])
    del entries[f"{PREFIX}.experts.1.down_proj.input_scale"]
    store(tmp_path, entries, layout.config)
    layer = layer_of(layout, SPLITS["one"][0], per_expert_inputs=True)
    report = load_checkpoint({PREFIX: layer}, tmp_path, style="qwen", progress=False)
    assert report.missing == (f"{PREFIX}.h_scale[1].w2",)


@pytest.mark.parametrize("larger", ["gate_proj", "up_proj"])
@pytest.mark.parametrize(
    ("name", "per_expert"),
    [
        ("modelopt_fp8", False),
        ("modelopt_fp8", True),
        ("modelopt_nvfp4", False),
        ("modelopt_nvfp4", True),
        ("compressed_nvfp4", False),
        ("compressed_nvfp4", True),
    ],
)
def test_of_input_scales_of_gate_and_up_the_larger_one_is_kept(
    name: str, per_expert: bool, larger: str, tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    entries = write(tmp_path, layout).entries
    before = layer_of(layout, ParallelConfig(), per_expert_inputs=per_expert)
    load_checkpoint({PREFIX: before}, tmp_path, style="qwen", progress=False)
    divides = name == "compressed_nvfp4"
    entry = "input_global_scale" if divides else "input_scale"
    entries[f"{PREFIX}.experts.1.{larger}.{entry}"] *= 0.25 if divides else 4
    store(tmp_path, entries, layout.config)
    layer = layer_of(layout, ParallelConfig(), per_expert_inputs=per_expert)
    assert load_checkpoint({PREFIX: layer}, tmp_path, style="qwen", progress=False).complete
    want = before.x_scale.detach().clone()
    want[1 if per_expert else 0] *= 4
    assert torch.equal(layer.x_scale, want)
    assert torch.equal(layer.h_scale, before.h_scale)


def test_zero_points_of_a_symmetric_layer_must_be_the_middle(tmp_path: Path) -> None:
    write(tmp_path, LAYOUTS["gptq_uint4"])
    layer = layer_of(LAYOUTS["gptq_int4"], ParallelConfig())
    with pytest.raises(ValueError, match=r"qzeros: has zero points other than 8, .* uint4:1x32"):
        load_checkpoint({PREFIX: layer}, tmp_path, style="qwen", progress=False)


@pytest.mark.parametrize("name", LAYOUTS)
def test_shared_experts_are_taken_apart(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    made = write(tmp_path, layout)
    g, values = torch.Generator().manual_seed(1), {}
    for shard, projection in PROJECTIONS.items():
        rows, columns = (D, 2 * I) if shard == "w2" else (2 * I, D)
        whole = layout.write(g, rows, columns, shard)
        for suffix, t in whole.entries.items():
            made.entries[f"{PREFIX}.shared_experts.{projection}.{suffix}"] = t
        parts = whole.value.chunk(2, 1 if shard == "w2" else 0)
        values[shard] = torch.cat((made.values[shard], torch.stack(parts)))
    store(tmp_path, made.entries, layout.config)
    layer = layer_of(layout, ParallelConfig(), shared_experts=2)
    assert load_checkpoint({PREFIX: layer}, tmp_path, style="qwen", progress=False).complete
    w13, w2 = decoded(layer, "w13"), decoded(layer, "w2")
    want = torch.cat((values["w1"], values["w3"]), 1)
    torch.testing.assert_close(w13, want, rtol=1e-6, atol=0)
    torch.testing.assert_close(w2, values["w2"], rtol=1e-6, atol=0)


def test_a_scale_that_divides_must_have_an_inverse(tmp_path: Path) -> None:
    layout = LAYOUTS["compressed_nvfp4"]
    entries = write(tmp_path, layout).entries
    name = f"{PREFIX}.experts.1.up_proj.weight_global_scale"
    entries[name].zero_()
    store(tmp_path, entries, layout.config)
    with pytest.raises(ValueError, match=rf"^{name}: scale 0.0 has no finite inverse"):
        load_checkpoint(
            {PREFIX: layer_of(layout, ParallelConfig())}, tmp_path, style="qwen", progress=False
        )

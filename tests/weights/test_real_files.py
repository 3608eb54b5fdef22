"""What files of others hold besides one layout: layers left out, other names, zeros left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_ops.layer import MoELayer
from moe_ops.ops.activate import Activation
from moe_ops.parallel.config import ParallelConfig
from moe_ops.quant.config import QuantConfig
from moe_ops.weights import load_checkpoint
from tests.chosen import in_turn
from tests.weights.checkpoints import (
    LAYOUTS,
    PREFIX,
    PROJECTIONS,
    D,
    E,
    I,
    Layout,
    integers,
    store,
    write,
)
from tests.weights.test_quantized_checkpoints import SPLITS, check_values, layer_of

ONE = ParallelConfig()
QUANTIZED = ("gptq_int4", "awq", "packed_uint4", "fp8_blocks", "modelopt_nvfp4")


def load(layer: MoELayer, folder: Path, **more: Any) -> Any:
    return load_checkpoint(
        {PREFIX: layer}, folder, **{"style": "qwen", "progress": False, **more}
    )  # fmt: skip


def plain(start: str = f"{PREFIX}.experts.") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """bfloat16 experts by the names of Qwen, and stacked by shard."""
    values = {s: torch.randn(E, *((D, I) if s == "w2" else (I, D))).bfloat16() for s in PROJECTIONS}
    return {
        f"{start}{e}.{p}.weight": values[s][e].clone()
        for e in range(E)
        for s, p in PROJECTIONS.items()
    }, values


def check_plain(layer: MoELayer, values: dict[str, Tensor]) -> None:
    gate, up = layer.w13_weight.chunk(2, 1)
    for got, shard in ((gate, "w1"), (up, "w3"), (layer.w2_weight, "w2")):
        assert torch.equal(got, values[shard].float())


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_layer_that_the_checkpoint_leaves_unquantized(name: str, tmp_path: Path) -> None:
    other = PREFIX.replace("0", "1")
    made = write(tmp_path, LAYOUTS[name])
    entries, values = plain(f"{other}.experts.")
    config = LAYOUTS[name].config | {"ignore": [f"re:{other}.*"], "modules_to_not_convert": [other]}
    store(tmp_path, made.entries | entries, config)
    layers = {
        PREFIX: layer_of(LAYOUTS[name], ONE), other: MoELayer(E, 2, D, I, dtype=torch.float32)
    }  # fmt: skip
    report = load_checkpoint(layers, tmp_path, style="qwen", progress=False)
    assert report.complete, str(report)
    check_values(layers[PREFIX], made.values)
    check_plain(layers[other], values)
    with pytest.raises(
        TypeError, match=rf"{other}.*weight: is bfloat16, .* none \(quant=None\) where it leaves"
    ):
        load_checkpoint(
            {other: layer_of(LAYOUTS[name], ONE)}, tmp_path, style="qwen", progress=False
        )


def test_a_layer_that_gpt_oss_leaves_unquantized(tmp_path: Path) -> None:
    """Rows of gate and up alternate, and outputs are columns."""
    w13, w2 = torch.randn(E, D, 2 * I), torch.randn(E, I, D)
    experts = {f"{PREFIX}.experts.gate_up_proj": w13, f"{PREFIX}.experts.down_proj": w2}
    store(tmp_path, experts, {"quant_method": "mxfp4"})
    layer = MoELayer(E, 2, D, I, dtype=torch.float32)
    assert load(layer, tmp_path, style="gpt-oss").complete
    check_plain(layer, {"w1": w13.mT[:, 0::2], "w3": w13.mT[:, 1::2], "w2": w2.mT})


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(D, I, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(I, D, bias=False)


@pytest.mark.parametrize("name", QUANTIZED)
def test_shared_experts_in_16_bits_beside_quantized_ones(name: str, tmp_path: Path) -> None:
    made = write(tmp_path, LAYOUTS[name])
    shared = {
        f"{PREFIX}.shared_experts.{p}.weight": torch.randn(
            (D, I) if s == "w2" else (I, D)
        ).bfloat16()
        for s, p in PROJECTIONS.items()
    }
    store(tmp_path, made.entries | shared, LAYOUTS[name].config)
    layer = layer_of(LAYOUTS[name], ONE, shared_experts=Shared())
    report = load(layer, tmp_path)
    assert report.complete, str(report)
    check_values(layer, made.values)
    for entry, want in shared.items():
        assert torch.equal(layer.get_parameter(entry.removeprefix(f"{PREFIX}.")), want.float())
    with pytest.raises(TypeError, match=r"shared_experts.*weight: is bfloat16, .* and a module wh"):
        load(layer_of(LAYOUTS[name], ONE, shared_experts=1), tmp_path)


BASE = {
    "projection": lambda n: n.replace("_proj.", "_proj.base_layer."),
    "experts": lambda n: n.replace(".experts.", ".experts.base_layer.base_layer."),
    "layer": lambda n: n.replace(f"{PREFIX}.", f"{PREFIX}.base_layer."),
}


@pytest.mark.parametrize("rename", BASE.values(), ids=BASE)
def test_names_with_base_layer(rename: Any, tmp_path: Path) -> None:
    made = write(tmp_path, LAYOUTS["gptq_uint4"])
    gate, adapter = torch.randn(E, D), f"{PREFIX}.gate.lora_A.weight"
    entries = {rename(n): t for n, t in made.entries.items()}
    entries |= {rename(f"{PREFIX}.gate.base_layer.weight"): gate, adapter: torch.zeros(2, D)}
    store(tmp_path, entries, LAYOUTS["gptq_uint4"].config)
    layer = layer_of(LAYOUTS["gptq_uint4"], ONE, internal_gate=True)
    report = load(layer, tmp_path)
    assert (report.missing, report.unexpected) == ((), (adapter,))
    check_values(layer, made.values)
    assert torch.equal(layer.gate.weight, gate)


def without_zeros(made: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t for n, t in made.items() if not n.endswith(("qzeros", "zero_point"))}


AWQ = Layout(integers(4, symmetric=True, kind="awq"), LAYOUTS["awq"].config, LAYOUTS["awq"].weights)
SYMMETRIC = {
    "gptq_4": (LAYOUTS["gptq_int4"], {"sym": True}),
    "gptq_8": (LAYOUTS["gptq_int8"], {"sym": True}),
    "packed_4": (LAYOUTS["packed_int4"], {}),
    "packed_8": (LAYOUTS["packed_int8"], {}),
    "awq": (AWQ, {}),
}


@in_turn(
    pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"]),
    pytest.mark.parametrize("split", ["one", "tp2"]),
    pytest.mark.parametrize("name", SYMMETRIC),
)
def test_symmetric_weights_in_both_kinds_of_formats(
    name: str, split: str, signed: bool, tmp_path: Path
) -> None:
    """With zero points that are all the middle, and without any."""
    layout, said = SYMMETRIC[name]
    made = write(tmp_path, layout)
    element = layout.weights.removeprefix("u")
    wanted = Layout(layout.write, layout.config, element if signed else f"u{element}")
    kinds = {"with": made.entries, "without": without_zeros(made.entries)}
    if name == "awq":  # which always has them
        del kinds["without"]
    for entries in kinds.values():
        store(tmp_path, entries, layout.config | said)
        for config in SPLITS[split]:
            layer = layer_of(wanted, config)
            report = load(layer, tmp_path)
            assert report.complete, str(report)
            check_values(layer, made.values)


def test_zero_points_are_not_made_up(tmp_path: Path) -> None:
    """Where the checkpoint is not symmetric, or has those of another weight, they are wanted."""
    for name, said in (("gptq_uint4", {"sym": False}), ("gptq_uint4", {})):
        made = write(tmp_path, LAYOUTS[name])
        store(tmp_path, without_zeros(made.entries), LAYOUTS[name].config | said)
        with pytest.raises(ValueError, match="no entry has the zero points of its codes"):
            load(layer_of(LAYOUTS[name], ONE), tmp_path)
    group = {"weights": {"num_bits": 4, "symmetric": False}}
    store(
        tmp_path, without_zeros(write(tmp_path, LAYOUTS["packed_uint4"]).entries),
        LAYOUTS["packed_uint4"].config | {"config_groups": {"a": group}},
    )  # fmt: skip
    with pytest.raises(ValueError, match="no entry has the zero points of its codes"):
        load(layer_of(LAYOUTS["packed_uint4"], ONE), tmp_path)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "alternating"])
def test_what_sizes_are_rounded_up_by_stays_zero(interleaved: bool, tmp_path: Path) -> None:
    """A zero point there would make weights of codes that are zero."""
    layout = LAYOUTS["packed_int4"]
    made = write(tmp_path, layout)
    plain_layer = MoELayer(E, 2, D, I, dtype=torch.float32)
    with torch.no_grad():
        plain_layer.w13_weight.copy_(torch.cat((made.values["w1"], made.values["w3"]), 1))
        plain_layer.w2_weight.copy_(made.values["w2"])
        x, logits = torch.randn(9, D), torch.randn(9, E)
        want = plain_layer(x, logits)
        layer = MoELayer(
            E, 2, D, I, quant=QuantConfig(weights=f"u{layout.weights}"), dtype=torch.float32,
            hidden_multiple=96, intermediate_multiple=96,
            activation=Activation(kind="silu", interleaved=interleaved),
        )  # fmt: skip
        assert load(layer, tmp_path).complete
        torch.testing.assert_close(
            layer(x, logits), want, rtol=1e-4, atol=1e-5 * float(want.abs().max())
        )

"""Static scales of inputs, as checkpoints have them: in models, by hand, and through saving."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import moe_ops
from moe_ops.hf.stored import stored_format
from moe_ops.testing import Tol, assert_close
from tests.hf.published import CONFIG, FILE, LAYOUTS, change, configure, write
from tests.hf.test_quantize import decoded, experts_of, logits
from tests.hf.test_saved import check_same

# A code on the edge between two may go the other way: one of 64 columns by an eighth.
TOL = Tol(2e-3, "codes of inputs, of sums in another order")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def float8(x: Tensor, s: Tensor) -> Tensor:
    return (x / s).clamp(-448, 448).to(torch.float8_e4m3fn).float() * s


def int8(x: Tensor, s: Tensor) -> Tensor:
    return (x / s).round().clamp(-127, 127) * s


def nvfp4(x: Tensor, s: Tensor) -> Tensor:
    groups = x.unflatten(-1, (-1, 16))
    of_group = (groups.abs().amax(-1, keepdim=True) / 6 / s).clamp(max=448)
    scale = of_group.to(torch.float8_e4m3fn).float() * s
    nearest = ((groups / scale).abs()[..., None] - E2M1).abs().argmin(-1)
    return (E2M1[nearest] * groups.sign() * scale).flatten(-2)


def of_int8() -> Any:
    """int8 with a scale a row, and static scales of inputs."""
    layout = LAYOUTS["int_channel"]

    def write_static(*args: Any) -> Any:
        made = layout.write(*args)
        made.entries["input_scale"] = torch.ones(1)
        return made

    return replace(layout, write=write_static)


# The layout, the formats, how inputs are rounded, scales of experts' inputs: of gate, up and down.
KINDS: dict[str, tuple[Any, str, str, Callable[[Tensor, Tensor], Tensor], list[list[float]]]] = {
    "modelopt_fp8": (
        LAYOUTS["modelopt_fp8"], "float8_e4m3fn:row", "float8_e4m3fn:tensor", float8,
        [[0.002, 0.003, 0.2], [0.01, 0.004, 0.3], [0.005, 0.005, 0.1]],
    ),
    "int8": (
        of_int8(), "int8:row", "int8:tensor", int8,
        [[0.01, 0.02, 3.0], [0.03, 0.02, 2.0], [0.015, 0.015, 1.0]],
    ),
    "compressed_nvfp4": (
        LAYOUTS["compressed_nvfp4"], "nvfp4", "nvfp4", nvfp4,
        [[0.002, 0.001, 0.25], [0.003, 0.001, 0.5], [0.002, 0.002, 0.125]],
    ),
}  # fmt: skip


def written(folder: Path, name: str) -> list[list[float]]:
    """A checkpoint of a kind, whose scales of inputs differ; those of gate, up and down."""
    layout, *_, scales = KINDS[name]
    write(folder, layout, outside=("o_proj",))

    def edit(entries: dict[str, Tensor]) -> None:
        for entry, t in entries.items():
            if ".experts." in entry and ".input_" in entry:
                _, _, rest = entry.partition(".experts.")
                e, projection, end = rest.split(".")
                value = scales[int(e)][PROJECTIONS.index(projection)]
                entries[entry] = torch.full_like(t, 1 / value if "global" in end else value)

    change(folder, edit)
    return scales


def load(folder: Path, **more: Any) -> PreTrainedModel:
    return moe_ops.from_checkpoint(folder, progress=False, **more)


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS)
def test_scales_are_the_checkpoints_and_round_inputs_as_by_hand(name: str, tmp_path: Path) -> None:
    _, weights, inputs, rounded, _ = KINDS[name]
    scales = torch.tensor(written(tmp_path / "hub", name))
    loaded = load(tmp_path / "hub")
    module = experts_of(loaded)[1]
    stored = stored_format(module)
    assert stored is not None
    assert (stored.w_format, stored.x_format, stored.static_inputs) == (weights, inputs, True)
    sx, sh = scales[:, :2].amax(1), scales[:, 2]
    if inputs == "nvfp4":  # one for all experts
        sx, sh = (s.max().expand(3) for s in (sx, sh))
    torch.testing.assert_close(module.gate_up_proj_input_scale.expand(3), sx)
    torch.testing.assert_close(module.down_proj_input_scale.expand(3), sh)

    x, weights_TK = torch.randn(5, 64), torch.rand(5, 2)
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 1], [2, 1]])
    w13, w2 = (decoded(module, p) for p in ("gate_up_proj", "down_proj"))
    want = torch.zeros(5, 64)
    for t in range(5):
        for k in range(2):
            e = int(ids[t, k])
            gate, up = (w13[e] @ rounded(x[t], sx[e])).chunk(2)
            h = rounded(F.silu(gate) * up, sh[e])
            want[t] += weights_TK[t, k] * (w2[e] @ h)
    assert_close(module(x, ids, weights_TK), want, TOL)
    plain = load(tmp_path / "hub", inputs="")
    assert float((experts_of(plain)[1](x, ids, weights_TK) - want).norm() / want.norm()) > 5e-3

    loaded.save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    check_same(loaded, again)
    assert torch.equal(logits(again), logits(loaded))
    again.half().save_pretrained(tmp_path / "half")
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert torch.equal(experts_of(half)[1].down_proj_input_scale, module.down_proj_input_scale)


def test_a_given_format_leaves_them_out_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="moe_ops")
    written(tmp_path, "modelopt_fp8")
    model = load(tmp_path, inputs="float8_e4m3fn:tensor")
    stored = stored_format(experts_of(model)[0])
    assert stored is not None
    assert not stored.static_inputs
    said = [r.message for r in caplog.records if "left out" in r.message]
    assert "18 static scales of inputs of experts are left out: these inputs are float8" in said[0]
    assert "2 static scales of inputs of other matrices are left out: these inputs are" in said[1]


def lose_one(folder: Path) -> None:
    change(folder, lambda e: e.pop("model.layers.0.mlp.experts.1.down_proj.input_scale"))


def zero_point(value: int) -> Callable[[Path], None]:
    name = "model.layers.0.mlp.experts.1.down_proj.input_zero_point"
    return lambda folder: change(folder, lambda e: e.update({name: torch.tensor([value])}))


def of_zero(folder: Path) -> None:
    name = "model.layers.0.mlp.experts.1.up_proj.input_scale"
    change(folder, lambda e: e.update({name: torch.zeros(1)}))


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "one_missing": (lose_one, r'h_scale\[1\]\.w2 is missing .*or give inputs=""'),
    "a_zero_point": (zero_point(3), r"input_zero_point: inputs have a zero point.*inputs=\"\""),
    "zero": (of_zero, r"1\.up_proj\.input_scale: expert 1 has \[0\.0\], but a scale is above 0"),
}


@pytest.mark.parametrize(("edit", "message"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_right_is_refused(
    edit: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    written(tmp_path, "modelopt_fp8")
    edit(tmp_path)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_a_zero_point_of_zero_is_none(tmp_path: Path) -> None:
    written(tmp_path, "modelopt_fp8")
    zero_point(0)(tmp_path)
    stored = stored_format(experts_of(load(tmp_path))[0])
    assert stored is not None
    assert stored.static_inputs


def test_scales_that_a_saved_model_lacks_are_named(tmp_path: Path) -> None:
    written(tmp_path / "hub", "modelopt_fp8")
    load(tmp_path / "hub").save_pretrained(tmp_path / "ours")
    entries = load_file(tmp_path / "ours" / FILE)
    lost = "model.layers.1.mlp.experts.down_proj_input_scale"
    del entries[lost]
    save_file(entries, tmp_path / "ours" / FILE, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"lacks {lost}, which config.json says"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "ours")


def test_config_json_names_static_inputs_that_there_can_be(tmp_path: Path) -> None:
    written(tmp_path / "hub", "modelopt_fp8")
    load(tmp_path / "hub").save_pretrained(tmp_path / "ours")
    said = {"quant_method": "moe_ops", "weights": "int4:1x32", "inputs": "", "static_inputs": True}
    configure(tmp_path / "ours", quantization_config=said)
    assert (tmp_path / "ours" / CONFIG).is_file()
    with pytest.raises(ValueError, match="static_inputs goes with one scale for the tensor"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "ours")

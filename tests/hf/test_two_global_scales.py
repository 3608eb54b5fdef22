"""NVFP4 checkpoints whose gate and up have global scales of their own, into models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from moe_ops.hf.stored import stored_format
from moe_ops.testing import assert_close
from tests.chosen import in_turn
from tests.hf.published import CONFIG, LAYOUTS, write
from tests.hf.test_published import TOL, check, load
from tests.hf.test_published_names import STACKED, write_each
from tests.hf.test_quantize import decoded, experts_of, logits
from tests.hf.test_saved import check_same
from tests.weights.checkpoints import Layout, Matrix

SECOND = {"modelopt_nvfp4": "weight_scale_2", "compressed_nvfp4": "weight_global_scale"}


def apart(name: str, ratio: float) -> Layout:
    """NVFP4 whose up projections have a global scale so many times that of gate."""
    layout, entry = LAYOUTS[name], SECOND[name]

    def write(g: torch.Generator, rows: int, columns: int, shard: str) -> Matrix:
        made = layout.write(g, rows, columns, shard)
        if shard == "w3":
            divides = name == "compressed_nvfp4"
            before = made.entries[entry]
            after = before / ratio if divides else before * ratio
            made.entries[entry] = after
            was, now = (1 / before, 1 / after) if divides else (before, after)
            made.value = made.value / was * now  # the former is a power of two
        return made

    return replace(layout, write=write)


def scales_of(model: nn.Module) -> list[Tensor]:
    return [m.gate_up_proj_global_scale for m in experts_of(model)]


@in_turn(
    pytest.mark.parametrize("inputs", [None, ""], ids=["static", "floats"]),
    pytest.mark.parametrize("name", SECOND),
)
def test_both_are_kept_and_saved(name: str, inputs: str | None, tmp_path: Path) -> None:
    want = write(tmp_path / "hub", apart(name, 1.1))
    loaded = load(tmp_path / "hub", inputs=inputs)
    for scale_E2 in scales_of(loaded):
        assert scale_E2.shape == (3, 2)
        assert_close(scale_E2[:, 1], 1.1 * scale_E2[:, 0], TOL)
    for module, plain in zip(experts_of(loaded), experts_of(want), strict=True):
        for projection in ("gate_up_proj", "down_proj"):
            assert torch.equal(decoded(module, projection), getattr(plain, projection))
    if inputs == "":
        check(loaded, want)
    loaded.save_pretrained(tmp_path / "ours")
    said = json.loads((tmp_path / "ours" / CONFIG).read_text())["quantization_config"]
    assert said["two_global_scales"] is True
    assert said.get("static_inputs", False) is (inputs is None)
    check_same(loaded, AutoModelForCausalLM.from_pretrained(tmp_path / "ours"))


@pytest.mark.parametrize("ratio", [1.0, 2.0, 0.25])
def test_one_is_kept_where_it_says_the_same(ratio: float, tmp_path: Path) -> None:
    """More backends multiply by one."""
    want = write(tmp_path / "hub", apart("modelopt_nvfp4", ratio))
    loaded = load(tmp_path / "hub", inputs="")
    check(loaded, want)
    assert all(scale_E.shape == (3,) for scale_E in scales_of(loaded))
    loaded.save_pretrained(tmp_path / "ours")
    said = json.loads((tmp_path / "ours" / CONFIG).read_text())["quantization_config"]
    assert "two_global_scales" not in said


def test_a_power_of_two_that_scales_of_blocks_cannot_make_up_for(tmp_path: Path) -> None:
    want = write(tmp_path, apart("modelopt_nvfp4", 2.0**-20))
    loaded = load(tmp_path, inputs="")
    assert scales_of(loaded)[0].shape == (3, 2)
    check(loaded, want)


def test_rows_of_gate_and_up_that_alternate(tmp_path: Path) -> None:
    """gpt-oss has them so, and columns of the scales are gate and up nevertheless."""
    torch.manual_seed(0)
    want = STACKED["gpt_oss"]().float().eval().requires_grad_(False)
    write_each(tmp_path, want, apart("modelopt_nvfp4", 1.3))
    loaded = load(tmp_path, inputs="")
    (scale_E2,) = scales_of(loaded)
    assert_close(scale_E2[:, 1], 1.3 * scale_E2[:, 0], TOL)
    assert_close(logits(loaded), logits(want), TOL)


def test_a_state_dict_goes_to_what_has_as_many(tmp_path: Path) -> None:
    write(tmp_path / "two", apart("modelopt_nvfp4", 1.1))
    write(tmp_path / "one", apart("modelopt_nvfp4", 1.0))
    two, one = (load(tmp_path / name, inputs="") for name in ("two", "one"))
    state: dict[str, Any] = two.state_dict()
    with pytest.raises(RuntimeError, match="gate_up_proj_global_scale: copying a param with shape"):
        one.load_state_dict(state)
    again = load(tmp_path / "two", inputs="")
    again.load_state_dict(state)
    assert stored_format(experts_of(again)[0]).w_format == "nvfp4"

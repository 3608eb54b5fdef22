"""Models in codes are loaded whole: transformers cuts no codes among ranks, nor sends by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import moe_ops
from tests.distributed.ranks import fake_group
from tests.hf.test_quantize import qwen
from tests.hf.test_quantized_linears import quantized
from tests.hf.test_saved import check_same

MODELS: dict[str, dict[str, Any]] = {
    "experts": {"linears": None, "head": None},
    "linears": {"head": None},
    "head": {"linears": None},
}
CUT = "by which transformers cuts weights among ranks, but codes of moe_ops are whole; load the mod"
SENT = "and stages send activations in the dtype of their first weight"


def config_of(**sizes: int) -> Any:
    distributed = pytest.importorskip("transformers.distributed")
    try:
        return distributed.DistributedConfig(**sizes)
    except TypeError:
        pytest.skip(f"this release of transformers has no {', '.join(sizes)}")


@pytest.mark.parametrize("given", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("size", ["tp_size", "fsdp_size", "dp_replicate_size"])
def test_a_model_that_is_cut_is_refused(size: str, given: dict[str, Any], tmp_path: Path) -> None:
    config, model = config_of(**{size: 2}), quantized(**given)
    model.save_pretrained(tmp_path)
    with fake_group(2), pytest.raises(ValueError, match=f"distributed_config has {size}=2, {CUT}"):
        type(model).from_pretrained(tmp_path, distributed_config=config)


@pytest.mark.parametrize("given", [MODELS["experts"], MODELS["head"]], ids=["experts", "head"])
def test_stages_of_layers_in_floats_are_loaded(given: dict[str, Any], tmp_path: Path) -> None:
    config, model = config_of(pp_size=2), quantized(**given)
    model.save_pretrained(tmp_path)
    with fake_group(2):
        stage = type(model).from_pretrained(tmp_path, distributed_config=config)
    check_same(stage.model.layers[0], model.model.layers[0])


def test_stages_of_linear_layers_in_codes_are_refused(tmp_path: Path) -> None:
    config, model, floats = config_of(pp_size=2), quantized(), qwen()
    model.save_pretrained(tmp_path / "codes")
    floats.save_pretrained(tmp_path / "floats")
    with fake_group(2):
        with pytest.raises(ValueError, match=f"has pp_size=2, {SENT}"):
            type(model).from_pretrained(tmp_path / "codes", distributed_config=config)
        stage = type(model).from_pretrained(tmp_path / "floats", distributed_config=config)
        with pytest.raises(ValueError, match=f"has pp_size=2, {SENT}"):
            moe_ops.quantize_model(stage, None, linear_format="int8:row", progress=False)


def test_a_size_of_one_cuts_nothing(tmp_path: Path) -> None:
    model = quantized()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, distributed_config=config_of(tp_size=1))
    check_same(loaded, model)

"""Models in codes whose config.json says other layers, or other formats, than their files hold."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hf.coded_linears import coded
from tests.hf.test_quantize import logits
from tests.hf.test_quantized_linears import FP8, INT4, quantized
from tests.hf.test_saved import FILE

Q, HEAD = "model.layers.{}.self_attn.q_proj", "lm_head"
Change = Callable[[dict[str, Any]], Any]


def saved(path: Path, change: Change, **given: Any) -> Any:
    """A model whose configuration is changed after it was saved."""
    model = quantized(**given)
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    change(config["quantization_config"])
    (path / "config.json").write_text(json.dumps(config))
    return model


def without(*names: str) -> Change:
    """Leaves names of linear layers out."""

    def change(said: dict[str, Any]) -> None:
        left = {f: [n for n in of if n not in names] for f, of in said["linears"].items()}
        said["linears"] = {format: of for format, of in left.items() if of}

    return change


def nothing(said: dict[str, Any]) -> None:
    pass


FEWER: dict[str, tuple[Change, str]] = {
    "layers": (without(Q.format(0), Q.format(1)), "layers.0.self_attn.q_proj, .*.1.self_attn.q_p"),
    "head": (without(HEAD), "has codes for lm_head, which config.json does not say"),
    "all": (lambda said: said.pop("linears"), "lm_head, .* and 1 more, which"),
    "experts": (lambda said: said.update(weights=""), "codes for .*0.mlp.experts, .*1.mlp.experts"),
    "kept": (lambda said: said["kept"].append("model.layers.1.mlp.experts"), "for .*1.mlp.experts"),
}


@pytest.mark.parametrize(("change", "message"), FEWER.values(), ids=FEWER)
@pytest.mark.parametrize("file", [FILE, "pytorch_model.bin"])
def test_codes_that_nothing_is_said_of_are_refused(
    file: str, change: Change, message: str, tmp_path: Path
) -> None:
    model = saved(tmp_path, change)
    if file != FILE:
        (tmp_path / FILE).unlink()
        torch.save(model.state_dict(), tmp_path / file)
    with pytest.raises(ValueError, match=message):
        type(model).from_pretrained(tmp_path, ignore_mismatched_sizes=True)


def test_a_base_model_of_a_file_with_a_head_too(tmp_path: Path) -> None:
    model = saved(tmp_path, without(Q.format(1)))
    with pytest.raises(ValueError, match=r"has codes for layers\.1\.self_attn\.q_proj, which"):
        type(model.model).from_pretrained(tmp_path)


@pytest.mark.parametrize("names", [(), (Q.format(1),), (HEAD,)], ids=str)
def test_a_state_dict_that_is_given(names: tuple[str, ...], tmp_path: Path) -> None:
    model = saved(tmp_path, without(*names))
    state = copy.deepcopy(model.state_dict())
    config = type(model.config).from_pretrained(tmp_path)
    if not names:
        loaded = type(model).from_pretrained(None, config=config, state_dict=state)
        assert torch.equal(logits(loaded), logits(model))
        return
    with pytest.raises(
        ValueError, match=f"the state dict lacks {names[0]}.weight, and the config d"
    ):
        type(model).from_pretrained(None, config=config, state_dict=state)


MORE: dict[str, tuple[dict[str, Any], Change, str]] = {
    "head": (
        {"head": None},
        lambda said: said["linears"].update({INT4: [HEAD]}),
        "lacks lm_head.weight_codes, which config.json says",
    ),
    "other_format": (
        {},
        lambda said: said.update(linears={"int8:row": said["linears"][FP8], INT4: [HEAD]}),
        r"k_proj\.weight_format in .* says that the linear layers are .*, but config.json says",
    ),
    "twice": (
        {},
        lambda said: said["linears"].update({"int8:row": [Q.format(0)]}),
        "linears has model.layers.0.self_attn.q_proj twice, but a layer has one format",
    ),
    "no_linear": (
        {},
        lambda said: said["linears"][FP8].append("model.norm"),
        "says that model.norm is quantised to .*, but it is Qwen3MoeRMSNorm, not a linear layer",
    ),
}


@pytest.mark.parametrize(("given", "change", "message"), MORE.values(), ids=MORE)
def test_more_than_there_is_is_refused(
    given: dict[str, Any], change: Change, message: str, tmp_path: Path
) -> None:
    model = saved(tmp_path, change, **given)
    with pytest.raises(ValueError, match=message):
        type(model).from_pretrained(tmp_path)


def test_names_of_layers_that_a_smaller_model_is_read_without(tmp_path: Path) -> None:
    model = saved(tmp_path, nothing)
    loaded = type(model).from_pretrained(tmp_path, num_hidden_layers=1)
    assert len(coded(loaded)) == 5

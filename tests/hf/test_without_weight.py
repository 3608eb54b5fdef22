"""What reads, changes or puts in the weight of a linear layer that holds codes is told so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import moe_ops
from moe_ops.testing import assert_close
from tests.hf.test_quantize import logits
from tests.hf.test_quantized_linears import INT4, TOL, quantized

FLOATS = "of a model in floats, and quantise it then; dequantize"
HOLDS = f"QuantizedLinear holds codes of {INT4}"
READS: dict[str, Callable[[Any], Any]] = {
    "read": lambda model: model.get_output_embeddings().weight,
    "resized": lambda model: model.resize_token_embeddings(100),
    "pruned": lambda model: prune.l1_unstructured(model.lm_head, "weight", 0.5),
    "normalised": lambda model: nn.utils.weight_norm(model.lm_head),
}
CHANGES: dict[str, Callable[[Any], Any]] = {
    "put_in": lambda model: setattr(model.lm_head, "weight", nn.Parameter(torch.ones(64, 64))),
    "pruned": lambda model: prune.l1_unstructured(model.lm_head, "weight_codes", 0.5),
    "computed": lambda model: parametrize.register_parametrization(
        model.lm_head, "weight_codes", nn.Identity()
    ),
    "deleted": lambda model: delattr(model.lm_head, "weight_scale"),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_weight_that_is_read(read: Any) -> None:
    with pytest.raises(AttributeError, match=f"{HOLDS}, and no weight: .*{FLOATS}"):
        read(quantized())


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_weight_that_is_put_in_and_codes_that_are_moved(change: Any) -> None:
    model = quantized()
    want = copy.deepcopy(model.lm_head.state_dict())
    with pytest.raises(ValueError, match=f"{HOLDS}, .*{FLOATS}"):
        change(model)
    got = model.lm_head.state_dict()
    assert got.keys() == want.keys() and all(torch.equal(t, want[n]) for n, t in got.items())


def test_a_head_that_is_tied_again() -> None:
    model = quantized()
    model.tie_weights()  # which its configuration does not ask for
    model.config.tie_word_embeddings = True
    with pytest.raises(ValueError, match=f"{HOLDS}, beside which weight would be"):
        model.tie_weights()
    assert not hasattr(model.lm_head, "weight") and getattr(model.lm_head, "weight", 0) == 0


def test_a_bias_is_pruned_and_casts_and_checkpoints_of_gradients_do_nothing() -> None:
    model = quantized()
    want = logits(model)
    model.gradient_checkpointing_enable()
    model.gradient_checkpointing_disable()
    model.lm_head.register_parameter("bias", nn.Parameter(torch.ones(64)))
    prune.random_unstructured(model.lm_head, "bias", 1.0)
    assert_close(logits(model), want, TOL)


def test_a_head_that_is_floats_while_it_is_resized() -> None:
    model = quantized()
    want = logits(model)
    codes = model.get_output_embeddings()
    head = nn.Linear(codes.in_features, codes.out_features, bias=False)
    head.weight.data = codes.dequantize()
    model.set_output_embeddings(head)
    model.resize_token_embeddings(100)
    assert model.get_output_embeddings().out_features == 100
    moe_ops.quantize_model(model, None, head_format="float8_e4m3fn:row", progress=False)
    got = logits(model)
    assert got.shape[-1] == 100
    assert float((got[..., :64] - want).norm() / want.norm()) < 0.05


def test_a_state_dict_that_was_cast_is_refused() -> None:
    head = quantized().lm_head
    cast = {n: t.half() for n, t in head.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"weight_codes is torch\.float16 in the state dict"):
        head.load_state_dict(cast)


def test_a_model_that_was_loaded_says_that_there_is_no_way_back(tmp_path: Path) -> None:
    model = quantized()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"makes no model in floats; load the model that was qu"):
        loaded.dequantize()

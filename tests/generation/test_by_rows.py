"""Expert weights stored by rows: the same model, of which strides alone are others."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from moe_ops.generation.by_rows import store_by_rows
from moe_ops.hf.quantize import quantize_model
from tests.hf import families


def gpt_oss() -> Any:
    return families.build("gpt_oss").model.to(torch.bfloat16)


def stacked(model: torch.nn.Module) -> list[Tensor]:
    return [p for name, p in model.named_parameters() if name.endswith("_proj") and p.dim() == 3]


def by_rows(weight: Tensor) -> bool:
    return weight.transpose(1, 2).is_contiguous() and not weight.is_contiguous()


def test_strides_change_and_nothing_else() -> None:
    model = gpt_oss()
    before, held = copy.deepcopy(model), stacked(model)
    ids = torch.randint(16, 90, (2, 5))
    store_by_rows(model)
    assert held and all(by_rows(weight) for weight in held)
    assert all(a is b for a, b in zip(held, stacked(model), strict=True))
    for name, value in before.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, before(ids).logits, rtol=0.02, atol=0.02)


def test_twice_is_once_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = gpt_oss()
    with caplog.at_level(logging.INFO, "moe_ops"):
        store_by_rows(model)
        places = [weight.data_ptr() for weight in stacked(model)]
        store_by_rows(model)
    (said,) = (r.getMessage() for r in caplog.records if r.name == "moe_ops")
    size = sum(weight.nbytes for weight in stacked(model)) / 1e9
    assert f"{len(places)} expert weights, {size:.2f} GB, by rows" in said and "in place" in said
    assert places == [weight.data_ptr() for weight in stacked(model)]


def test_a_checkpoint_is_as_before(tmp_path: Any) -> None:
    model = gpt_oss()
    store_by_rows(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert all(weight.is_contiguous() for weight in stacked(loaded))
    for a, b in zip(stacked(loaded), stacked(model), strict=True):
        assert torch.equal(a, b)


def test_gradients_still_arrive() -> None:
    model = gpt_oss().train()
    store_by_rows(model)
    model(torch.randint(16, 90, (1, 3))).logits.float().sum().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in stacked(model))


@pytest.mark.parametrize("why", ["float32", "quantised", "rows of 8 bytes", "rows already"])
def test_others_stay_as_they_are(why: str) -> None:
    if why == "rows already":
        model = families.build("mixtral").model.to(torch.bfloat16)
    elif why == "rows of 8 bytes":
        model = torch.nn.Module()
        model.is_transposed = True
        model.up_proj = torch.nn.Parameter(torch.zeros(2, 4, 16, dtype=torch.bfloat16))
    else:
        model = families.build("gpt_oss").model
    if why == "quantised":
        quantize_model(model.to(torch.bfloat16), "int8_w8a16", progress=False)
    before = [(t.data_ptr(), t.stride()) for t in model.state_dict().values()]
    store_by_rows(model)
    assert before == [(t.data_ptr(), t.stride()) for t in model.state_dict().values()]


def test_without_room_the_rest_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, contiguous, copies = gpt_oss(), Tensor.contiguous, []

    def one_fits(weight: Tensor) -> Tensor:
        copies.append(weight)
        if len(copies) > 1:
            raise torch.OutOfMemoryError("no room")
        return contiguous(weight)

    monkeypatch.setattr(Tensor, "contiguous", one_fits)
    with caplog.at_level(logging.WARNING, logger="moe_ops"):
        store_by_rows(model)
    monkeypatch.undo()
    weights = stacked(model)
    assert [by_rows(weight) for weight in weights] == [True] + [False] * (len(weights) - 1)
    assert f"{len(weights) - 1} of {len(weights)} expert weights stay" in caplog.text

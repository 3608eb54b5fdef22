"""Recorded routings as values: their parts, their files, and what does not fit together."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moe_ops import RecordedRouting
from tests.recorded.records import random_record


def test_calls_are_joined_along_the_tokens_of_their_sequences() -> None:
    record = random_record((2, 3), (2, 1), (2, 2), weights=True)
    joined = record.joined()
    assert joined.calls == ((2, 6),)
    parts = [record.of_calls(i, i + 1).by_sequence() for i in range(3)]
    assert torch.equal(joined.by_sequence(), torch.cat(parts, 1))
    assert joined.weights_TLK is not None and record.weights_TLK is not None
    assert torch.equal(joined.weights_TLK[:3], record.weights_TLK[:3])
    assert torch.equal(joined.weights_TLK[3], record.weights_TLK[6])


def test_calls_are_counted_as_in_a_list() -> None:
    record = random_record((2, 3), (1, 4), (2, 1))
    assert record.of_calls(1).calls == ((1, 4), (2, 1))
    assert torch.equal(record.of_calls(1, 2).ids_TLK, record.ids_TLK[6:10])
    assert torch.equal(record.of_calls(-1).ids_TLK, record.ids_TLK[10:])


def test_sequences_are_taken_in_any_order_and_company() -> None:
    record = random_record((4, 5))
    taken = record.sequences([3, 0, 3])
    assert taken.calls == ((3, 5),)
    assert torch.equal(taken.by_sequence(), record.by_sequence()[[3, 0, 3]])


def test_tokens_behind_the_recorded_ones_have_no_experts() -> None:
    record = random_record((2, 3), weights=True)
    longer = record.padded(5)
    assert longer.calls == ((2, 5),)
    assert torch.equal(longer.by_sequence()[:, :3], record.by_sequence())
    assert (longer.by_sequence()[:, 3:] == -1).all()
    assert torch.equal(record.padded(3).ids_TLK, record.ids_TLK)


@pytest.mark.parametrize("experts", [8, 255, 256, 1000])
@pytest.mark.parametrize("weights", [None, torch.float32, torch.bfloat16])
def test_a_file_holds_what_was_recorded(
    experts: int, weights: torch.dtype | None, tmp_path: Path
) -> None:
    record = random_record((2, 3), (2, 1), experts=experts, weights=weights is not None)
    if weights is torch.bfloat16:
        assert record.weights_TLK is not None
        rounded = record.weights_TLK.to(weights).float()
        record = dataclasses.replace(record, weights_TLK=rounded)
    record = dataclasses.replace(record, ids_TLK=record.ids_TLK.clone())
    record.ids_TLK[1, 2] = -1
    record.ids_TLK[0, 0] = torch.tensor([experts - 1, 0])
    record.save(tmp_path / "routing.safetensors")
    read = RecordedRouting.load(tmp_path / "routing.safetensors")
    assert torch.equal(read.ids_TLK, record.ids_TLK)
    assert (read.calls, read.layers) == (record.calls, record.layers)
    assert read.num_experts == experts
    if record.weights_TLK is None:
        assert read.weights_TLK is None
    else:
        assert read.weights_TLK is not None
        assert torch.equal(read.weights_TLK, record.weights_TLK)


def test_a_file_has_a_byte_for_each_of_few_experts(tmp_path: Path) -> None:
    few, many = tmp_path / "few.safetensors", tmp_path / "many.safetensors"
    random_record((100, 10), experts=128).save(few)
    random_record((100, 10), experts=256).save(many)
    assert many.stat().st_size - few.stat().st_size == 100 * 10 * 3 * 2
    with safe_open(few, framework="pt") as file:
        assert json.loads(file.metadata()["calls"]) == [[100, 10]]


RECORD = random_record((2, 3))
IDS = RECORD.ids_TLK
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"ids_TLK": IDS.int()}, "must be int16"),
    "shape": ({"ids_TLK": IDS[0]}, r"\[tokens, layers, top_k\]"),
    "layers": ({"layers": ("one",)}, "has 3 layers, but 1 are named"),
    "calls": ({"calls": ((2, 2),)}, "has 6 tokens, but the calls have 4"),
    "range": ({"num_experts": 2}, "there are 2 experts"),
    "negative": ({"ids_TLK": IDS - 9}, "there are 8 experts"),
    "holes": ({"ids_TLK": torch.where(IDS[0, 0, 0] == IDS, -1, IDS)}, "has -1 beside ids"),
    "experts": ({"num_experts": 2**15 + 1}, "must be from 1 to 32768"),
    "weights": ({"weights_TLK": torch.zeros(1)}, "weights_TLK must be float32"),
}


@pytest.mark.parametrize("name", WRONG)
def test_parts_that_do_not_fit_are_refused(name: str) -> None:
    parts, says = WRONG[name]
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(RECORD, **parts)


REFUSED: dict[str, tuple[Any, str]] = {
    "other_batches": (lambda: random_record((2, 3), (3, 1)).joined(), r"calls of \[2, 3\]"),
    "no_call": (lambda: RECORD.of_calls(1), "none from 1 to None"),
    "no_sequence": (lambda: RECORD.sequences([2]), "some from 0 to 1"),
    "fewer_tokens": (lambda: RECORD.padded(2), "have 3 tokens, and cannot have 2"),
    "several_calls": (lambda: random_record((1, 2), (1, 2)).by_sequence(), "record of 2 calls"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_record_does_not_have_is_refused(name: str) -> None:
    call, says = REFUSED[name]
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({}, "its format is None"),
        ({"format": "moe_ops.routing", "version": "2"}, "is of version '2'"),
    ],
    ids=["other", "later"],
)
def test_files_of_others_are_refused(said: dict[str, str], says: str, tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    save_file({"ids": torch.zeros(1)}, path, metadata=said)
    with pytest.raises(ValueError, match=says):
        RecordedRouting.load(path)


def test_what_is_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="no safetensors file"):
        RecordedRouting.load(path)

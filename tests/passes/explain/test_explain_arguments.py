"""What `explain` takes, and what it refuses before it traces anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import moe_ops
from tests.moe_block import Block

X = torch.ones(3, 16)
BAD: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "no_inputs": (None, {}, TypeError, "inputs must be keyword arguments as a mapping, such as {"),
    "text": ("ids", {}, TypeError, "inputs must be keyword arguments .*, got a str: 'ids'"),
    "number": (3, {}, TypeError, "inputs must be .* or a tensor, got an int: 3"),
    "key": ({0: X}, {}, TypeError, "the name of an input must be a str, got an int: 0"),
    "no_tokens": (X, {"tokens": [0]}, ValueError, "tokens must be numbers from 1 on, got 0"),
    "negative": (X, {"tokens": [8, -1]}, ValueError, "tokens must be numbers from 1 on, got -1"),
    "one_number": (X, {"tokens": 64}, TypeError, r"tokens must be several ints, such as \(1, 64\)"),
    "half": (X, {"tokens": [1.5]}, TypeError, "each of tokens must be an int, got a float: 1.5"),
    "empty": (X, {"tokens": []}, ValueError, "tokens is empty; give at least one number from 1"),
    "dynamic": (X, {"dynamic": "yes"}, TypeError, "dynamic must be True or False, got a str"),
    "html": (X, {"html": True}, TypeError, "html must be a path, got a bool: True"),
    "depyf": (X, {"depyf": True}, TypeError, "depyf must be the path of a folder, got a bool"),
}


@pytest.mark.parametrize(("inputs", "options", "error", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_explained_is_refused(
    inputs: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        moe_ops.explain(lambda x: pytest.fail("was traced"), inputs, **options)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="model must be a module or another callable, got None"):
        moe_ops.explain(None, X)  # type: ignore[arg-type]


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for path, error, message in (
        (tmp_path, IsADirectoryError, "is a folder; give a file in it"),
        (tmp_path / "none" / "x.html", FileNotFoundError, "there is no folder .*none'; make it"),
    ):
        with pytest.raises(error, match=message):
            moe_ops.explain(lambda x: pytest.fail("was traced"), X, html=str(path))


@pytest.mark.slow
def test_a_tensor_alone_is_the_first_argument() -> None:
    block = Block()
    one, several = (moe_ops.explain(block, inputs) for inputs in (X, (X,)))
    assert one.plan == several.plan
    assert len(one.regions) == 1
    assert moe_ops.buckets_of(one, 64) == moe_ops.buckets_of(one.plan, 64)

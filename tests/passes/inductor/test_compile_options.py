"""Options are checked where they are given: before anything is traced, compiled or measured."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import moe_ops
from moe_ops.planning import tuned
from moe_ops.planning.tuned import Cell, TunedLayer

MODEL = nn.Linear(2, 2)
TAKERS: dict[str, Callable[..., Any]] = {
    "compile": lambda **options: moe_ops.compile(MODEL, **options),
    "inductor_options": moe_ops.inductor_options,
    "compile_config": moe_ops.compile_config,
    "explain": lambda **options: moe_ops.explain(MODEL, (torch.ones(1, 2),), **options),
}
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "backend": (
        {"thresholds": ((64, "cpuu"), (None, "aten"))},
        ValueError,
        "thresholds name cpuu, but the backends of experts and moe are ",
    ),
    "plain_string": (
        {"thresholds": "cpu"},
        TypeError,
        "thresholds must be pairs of the largest number of tokens and a backend, such as "
        "((64, 'cpu'), (None, 'aten')), got a str: 'cpu'",
    ),
    "mapping": ({"thresholds": {64: "cpu"}}, TypeError, "thresholds must be pairs of the largest"),
    "one_pair": (
        {"thresholds": (None, "cpu")},
        TypeError,
        "thresholds[0] must be a pair of the largest number of tokens and a backend, as in "
        "((64, 'cpu'), (None, 'aten')), got None",
    ),
    "triple": ({"thresholds": ((1, "cpu", 2),)}, TypeError, "thresholds[0] must be a pair of"),
    "float": (
        {"thresholds": ((64.0, "cpu"), (None, "aten"))},
        TypeError,
        "thresholds[0]: the number of tokens must be an int, or None in the last pair, got a "
        "float: 64.0",
    ),
    "flag": ({"thresholds": ((True, "cpu"), (None, "aten"))}, TypeError, "thresholds[0]: the num"),
    "turned": (
        {"thresholds": ((64, "cpu"), ("aten", None))},
        TypeError,
        "thresholds[1]: the number of tokens must be an int",
    ),
    "no_name": (
        {"thresholds": ((64, "cpu"), (None, None))},
        TypeError,
        "thresholds[1]: the backend must be a str, got None",
    ),
    "falling": (
        {"thresholds": ((64, "cpu"), (8, "aten"), (None, "cpu"))},
        ValueError,
        "with ascending numbers above 0, and None as the last, such as ((64, 'cpu')",
    ),
    "closed": ({"thresholds": ((64, "cpu"),)}, ValueError, "and None as the last"),
    "empty": ({"thresholds": ()}, ValueError, "and None as the last"),
    "strict": ({"strict": "no"}, TypeError, "strict must be True or False, got a str: 'no'"),
    "linears": ({"linears": None}, TypeError, "linears must be True or False, got None"),
    "beside": ({"beside": "auto"}, TypeError, "beside must be "),
    "dump": ({"dump": 1}, TypeError, "dump must be True or False, got an int: 1"),
    "stop_after": (
        {"stop_after": "pick_backends"},
        ValueError,
        "did you mean 'pick_backend'?",
    ),
    "stop_after_pass": (
        {"stop_after": print},
        TypeError,
        "stop_after must be a str, got a builtin",
    ),
    "tuned_number": ({"tuned": 3}, TypeError, "tuned must be a str, got an int: 3"),
    "unknown": ({"colour": ()}, TypeError, "unknown options: colour; there are thresholds, "),
    "close": ({"thresholdz": ()}, TypeError, "did you mean 'thresholds'?"),
}


@pytest.mark.parametrize("taker", TAKERS.values(), ids=TAKERS)
@pytest.mark.parametrize(("options", "error", "text"), BAD.values(), ids=BAD)
def test_a_bad_option_is_refused_where_it_is_given(
    taker: Callable[..., Any], options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as raised:
        taker(**options)
    assert text in str(raised.value)


def test_the_closest_backend_is_told() -> None:
    with pytest.raises(ValueError, match=r"aten, by_row, cpu, .*reference.*; did you mean 'cpu'\?"):
        moe_ops.inductor_options(thresholds=[[None, "cpuu"]])


OF_COMPILE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "fullgraph": ({"fullgraph": 1}, TypeError, "fullgraph must be True or False, got an int: 1"),
    "dynamic": ({"dynamic": "yes"}, TypeError, "dynamic must be True or False, got a str: 'yes'"),
    "extra_list": ({"extra": ["max_autotune"]}, TypeError, "extra must be a mapping of Inductor's"),
    "extra_name": (
        {"extra": {"max_autotun": True}},
        ValueError,
        "extra: Inductor has no option 'max_autotun'; torch._inductor.config lists them; did you "
        "mean 'max_autotune'?",
    ),
    "extra_key": ({"extra": {3: True}}, ValueError, "extra: Inductor has no option 3"),
}


@pytest.mark.parametrize(("options", "error", "text"), OF_COMPILE.values(), ids=OF_COMPILE)
def test_what_torch_compile_is_given_is_checked_too(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as raised:
        moe_ops.compile(MODEL, **options)
    assert text in str(raised.value)


LAYER = TunedLayer(device="cpu", op="experts", E=8, K=2, D=64, I=32, dtype="float32")
CELLS = {Cell(tokens=1, routing="zipf", backend="cpu"): 1.0}


def changed(path: Path, **changes: Any) -> str:
    """A table with one layer, some of whose entries are changed; ... leaves one out."""
    tuned.write(path, {LAYER: CELLS})
    values = json.loads(path.read_text())
    layer = values["layers"][0] | changes
    values["layers"] = [{k: v for k, v in layer.items() if v is not ...}]
    return json.dumps(values)


TABLES: dict[str, tuple[Callable[[Path], str], str]] = {
    "broken": (lambda p: '{"version": 1, "layers": [', "is not JSON: Expecting value: line 1"),
    "empty": (lambda p: "", "is not JSON: Expecting value"),
    "list": (lambda p: "[]", "is no tuned table: it has no list of layers"),
    "no_layers": (lambda p: '{"version": 1}', "is no tuned table: it has no list of layers"),
    "version": (lambda p: '{"version": 9, "layers": []}', "has version 9, this is moe_ops with"),
    "number": (lambda p: '{"version": 1, "layers": [3]}', "a layer must be an object, got an int"),
    "no_size": (lambda p: changed(p, E=...), "a layer lacks E (layer 0)"),
    "size": (lambda p: changed(p, E="8"), "E must be an int, got a str: '8' (layer 0)"),
    "no_times": (lambda p: changed(p, times=...), "a layer lacks times"),
    "times": (lambda p: changed(p, times=7), "times must be a list, got an int: 7"),
    "short_time": (
        lambda p: changed(p, times=[[1, "zipf", "cpu"]]),
        "a time is [tokens, routing, backend, microseconds], got [1, 'zipf', 'cpu']",
    ),
    "no_tokens": (
        lambda p: changed(p, times=[[0, "zipf", "cpu", 1.0]]),
        "the tokens of a time=0 must be at least 1",
    ),
    "name": (
        lambda p: changed(p, times=[[1, "zipf", 3, 1.0]]),
        "backend must be a str, got an int: 3",
    ),
    "no_time": (
        lambda p: changed(p, times=[[1, "zipf", "cpu", 0]]),
        "the microseconds of a time must be above 0, got 0",
    ),
    "endless": (
        lambda p: changed(p, times=[[1, "zipf", "cpu", float("nan")]]),
        "the microseconds of a time must be above 0, got nan",
    ),
}


@pytest.mark.parametrize(("text", "message"), TABLES.values(), ids=TABLES)
def test_a_broken_table_is_refused_by_its_name(
    tmp_path: Path, text: Callable[[Path], str], message: str
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text(path))
    for taker in TAKERS.values():
        with pytest.raises(ValueError, match=rf"mine\.json.*{re.escape(message)}"):
            taker(tuned=path)


def test_a_table_that_is_no_text_or_no_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(b"\xff\xfe\x00")
    for taker in TAKERS.values():
        with pytest.raises(ValueError, match=r"mine\.json is not JSON"):
            taker(tuned=str(path))
        with pytest.raises(FileNotFoundError, match="there is no tuned table"):
            taker(tuned=str(tmp_path / "none.json"))
        with pytest.raises(FileNotFoundError, match="there is no tuned table"):
            taker(tuned=tmp_path)

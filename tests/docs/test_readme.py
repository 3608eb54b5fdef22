"""The picture of README and its table of models are what was measured."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import expecttest
import pytest

from tests.docs import models, picture
from tests.docs.picture import PICTURE, Bar, Group
from tests.sources import ROOT

REMEDY = "run `python -m tests.docs.picture` if it should, and look at it"


def test_the_picture_is_what_was_measured() -> None:
    want = picture.drawn(picture.groups())
    if expecttest.ACCEPT:
        PICTURE.write_text(want)
    assert PICTURE.read_text() == want, f"{PICTURE.name} does not show what was measured; {REMEDY}"
    assert f"]({PICTURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text()


def test_the_picture_is_small_and_has_colours_for_the_dark() -> None:
    assert PICTURE.stat().st_size < 20_000
    ElementTree.parse(PICTURE)
    assert "prefers-color-scheme: dark" in PICTURE.read_text()


def test_bars_are_as_long_as_their_ratios() -> None:
    drawn = picture.drawn([Group("a & b", [Bar("half", 0.5), Bar("double", 2.0)])])
    bars = [e for e in ElementTree.fromstring(drawn) if e.get("class") in ("bar", "slower")]
    half, double = (float(bar.get("width", "")) for bar in bars)
    assert double == pytest.approx(4 * half, rel=1e-2)
    assert [bar.get("class") for bar in bars] == ["slower", "bar"]
    assert ">0.50<" in drawn and ">2.0<" in drawn and "a &amp; b" in drawn


def test_every_bar_fits() -> None:
    ratios = [bar.ratio for group in picture.groups() for bar in group.bars]
    assert len(ratios) > 5
    assert max(ratios) <= picture.MOST


def speed(way: str, batch: int, rate: float) -> dict[str, Any]:
    return {"way": way, "batch": batch, "tokens_per_s": rate}


def test_stock_is_the_fastest_of_its_ways() -> None:
    forwards = [
        {"way": way, "size": "1x2", "ms": ms}
        for way, ms in {"moe_ops": 2.0, "stock": 8.0, "stock graphs": 5.0}.items()
    ]
    assert picture.of_forward(forwards) == [Bar("1 x 2 tokens", 2.5)]


def test_files_of_one_model_on_one_device_are_one_row() -> None:
    about = {"device": "NVIDIA H200", "command": "generate.py --model mixtral-8x7b --stock none"}
    floats = [speed("moe_ops", 1, 100.0), speed("moe_ops", 8, 400.0), speed("default", 1, 40.0)]
    codes = [speed("moe_ops int4:1x128:bfloat16", 8, 900.0)]
    few = {"device": "NVIDIA H100 80GB HBM3", "command": "generate.py --layers 4", "speeds": codes}
    rows = models.table([about | {"speeds": floats}, about | {"speeds": codes}, few]).splitlines()
    assert rows[2:] == [
        "| Mixtral-8x7B | H200 | 100, 400, – | 2.5, –, – | –, 900, – |",
        "| Qwen3-30B-A3B, 4 layers | H100 |  |  | –, 900, – |",
    ]

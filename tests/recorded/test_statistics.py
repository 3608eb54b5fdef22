"""What is told of routings and loads, as numbers, text, JSON and a page."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from moe_ops import RecordedRouting
from moe_ops.__main__ import main
from moe_ops.layer.loads import ModelLoads
from moe_ops.recorded.page import page
from moe_ops.recorded.statistics import RoutingStatistics, of_loads, of_record, read
from tests.recorded.records import random_record


def record_of(ids_TLK: list[list[list[int]]], experts: int = 4) -> RecordedRouting:
    ids = torch.tensor(ids_TLK, dtype=torch.int16)
    return RecordedRouting(
        ids_TLK=ids,
        calls=((1, len(ids)),),
        layers=tuple(f"layers.{i}" for i in range(ids.shape[1])),
        num_experts=experts,
    )


def test_loads_and_what_follows_from_them() -> None:
    found = of_record(record_of([[[0, 1], [0, 1]], [[0, 1], [2, 3]], [[0, 2], [-1, -1]]]))
    assert found.tokens == 3
    assert found.loads_LE.tolist() == [[3, 2, 1, 0], [1, 1, 1, 1]]
    assert found.unused_L.tolist() == [1, 0]
    assert found.imbalance_L.tolist() == [2.0, 1.0]
    entropy = -sum(p * math.log(p) for p in (3 / 6, 2 / 6, 1 / 6)) / math.log(4)
    assert found.entropy_L.tolist() == pytest.approx([entropy, 1.0])


def test_experts_chosen_together() -> None:
    found = of_record(record_of([[[0, 1]], [[1, 0]], [[0, 2]], [[3, 2]]]))
    (pairs,) = found.together
    told = [(p.first, p.second, p.tokens, p.lift) for p in pairs]
    # Of four tokens three chose 0 and two chose 1: by chance 1.5 had both.
    assert told == [(0, 1, 2, 2 * 4 / (3 * 2)), (0, 2, 1, 4 / (3 * 2)), (2, 3, 1, 4 / (2 * 1))]


def test_pairs_are_counted_over_many_tokens() -> None:
    record = random_record((3, 3000), layers=1, experts=6, top_k=3)
    found = of_record(record)
    chosen = torch.zeros(record.tokens, 6).scatter_(1, record.ids_TLK[:, 0].long(), 1.0)
    for pair in found.together[0]:
        assert pair.tokens == int((chosen[:, pair.first] * chosen[:, pair.second]).sum())
    assert len(found.together[0]) == 15


LOADS = ModelLoads(
    layers=("a", "b"),
    logical_LE=torch.tensor([[1, 2, 3], [0, 6, 0]]),
    physical_LP=torch.tensor([[1, 2, 3], [0, 6, 0]]),
    experts_LP=torch.tensor([[0, 1, 2], [0, 1, 2]]),
    slots=(3,),
)


def same(a: RoutingStatistics, b: RoutingStatistics) -> bool:
    return a.as_json() == b.as_json() and torch.equal(a.loads_LE, b.loads_LE)


def test_files_of_every_kind_are_read(tmp_path: Path) -> None:
    record, found = random_record((2, 50)), of_loads(LOADS)
    record.save(tmp_path / "routing.safetensors")
    assert same(read(tmp_path / "routing.safetensors"), of_record(record))
    for name, said in (("own", of_record(record).as_json()), ("loads", LOADS.as_json())):
        (tmp_path / f"{name}.json").write_text(json.dumps(said))
    assert same(read(tmp_path / "own.json"), of_record(record))
    assert same(read(tmp_path / "loads.json"), found)
    lines = [{"first_step": i, **LOADS.as_json()} for i in range(3)]
    (tmp_path / "loads.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert read(tmp_path / "loads.jsonl").loads_LE.tolist() == [[3, 6, 9], [0, 18, 0]]


WRONG = {
    "empty.jsonl": ("", "is empty"),
    "text.json": ("routing", "is no JSON"),
    "other.json": ("[1]", "holds no recorded routing"),
    "later.json": ('{"format": "moe_ops.routing", "version": "2"}', "of version '2'"),
    "lines.jsonl": (
        '{"logical": [[1]], "layers": ["a"]}\n{"logical": [[1]], "layers": ["b"]}',
        "other layers or experts",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_files_are_refused(name: str, tmp_path: Path) -> None:
    text, says = WRONG[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=says):
        read(tmp_path / name)


class Parsed(HTMLParser):
    """What a page holds: elements that are open, addresses that it would load, and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text: list[str] = []
        self.rects = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.rects += tag == "rect"
        self.loads += [str(v) for n, v in attrs if n in ("src", "href", "xlink:href")]
        if tag not in ("meta", "html", "rect", "line"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_a_page_is_whole_and_loads_nothing() -> None:
    found = of_record(random_record((2, 200), layers=5, experts=8))
    found = dataclasses.replace(found, layers=("<b>", *found.layers[1:]))
    text = page(found, "a & b")
    parsed = Parsed(text)
    assert not parsed.open
    assert not parsed.loads
    assert "<script" not in text and "url(" not in text and "@import" not in text
    assert "a & b" in "".join(parsed.text) and "<b>" in "".join(parsed.text)
    assert "prefers-color-scheme: dark" in text
    heat = text.partition("Highest load")[0]
    unlike = (found.shares_LE * 8).log2().abs() / max(
        1.0, float((found.shares_LE * 8).max().log2())
    )
    assert len(re.findall("fill-opacity", heat)) == int((unlike >= 0.005).sum())


def test_a_page_of_loads_shows_no_pairs() -> None:
    text = page(of_loads(LOADS), "loads")
    assert "chosen together" not in text
    assert Parsed(text).rects > 2
    empty = RoutingStatistics(layers=("a",), loads_LE=torch.zeros(1, 3, dtype=torch.int64))
    assert not Parsed(page(empty, "nothing")).open


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = random_record((2, 50))
    record.save(tmp_path / "r.safetensors")
    html, said = tmp_path / "r.html", tmp_path / "r.json"
    assert (
        main(["routing", str(tmp_path / "r.safetensors"), "--html", str(html), "--json", str(said)])
        == 0
    )
    shown = capsys.readouterr().out
    assert shown.startswith("100 tokens, 3 layers of 8 experts\n")
    assert len(shown.splitlines()) == 2 + 3
    assert html.read_text() == page(of_record(record), "r.safetensors")
    assert same(read(said), of_record(record))


def test_the_command_refuses_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["routing", str(tmp_path / "none.safetensors")])
    assert left.value.code == 2
    assert "none.safetensors: there is no such file; give one that" in capsys.readouterr().err

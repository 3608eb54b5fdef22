"""The example of replay trains on what it generated, with the same experts."""

from __future__ import annotations

import re

import pytest

from tests.examples.loaded import load


def test_experts_are_those_of_generate_with_replay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    example = load(monkeypatch, "replay.py", "replay")
    for name, value in {"SEQUENCES": 6, "PROMPT": 4, "NEW": 5, "TRAINED": 2}.items():
        monkeypatch.setattr(example, name, value)
    example.main(["--batch-invariant"])
    plain, replayed = capsys.readouterr().out.splitlines()
    line = (
        r" *(\w+) replay: experts differ for +([\d.]+)% .* by ([\d.]+) on average, ([\d.]+) at most"
    )
    found = [re.fullmatch(line, text) for text in (plain, replayed)]
    assert all(found), (plain, replayed)
    (first, *_), (second, others, mean, most) = (m.groups() for m in found if m)
    assert (first, second, float(others)) == ("without", "with", 0)
    assert 0 <= float(mean) <= float(most) < 0.1

"""Formats that take turns on the CPU: checked first, then timed on the same routing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from moe_ops.bench import __main__ as cli
from moe_ops.bench import quantized
from moe_ops.bench.quantized import Turns
from moe_ops.testing import LAYERS, Case

TINY = Case(name="tiny", T=1, E=6, K=2, D=128, I=128)
INT8 = "int8:row+int8:row"


def test_every_expert_has_memory_of_its_own() -> None:
    for name, weights in quantized.layers(TINY, [INT8]).items():
        tensors = (weights.w13_EFD, weights.w2_EDI, *weights.beside.values())
        for t in tensors:
            assert t.shape[0] == TINY.E and t.is_contiguous(), name
            assert torch.equal(t[0], t[quantized.DISTINCT]) and not torch.equal(t[0], t[1])


def test_formats_take_turns_on_the_same_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, str]] = []
    monkeypatch.setattr(quantized, "check", lambda *args: None)
    monkeypatch.setattr(
        quantized, "experts", lambda *args, **kw: calls.append((args[2], kw.get("w_format", "")))
    )
    found = quantized.measure(TINY, [1, 3], ["int8:row"], 0.0)
    rounds = quantized.WARM_UP + quantized.LEAST
    assert [format for _, format in calls] == ["", "int8:row"] * (2 * rounds)
    ids = [ids for ids, _ in calls]
    assert all(a is b for a, b in zip(ids[::2], ids[1::2], strict=True))
    assert any(not torch.equal(ids[0], other) for other in ids[2 : 2 * rounds : 2])
    assert [(one.format, one.tokens, one.turns) for one in found] == [
        (format, T, quantized.LEAST) for T in (1, 3) for format in ("bfloat16", "int8:row")
    ]
    assert all(0 < one.low_ms <= one.ms <= one.high_ms for one in found)


def test_what_is_wrong_or_has_no_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotImplementedError, match="mxfp6_e3m2 has no kernel to time here: needs"):
        quantized.layers(TINY, ["mxfp6_e3m2"])
    with pytest.raises(ValueError, match="int8:1x256"):
        quantized.layers(TINY, ["int8:1x256"])
    run = quantized.experts
    twice = lambda *args, **kw: 2 * run(*args, **kw)  # noqa: E731
    twice.reference, twice.refusals = run.reference, run.refusals  # type: ignore[attr-defined]
    monkeypatch.setattr(quantized, "experts", twice)
    with pytest.raises(AssertionError, match="bfloat16: not timed; it"):
        quantized.layers(TINY, ["int8:row"])


def test_table_text() -> None:
    def turns(format: str, tokens: int, ms: float) -> Turns:
        return Turns(format=format, tokens=tokens, turns=5, ms=ms, low_ms=ms, high_ms=ms)

    found = [turns("bfloat16", 1, 4.0), turns("mxfp4", 1, 1.25)]
    found += [turns("bfloat16", 64, 80.0), turns("mxfp4", 64, 100.0)]
    assert_expected_inline(
        quantized.table(found),
        """\
| format | 1 token, ms | 64 tokens, ms |
| --- | --- | --- |
| `bfloat16` | 4.00 | 80.00 |
| `mxfp4` | 1.25 (3.20) | 100.00 (0.80) |""",
    )


def test_the_command_prints_the_table_and_writes_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(LAYERS, "olmoe", TINY)
    figures = tmp_path / "figures.json"
    words = ["--layer", "olmoe", "--tokens", "2", "--seconds", "0", "--json", str(figures)]
    monkeypatch.setattr(sys, "argv", ["bench", "quantised", "--formats", INT8, *words])
    cli.main()
    assert f"| `{INT8}` | " in capsys.readouterr().out
    written = json.loads(figures.read_text())
    assert written["case"]["name"] == "tiny" and written["torch"] == torch.__version__
    assert [one["format"] for one in written["turns"]] == ["bfloat16", INT8]

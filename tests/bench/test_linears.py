"""What `bench linears` measures, and what its table says."""

from __future__ import annotations

import pytest
import torch

from moe_ops.bench import linears, timing
from moe_ops.bench.__main__ import parse

SMALL = linears.Layers(name="small", sizes=(48, 16), K=128)


def test_each_backend_that_takes_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(timing.SECONDS, "cpu", 0.001)
    monkeypatch.setitem(linears.BYTES, "cpu", 1e5)
    found = [*linears.measure([SMALL], ["int8:row", "nvfp4"], [1, 5], torch.device("cpu"))]
    by = {(t.format, t.rows): {o.by for o in found if (o.format, o.rows) == (t.format, t.rows)}
          for t in found}  # fmt: skip
    assert by == {
        (format, T): {"dequantize", "floats"} | ({"cpu"} if format == "int8:row" else set())
        for format in ("int8:row", "nvfp4") for T in (1, 5)
    }  # fmt: skip
    assert all(t.us > 0 and t.layers == "small" for t in found)


def test_a_row_for_each_number_of_rows() -> None:
    def time(rows: int, by: str, us: float) -> linears.Time:
        return linears.Time(layers="o", format="mxfp4", rows=rows, by=by, us=us)

    found = [time(1, "triton", 2.0), time(1, "floats", 3.04), time(600, "floats", 40.0)]
    first, *rows = linears.table(found).splitlines()
    assert first.split() == ["layers", "format", "rows", "triton", "floats"]
    assert [row.split() for row in rows[-2:]] == [
        ["o", "mxfp4", "1", "2.0", "3.0"], ["o", "mxfp4", "600", "40.0"],
    ]  # fmt: skip


def test_options() -> None:
    args = parse(["linears", "--layers", "qwen3_30b_o", "--formats", "mxfp4", "--rows", "1", "2"])
    assert (args.layers, args.formats, args.rows) == (["qwen3_30b_o"], ["mxfp4"], [1, 2])

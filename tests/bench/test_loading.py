"""The loading benchmark runs, and does not time what is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moe_ops.bench import loading


@pytest.mark.parametrize("coding", loading.CODINGS)
def test_a_line_says_both_rates(
    coding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {"gate_proj": (128, 256), "up_proj": (128, 256), "down_proj": (256, 128)}
    monkeypatch.setattr(loading, "PROJECTIONS", shapes)
    monkeypatch.setattr(loading, "WIDTH", 256)
    monkeypatch.setattr(loading, "ROWS", 128)
    line = str(loading.measure(coding, gib=0.001, repeats=1, cold=False, folder=tmp_path))
    assert re.match(rf"{coding} +0.00 GiB, \d+ entries: load_checkpoint [\d.]+ GiB/s; ", line)


def test_an_incomplete_load_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loading.CODINGS, "bf16", ("float8_e4m3fn:128x128", loading.PLAIN))
    monkeypatch.setattr(
        loading, "tensors", lambda coding, rows, columns: {
            "weight": loading.torch.zeros(rows, columns).to(loading.torch.float8_e4m3fn)
        },
    )  # fmt: skip
    with pytest.raises(ValueError, match="no entry has the scales of its codes"):
        loading.measure("bf16", gib=0.001, repeats=1, cold=False, folder=tmp_path)

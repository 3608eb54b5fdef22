"""The column of real widths in docs/FAMILIES.md says what the file of results says."""

from __future__ import annotations

import pytest

from tests.hf import gpu_families, page


def test_the_column_of_real_widths_is_that_of_the_results() -> None:
    results = gpu_families.load(gpu_families.RESULTS)
    wanted = {
        family: (gpu_families.column(o), gpu_families.cell(o)) for family, o in results.items()
    }
    cells = page.read(page.PAGE.read_text())
    found = {
        family: (column, cell)
        for family, row in cells.items()
        for column, cell in row.items()
        if column.startswith("real widths")
    }
    assert results and found == wanted, "run `python -m tests.hf.gpu_families --write`"


def test_a_check_that_held_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow family may take several runs."""
    ran: list[str] = []
    everything = sorted(gpu_families.CHECKS)
    slow = [{"outcome": "forward: not done after 5 s"}]

    def in_one(family: str, check: str, limit: float) -> gpu_families.Outcome:
        ran.append(check)
        if check == "forward" and slow:
            return slow.pop()
        counts = {"layers": 2, "ours": 2} if check == "float32" else {}
        return {"outcome": gpu_families.HOLDS} | counts

    monkeypatch.setattr(gpu_families, "in_one", in_one)
    first = gpu_families.in_process("mixtral", 5, None)
    assert not gpu_families.holds(first) and sorted(ran) == everything
    second = gpu_families.in_process("mixtral", 5, first)
    assert gpu_families.holds(second) and ran[4:] == ["forward"]
    assert (second["layers"], second["ours"]) == (2, 2)
    gpu_families.in_process("mixtral", 5, first | {"device": "another GPU"})
    assert sorted(ran[5:]) == everything

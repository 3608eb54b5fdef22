"""The column of real widths in docs/FAMILIES.md says what the file of results says."""

from __future__ import annotations

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


def test_a_check_that_held_is_not_run_again() -> None:
    """A slow family may take several runs, one of which may be stopped at any time."""
    holds = {"outcome": gpu_families.HOLDS, "seconds": 2.0}
    known = None
    for check in gpu_families.CHECKS:
        assert not gpu_families.holds(known)
        slow = {"outcome": f"{check}: not done after 5 s", "seconds": 5.0}
        known = gpu_families.with_check(known, check, slow)
        assert known["outcome"] == slow["outcome"] and check not in gpu_families.held(known)
        counts = {"layers": 2, "ours": 2} if check == "float32" else {}
        known = gpu_families.with_check(known, check, holds | counts)
        assert check in gpu_families.held(known)
    assert gpu_families.holds(known) and gpu_families.held(known) == list(gpu_families.CHECKS)
    assert known is not None and (known["ours"], known["seconds"]) == (
        2,
        7.0 * len(gpu_families.CHECKS),
    )
    assert gpu_families.held(known | {"device": "another GPU"}) == []


def test_a_failure_is_told_until_its_check_holds() -> None:
    fails = {"outcome": "layers: too far away", "seconds": 1.0}
    holds = {"outcome": gpu_families.HOLDS, "seconds": 1.0}
    known = gpu_families.with_check(None, "layers", fails)
    known = gpu_families.with_check(known, "forward", holds)
    assert known["outcome"] == fails["outcome"] and gpu_families.held(known) == ["forward"]
    known = gpu_families.with_check(known, "layers", holds)
    assert known["outcome"] == "not run yet: float32, generate"

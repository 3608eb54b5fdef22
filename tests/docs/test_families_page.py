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

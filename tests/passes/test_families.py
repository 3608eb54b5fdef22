"""Stock models of transformers under our passes: every layer found, and the numbers kept.

docs/FAMILIES.md holds what was found, a column for each torch; `make golden` writes that of the
torch at hand, `make families` those of all.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import fx

from moe_ops.passes import PIPELINE
from moe_ops.passes.context import Context
from moe_ops.testing import Tol, assert_close
from tests.hf import families
from tests.passes.post_grad import Compiled

TOL = Tol(1e-5, "float32 sums in another order, over a few layers")
LIFTS = PIPELINE[:3]
PAGE = Path(__file__).parents[2] / "docs" / "FAMILIES.md"

# Families with layers that stay as they are, and why.
EXPERTS_STAY = {
    "inkling2": "softcapped activation",
    "muse_spark": "a norm on each expert's output",
}
ROUTERS_STAY = {
    "deepseek_v4": "a table from token ids to experts in some layers",
    "inkling": "softmax over routed and shared logits together",
    "phimoe": "sparsemixer",
    "zaya": "state from layer to layer, and an expert that is skipped",
}
# One family for each group of routers, and each kind of experts, is enough for other forms.
SOME = (
    "qwen3_moe", "mixtral", "gemma4", "deepseek_v2", "ernie4_5_moe", "gpt_oss", "granitemoe",
    "deepseek_v3", "glm4_moe", "minimax_m2", "kolibri1", "aria", "nemotron_h",
)  # fmt: skip


@dataclasses.dataclass
class Lifts:
    """The lifting passes, and what they found in all graphs of a model."""

    experts: int = 0
    routers: int = 0
    context: Context = dataclasses.field(default_factory=Context)

    def __call__(self, graph: fx.Graph) -> None:
        *experts, routers = [run(graph, self.context) for run in LIFTS]
        self.experts, self.routers = self.experts + sum(experts), self.routers + routers
        graph.eliminate_dead_code()


def check(
    family: str, form: str, dtype: torch.dtype, *, dynamic: bool, device: str = "cpu"
) -> Lifts:
    """Compile a tiny stock model down to our passes, and compare it with itself uncompiled."""
    tiny, found = families.build(family, form), Lifts()
    model, inputs = tiny.model.to(device, dtype), {k: v.to(device) for k, v in tiny.inputs.items()}
    with torch.inference_mode():
        want = first(model(**inputs, use_cache=False))
    compiled = Compiled(model, found, dynamic=None if dynamic else False, fullgraph=False)
    if dynamic:
        for t in inputs.values():
            torch._dynamo.mark_dynamic(t, 1)
    got = first(compiled(**inputs, use_cache=False))
    if dtype is torch.float32:
        assert_close(got, want, TOL, family)
    return found


def first(output: object) -> torch.Tensor:
    return output.logits if "logits" in output else output.last_hidden_state  # type: ignore


def layers(family: str) -> int:
    return len(families.experts(families.build(family).model))


def assert_complete(family: str, found: Lifts) -> None:
    n, reasons = layers(family), [note.text for note in found.context.refusals]
    assert found.experts == (0 if family in EXPERTS_STAY else n), reasons
    if family in ROUTERS_STAY:
        assert found.routers < n
    elif family not in EXPERTS_STAY:
        assert found.routers == n, reasons


@pytest.mark.slow
@pytest.mark.parametrize("family", families.discover())
def test_every_layer_of_a_stock_model_is_lifted(family: str) -> None:
    found = check(family, "grouped_mm", torch.float32, dynamic=False)
    assert_complete(family, found)
    hold(family, f"{found.experts} + {found.routers}")


FORMS = [
    ("batched_mm", torch.float32, True),
    ("batched_mm", torch.bfloat16, False),
    ("grouped_mm", torch.bfloat16, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "dtype", "dynamic"), FORMS, ids=str)
@pytest.mark.parametrize("family", SOME)
def test_every_form_is_lifted(family: str, form: str, dtype: torch.dtype, dynamic: bool) -> None:
    if family not in families.discover():
        pytest.skip(f"this transformers has no {family}")
    assert_complete(family, check(family, form, dtype, dynamic=dynamic))


def column() -> str:
    """The torch and the transformers at hand, as the page names them."""
    torch_version = re.match(r"\d+\.\d+", torch.__version__)
    assert torch_version is not None
    return f"torch {torch_version[0]}, transformers {transformers.__version__}"


def hold(family: str, cell: str) -> None:
    """Require, or write with EXPECTTEST_ACCEPT=1, a cell of the page."""
    with PAGE.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # tests may run side by side
        page = file.read()
        cells = read(page)
        if os.environ.get("EXPECTTEST_ACCEPT") == "1":
            cells.setdefault(family, {})[column()] = cell
            file.seek(0)
            file.truncate()
            file.write(write(page, cells))
        elif any(column() in row for row in cells.values()):
            assert cells.get(family, {}).get(column()) == cell, "run `make families`"


START, END = "<!-- families -->\n", "<!-- end -->"


def read(page: str) -> dict[str, dict[str, str]]:
    """The cells of the page's table, by family and column."""
    table = page.partition(START)[2].partition(END)[0].strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    if not rows:
        return {}
    head, _, *body = rows
    return {
        row[0]: {name: cell for name, cell in zip(head[1:], row[1:], strict=True) if cell}
        for row in body
    }


def write(page: str, cells: dict[str, dict[str, str]]) -> str:
    """The page with these cells in its table."""
    columns = sorted({name for row in cells.values() for name in row})
    lines = ["| " + " | ".join(["family", *columns]) + " |", "| --- " * (len(columns) + 1) + "|"]
    for family in sorted(cells):
        row = [cells[family].get(name, "") for name in columns]
        lines.append("| " + " | ".join([family, *row]) + " |")
    before, _, rest = page.partition(START)
    return before + START + "\n".join(["", *lines, "", ""]) + END + rest.partition(END)[2]


def test_the_page_can_be_read_and_written() -> None:
    cells = {"b": {"torch 2": "1 + 1"}, "a": {"torch 1": "2 + 0", "torch 2": "2 + 2"}}
    page = write(f"Before.\n{START}{END}\nAfter.\n", cells)
    assert page.startswith("Before.\n") and page.endswith("After.\n")
    assert read(page) == cells
    assert write(page, cells) == page
    assert read(PAGE.read_text()), "the page has no table"

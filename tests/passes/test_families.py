"""Stock models of transformers under our passes: every layer found, and the numbers kept.

docs/FAMILIES.md holds what was found, a column for each torch; `make golden` writes that of the
torch at hand, `make families` those of all.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import fx

from moe_ops.passes import PIPELINE
from moe_ops.passes.rewriting.context import Context
from moe_ops.testing import Tol, assert_close
from tests.chosen import COMPILED, one_in, those_of
from tests.hf import families
from tests.hf.page import END, PAGE, START, hold, read, versions, write
from tests.passes.post_grad import Compiled

TOL = Tol(1e-5, "float32 sums in another order, over a few layers")
ROUNDED = Tol(2e-2, "bfloat16 sums in another order, over a layer")
LIFTS = PIPELINE[:3]

# Families with layers that stay as they are, and why.
EXPERTS_STAY = {
    "inkling2": "softcapped activation",
    "inkling2_loop": "softcapped activation",
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
@pytest.mark.parametrize("family", those_of(COMPILED, families.discover()))
def test_every_layer_of_a_stock_model_is_lifted(family: str) -> None:
    found = check(family, "grouped_mm", torch.float32, dynamic=False)
    assert_complete(family, found)
    hold({family: f"{found.experts} + {found.routers}"}, versions())


FORMS = [
    pytest.param("batched_mm", torch.float32, True, marks=pytest.mark.every),
    pytest.param("batched_mm", torch.bfloat16, False, marks=pytest.mark.every),
    ("grouped_mm", torch.bfloat16, True),
]


@pytest.mark.slow
@one_in(2, pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"]))
def test_a_sum_that_is_added_to_in_float32_is_rounded_before(form: str) -> None:
    """Inductor of torch 2.11 drops the conversions between; the model, and the op, do not."""
    tiny, found = families.build("hy_v3", form), Lifts()
    model = tiny.model.bfloat16()
    for module in model.modules():
        if hasattr(module, "enable_moe_fp32_combine"):
            module.enable_moe_fp32_combine = True
    with torch.inference_mode():
        want = first(model(**tiny.inputs, use_cache=False))
    got = first(Compiled(model, found, fullgraph=False)(**tiny.inputs, use_cache=False))
    assert_complete("hy_v3", found)
    assert_close(got.float(), want.float(), ROUNDED)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "dtype", "dynamic"), FORMS, ids=str)
@pytest.mark.parametrize("family", those_of(["gpt_oss"], SOME))
def test_every_form_is_lifted(family: str, form: str, dtype: torch.dtype, dynamic: bool) -> None:
    if family not in families.discover():
        pytest.skip(f"this transformers has no {family}")
    assert_complete(family, check(family, form, dtype, dynamic=dynamic))


def test_the_page_can_be_read_and_written() -> None:
    cells = {"b": {"torch 2": "1 + 1"}, "a": {"torch 1": "2 + 0", "torch 2": "2 + 2"}}
    page = write(f"Before.\n{START}{END}\nAfter.\n", cells)
    assert page.startswith("Before.\n") and page.endswith("After.\n")
    assert read(page) == cells
    assert write(page, cells) == page
    assert read(PAGE.read_text()), "the page has no table"

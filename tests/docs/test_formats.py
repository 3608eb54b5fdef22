"""docs/FORMATS.md says what the registries say."""

import difflib
import inspect
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import expecttest
import pytest

from moe_ops import OPS, expert_gemm, experts
from moe_ops.ops.experts import ExpertsCall
from moe_ops.quant import schemes
from moe_ops.quant.schemes import SchemeInfo
from tests.docs.formats import fill, objection
from tests.docs.served import DECODING, calls

PAGE = Path(__file__).resolve().parents[2] / "docs" / "FORMATS.md"
REMEDY = "run `make golden` if it should, and read the difference"


def difference() -> list[str]:
    """Lines that the registries change in the page: "-" before those in it, "+" the new ones."""
    page = PAGE.read_text()
    lines = difflib.ndiff(page.splitlines(), fill(page).splitlines())
    return [line for line in lines if line.startswith(("- ", "+ "))]


def test_the_page_is_what_the_registries_give() -> None:
    if expecttest.ACCEPT:
        PAGE.write_text(fill(PAGE.read_text()))
    changed = "\n".join(difference())
    assert not changed, f"docs/FORMATS.md does not say what the code does; {REMEDY}:\n{changed}"


@pytest.fixture
def registering(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered with the ops of products lasts for one test."""
    for op in (expert_gemm, experts):
        monkeypatch.setattr(op, "_backends", dict(op.backends))
        monkeypatch.setattr(op, "_order", {})


def only(w_format: str) -> Callable[[Any], str | None]:
    """A `supports` that takes one format of weights."""

    def supports(call: Any) -> str | None:
        return None if call.w_format == w_format else f"is for {w_format}"

    return supports


@pytest.mark.slow
@pytest.mark.usefixtures("registering")
def test_a_new_backend_of_products_changes_every_op_with_products() -> None:
    takes = only("mxfp6_e2m3")
    for name in [n for n in experts.backends if n.startswith("triton.")]:  # which take it whole
        del experts.backends[name]
    expert_gemm.backend(
        "new", reads=expert_gemm.optional, devices=("cuda",), priority=2, supports=takes
    )(expert_gemm.body)
    new = [line for line in difference() if line.startswith("+ ")]
    served = [line for line in new if "native: `new`" in line and "weights and" not in line]
    assert served == [
        "+ | weights | `mxfp6_e2m3_w6a16` | `expert_gemm`, `experts`, `moe` "
        "| reference: `dequantize` | native: `new` |"
    ]
    assert any("| `new` | `expert_gemm` | CPU | all | needs a tensor on cuda" in n for n in new)
    assert any(line.endswith("| is for mxfp6_e2m3 |") for line in new)


@pytest.mark.slow
@pytest.mark.usefixtures("registering")
def test_a_new_backend_of_experts_leaves_its_parts_alone() -> None:
    experts.backend("new", reads=experts.optional, priority=2, supports=only("nvfp4"))(experts.body)
    new = [line for line in difference() if line.startswith("+ ")]
    served = [line.split(" | ")[3] for line in new if "native: `new`" in line]
    assert served == ["`experts`, `moe`"] * 2
    alone = [line.split(" | ")[2] for line in new if "| `expert_gemm` | " in line]
    assert {"`nvfp4_w4a4`", "`nvfp4_w4a16`"} <= set(alone)


@pytest.mark.slow
def test_a_new_scheme_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    new = SchemeInfo(name="fp8_e5m2_w8a16", weight_formats=("float8_e5m2:row",))
    monkeypatch.setitem(schemes.SCHEMES, new.name, new)
    monkeypatch.setitem(schemes.BY_KIND, ("float8_e5m2", ""), new.name)
    changed = difference()
    line = "+ | `fp8_e5m2_w8a16` | `float8_e5m2:row`: 8 + 32/row | float32 | not quantised |"
    assert line in changed
    assert any("`fp8_e5m2_w8a16`" in c and "reference: `dequantize`" in c for c in changed)


@pytest.mark.slow
def test_an_op_that_refuses_a_scheme_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    before = experts.check

    def refuse(call: ExpertsCall) -> None:
        before(call)
        if "nvfp4" in (call.w_format, call.x_format):
            raise ValueError("nvfp4 | is out of stock")

    assert not difference()  # finds what `moe` is made of, which keeps, while `experts` takes it
    monkeypatch.setattr(experts, "check", refuse)
    cell = r"refused: nvfp4 \| is out of stock"
    assert any(f"`experts` | {cell} | {cell} |" in line for line in difference())


def test_a_table_that_the_page_lacks_is_missed() -> None:
    page = PAGE.read_text()
    with pytest.raises(ValueError, match=r"but wants each of .*'published'.* once"):
        fill(page.replace("<!-- published -->", ""))


def test_every_op_that_takes_formats_is_asked() -> None:
    takes = {
        name
        for name, op in OPS.items()
        if any(p.endswith("format") for p in inspect.signature(op).parameters)
    }
    takes.remove("experts_over_ranks")  # it calls `experts` where tokens meet
    takes.remove("experts_batched")  # it multiplies what `experts` does, by the same products
    takes -= {"experts_saving", "experts_backward"}  # of whose gradients docs/TRAINING.md tells
    takes = {name for name in takes if "adapted" not in name}  # as without adapters
    assert set(calls("float8_e4m3fn:row", "float8_e4m3fn:row")) == takes


def test_backends_that_decode_are_there() -> None:
    assert set(DECODING) <= {name for op in OPS.values() for name in op.backends}


def test_what_the_page_names_is_there() -> None:
    names = re.findall(r"`(moe_ops(?:\.\w+)+)`", PAGE.read_text())
    assert len(names) > 10
    for name in names:
        pkgutil.resolve_name(name)
    assert objection("float8_e4m3fn:64x64", "float8_e4m3fn:1x64") is None

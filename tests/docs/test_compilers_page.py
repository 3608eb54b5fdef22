"""docs/COMPILERS.md says what each consumer does with each op: every one has a rule or a reason."""

from __future__ import annotations

import dataclasses
import difflib

import expecttest
import pytest

from moe_ops import OPS
from moe_ops.registry.rules import Rules
from moe_ops.registry.spec import DECODE_OPS
from tests.docs.compilers import fill, told
from tests.sources import ROOT

PAGE = ROOT / "docs" / "COMPILERS.md"
EVERY = OPS | DECODE_OPS


@pytest.mark.parametrize("consumer", [f.name for f in dataclasses.fields(Rules)])
@pytest.mark.parametrize("name", EVERY)
def test_each_op_has_a_rule_or_a_reason(name: str, consumer: str) -> None:
    rules = EVERY[name].rules
    assert rules is not None
    rule, said = getattr(rules, consumer), told(EVERY[name])[consumer]
    assert said.startswith("no rule: it ") == isinstance(rule, str)
    if isinstance(rule, str):
        assert len(rule.split()) > 3, f"{name}: {rule!r} is no reason"


def test_the_page_is_what_the_rules_say() -> None:
    page = PAGE.read_text()
    if expecttest.ACCEPT:
        PAGE.write_text(fill(page))
    wanted = fill(page).splitlines()
    changed = [x for x in difflib.ndiff(page.splitlines(), wanted) if x.startswith(("- ", "+ "))]
    assert not changed, "run `make golden`, and read the difference:\n" + "\n".join(changed)


def test_a_table_that_the_page_lacks_is_missed() -> None:
    with pytest.raises(ValueError, match=r"but wants each of .*'vmap'.* once"):
        fill(PAGE.read_text().replace("<!-- consumer vmap -->", ""))

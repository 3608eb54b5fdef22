"""The tables of docs/COMPILERS.md, read off the rules of every op.

The page is written by hand but for its tables: `fill` replaces what stands between
`<!-- consumer NAME -->` and `<!-- end -->` by what that consumer does with each op.
"""

from __future__ import annotations

import re

from moe_ops import OPS
from moe_ops.registry.spec import DECODE_OPS, Op
from tests.docs.formats import grouped, quoted, table

BLOCK = re.compile(r"<!-- consumer (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def told(op: Op) -> dict[str, str]:
    """What each consumer does with an op. Raises ValueError for an op without rules."""
    if op.rules is None:
        raise ValueError(f"{op.name} has no rules; give it some in rules.py beside it")
    return op.rules.told()


def consumers() -> dict[str, str]:
    """By consumer its table: what it does, and with which ops."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, op in sorted((OPS | DECODE_OPS).items()):
        for consumer, what in told(op).items():
            found.setdefault(consumer, []).append((what, name))
    return {
        consumer: table(
            ("ops", consumer), [(quoted(names), what) for what, names in grouped(cells).items()]
        )
        for consumer, cells in found.items()
    }


def fill(page: str) -> str:
    """The page with its tables made anew. Raises ValueError unless it has each table once."""
    tables, found = consumers(), BLOCK.findall(page)
    if sorted(found) != sorted(tables):
        raise ValueError(f"the page has the tables {found}, but wants each of {[*tables]} once")
    return BLOCK.sub(lambda m: f"<!-- consumer {m[1]} -->\n\n{tables[m[1]]}\n\n<!-- end -->", page)

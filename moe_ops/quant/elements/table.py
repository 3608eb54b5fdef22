"""The elements that are known, by name."""

from __future__ import annotations

from collections.abc import Mapping

from moe_ops.checks.shapes import check_choice
from moe_ops.fake_impls import formats
from moe_ops.quant.elements.kinds import Element

ELEMENTS: dict[str, Element] = {}


def element_of(name: str) -> Element:
    """The element of a name. Raises ValueError for an unknown one."""
    check_choice("element", name, tuple(ELEMENTS))
    return ELEMENTS[name]


def add(element: Element, published: Mapping[str, str] | None = None) -> None:
    """Let format strings name an element, and short names stand for formats of it."""
    ELEMENTS[element.name] = element
    formats.ELEMENTS[element.name] = element.storage
    formats.PUBLISHED.update(published or {})


def remove(element: Element) -> None:
    """Forget an element and the short names of its formats."""
    del ELEMENTS[element.name], formats.ELEMENTS[element.name]
    for short, long in list(formats.PUBLISHED.items()):
        if long.partition(":")[0] == element.name:
            del formats.PUBLISHED[short]

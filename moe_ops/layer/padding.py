"""The multiples that widths of a layer are to be, as its backend, its formats and the transport of
its tokens ask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from moe_ops.checks.shapes import check_choice
from moe_ops.layer.exchange import Exchange
from moe_ops.layer.records import Padding
from moe_ops.ops.dispatch_tokens import dispatch_tokens
from moe_ops.ops.experts import experts
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.formats import Format
from moe_ops.ranks import transport
from moe_ops.registry.backend import Multiples

WHOLE = Multiples()


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The multiples of a layer's widths, and who asked for which; empty: nobody did."""

    hidden_multiple: int
    intermediate_multiple: int | None
    by: tuple[str, ...]

    @staticmethod
    def of(
        padding: Padding, quant: QuantConfig | None, dtype: torch.dtype, exchange: Exchange | None
    ) -> Asked:
        """What a layer is told and what is asked of others, together.

        Raises ValueError for a backend that there is not, and for one that does not multiply the
        layer's formats.
        """
        collective = "" if exchange is None else exchange.collective
        found = dict(_asked(padding.padding, quant, dtype, collective))
        together = Multiples(
            hidden=padding.hidden_multiple, intermediate=padding.intermediate_multiple or 1
        )
        for multiples in found.values():
            together |= multiples
        told = (padding.intermediate_multiple, padding.padding) != (None, None)
        return Asked(
            hidden_multiple=together.hidden,
            intermediate_multiple=together.intermediate if told else None,
            by=tuple(f"{who} asks for {_said(m)}" for who, m in found.items() if m != WHOLE),
        )

    @property
    def multiples(self) -> dict[str, Any]:
        """The multiples of the widths, as `LayerSizes.of` takes them."""
        return {
            "hidden_multiple": self.hidden_multiple,
            "intermediate_multiple": self.intermediate_multiple,
        }


def _asked(
    backend: str | None, quant: QuantConfig | None, dtype: torch.dtype, collective: str
) -> Iterator[tuple[str, Multiples]]:
    """Who needs which multiples. A format is asked where a backend is named: without one, widths
    that it does not divide are refused."""
    if backend is not None:
        yield backend, _of_backend(backend, quant, dtype)
        if quant is not None:
            yield str(quant), _of_formats(quant)
    rounds = dispatch_tokens.backends[transport.PUSH].rounds
    if collective in (transport.PUSH, transport.AUTO) and rounds is not None:
        words = rounds("", "", dtype)
        assert isinstance(words, Multiples)
        yield transport.PUSH, words


def _of_backend(name: str, quant: QuantConfig | None, dtype: torch.dtype) -> Multiples:
    check_choice("padding", name, tuple(experts.backends))
    rounds = experts.backends[name].rounds
    if rounds is None:
        return WHOLE
    weights, inputs = ("", "") if quant is None else (quant.weights, quant.inputs)
    found = rounds(weights, inputs, dtype)
    if isinstance(found, str):
        raise ValueError(
            f"padding={name!r} asks a backend that does not run this layer, as it {found}; name "
            "one that does, or the multiples themselves: Padding(hidden_multiple=...)"
        )
    return found


def _of_formats(quant: QuantConfig) -> Multiples:
    """The multiples by which bytes and groups are whole, in both weights and both inputs."""
    found = WHOLE
    for format in filter(None, (quant.format, quant.input_format)):
        rows, columns = _groups(format)
        found |= Multiples(hidden=columns, intermediate=columns)
        found |= Multiples(hidden=rows, intermediate=rows)
        values = format.parsed.storage.values
        found |= Multiples(hidden=values, intermediate=values)
    return found


def _groups(format: Format) -> tuple[int, int]:
    """Rows and columns that share a scale, 1 where all of them do."""
    rows, columns = (size if size > 0 else 1 for size in format.group)
    return rows, columns


def _said(multiples: Multiples) -> str:
    words = ((multiples.hidden, "hidden"), (multiples.intermediate, "intermediate"))
    return "multiples of " + " and ".join(f"{n} ({what})" for n, what in words if n > 1)

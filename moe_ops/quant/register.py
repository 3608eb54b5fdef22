"""Formats of other packages: an element, short names of its formats, and the schemes with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moe_ops.checks.options import check_text, check_type
from moe_ops.fake_impls.formats import PUBLISHED, parse
from moe_ops.interop import aot_cache
from moe_ops.quant import formats
from moe_ops.quant import schemes as known
from moe_ops.quant.elements import table
from moe_ops.quant.elements.kinds import Integer, Minifloat
from moe_ops.quant.formats import Format
from moe_ops.quant.schemes import SCHEMES, SchemeInfo

_REGISTERED: set[str] = set()


def register_format(
    element: Integer | Minifloat,
    *,
    published: Mapping[str, str] | None = None,
    schemes: Sequence[SchemeInfo] = (),
) -> None:
    """Let ops, layers and models take formats of an element that moe_ops does not have.

    They run at once, by the definitions of the ops and on CPUs by the backend "dequantize"; and on
    GPUs by Triton kernels, if the element has a `triton_decoder`: by triton.tiny, triton.rows,
    triton.grouped and "triton" of `expert_gemm`, with inputs that are not quantised or that these
    emulate. Backends that have no kernel for the element say so. `published` are short names of
    formats, as mxfp4 is one of float4_e2m1:1x32:e8m0. `schemes` say which inputs go with which
    weights: without one the ops alone take the formats, and no `QuantConfig`. Register before the
    first call, and in every process: saved models hold names alone.

    Raises TypeError for what is no element, ValueError for a name that is taken, for a decoder that
    is no place, and for formats that are none or are another scheme's; nothing is registered then.
    """
    check_type("element", element, (Integer, Minifloat), "an Integer or a Minifloat")
    name, short = element.name, dict(published or {})
    if not name.isidentifier() or name in table.ELEMENTS:
        raise ValueError(
            f"the element {name!r} {'is known already' if name in table.ELEMENTS else 'is no name'}"
            "; give another name, of letters, digits and underscores"
        )
    check_text("triton_decoder", element.triton_decoder)
    module, _, function = element.triton_decoder.partition(":")
    if element.triton_decoder and not all(map(str.isidentifier, (*module.split("."), function))):
        raise ValueError(
            f"the triton_decoder {element.triton_decoder!r} of {name} is no place of a function; "
            "give one as 'module:function'"
        )
    for taken, long in short.items():
        if not taken.isidentifier() or taken in PUBLISHED:
            raise ValueError(f"{taken!r} is no name that is free for a format; give another one")
        if long.partition(":")[0] != name:
            raise ValueError(f"the format {long!r} is not one of {name}; leave its name out")
    table.add(element, short)
    _REGISTERED.add(name)
    try:
        for long in short.values():
            Format.of(long)
        for scheme in schemes:
            known.add(scheme)
    except ValueError:
        forget_format(name)
        raise
    # Graphs that torch caches name the format, and hold what this definition made of it.
    aot_cache.tag_definition(repr((element, short)))


def forget_format(name: str) -> None:
    """Undo `register_format` of an element, as a test does that leaves no trace.

    What was decided for calls, and compiled, stays with the process: register no other definition
    under this name. Raises ValueError for what was not registered.
    """
    if name not in _REGISTERED:
        raise ValueError(
            f"the element {name!r} was not registered; give one of "
            f"{', '.join(sorted(_REGISTERED)) or 'those that were (none)'}"
        )
    for scheme in [s for s in SCHEMES.values() if name in _elements(s)]:
        known.remove(scheme)
    table.remove(table.ELEMENTS[name])
    _REGISTERED.remove(name)
    parse.cache_clear()
    formats.forget_kept()


def _elements(scheme: SchemeInfo) -> set[str]:
    """The elements of a scheme's formats."""
    every = (*scheme.weight_formats, *scheme.input_formats)
    return {Format.of(format).element for format in every if format}

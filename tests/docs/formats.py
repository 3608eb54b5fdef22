"""The tables of docs/FORMATS.md, read off the registries of schemes, formats and backends.

The page is written by hand but for its tables: `fill` replaces what stands between `<!-- NAME -->`
and `<!-- end -->` by the table of that name.
"""

import math
import re
from collections.abc import Hashable, Iterable
from typing import NamedTuple, TypeVar

import torch

from moe_ops import OPS, experts
from moe_ops.backends.flashinfer import b12x, cute_dsl, cutlass, trtllm
from moe_ops.fake_impls.formats import ALL, ELEMENTS, PUBLISHED
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.quant.schemes import SCHEMES, check_groups, scheme_of
from tests.docs.served import DEVICES, calls, how, machine, refusals

# Weights and inputs that look as if they went together, besides those of one scheme.
TRIED = (
    ("int4:128", ""),
    ("int4:1x128:e8m0", ""),
    ("float8_e4m3fn:column", ""),
    ("int4:1x128", "int8:row"),
    ("", "int8:row"),
    ("nvfp4", "float8_e4m3fn:row"),
    ("mxfp4", "float8_e4m3fn:1x32"),
    ("float8_e4m3fn:128x128", "float8_e4m3fn:1x64"),
)
ORDER = ("nothing", "weights", "weights and inputs")  # what is quantised
BLOCK = re.compile(r"<!-- (\w+) -->\n.*?<!-- end -->", re.DOTALL)

Key, Value = TypeVar("Key", bound=Hashable), TypeVar("Value")


class Pair(NamedTuple):
    """A scheme, and one of its formats of weights and of inputs ("": not quantised)."""

    scheme: str
    weights: str
    inputs: str

    def __str__(self) -> str:
        return f"`{self.weights}`" + (f" with `{self.inputs}`" if self.inputs else "")


def fill(page: str) -> str:
    """The page with its tables made anew. Raises ValueError unless it has each table once."""
    found = BLOCK.findall(page)
    if sorted(found) != sorted(TABLES):
        raise ValueError(f"the page has the tables {found}, but wants each of {list(TABLES)} once")
    return BLOCK.sub(lambda m: f"<!-- {m[1]} -->\n\n{TABLES[m[1]]()}\n\n<!-- end -->", page)


def runs() -> str:
    """Schemes x ops x devices. Schemes with equal cells share their lines, and so do their ops."""
    found = []
    with machine():
        for pair in pairs():
            for name, call in calls(pair.weights, pair.inputs).items():
                row = tuple(how(OPS[name], call, device) for device in DEVICES.values())
                found.append((pair, (name, row)))
    cells = grouped(((quantized(pair), tuple(of)), pair) for pair, of in grouped(found).items())
    lines = []
    for (what, of), some in sorted(cells.items(), key=lambda item: ORDER.index(item[0][0])):
        label = names(some)
        for row, ops in grouped((row, name) for name, row in of).items():
            lines.append((what, label, quoted(ops), *row))
            what = label = "the same"
    return table(("quantised", "schemes", "op", *DEVICES), lines)


def refused_by_backends() -> str:
    """Which backends do not take the calls of which schemes, and why."""
    found = []
    with machine():
        for pair in pairs():
            for name, call in calls(pair.weights, pair.inputs).items():
                for label, device in DEVICES.items():
                    for backend, reason in refusals(OPS[name], call, device).items():
                        stored = OPS[name].backends[backend].layout  # and none of these calls is
                        if reason is not None and stored is None:
                            reason = re.sub("read .*w_format=.*", "read w_format", reason)
                            found.append(((backend, name, label, reason), pair))
    by_op = grouped(
        ((backend, label, reason, tuple(some)), name)
        for (backend, name, label, reason), some in grouped(found).items()
    )
    by_device = grouped(
        ((backend, tuple(ops), reason, some), label)
        for (backend, label, reason, some), ops in by_op.items()
    )
    lines = (
        (f"`{backend}`", quoted(ops), ", ".join(labels), names(list(some), short=True), reason)
        for (backend, ops, reason, some), labels in by_device.items()
    )
    return table(("backend", "op", "device", "does not take", "because"), lines)


def flashinfer() -> str:
    """What the backends of FlashInfer multiply, and where."""
    lines = []
    for of in (cutlass, b12x, cute_dsl, trtllm):
        for (weights, inputs), way in of.WAYS.items():
            layout = experts.backends[of.NAME].layout
            assert layout is not None
            where = ", ".join(f"{major}.{minor}" for major, minor in way.capabilities)
            plain = " or ".join(map(dtype_name, way.dtypes))
            static = " (static scales)" * way.static_inputs
            lines.append((
                f"`{of.NAME}`", f"`{weights}`" if weights else plain,
                f"`{inputs}`{static}" if inputs else plain, where, f"`{layout.name}`",
            ))  # fmt: skip
    return table(("backend", "weights", "inputs", "compute capability", "layout"), lines)


def schemes() -> str:
    """The formats of every scheme; weights with like scales and the same inputs share a line."""
    lines = []
    for scheme, some in grouped((pair.scheme, pair) for pair in pairs()).items():
        inputs = grouped((pair.weights, pair.inputs) for pair in some)
        like = grouped(((scales(w), tuple(xs)), w) for w, xs in inputs.items())
        for (kind, xs), ws in like.items():
            sizes = ", ".join(f"{spelled(w)}: {bits(w)}" if w else spelled(w) for w in ws)
            lines.append((f"`{scheme}`", sizes, kind, ", ".join(map(spelled, xs))))
    return table(("scheme", "weights: bits a value", "their scales", "inputs"), lines)


def elements() -> str:
    """What the codes of every element type stand for."""
    lines = []
    for name, storage in ELEMENTS.items():
        if storage.block:  # which has no codes of single values
            continue
        values = packing.decode(codes(name), name)
        finite = values[values.isfinite()]
        others = {"NaN": values.isnan(), "infinity": values.isinf()}
        edges = packing.encode(torch.tensor([torch.inf, torch.nan]), name)
        infinity, nan = (f"{x:g}" for x in packing.decode(edges, name).tolist())
        units = f"{storage.units} bytes" if storage.units > 1 else dtype_name(storage.dtype)
        packed = f"{storage.values} in {units}" if storage.values > 1 else units
        lines.append(
            (
                f"`{name}`",
                f"{Format.of(f'{name}:row').bits:g}",
                packed,
                f"{finite.min():g} to {finite.max():g}",
                f"2^{math.log2(finite[finite > 0].min()):g}",
                ", ".join(word for word, found in others.items() if found.any()) or "neither",
                f"{infinity}, {nan.replace('nan', 'NaN')}",
            )
        )
    last = ("smallest > 0", "codes for", "inf, NaN become")
    return table(("element", "bits", "stored as", "values", *last), lines)


def published() -> str:
    """The formats that have a name."""
    used = {name for pair in pairs() for name in (pair.weights, pair.inputs)}
    lines = [
        (f"`{name}`", f"`{long}`", scales(name), bits(name), "yes" if name in used else "no")
        for name, long in PUBLISHED.items()
    ]
    return table(("name", "stands for", "scales", "bits a value", "in a scheme"), lines)


def refused() -> str:
    """Formats that do not go together, by the errors that say so."""
    lines = []
    with machine():
        for w, x in (*((pair.weights, pair.inputs) for pair in listed()), *TRIED):
            reason = objection(w, x)
            if reason is not None:
                lines.append((spelled(w), spelled(x), reason, by_ops(w, x)))
    return table(("weights", "inputs", "refused because", "the ops alone"), lines)


TABLES = {
    table.__name__: table
    for table in (runs, refused_by_backends, flashinfer, schemes, elements, published, refused)
}


def listed() -> list[Pair]:
    """Every weight format of a scheme with every input format, whether or not they go together."""
    return [
        Pair(scheme.name, w, x)
        for scheme in SCHEMES.values()
        for w in scheme.weight_formats
        for x in scheme.input_formats
    ]


def pairs() -> list[Pair]:
    """What every scheme is built in."""
    return [pair for pair in listed() if objection(pair.weights, pair.inputs) is None]


def objection(weights: str, inputs: str) -> str | None:
    """Why no configuration has these formats, or None: its rules."""
    try:
        w, x = (Format.of(name) if name else None for name in (weights, inputs))
        scheme_of(w, x)
        check_groups(x, w)
    except ValueError as error:
        return str(error).replace(", ".join(SCHEMES), "the schemes above")
    return None


def by_ops(weights: str, inputs: str) -> str:
    """How the products of two formats are served on the CPU, whether or not a scheme has them."""
    try:
        made = calls(weights, inputs)
    except ValueError:
        return "refused"
    cells = (how(OPS[name], call, "cpu") for name, call in made.items() if name != "quantize")
    return ", ".join(dict.fromkeys(cell.partition(":")[0] for cell in cells))


def codes(element: str) -> torch.Tensor:
    """Every code of an element once."""
    dtype = ELEMENTS[element].dtype
    count = 2 ** round(Format.of(f"{element}:row").bits)
    return torch.arange(count, dtype=torch.uint8).view(dtype)


def scales(format: str) -> str:
    """The types of a format's scales, and their dtype where the type does not name it."""
    if not format:
        return "none"
    of = Format.of(format)
    dtype = dtype_name(of.parsed.scale_dtype)
    each = of.scale if of.scale == dtype else f"{of.scale} in {dtype}"
    if of.has_global_scale:
        return f"{each}; float32 of the matrix"
    return f"{each}; uint8 zero points" if of.has_zero else each


def quantized(pair: Pair) -> str:
    """Which operands of a product are quantised."""
    if pair.inputs:
        return "weights and inputs"
    return "weights" if pair.weights else "nothing"


def bits(format: str) -> str:
    """Bits of one value with its share of scales and zero points."""
    of = Format.of(format)
    storage = of.parsed.storage
    each = 8 * storage.units / storage.values if storage.block else of.bits
    shared = 8 * (of.parsed.scale_dtype.itemsize + of.has_zero)
    rest = f" + {8 * torch.float32.itemsize}/matrix" if of.has_global_scale else ""
    if ALL not in of.group:
        return f"{each + shared / (of.group[0] * of.group[1]):.5g}{rest}"
    part = {(1, ALL): "row", (ALL, 1): "column", (ALL, ALL): "matrix"}[of.group]
    return f"{each:g} + {shared}/{part}{rest}"


def names(some: list[Pair], *, short: bool = False) -> str:
    """Schemes by name; of a scheme that is not here as a whole, its formats too.

    short: most of them as all but the others.
    """
    here, every = (grouped((pair.scheme, pair) for pair in of) for of in (some, pairs()))
    whole = [scheme for scheme, of in here.items() if of == every[scheme]]
    missing = [scheme for scheme in every if scheme not in here]
    if short and len(whole) == len(here) > len(missing):
        return f"all but {quoted(missing)}" if missing else "all"
    return ", ".join(
        f"`{scheme}`" if scheme in whole else f"`{scheme}` ({', '.join(map(str, of))})"
        for scheme, of in here.items()
    )


def grouped(items: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """The values of each key, in the order in which they come."""
    found: dict[Key, list[Value]] = {}
    for key, value in items:
        found.setdefault(key, []).append(value)
    return found


def table(head: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    rows = (head, ("---",) * len(head), *lines)
    return "\n".join(
        "|".join(("", *(f" {c} ".replace("|", r"\|") for c in row), "")) for row in rows
    )


def quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def spelled(format: str) -> str:
    return f"`{format}`" if format else "not quantised"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""The records and schemas of ops in C++, written from those in Python, so that both are one."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterable, Mapping
from inspect import Parameter
from types import UnionType
from typing import Any

import torch
from torch import Tensor

from moe_ops.backends import reads
from moe_ops.fake_impls.formats import PUBLISHED
from moe_ops.kernels.cpu import quantized
from moe_ops.ops.experts import ExpertsCall, experts
from moe_ops.ops.moe import MoeCall, moe
from moe_ops.ops.route import RouteCall, route
from moe_ops.quant.formats import Format
from moe_ops.registry.spec import OPS, Op

# The ops that the library has, and the arguments with defaults that its code reads. It refuses
# calls in which another one differs from its default, such as one that an op gets later.
READS: Mapping[str, tuple[str, ...]] = {
    "route": reads.ROUTE,
    "dispatch": ("expert_map",),
    "expert_gemm": reads.FLOAT_GEMM,
    "activate": reads.ACTIVATION,
    "combine": (),
    "experts": (*reads.EXPERTS, *reads.STATIC_SCALES, *reads.CODES),
}
# `moe` reads what `route` and `experts` do, whose records it makes.
LIBRARY_OPS = (*READS, "moe")
STORED = {
    torch.int8: "ScalarType::Char",
    torch.uint8: "ScalarType::Byte",
    torch.float8_e4m3fn: "ScalarType::Float8_e4m3fn",
}
TYPES = {int: "int64_t", float: "double", bool: "bool", str: "std::string", Tensor: "Tensor"}


def header() -> str:
    """C++ with a record of each op's arguments, its name and its schemas."""
    parts = ["#pragma once", '#include "arguments.h"', _formats(), "namespace moe_ops {"]
    parts += [_record(OPS[name], READS[name]) for name in READS]
    parts += [_record(moe, None, _parts_of_moe()), "}  // namespace moe_ops", ""]
    return "\n\n".join(parts)


def _formats() -> str:
    """Macros with the elements and scales that the kernels take, and the names of formats."""
    found = {name: Format.of(f"{name}:row") for name in quantized.ELEMENTS}
    elements = (
        f"{{{json.dumps(name)}, {STORED[f.parsed.storage.dtype]}, {f.parsed.storage.values}, "
        f"{f.parsed.storage.units}, {json.dumps(f.has_zero)}}}"
        for name, f in found.items()
    )
    published = (
        f"{{{json.dumps(short)}, {json.dumps(full)}}}" for short, full in PUBLISHED.items()
    )
    macros = {
        "ELEMENTS": elements,
        "SCALES": map(json.dumps, quantized.SCALES),
        "PUBLISHED": published,
    }
    return "\n".join(f"#define MOE_{name} {', '.join(of)}" for name, of in macros.items())


def _record(op: Op, reads: Iterable[str] | None, more: str = "") -> str:
    """The record of an op; with `reads`, one that refuses what these leave out."""
    parameters = op.arguments.signature.parameters
    fields = [f"  {_type(p.annotation)} {name};" for name, p in parameters.items()]
    taken = (f"taken<{_type(p.annotation)}>(stack[{i}])" for i, p in enumerate(parameters.values()))
    kind, planned = op.arguments.record.__name__, f"{op.name}.planned{op.planned_schema}"
    lines = [
        f"struct {kind} {{",
        f'  static constexpr const char* kName = "{op.name}";',
        f"  static constexpr const char* kSchema = {json.dumps(op.name + op.schema)};",
        f"  static constexpr const char* kPlanned = {json.dumps(planned)};",
        f"  static constexpr uint64_t kArguments = {len(parameters)};",
        *fields,
        "  bool batch_invariant = false;  // as a plan says",
        f"  static {kind} of(StableIValue* stack) {{ return {{{', '.join(taken)}}}; }}",
    ]
    if reads is not None:
        lines.append(_refusal(parameters, {*reads}))
    return "\n".join([*lines, *filter(None, [more]), "};"])


def _refusal(parameters: Mapping[str, Parameter], reads: set[str]) -> str:
    """A function that raises for the first argument that differs from its default unread."""
    unread = {
        name: p.default
        for name, p in parameters.items()
        if p.default is not Parameter.empty and name not in reads
    }
    lines = (
        f'    if (!({name} == {_value(default)})) refuse_argument(op, "{name}", {name});'
        if default is not None
        else f'    if ({name}) refuse_argument(op, "{name}", {name});'
        for name, default in unread.items()
    )
    return "\n".join(
        ["  void refuse_unread(const char* op) const {", "    (void)op;", *lines, "  }"]
    )


def _parts_of_moe() -> str:
    """The records of `route` and `experts` that one of `moe` holds."""
    names = {path: name for name, path in MoeCall.FLAT.items()}

    def made(part: str, record: type, op: Op) -> str:
        found = []
        for name, p in op.arguments.signature.parameters.items():
            flat = names.get(f"{part}.{name}")
            given = name if p.default is Parameter.empty else _value(p.default)
            found.append(given if flat is None else flat)
        return f"{record.__name__}{{{', '.join(found)}}}"

    return "\n".join(
        [
            f"  RouteCall routing() const {{ return {made('routing', RouteCall, route)}; }}",
            "  ExpertsCall layer(const Tensor& weights_TK, const Tensor& ids_TK) const {",
            f"    return {made('layer', ExpertsCall, experts)};",
            "  }",
        ]
    )


def _type(hint: Any) -> str:
    members = typing.get_args(hint) if isinstance(hint, UnionType) else ()
    if type(None) in members:
        (kind,) = (m for m in members if m is not type(None))
        return f"std::optional<{TYPES[kind]}>"
    return TYPES[hint]


def _value(default: Any) -> str:
    """A default as C++."""
    return "std::nullopt" if default is None else json.dumps(default)

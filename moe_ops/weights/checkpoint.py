"""Whole checkpoints into layers: `load_checkpoint`."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from moe_ops.layer import MoELayer
from moe_ops.layer.tensors import INPUT_SCALES, NAMES, STATE
from moe_ops.prepared import as_loaded
from moe_ops.quant.scales import inverse
from moe_ops.weights.configuration import coding_in
from moe_ops.weights.experts import (
    WEIGHTS,
    LoadRecord,
    Piece,
    Writes,
    check_load,
    load_expert,
    prepare_expert,
    write,
)
from moe_ops.weights.files import entries, files_of
from moe_ops.weights.fused import taken_apart
from moe_ops.weights.layouts import PLAIN, TRANSPOSED, Coding, Stored
from moe_ops.weights.names import FOREIGN, GATE_UP_DOWN, Entry, Style, style_of
from moe_ops.weights.outside import check_outside
from moe_ops.weights.report import LoadReport
from moe_ops.weights.shards import ShardPlan, one_input_scale
from moe_ops.weights.writer import Writer

log = logging.getLogger("moe_ops")

Read = Callable[[], Tensor]
EXPERTS = tuple(name for name in NAMES if name in WEIGHTS)
ORDER = "g_idx"  # what names of orders of columns end in
SHARED = "shared_experts."  # what a style's names of them begin with, in the layer's words
TOGETHER = 128  # entries that are checked before they are written


def load_checkpoint(
    layers: Mapping[str, MoELayer],
    source: str | Path | Iterable[str | Path],
    *,
    style: str | Style,
    coding: Coding | None = None,
    sharded: bool = False,
    progress: bool = True,
) -> LoadReport:
    """Load this rank's share of every layer from files; says what was found.

    layers: by the prefix of their names, such as "model.layers.3.mlp"; the prefix ends before
    ".experts". source: a directory (its *.safetensors, those of its index, or its *.gguf), a file
    or several. style: the family that wrote the names, a key of `STYLES`, or a `Style`. coding: how
    weights are laid out; None reads it from quantization_config in the config.json beside the
    files; a GGUF file says it itself. sharded: the tensors of experts are this rank's parts
    already, as one that saved its own share has them.

    Loads experts, with their replicas and, where they are fused, shared ones; else shared experts,
    the gate and the correction bias by the names of the layer's own parameters. Prepared layers are
    prepared again at the end. Files are mapped, not read, and tensors copied one at a time, so no
    more memory is needed than for the layers and, of layouts that are converted, one expert's
    matrix. With progress, a line per file is written to standard error.

    Raises ValueError or TypeError, naming file entry and shapes, for a tensor that does not fit: it
    is not loaded, those before it are. Raises FileNotFoundError for no files, ValueError for files
    that cannot be read, unsupported codings, float8 tensors outside the experts and layers on the
    meta device; ImportError for GGUF files without the package gguf.
    """
    check_load(layers, coding, sharded, progress)
    found = style_of(style)
    files = files_of(source)
    coding = coding_in(files[0].parent) if coding is None else coding
    if found.transposed and coding is PLAIN:
        coding = TRANSPOSED
    begin = time.perf_counter()
    with as_loaded(layers.values()), Writer() as writer:
        loading = _Loading(
            style=found, coding=coding, sharded=sharded, layers=dict(layers), writer=writer
        )
        for file in files:
            check_outside(file, loading.target)
        for file in files:  # before the tensors that they put in order
            for stored in entries(file, ORDER):
                loading.take(stored)
        for i, file in enumerate(files):
            before = loading.bytes_loaded
            start = time.perf_counter()
            try:
                for stored in entries(file):
                    if not stored.name.endswith(ORDER):
                        loading.take(stored)
            finally:
                loading.flush()
            if progress:
                mib, took = (loading.bytes_loaded - before) / 2**20, time.perf_counter() - start
                sys.stderr.write(
                    f"{i + 1} of {len(files)}  {file.name}  {mib:.0f} MiB in {took:.1f} s\n"
                )
    return loading.report(time.perf_counter() - begin)  # with what the writer still had to do


@dataclass(eq=False, slots=True, kw_only=True)
class _Loading:
    """One load in progress."""

    style: Style
    coding: Coding
    sharded: bool
    layers: dict[str, MoELayer]
    writer: Writer
    bytes_loaded: int = 0
    loaded: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    records: dict[str, LoadRecord] = field(default_factory=dict)
    # Tensors besides the experts', by prefix and name in the layer.
    others: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    decoded: set[str] = field(default_factory=set)  # codings of which a line was logged
    known: dict[str, Entry | str] = field(default_factory=dict)  # by the name below a prefix
    last: str | None = None  # the prefix, and a dot, of the layer that was loaded last
    nested: bool = False  # whether a prefix may begin with another one
    # By prefix, parameter and shard: how tensors go in that go in as they are.
    plans: dict[tuple[str, str, str], ShardPlan] = field(default_factory=dict)
    filled: set[tuple[str, str]] = field(default_factory=set)
    # Checked, and to be written together: what checks need stays in the caches meanwhile.
    pending: list[Writes] = field(default_factory=list)

    def __post_init__(self) -> None:
        for prefix, layer in self.layers.items():
            self.records[prefix] = LoadRecord()
            own = layer.state_dict(keep_vars=True)
            self.others[prefix] = {n: t for n, t in own.items() if n not in (*EXPERTS, *STATE)}
        self.nested = any(p in self.layers for prefix in self.layers for p in _prefixes(prefix))

    def _prefix_of(self, name: str) -> str | None:
        """The longest prefix of a layer that a name has."""
        if self.last is not None and name.startswith(self.last) and not self.nested:
            return self.last[:-1]
        found = next((p for p in _prefixes(name) if p in self.layers), None)
        self.last = found and f"{found}."
        return found

    def _entry(self, prefix: str, name: str) -> Entry | str:
        """What a name below a prefix is."""
        rest = name[len(prefix) + 1 :] if prefix else name
        return self.known.get(rest) or self.known.setdefault(rest, self.style.entry(rest))

    def target(self, name: str) -> Tensor | None:
        """The parameter or buffer that takes a tensor as it is, by its name in a file."""
        prefix = self._prefix_of(name)
        if prefix is None:
            return None
        entry = self._entry(prefix, name)
        return self.others[prefix].get(entry) if isinstance(entry, str) else None

    def flush(self, *, made: bool = False) -> None:
        """Write what is pending: what is made for it at once, copies of the rest by the way."""
        copies: list[tuple[Tensor, Tensor]] = []
        for writes in self.pending:
            if isinstance(writes, list) and not made:
                copies += writes
            else:
                write(writes)
        self.pending.clear()
        if copies:
            self.writer.add(copies)

    def take(self, stored: Stored) -> None:
        """Load one entry of a file."""
        name, read = stored.name, stored.read
        prefix = self._prefix_of(name)
        if prefix is None:
            return
        entry = self._entry(prefix, name)
        if isinstance(entry, Entry):
            coding = stored.coding or self.coding
            if not self._take_as_it_is(prefix, name, entry, stored):
                self._take_expert(prefix, name, entry, read, coding)
            if coding.decodes:
                self._take_scale(prefix, name, entry, read, coding)
            made = stored.made or self.records[prefix].orders.some
            if len(self.pending) >= TOGETHER or made:
                self.flush(made=made)
            return
        for quantiser, pattern in FOREIGN.items():
            if pattern.search(name):
                raise ValueError(
                    f"{name} is of {quantiser}, of which weights of 4 bits are read, with all of "
                    "their parts in one file; dequantise the checkpoint, or quantise it in one of "
                    "docs/FORMATS.md"
                )
        if self.layers[prefix].placement.shared and entry.startswith(SHARED):
            self._take_fused(prefix, name, entry.removeprefix(SHARED), read)
        else:
            self._take_other(prefix, name, entry, read)

    def _take_scale(self, prefix: str, name: str, entry: Entry, read: Read, coding: Coding) -> None:
        """The scales that lie between the values; of a layer without a format, one line instead."""
        layer = self.layers[prefix]
        if layer.quant is None:
            if coding.name not in self.decoded:
                log.info(
                    "%s is %s: decoded to %s, as others are", name, coding.name,
                    layer.w13_weight.dtype,
                )  # fmt: skip
            self.decoded.add(coding.name)
            return
        scale = replace(entry, parameter=entry.parameter.replace("weight", "scale"))
        self._take_expert(prefix, name, scale, read, coding, count=False)  # the weight counts

    def _take_as_it_is(self, prefix: str, name: str, entry: Entry, stored: Stored) -> bool:
        """Take an expert's tensor as one like it was taken before; False if it is to be looked at
        more closely. There are thousands.
        """
        plan = self.plans.get((prefix, entry.parameter, entry.shard))
        if plan is None or entry.expert is None or entry.reciprocal or stored.coding is not None:
            return False
        record = self.records[prefix]
        key = (entry.parameter, entry.expert, entry.shard)
        slots = record.slots_of(self.layers[prefix], entry.expert)
        if not slots or key in record.seen:
            return False
        t = stored.read()
        whole = plan.whole(t)
        if whole is None:
            return False
        self.pending.append([(plan.places[slot], whole) for slot in slots])
        record.orders.written.add(entry.expert)
        record.seen[key] = name
        self.loaded.append(name)
        self.bytes_loaded += t.nbytes
        return True

    def _take_expert(
        self,
        prefix: str,
        name: str,
        entry: Entry,
        read: Read,
        coding: Coding,
        *,
        count: bool = True,
    ) -> None:
        layer, record = self.layers[prefix], self.records[prefix]
        part, _ = WEIGHTS[entry.parameter]
        if not _has_place(layer, entry.parameter, part):
            self.unexpected.append(name)
            return
        experts = range(layer.num_experts) if entry.expert is None else (entry.expert,)
        shards = {"w13": ("w1", "w3"), "w3": _up(layer)}.get(entry.shard, (entry.shard,))
        keys = [(entry.parameter, e, shard) for e in experts for shard in shards]
        if any(key in record.seen for key in keys):
            self.twice.append(name)
            return
        shared = layer.replicas is not None if part == "g_idx" else one_input_scale(layer)
        here, every = False, part in ("g_idx", "input") and shared
        if entry.expert is None or every or record.slots_of(layer, entry.expert):
            t = _read(name, entry, read)
            piece = Piece(
                entry.parameter, t, name, entry.shard, entry.expert,
                coding, self.style.interleaved, self.sharded,
            )  # fmt: skip
            here, writes = prepare_expert(layer, piece, record)
            self.pending.append(writes)
            self.bytes_loaded += t.nbytes * (here and count)
            if here and part in ("weight", "scale") and shards == (entry.shard,):
                self._keep_plan(prefix, entry, t, coding)
        record.seen.update(dict.fromkeys(keys, name))
        if count:
            (self.loaded if here else self.elsewhere).append(name)

    def _keep_plan(self, prefix: str, entry: Entry, t: Tensor, coding: Coding) -> None:
        """Keep how a tensor went in, for `_take_as_it_is`, if it went in as it is."""
        layer, record = self.layers[prefix], self.records[prefix]
        ordered = record.orders.some or layer.input_order is not None
        if entry.expert is None or ordered or coding is not self.coding:
            return
        plan = record.plan_of(
            layer, entry.parameter, entry.shard, coding, self.style.interleaved, self.sharded
        )
        if plan.whole(t) is not None:
            self.plans[prefix, entry.parameter, entry.shard] = plan

    def _take_fused(self, prefix: str, name: str, rest: str, read: Read) -> None:
        """Shared experts that the layer has in slots; a checkpoint has them side by side in one."""
        layer, record = self.layers[prefix], self.records[prefix]
        entry = GATE_UP_DOWN.entry(f"experts.0.{rest}")
        if isinstance(entry, str) or not _has_place(
            layer, entry.parameter, WEIGHTS[entry.parameter][0]
        ):
            self.unexpected.append(name)
            return
        shared = layer.placement.shared
        keys = [(entry.parameter, layer.num_experts + s, entry.shard) for s in range(shared)]
        if keys[0] in record.seen:
            self.twice.append(name)
            return
        part, second = WEIGHTS[entry.parameter]
        t = _read(name, entry, read)
        format = None if layer.quant is None else layer.quant.format
        pieces = taken_apart(t, part, second, shared, self.coding, format)
        for s, piece in enumerate(pieces):
            load_expert(
                layer, entry.parameter, piece, name, entry.shard, layer.num_experts + s,
                coding=self.coding, sharded=self.sharded, record=record,
            )  # fmt: skip
        record.seen.update(dict.fromkeys(keys, name))
        self.loaded.append(name)
        self.bytes_loaded += t.nbytes

    def _take_other(self, prefix: str, name: str, parameter: str, read: Read) -> None:
        target = self.others[prefix].get(parameter)
        if target is None:
            self.unexpected.append(name)
            return
        if (prefix, parameter) in self.filled:
            self.twice.append(name)
            return
        t = read()
        if t.shape != target.shape:
            raise ValueError(
                f"{name}: expected the shape {list(target.shape)}, found {list(t.shape)}"
            )
        if t.is_floating_point() != target.is_floating_point():
            raise TypeError(f"{name}: is {t.dtype}, but the layer's {parameter} is {target.dtype}")
        with torch.no_grad():
            target.copy_(t)
        self.filled.add((prefix, parameter))
        self.loaded.append(name)
        self.bytes_loaded += t.nbytes

    def report(self, seconds: float) -> LoadReport:
        missing = [m for prefix in self.layers for m in self._missing(prefix)]
        return LoadReport(
            loaded=tuple(self.loaded),
            elsewhere=tuple(self.elsewhere),
            missing=tuple(missing),
            unexpected=tuple(self.unexpected),
            twice=tuple(self.twice),
            bytes_loaded=self.bytes_loaded,
            seconds=seconds,
        )

    def _missing(self, prefix: str) -> Iterator[str]:
        layer, record = self.layers[prefix], self.records[prefix]
        for parameter in EXPERTS:
            if getattr(layer, parameter) is None:
                continue
            _, second = WEIGHTS[parameter]
            first = ("w1", "w3") if layer.activation.gated else ("w1",)
            every = parameter in INPUT_SCALES and one_input_scale(layer)
            for expert in range(layer.num_experts + (0 if every else layer.placement.shared)):
                if not every and not record.slots_of(layer, expert):
                    continue
                for shard in ("w2",) if second else first:
                    if (parameter, expert, shard) not in record.seen:
                        yield f"{prefix}.{parameter}[{expert}].{shard}"
        for parameter in self.others[prefix]:
            if (prefix, parameter) not in self.filled:
                yield f"{prefix}.{parameter}"


def _read(name: str, entry: Entry, read: Read) -> Tensor:
    """The tensor of an entry, as a multiplier if it is a scale that divides."""
    if not entry.reciprocal:
        return read()
    try:
        return inverse(read())
    except (ValueError, TypeError) as error:
        raise type(error)(f"{name}: {error}") from error


def _up(layer: MoELayer) -> tuple[str, ...]:
    """What an up projection is called: without a gate it is the first weight."""
    return ("w3",) if layer.activation.gated else ("w1",)


def _has_place(layer: MoELayer, parameter: str, part: str) -> bool:
    """Whether the layer holds it, or is to be told: what it lacks may still have to be checked."""
    if part in ("g_idx", "shape", "zero"):
        return layer.quant is not None
    if parameter == "w2_bias":
        return layer.w13_bias is not None
    return getattr(layer, parameter) is not None


def _prefixes(name: str) -> Iterator[str]:
    """Everything before a dot, the longest first, and nothing."""
    end = len(name)
    while (end := name.rfind(".", 0, end)) > 0:
        yield name[:end]
    yield ""

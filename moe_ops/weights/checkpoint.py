"""One load of a checkpoint: its entries are checked, one by one, then all of them are written."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moe_ops.checks.shapes import FLOATS
from moe_ops.layer import MoELayer
from moe_ops.layer.tensors import STATE
from moe_ops.quant.scales import inverse
from moe_ops.weights.configuration import naming
from moe_ops.weights.experts import Piece, prepare_expert, write
from moe_ops.weights.fused import taken_apart
from moe_ops.weights.global_scales import GlobalScales
from moe_ops.weights.layouts import PLAIN, TRANSPOSED, Coding, Stored, scale_above
from moe_ops.weights.names import FOREIGN, GATE_UP_DOWN, Entry, Style
from moe_ops.weights.numbers import check_complete, check_input_factors
from moe_ops.weights.places import EXPERTS, has_place, missing_of, shards_of
from moe_ops.weights.record import WEIGHTS, LoadRecord, Writes
from moe_ops.weights.report import LoadReport
from moe_ops.weights.shards import ShardPlan, has_one_global_scale, one_input_scale
from moe_ops.weights.writer import Writer

log = logging.getLogger("moe_ops")

Read = Callable[[], Tensor]
ORDER = "g_idx"  # what names of orders of columns end in
SHARED = "shared_experts."  # what a style's names of them begin with, in the layer's words
TOGETHER = 128  # copies that the writer is given at a time


@dataclass(eq=False, slots=True, kw_only=True)
class Loading:
    """One load in progress.

    `take` checks entries and writes nothing; `end_source` ends those of a file. When all are taken,
    `settle` checks what takes several, `write_source` writes those of one file after the other, and
    `write_last` the rest: with at_once, each time, what was taken since.
    """

    style: Style
    coding: Coding
    sharded: bool
    layers: dict[str, MoELayer]
    at_once: bool = False  # whether entries are written before all are known
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
    latest: str | None = None  # the prefix, and a dot, of the layer of the entry before
    nested: bool = False  # whether a prefix may begin with another one
    # By prefix, parameter and shard: how tensors go in that go in as they are.
    plans: dict[tuple[str, str, str], ShardPlan] = field(default_factory=dict)
    filled: set[str] = field(default_factory=set)
    pending: list[Writes] = field(default_factory=list)  # since the last source
    sources: deque[tuple[list[Writes], int]] = field(default_factory=deque)  # and their bytes

    def __post_init__(self) -> None:
        for prefix, layer in self.layers.items():
            self.records[prefix] = LoadRecord(
                global_scales=None if self.at_once else GlobalScales()
            )
            own = layer.state_dict(keep_vars=True)
            self.others[prefix] = {n: t for n, t in own.items() if n not in (*EXPERTS, *STATE)}
        self.nested = any(p in self.layers for prefix in self.layers for p in _prefixes(prefix))

    def _prefix_of(self, name: str) -> str | None:
        """The longest prefix of a layer that a name has."""
        if self.latest is not None and name.startswith(self.latest) and not self.nested:
            return self.latest[:-1]
        found = next((p for p in _prefixes(name) if p in self.layers), None)
        self.latest = found and f"{found}."
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

    def end_source(self) -> None:
        """What was taken since the last call is of one file."""
        before = sum(size for _, size in self.sources)
        self.sources.append((self.pending, self.bytes_loaded - before))
        self.pending = []

    def settle(self) -> None:
        """After the last entry: check what takes several, and find what follows from them.

        Raises ValueError, naming the entry, for weights whose scales or zero points did not come.
        """
        for prefix, layer in self.layers.items():
            scales = self.records[prefix].global_scales
            if scales is not None and has_one_global_scale(layer):
                assert layer.w13_global_scale is not None
                self.pending.append(scales.settle(layer.w13_global_scale.detach()))
            if self.coding.symmetric:
                self.pending.append(list(self._middles(prefix)))
            check_complete(layer, self.records[prefix], shards_of(layer))

    def _middles(self, prefix: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Zero points of experts that have none in a symmetric checkpoint, where the layer has."""
        layer, record = self.layers[prefix], self.records[prefix]
        for parameter, shards in shards_of(layer).items():
            zero, weight = (f"{parameter}_{what}" for what in ("zero", "weight"))
            if layer.quant is None or getattr(layer, zero) is None:
                continue
            middle = torch.tensor(layer.quant.format.middle, dtype=torch.uint8)
            for shard in shards:
                how = record.plan_of(layer, zero, shard, PLAIN, False, self.sharded)
                every = middle.expand(how.rows.size, how.columns.size)
                for expert in range(layer.num_experts + layer.placement.shared):
                    key = (zero, expert, shard)
                    if key in record.seen or (weight, expert, shard) not in record.seen:
                        continue
                    record.seen[key] = record.seen[weight, expert, shard]
                    for slot in record.slots_of(layer, expert):
                        yield how.region(slot, every, how.halves[0], 0), every

    def write_source(self, writer: Writer) -> int:
        """Write what was taken of the next file: copies by the way, what is made for it at once.
        Its bytes.
        """
        copies: list[tuple[Tensor, Tensor]] = []
        found, size = self.sources.popleft()
        for writes in found:
            if not isinstance(writes, list):
                write(writes)
                continue
            copies += writes
            if len(copies) >= TOGETHER:
                writer.add(copies)
                copies = []
        if copies:
            writer.add(copies)
        return size

    def write_last(self) -> None:
        """Write what is of no source yet."""
        for writes in self.pending:
            write(writes)
        self.pending.clear()

    def take(self, stored: Stored) -> None:
        """Check one entry of a file, which is to be written."""
        name = stored.name
        prefix = self._prefix_of(name)
        if prefix is None:
            return
        entry = self._entry(prefix, name)
        if isinstance(entry, Entry):
            coding = stored.coding or self._coding_of(entry, stored.read)
            if not self._take_as_it_is(prefix, name, entry, stored):
                self._take_expert(prefix, entry, stored, coding)
            if coding.decodes:
                self._take_scale(prefix, entry, stored, coding)
            return
        check_input_factors(name, stored.read)
        for quantizer, pattern in FOREIGN.items():
            if pattern.search(name):
                raise ValueError(
                    f"{name} is of {quantizer}, of which weights of 4 bits are read, with all of "
                    "their parts in one file; dequantise the checkpoint, or quantise it in one of "
                    "docs/FORMATS.md"
                )
        if self.layers[prefix].placement.shared and entry.startswith(SHARED):
            self._take_fused(prefix, entry.removeprefix(SHARED), stored)
        else:
            self._take_other(prefix, entry, stored)

    def _coding_of(self, entry: Entry, read: Read) -> Coding:
        """The checkpoint's coding, but for weights that it leaves unquantised."""
        if not entry.plain or self.coding.weight is None:
            return self.coding
        if self.coding.plain_names and read().dtype not in FLOATS:
            return self.coding
        return TRANSPOSED if self.style.transposed else PLAIN

    def _take_scale(self, prefix: str, entry: Entry, stored: Stored, coding: Coding) -> None:
        """The scales that lie between the values; of a layer without a format, one line instead."""
        layer = self.layers[prefix]
        if layer.quant is None:
            if coding.name not in self.decoded:
                into = layer.w13_weight.dtype
                log.info("%s is %s: decoded to %s, as others are", stored.name, coding.name, into)
            self.decoded.add(coding.name)
            return
        scale = replace(entry, parameter=entry.parameter.replace("weight", "scale"))
        if coding.scale_of_blocks is not None:
            stored, coding = scale_above(coding, stored), PLAIN
        self._take_expert(prefix, scale, stored, coding, count=False)  # the weight counts

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
        entry: Entry,
        stored: Stored,
        coding: Coding,
        *,
        count: bool = True,
    ) -> None:
        layer, record, name = self.layers[prefix], self.records[prefix], stored.name
        part, _ = WEIGHTS[entry.parameter]
        if not has_place(layer, entry.parameter, part):
            self.unexpected.append(name)
            return
        experts = range(layer.num_experts) if entry.expert is None else (entry.expert,)
        shards = {"w13": ("w1", "w3"), "w3": shards_of(layer)["w13"][-1:]}.get(
            entry.shard, (entry.shard,)
        )
        keys = [(entry.parameter, e, shard) for e in experts for shard in shards]
        if any(key in record.seen for key in keys):
            if count:
                self.twice.append(name)
            return
        shared = layer.replicas is not None if part == "g_idx" else one_input_scale(layer)
        here, every = False, part in ("g_idx", "input") and shared
        if entry.expert is None or every or record.slots_of(layer, entry.expert):
            t = _read(name, entry, stored.read) if stored.like is None else stored.like()
            piece = Piece(
                entry.parameter, t, name, entry.shard, entry.expert,
                coding, self.style.interleaved, self.sharded,
            )  # fmt: skip
            here, writes = prepare_expert(layer, piece, record)
            if stored.like is not None:
                writes = _made(layer, piece, stored.read, record)
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
        if entry.parameter == "w13_scale" and has_one_global_scale(layer):
            return  # kept until the global scales are known
        if entry.expert is None or ordered or coding is not self.coding:
            return
        plan = record.plan_of(
            layer, entry.parameter, entry.shard, coding, self.style.interleaved, self.sharded
        )
        if plan.whole(t) is not None:
            self.plans[prefix, entry.parameter, entry.shard] = plan

    def _take_fused(self, prefix: str, rest: str, stored: Stored) -> None:
        """Shared experts that the layer has in slots; a checkpoint has them side by side in one."""
        layer, record, name = self.layers[prefix], self.records[prefix], stored.name
        entry = GATE_UP_DOWN.entry(f"experts.0.{rest}")
        if isinstance(entry, str) or not has_place(
            layer, entry.parameter, WEIGHTS[entry.parameter][0]
        ):
            self.unexpected.append(name)
            return
        shared = layer.placement.shared
        keys = [(entry.parameter, layer.num_experts + s, entry.shard) for s in range(shared)]
        if keys[0] in record.seen:
            self.twice.append(name)
            return
        t = _read(name, entry, stored.read) if stored.like is None else stored.like()
        found = list(self._fused_writes(prefix, name, entry, t))
        if stored.like is None:
            self.pending += found
        else:
            later = self._fused_writes(prefix, name, entry, stored.read)
            self.pending.append(one for writes in later for one in writes)
        record.seen.update(dict.fromkeys(keys, name))
        self.loaded.append(name)
        self.bytes_loaded += t.nbytes

    def _fused_writes(
        self, prefix: str, name: str, entry: Entry, t: Tensor | Read
    ) -> Iterator[Writes]:
        """The writes of each of the shared experts that a tensor holds, which may be read first."""
        layer, record = self.layers[prefix], self.records[prefix]
        (part, second), shared = WEIGHTS[entry.parameter], layer.placement.shared
        format = None if layer.quant is None else layer.quant.format
        whole = t if isinstance(t, Tensor) else t()
        coding = self._coding_of(entry, lambda: whole)
        with naming(name):
            pieces = taken_apart(whole, part, second, shared, coding, format)
        for s, t_s in enumerate(pieces):
            piece = Piece(
                entry.parameter, t_s, name, entry.shard, layer.num_experts + s,
                coding, False, self.sharded,
            )  # fmt: skip
            yield prepare_expert(layer, piece, record)[1]

    def _take_other(self, prefix: str, parameter: str, stored: Stored) -> None:
        name = stored.name
        target = self.others[prefix].get(parameter)
        if target is None:
            self.unexpected.append(name)
            return
        if f"{prefix}.{parameter}" in self.filled:
            self.twice.append(name)
            return
        t = stored.read() if stored.like is None else stored.like()
        if t.shape != target.shape:
            raise ValueError(
                f"{name}: expected the shape {list(target.shape)}, found {list(t.shape)}"
            )
        if t.is_floating_point() != target.is_floating_point():
            raise TypeError(f"{name}: is {t.dtype}, but the layer's {parameter} is {target.dtype}")
        into = target.detach()
        self.pending.append([(into, t)] if stored.like is None else _read_later(into, stored.read))
        self.filled.add(f"{prefix}.{parameter}")
        self.loaded.append(name)
        self.bytes_loaded += t.nbytes

    def report(self, seconds: float) -> LoadReport:
        missing = [
            m
            for prefix, layer in self.layers.items()
            for m in missing_of(prefix, layer, self.records[prefix], self.others[prefix])
            if m not in self.filled
        ]
        return LoadReport(
            loaded=tuple(self.loaded),
            elsewhere=tuple(self.elsewhere),
            missing=tuple(missing),
            unexpected=tuple(self.unexpected),
            twice=tuple(self.twice),
            bytes_loaded=self.bytes_loaded,
            seconds=seconds,
        )


def _made(layer: MoELayer, piece: Piece, read: Read, record: LoadRecord) -> Writes:
    """The writes of a tensor that is made when it is read, of which a piece like it was checked."""
    _, writes = prepare_expert(layer, replace(piece, tensor=read()), record)
    yield from writes


def _read_later(target: Tensor, read: Read) -> Writes:
    yield target, read()


def _read(name: str, entry: Entry, read: Read) -> Tensor:
    """The tensor of an entry, as a multiplier if it is a scale that divides."""
    if not entry.reciprocal:
        return read()
    try:
        return inverse(read())
    except (ValueError, TypeError) as error:
        raise type(error)(f"{name}: {error}") from error


def _prefixes(name: str) -> Iterator[str]:
    """Everything before a dot, the longest first, and nothing."""
    end = len(name)
    while (end := name.rfind(".", 0, end)) > 0:
        yield name[:end]
    yield ""

"""Which part of a checkpoint's tensor a rank keeps, and where in the layer's tensor it goes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops.layer import MoELayer
from moe_ops.layer.tensors import LayerSizes
from moe_ops.quant.formats import ROW, TENSOR, Format
from moe_ops.quant.scales import wrong_scale, wrong_zero
from moe_ops.weights.advice import advising
from moe_ops.weights.layouts import Coding, Matrix, to_dtype

KINDS = {torch.uint8: "e8m0", torch.float8_e4m3fn: "float8_e4m3fn"}  # of scales
ALL = -1  # of the units of an axis that share a scale
WORD_ROWS = 8  # rows that are whole words of every layout
BLOCKS = 16  # in which rows are put in order, so that this takes less memory than the matrix
# That are converted at once, for the same reason: this takes up to three times as many.
BLOCK_BYTES = 1 << 20
LEAST_BLOCKS = 4  # of a small matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The units from `start` on, `size` of `whole`, that a rank keeps; it has room for `room`."""

    start: int
    size: int
    whole: int
    room: int

    @property
    def is_whole(self) -> bool:
        return self.size == self.whole

    def grouped(self, group: int, what: str) -> Span:
        """The span in groups of `group` units; -1 makes all units one group. Raises ValueError if
        it cuts a group."""
        if group == ALL:
            return Span(start=0, size=1, whole=1, room=1)
        end = self.start + self.size
        if self.size and (self.start % group or (end % group and end != self.whole)):
            raise ValueError(
                f"{what} {self.start} to {end - 1} of {self.whole} are this rank's, which cuts "
                f"groups of {group}; take other tensor parallel sizes, or expert parallelism"
            )
        size, whole, room = (-(-n // group) for n in (self.size, self.whole, self.room))
        return Span(start=self.start // group, size=size, whole=whole, room=room)


def spans(sizes: LayerSizes, shard: str, *, sharded: bool) -> tuple[Span, Span]:
    """The rows and the columns of a shard that a rank keeps; sharded: that the tensor consists of.

    w1 and w3 are split along their outputs, w2 along its inputs.
    """
    width = Span(start=0, size=sizes.hidden_size, whole=sizes.hidden_size, room=sizes.D)
    inner = Span(
        start=0 if sharded else sizes.first,
        size=sizes.used,
        whole=sizes.used if sharded else sizes.intermediate_size,
        room=sizes.I,
    )
    return (width, inner) if shard == "w2" else (inner, width)


def check_shape(layer: MoELayer, shard: str, t_E: Sequence[Tensor], sharded: bool) -> None:
    """Raise ValueError unless the sizes that a checkpoint tells are those of the layer."""
    rows, columns = spans(layer.sizes, shard, sharded=sharded)
    wanted = [rows.whole * (2 if shard == "w13" else 1), columns.whole]
    found = next((t.tolist() for t in t_E if t.tolist() != wanted), None)
    if found is not None:
        raise advising(
            ValueError,
            f"expected {wanted}, found {found}",
            "make the layer with the checkpoint's hidden_size and intermediate_size",
        )


@dataclass(frozen=True, kw_only=True, eq=False)  # with a __dict__, for what is kept
class ShardPlan:
    """How the tensors of one name go into a layer, expert by expert.

    Everything is a matrix [rows, columns] counted in groups that share a number: a bias has one
    column, a scale of a tensor one row too.
    """

    target: Tensor  # the layer's tensor as [slots, rows, columns]
    part: str
    format: Format | None
    matrix: Matrix  # as the checkpoint has it
    rows: Span  # of one half
    columns: Span
    halves: tuple[int, ...]  # of the layer's rows that the tensor holds: 0 gate (or all), 1 up
    stored_alternating: bool
    held_alternating: bool
    shared: bool  # one number serves gate and up
    shape: tuple[int, ...] | None  # of one expert's tensor; None if its sizes do not fill words
    signed: bool = False  # scales may be negative
    repeats: int = 1  # blocks of rows of the layer in one of the checkpoint

    def sources(self, t: Tensor) -> Iterator[tuple[Tensor, int, int]]:
        """What one expert's tensor holds, as the layer takes it, with its half and first row.

        Conversions come in blocks of rows, whose memory is small. Raises ValueError or TypeError
        for a tensor of another shape or dtype.
        """
        if self.matrix.as_words and t.dtype != torch.int32:
            raise TypeError(f"packed values must be int32 words, got {t.dtype}")
        t, matrix = self.as_matrix(t)
        step = self.rows.size
        if matrix.convert is not None:
            most = min(step * BLOCK_BYTES // max(t.nbytes, 1), step // LEAST_BLOCKS)
            step = max(most // WORD_ROWS, 1) * WORD_ROWS
        for place, half in enumerate(self.halves):
            for first in range(0, self.rows.size, max(step, 1)):
                rows = min(step, self.rows.size - first)
                piece = self._cut(t, matrix, place, first, rows)
                if matrix.convert is not None:
                    piece = matrix.convert(piece, self.format)
                    if self.cut_decoded:
                        piece = piece.narrow(1, self.columns.start, self.columns.size)
                elif matrix.rows.place == 1:
                    piece = piece.T
                kind = "scale" if self.part == "global_scale" else self.part
                piece = to_dtype(piece, self.target.dtype, kind)
                yield piece, half, first

    @functools.cached_property
    def cut_decoded(self) -> bool:
        """Whether this rank's columns begin or end inside a block of values that are decoded
        together: whole rows are decoded, and then cut.
        """
        span = self.columns
        ends = (self.matrix.columns.stored(n) for n in (span.start, span.size))
        decoded = self.format is None and self.matrix.convert is not None
        return decoded and self.part == "weight" and not span.is_whole and None in ends

    @functools.cached_property
    def places(self) -> tuple[Tensor, ...]:
        """Where a tensor that goes into the layer as it is goes, by slot; empty if tensors of this
        name are taken apart. Most tensors of most checkpoints are not, and there are thousands.
        """
        matrix, shape = self.matrix, self.shape
        taken_apart = (
            len(self.halves) != 1
            or matrix.convert is not None
            or matrix.block is not None
            or self.part not in ("weight", "scale")
            or self.shared
            or self.held_alternating
            or not (self.rows.is_whole and self.columns.is_whole)
        )
        if taken_apart or shape is None:
            return ()
        rows, columns = shape[::-1] if matrix.rows.place == 1 else shape
        found = self.target.narrow(1, self.halves[0] * self.rows.room, self.rows.size)
        return found.narrow(2, 0, columns).unbind(0) if rows == found.shape[1] else ()

    def whole(self, t: Tensor) -> Tensor | None:
        """An expert's tensor as it goes to one of `places`, or None if it is to be taken apart."""
        if not self.places or t.dim() != 2:
            return None
        t = t.T if self.matrix.rows.place == 1 else t
        place = self.places[0]
        if t.shape != place.shape or t.dtype != place.dtype or self.wrong_in(t) is not None:
            return None
        return t

    def wrong_in(self, t: Tensor) -> str | None:
        """What in scales or zero points, as the layer takes them, no weight can have, and what they
        are; None for other parts."""
        if t.is_meta:
            return None
        if self.part == "zero":
            assert self.format is not None
            return wrong_zero(t, self.format.element)
        if self.part not in ("scale", "global_scale"):
            return None
        wrong = wrong_scale(t, KINDS.get(self.target.dtype, "float32"), signed=self.signed)
        return wrong and f"{wrong}, but a scale is {'finite' if self.signed else 'above 0'}"

    def region(self, slot: int, piece: Tensor, half: int, first: int) -> Tensor:
        """The view of the layer's tensor where what `sources` gave goes."""
        target = self.target[slot]
        if self.held_alternating:
            target = target[half::2]
        elif not self.shared:
            first += half * self.rows.room
        rows, columns = piece.shape
        if rows != target.shape[0]:
            target = target.narrow(0, first, rows)
        return target if columns == target.shape[1] else target.narrow(1, 0, columns)

    def as_matrix(self, t: Tensor) -> tuple[Tensor, Matrix]:
        """One expert's tensor with two axes. A scale may be one value for all rows, or lack the
        axis of its one column.
        """
        rows = self.rows.whole * len(self.halves)
        if self.columns.whole == 1 and self.part in ("scale", "global_scale", "bias"):
            of_rows = self.format is not None and self.format.group in (TENSOR, ROW)
            of_tensor = self.part == "global_scale" or (self.part == "scale" and of_rows)
            if of_tensor and t.numel() == 1:
                return t.reshape(1, 1).expand(rows, 1), Matrix()
            if of_tensor and t.numel() == len(self.halves):
                return t.reshape(-1, 1).repeat_interleave(self.rows.whole, 0), Matrix()
            if tuple(t.shape) == (rows,):
                return t[:, None], Matrix()
        if self.repeats > 1 and self.shape is not None and t.dim() == 2:
            stored = (-(-self.shape[0] // self.repeats), self.shape[1])
            if tuple(t.shape) == stored:
                t = t.repeat_interleave(self.repeats, 0)[: self.shape[0]]
        if t.shape != self.shape:
            raise ValueError(f"expected the shape {self._wanted()}, found {list(t.shape)}")
        return (t if self.matrix.block is None else t.flatten(-2)), self.matrix

    def _stored_columns(self) -> tuple[int, int]:
        """First column and size of what is cut out before it is converted."""
        span = self.columns
        return (0, span.whole) if self.cut_decoded else (span.start, span.size)

    def _wanted(self) -> str:
        if self.shape is not None:
            return str(list(self.shape[:1] if self.part == "bias" else self.shape))
        return (
            f"of a matrix of {self.rows.whole * len(self.halves)} x {self.columns.whole}, "
            "which does not fill the layout's words,"
        )

    def _cut(self, t: Tensor, matrix: Matrix, place: int, first: int, rows: int) -> Tensor:
        """Some rows of this rank's part of the half at `place` of a stored matrix."""
        if len(self.halves) == 1 and rows == self.rows.whole and self.columns.is_whole:
            return t
        first, step = self.rows.start + first, 1
        if self.stored_alternating:
            first, step = len(self.halves) * first + place, len(self.halves)
        else:
            first += place * self.rows.whole
        if step > 1 and matrix.rows.values > 1:
            raise ValueError("alternating rows of gate and up cannot be taken out of words of both")
        bounds = (
            (matrix.rows, first, rows, step, "rows"),
            (matrix.columns, *self._stored_columns(), 1, "columns"),
        )
        cut = [slice(None), slice(None)]
        for axis, start, size, stride, what in bounds:
            begin, length = axis.stored(start), axis.stored(size)
            if begin is None or length is None:
                raise ValueError(
                    f"{what} {start} to {start + size - 1} are this rank's, which cuts words of "
                    f"{axis.values}; take other tensor parallel sizes, or expert parallelism"
                )
            cut[axis.place] = slice(begin, begin + length * stride, stride)
        return t[tuple(cut)]


def plan(
    layer: MoELayer,
    parameter: str,
    part: str,
    shard: str,
    coding: Coding,
    interleaved: bool,
    sharded: bool,
    ordered: bool = False,
) -> ShardPlan:
    """How tensors of a shard go into a parameter that the layer holds: weight, scale, zero, bias or
    global scale; ordered: their columns are put in order, which takes words apart. Raises
    ValueError where the rank's part cannot be cut out.
    """
    target: Tensor = getattr(layer, parameter).detach()  # writes need no gradient
    format = None if layer.quant is None else layer.quant.format
    group = {"weight": (1, 1), "bias": (1, ALL), "global_scale": (ALL, ALL)}.get(part)
    if group is None:
        assert format is not None
        group = format.group
    gated = layer.activation.gated and shard != "w2"
    if shard == "w13" and not gated:
        raise ValueError("holds gate and up, but the layer's experts have no gate")
    rows, columns = spans(layer.sizes, shard, sharded=sharded)
    # Two global scales are a column of the layer's tensor, so not shared.
    shared = gated and group[0] == ALL and not (part == "global_scale" and target.dim() == 2)
    alternating = gated and layer.activation.interleaved and not shared
    if gated and group[0] > 1 and (rows.room % group[0] or alternating or interleaved):
        raise advising(
            ValueError,
            f"scales of {group[0]} rows would be shared by gate and up, {rows.room} rows each",
            "give the layer rows [gate; up] of a multiple, or a format whose blocks have as many "
            "rows as divide both",
        )
    halves = {"w13": (0, 1), "w3": (1,) if gated else (0,)}.get(shard, (0,))
    matrix = Matrix() if part in ("bias", "global_scale") else coding.matrix(part, format)
    rows, columns = rows.grouped(group[0], "rows"), columns.grouped(group[1], "columns")
    target = target.reshape(target.shape[0], target.shape[1] if target.dim() > 1 else 1, -1)
    if part == "weight" and not ordered:
        target, matrix = matrix.in_words(target, format)
    return ShardPlan(
        target=target,
        part=part,
        format=format,
        matrix=matrix,
        rows=rows,
        columns=columns,
        halves=halves,
        stored_alternating=interleaved and len(halves) == 2,
        held_alternating=alternating,
        shared=shared,
        shape=matrix.shape(rows.whole * len(halves), columns.whole),
        signed=coding.decodes,
        repeats=_repeats(coding, group) if part == "scale" else 1,
    )


def _repeats(coding: Coding, group: tuple[int, int]) -> int:
    """How many of the layer's blocks of rows have one scale in the checkpoint."""
    rows, columns = coding.block or group
    return rows // group[0] if columns == group[1] and rows % group[0] == 0 else 1


def has_one_global_scale(layer: MoELayer) -> bool:
    """Whether one second-level scale serves gate and up of an expert."""
    return layer.w13_global_scale is not None and layer.w13_global_scale.dim() == 1


def one_input_scale(layer: MoELayer) -> bool:
    """Whether one static scale serves the inputs of all experts, wherever they are."""
    return layer.quant is None or not layer.quant.per_expert_inputs

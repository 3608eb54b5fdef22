"""Quantised experts for one token, or few rows an expert, on Hopper:
`register_stream_gluon.py` launched."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton import Constant
from moe_ops.kernels.triton.experts.call import DTYPES, Call, Reads
from moe_ops.kernels.triton.experts.driver import Products
from moe_ops.kernels.triton.experts.weights import Experts, Stack, strides
from moe_ops.kernels.triton.launch import pdl_options
from moe_ops.kernels.triton.replay import launch


@dataclass(frozen=True, eq=False)
class Sizes(Constant):
    """The sizes of a tile, SIZES of kernels: S shares, MW warps along rows, MT tiles of 16 rows for
    each warp, NT tiles of 8 tokens; how many steps ahead tokens are loaded; whether a product is
    ahead of the load of codes for a later step, which can then use its registers; and whether
    scales are multiplied into values, as they are for many rows an expert, also those that serve a
    whole step, or all columns."""

    S: int
    MW: int
    MT: int
    NT: int
    X: int = 1
    late: bool = False
    in_values: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The sizes of a launch: S, MW, MT and NT as in `Sizes`, C parts of the columns, how many steps
    ahead codes are loaded, and tokens, at most as many as codes, one if they are rounded; whether
    one token is rounded to codes of 8 bits where it is loaded; the most registers of a thread, 0
    for as many as it takes; and `late` and `in_values` as in `Sizes`."""

    S: int = 1
    MW: int = 1
    MT: int = 1
    NT: int = 1
    C: int = 1
    ahead: int = 2
    tokens_ahead: int = 1
    late: bool = False
    rounds: bool = False
    registers: int = 0
    in_values: bool = False

    def __post_init__(self) -> None:
        most = 1 if self.rounds else self.ahead
        if self.tokens_ahead > most:
            raise ValueError(f"tokens are loaded {self.tokens_ahead} steps ahead, {most} at most")

    @property
    def warps(self) -> int:
        return self.S * self.MW

    @property
    def options(self) -> dict[str, int]:
        """What Triton is told of a launch: its warps, and the most registers of a thread."""
        most = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.warps, **most}

    @property
    def sizes(self) -> Sizes:
        return Sizes(
            self.S, self.MW, self.MT, self.NT, self.tokens_ahead, self.late, self.in_values
        )

    @property
    def rows(self) -> int:
        return 16 * self.MW * self.MT

    @property
    def tokens(self) -> int:
        return 8 * self.NT


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    up: Stream
    down: Stream


def _up(c: Call) -> None:
    from moe_ops.kernels.triton.experts.products import register_stream_gluon as kernels

    layer, stream, (E, D, I) = c.layer, c.tiles.up, c.sizes
    kernel, routed, rows = kernels.one_up, (c.ids_TK, c.weights, c.expert_map), c.ids_TK.shape[1]
    size, more = c.n_map, {}
    if c.order:
        kernel, routed, rows = (
            kernels.few_up,
            (*c.order, c.slots, c.weights),
            c.units(stream.tokens),
        )
        size, more = c.x.values.stride(0), {"K": c.x.choices, "BE": c.BE, "LOOPS": c.loops}
    F = 2 * I if layer.act.gated else I
    launch(
        kernel, (rows * triton.cdiv(F, stream.rows),),
        c.x.values, c.x.scale, *routed, *_words(layer.stack13, layer), c.h.values, size,
        strides(layer.stack13)[3], *c.added13.arguments,
        E=E, D=D, I=I, ACT=layer.act, W=layer.weight, SHARED=layer.shared13,
        DTYPE=_multiplied_as(c), **c.added13.constants, P=stream.ahead, SIZES=stream.sizes,
        **stream.options, **more, **pdl_options(c.ids_TK),
    )  # fmt: skip


def _down(c: Call) -> None:
    from moe_ops.kernels.triton.experts.products import register_stream_gluon as kernels

    layer, stream, (E, D, I) = c.layer, c.tiles.down, c.sizes
    weights = c.summed if c.invariant else c.weights
    kernel, routed, rows = kernels.one_down, (c.ids_TK, weights, c.expert_map), 1
    written = c.residual_TD, c.out, c.n_map
    more = {"K": c.ids_TK.shape[1], "C": stream.C, "ORDERED": c.invariant}
    if c.order:
        kernel, routed, rows = (
            kernels.few_down,
            (*c.order, c.slots, c.weights),
            c.units(stream.tokens),
        )
        written, more = (c.out,), {"BE": c.BE, "LOOPS": c.loops}
    launch(
        kernel, (rows * triton.cdiv(D, stream.rows),),
        c.h.values, c.h.scale, *routed, *_words(layer.stack2, layer), *written,
        strides(layer.stack2)[3], *c.added2.arguments,
        E=E, D=D, I=I, W=layer.weight, DTYPE=_multiplied_as(c), **c.added2.constants,
        P=stream.ahead, SIZES=stream.sizes,
        **stream.options, **more, **pdl_options(c.ids_TK),
    )  # fmt: skip


def _words(stack: Stack, layer: Experts) -> tuple[Tensor | None, ...]:
    """A weight in words of 32 bits; of codes of six bits of 64, which a thread loads at once."""
    assert layer.codes is not None
    return stack[0].view(torch.int64 if layer.codes.bits == 6 else torch.int32), *stack[1:]


def _multiplied_as(c: Call) -> tl.dtype:
    """Codes of 8 bits are multiplied as float16, which holds them exactly."""
    codes = c.layer.codes
    assert codes is not None
    return tl.float16 if codes.quantizes else DTYPES[c.dtype]


def _rounds(c: Call) -> tuple[bool, bool]:
    """Whether the products of one token make codes of x and of h: where tiles say so. Not by scales
    that are given, or that are found over all choices."""
    codes = c.codes
    if codes is None or not codes.quantizes or codes.scaled == "tensor":
        return False, False
    if codes.x_scale is not None or codes.h_scale is not None:
        return False, False
    return c.tiles.up.rounds and codes.x_scale_TG is None, c.tiles.down.rounds


READS = Reads(in_words=True, weighs=True)
# Of one token; and of a few for each expert, of which every weight is read once for several rows.
run_one = Products(up=_up, down=_down, reads=READS, sorts=False, rounds=_rounds).run
run = Products(up=_up, down=_down, reads=READS).run

"""The layouts of weights that FlashInfer's backends read, by what the weights are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops.backends.flashinfer import orders
from moe_ops.registry.layouts import Layout

Order = Callable[[Tensor], Tensor]
FLOATS, FP8, MXFP8 = "floats", "float8 codes", "mxfp8 codes"
MXFP4, NVFP4 = "mxfp4 codes", "nvfp4 codes"


@dataclass(frozen=True, slots=True)
class Weights:
    """What stacked weights are: their kind, and whether w13 holds a gate."""

    kind: str
    gated: bool

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> Weights:
        """Raises ValueError for codes that no backend here reads."""
        w13, w2, scale = (tensors.get(n) for n in ("w13_EFD", "w2_EDI", "w13_scale_EFG"))
        assert w13 is not None and w2 is not None
        scale_dtype = None if scale is None else scale.dtype
        kind = KINDS.get((w13.dtype, scale_dtype), "")
        values = 2 if kind in (MXFP4, NVFP4) else 1
        groups = {MXFP8: 32, MXFP4: 32, NVFP4: 16}.get(kind)
        columns = values * w13.shape[2]
        if groups is not None and scale is not None and scale.shape[2] * groups != columns:
            kind = ""
        if not kind or any(tensors.get(f"w{n}_zero_E{g}") is not None for n, g in ZEROS):
            held = w13.dtype if scale is None else f"{w13.dtype} with scales of {scale.dtype}"
            raise ValueError(
                f"FlashInfer has no order for weights of {held}; it reads 16-bit floats, float8 "
                "with scales of the tensor or of blocks, mxfp8, mxfp4 and nvfp4"
            )
        return Weights(kind, w13.shape[1] == 2 * values * w2.shape[2])


KINDS: dict[tuple[torch.dtype, torch.dtype | None], str] = {
    (torch.bfloat16, None): FLOATS,
    (torch.float16, None): FLOATS,
    (torch.float8_e4m3fn, torch.float32): FP8,
    (torch.float8_e4m3fn, torch.uint8): MXFP8,
    (torch.uint8, torch.uint8): MXFP4,
    (torch.uint8, torch.float8_e4m3fn): NVFP4,
}
ZEROS = ((13, "FG"), (2, "DG"))


def _apply(tensors: Mapping[str, Tensor], by_name: Mapping[str, Order]) -> dict[str, Tensor]:
    given = ((name, order, tensors.get(name)) for name, order in by_name.items())
    return {name: order(t) for name, order, t in given if t is not None}


def _rows(tensors: Mapping[str, Tensor], order: Order) -> dict[str, Tensor]:
    """What goes by the rows of w13: its codes, its bias, and scales if it has more than one row."""
    made = _apply(tensors, {"w13_EFD": order, "b13_EF": lambda t: order(t[..., None])[..., 0]})
    scale = tensors.get("w13_scale_EFG")
    if scale is not None:
        made["w13_scale_EFG"] = order(scale) if scale.shape[1] > 1 else scale
    return made


def _up_gate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    weights = Weights.of(tensors)
    if weights.kind == MXFP8:
        raise ValueError(
            f"the layout 'flashinfer.up_gate' is not for {MXFP8}; take 'flashinfer.shuffled'"
        )
    made = _rows(tensors, orders.up_first) if weights.gated else {}
    return made | _apply({**tensors, **made}, TILED.get(weights.kind, {}))


def _gate_up(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    weights = Weights.of(tensors)
    made = _apply(tensors, UNTILED.get(weights.kind, {}))
    return made | (_rows({**tensors, **made}, orders.up_first) if weights.gated else {})


SCALES = ("w13_scale_EFG", "w2_scale_EDG")
CODES = ("w13_EFD", "w2_EDI")
TILED: dict[str, dict[str, Order]] = {
    NVFP4: dict.fromkeys(SCALES, orders.swizzled),
    MXFP4: {**dict.fromkeys(CODES, orders.mixed), **dict.fromkeys(SCALES, orders.folded)},
}
UNTILED: dict[str, dict[str, Order]] = {
    NVFP4: dict.fromkeys(SCALES, orders.unswizzled),
    MXFP4: {**dict.fromkeys(CODES, orders.unmixed), **dict.fromkeys(SCALES, orders.unfolded)},
}
# Rows of up and of the gate in a chunk, as the epilogue of the first product pairs them.
CHUNKS = {FLOATS: 32, NVFP4: 64}


def _chunks(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    weights, size = _chunk(tensors)
    made = _rows(tensors, lambda t: orders.chunked(t, size)) if weights.gated else {}
    return made | _apply({**tensors, **made}, TILED.get(weights.kind, {}))


def _unchunked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    weights, size = _chunk(tensors)
    made = _apply(tensors, UNTILED.get(weights.kind, {}))
    if weights.gated:
        made |= _rows({**tensors, **made}, lambda t: orders.unchunked(t, size))
    return made


def _chunk(tensors: Mapping[str, Tensor]) -> tuple[Weights, int]:
    weights = Weights.of(tensors)
    if weights.kind not in CHUNKS:
        other = "flashinfer.shuffled" if weights.kind == MXFP8 else "flashinfer.up_gate"
        raise ValueError(
            f"the layout 'flashinfer.chunks' is for {' and '.join(CHUNKS)}, got {weights.kind}; "
            f"take {other!r}"
        )
    return weights, CHUNKS[weights.kind]


def _shuffle(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    weights = Weights.of(tensors)
    if weights.kind == FP8:
        return _up_gate(tensors)
    order = orders.shuffled if weights.kind == FLOATS else orders.shuffled_rows
    made = _apply(tensors, _both(order, CODES, weights.gated))
    scales = _apply(tensors, _both(orders.shuffled_rows, SCALES, weights.gated))
    return made | {name: orders.swizzled(scale) for name, scale in scales.items()}


def _unshuffle(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    weights = Weights.of(tensors)
    if weights.kind == FP8:
        return _gate_up(tensors)
    order = orders.unshuffled if weights.kind == FLOATS else orders.unshuffled_rows
    made = _apply(tensors, _both(order, CODES, weights.gated))
    scales = _apply(tensors, dict.fromkeys(SCALES, orders.unswizzled))
    return made | _apply(scales, _both(orders.unshuffled_rows, SCALES, weights.gated))


def _both(
    order: Callable[[Tensor, bool], Tensor], names: tuple[str, str], gated: bool
) -> dict[str, Order]:
    """An order of both products, the first of which may have rows of a gate."""
    return {names[0]: lambda t: order(t, gated), names[1]: lambda t: order(t, False)}


# What CUTLASS and b12x read alike: up before the gate; nvfp4 with swizzled scales, mxfp4 as the
# mixed product of Hopper wants it.
UP_GATE = Layout(name="flashinfer.up_gate", prepare=_up_gate, restore=_gate_up)
# CuTe DSL: up and gate in turn, 32 rows of floats or 64 of nvfp4 at a time.
CHUNKED = Layout(name="flashinfer.chunks", prepare=_chunks, restore=_unchunked)
# TensorRT-LLM's generated kernels: rows shuffled, scales swizzled with them; of float8 in blocks,
# whose kernels read plain rows, up before the gate.
SHUFFLED = Layout(name="flashinfer.shuffled", prepare=_shuffle, restore=_unshuffle)

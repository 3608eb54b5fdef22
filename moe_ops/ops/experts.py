"""The experts in one op: dispatch, two matrix products around an activation, combine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.shapes import (
    DTYPES,
    FLOATS,
    INDICES,
    check_choice,
    check_devices,
    check_float,
    check_no_double,
    check_size,
)
from moe_ops.checks.signature import did_you_mean
from moe_ops.ops.activate import Options, activate, check_activation, options_of
from moe_ops.ops.combine import combine
from moe_ops.ops.dispatch import DispatchCall
from moe_ops.ops.dispatch import check as check_dispatch
from moe_ops.ops.experts_products import first_product, second_product
from moe_ops.quant.arguments import (
    check_global_scale,
    check_input_format,
    check_packing,
    check_plain,
    check_static_scale,
    check_tokens,
    check_weight,
)
from moe_ops.quant.formats import Format
from moe_ops.registry.layouts import untrained
from moe_ops.registry.spec import op


@dataclass(slots=True)
class ExpertsCall:
    """The arguments of `experts`."""

    x_TD: Tensor
    weights_TK: Tensor
    ids_TK: Tensor
    w13_EFD: Tensor
    w2_EDI: Tensor
    b13_EF: Tensor | None = None
    b2_ED: Tensor | None = None
    expert_map: Tensor | None = None
    transposed: bool = False
    kind: str = "silu"
    gated: bool = True
    interleaved: bool = False
    alpha: float = 1.0
    limit: float | None = None
    up_shift: float = 0.0
    w13_scale_EFG: Tensor | None = None
    w2_scale_EDG: Tensor | None = None
    w13_zero_EFG: Tensor | None = None
    w2_zero_EDG: Tensor | None = None
    global_scale13_E: Tensor | None = None
    global_scale2_E: Tensor | None = None
    x_scale: Tensor | None = None
    h_scale: Tensor | None = None
    w_format: str = ""
    x_format: str = ""
    layout: str = ""
    expert_offset: int | None = None
    x_scale_TG: Tensor | None = None
    out_dtype: str = ""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the result."""
        return DTYPES[self.out_dtype] if self.out_dtype else self.x_TD.dtype

    @property
    def activation(self) -> Options:
        """The arguments of `activate` after its tensor."""
        return options_of(self)

    @property
    def widths(self) -> tuple[int, int]:
        """The widths of the model and of an expert: D and I."""
        F = self.w13_EFD.shape[2 if self.transposed else 1]
        return self.x_TD.shape[1], F // 2 if self.gated else F

    @property
    def has_input_scales(self) -> bool:
        """Whether the scales of x and h are given, so that none is made of all rows of a call."""
        of_x = self.x_scale is not None or self.x_scale_TG is not None
        return of_x and self.h_scale is not None


# The arguments of calls whose tokens are codes. Ops around `experts` take floats.
OF_CODES = ("x_scale_TG", "out_dtype")


def check(call: ExpertsCall) -> None:
    """Raise ValueError or TypeError unless `experts` takes these arguments."""
    if _is_plain(call) and _fits(call):
        return
    key = _key(call)
    if key is None or key not in _CHECKED:
        _check(call)
        if key is not None:
            if len(_CHECKED) >= MOST_CHECKED:
                _CHECKED.clear()
            _CHECKED.add(key)


# All that a check looks at, of calls without a fault: a look takes a third of the check.
_CHECKED: set[tuple[Any, ...]] = set()
MOST_CHECKED = 4096


def _key(call: ExpertsCall) -> tuple[Any, ...] | None:
    """None where sizes may be symbols, as those of a tracer's tensors are."""
    if type(call.x_TD) is not Tensor:
        return None
    given = experts.arguments.flat(call)
    return tuple([(a.shape, a.dtype, a.device) if isinstance(a, Tensor) else a for a in given])


def _check(call: ExpertsCall) -> None:
    if call.x_scale_TG is None and not call.out_dtype:
        check_float("x_TD", call.x_TD, 2)
    else:
        check_tokens(call.x_TD, call.x_scale_TG, call.x_format, call.x_scale)
        check_choice("out_dtype", call.out_dtype, tuple(DTYPES))
    check_weights(call)
    ids_TK, weights_TK = call.ids_TK, call.weights_TK
    check_dispatch(DispatchCall(call.x_TD, ids_TK, call.w13_EFD.shape[0], call.expert_map))
    check_float("weights_TK", weights_TK, 2, call.x_TD)
    check_size("weights_TK", weights_TK, 0, ids_TK.shape[0], "the tokens of ids_TK")
    check_size("weights_TK", weights_TK, 1, ids_TK.shape[1], "the top-k of ids_TK")
    check_activation(call)
    check_devices(call.x_TD, weights_TK=weights_TK)


def _is_plain(call: ExpertsCall) -> bool:
    """Whether a layer has no more than two weights and the common activation."""
    c = call
    return (
        c.b13_EF is c.b2_ED is c.expert_map is None
        and c.limit is None
        and c.expert_offset is None
        and c.gated
        and not c.interleaved
        and c.kind == "silu"
        and c.alpha == 1.0
        and c.up_shift == 0.0
        and not c.w_format
        and not c.x_format
        and (not c.layout or c.layout in experts.layouts)  # which change no shape
        and c.w13_scale_EFG is c.w2_scale_EDG is c.global_scale13_E is c.global_scale2_E is None
        and c.w13_zero_EFG is c.w2_zero_EDG is c.x_scale is c.h_scale is c.x_scale_TG is None
        and not c.out_dtype
    )


def _fits(call: ExpertsCall) -> bool:
    """Whether a plain layer fits: takes a microsecond, where finding what does not takes five."""
    x_TD, w13_EFD, w2_EDI = call.x_TD, call.w13_EFD, call.w2_EDI
    weights_TK, ids_TK = call.weights_TK, call.ids_TK
    x, w13, w2, routed = x_TD.shape, w13_EFD.shape, w2_EDI.shape, ids_TK.shape
    if len(x) != 2 or len(w13) != 3 or len(w2) != 3 or len(routed) != 2:
        return False
    F, D, D2, I = (  # noqa: E741
        (w13[2], w13[1], w2[2], w2[1]) if call.transposed else (w13[1], w13[2], w2[1], w2[2])
    )
    device, dtype = x_TD.device, x_TD.dtype
    return (
        D == D2 == x[1]
        and F == 2 * I
        and w13[0] == w2[0] > 0
        and routed[0] == x[0]
        and routed[1] > 0
        and weights_TK.shape == routed
        and dtype in FLOATS
        and w13_EFD.dtype is dtype is w2_EDI.dtype
        and weights_TK.dtype in FLOATS
        and ids_TK.dtype in INDICES
        and w13_EFD.device == w2_EDI.device == weights_TK.device == ids_TK.device == device
    )


# What a layout may reorder: the tensors that every expert has some of.
WEIGHTS = (
    "w13_EFD", "w2_EDI", "b13_EF", "b2_ED", "w13_scale_EFG", "w2_scale_EDG", "w13_zero_EFG",
    "w2_zero_EDG",
)  # fmt: skip


def weights_of(call: ExpertsCall) -> dict[str, Tensor]:
    """The tensors of `WEIGHTS` that a call has, by name."""
    return {n: t for n in WEIGHTS if (t := getattr(call, n)) is not None}


def restored(call: ExpertsCall) -> ExpertsCall:
    """A call of prepared weights, with copies of the weights as they were loaded."""
    done = replace(call, layout="")
    for name, t in experts.layouts[call.layout].restore(weights_of(call)).items():
        setattr(done, name, untrained(t, getattr(call, name), name, call.layout))
    return done


def check_weights(call: ExpertsCall) -> None:
    """Raise ValueError or TypeError unless the weights and what belongs to them fit the tokens and
    each other."""
    if call.layout and call.layout not in experts.layouts:
        known, hint = ", ".join(experts.layouts), did_you_mean(call.layout, experts.layouts)
        said = f"backends registered {known or 'none'}{hint}"
        raise ValueError(f"layout={call.layout!r} is unknown; {said}")
    x_TD, w13_EFD, w2_EDI, x_format = call.x_TD, call.w13_EFD, call.w2_EDI, call.x_format
    _check_formats(call)
    if call.expert_offset is not None:
        _check_offset(call.expert_offset, call.expert_map, w13_EFD.shape[0])
    rows, cols = (2, 1) if call.transposed else (1, 2)
    E, F, D = w13_EFD.shape[0], w13_EFD.shape[rows], x_TD.shape[1]
    I = F // 2 if call.gated else F  # noqa: E741
    if E < 1:
        raise ValueError(
            f"w13_EFD holds no expert, got shape {tuple(w13_EFD.shape)}; give one expert or more"
        )
    if call.gated and F % 2:
        raise ValueError(
            f"gated experts need an even number of rows, got w13_EFD {tuple(w13_EFD.shape)}; "
            "give as many of the gate as of up, or gated=False"
        )
    format = call.w_format
    if format:
        for width in (D, I):
            check_packing("w_format", Format.of(format), width)
    check_size("w13_EFD", w13_EFD, cols, packed(format, D), f"the width of x_TD{_in(format)}")
    check_size("w2_EDI", w2_EDI, 0, E, "the experts of w13_EFD")
    check_size("w2_EDI", w2_EDI, rows, D, "the width of x_TD")
    why = f"the width after the activation{_in(format)}"
    check_size("w2_EDI", w2_EDI, cols, packed(format, I), why)
    for name, bias, size in (("b13_EF", call.b13_EF, F), ("b2_ED", call.b2_ED, D)):
        if bias is not None:
            check_float(name, bias, 2, x_TD)
            check_size(name, bias, 0, E, "the experts of w13_EFD")
            check_size(name, bias, 1, size, "the rows of one expert's weight")
    check_global_scale("global_scale13_E", call.global_scale13_E, E, w13_EFD, 1 + call.gated)
    check_global_scale("global_scale2_E", call.global_scale2_E, E, w13_EFD)
    check_static_scale("x_scale", call.x_scale, x_format, x_TD, E)
    check_static_scale("h_scale", call.h_scale, x_format, x_TD, E)
    if x_format:
        _check_contained(
            "x_scale", call.x_scale, "global_scale13_E", call.global_scale13_E, x_format
        )
        _check_contained("h_scale", call.h_scale, "global_scale2_E", call.global_scale2_E, x_format)
        check_input_format("x_format", x_format, D)
        check_input_format("x_format", x_format, I)
    check_devices(x_TD, w13_EFD=w13_EFD, w2_EDI=w2_EDI, b13_EF=call.b13_EF, b2_ED=call.b2_ED)


def _check_contained(
    name: str, scale: Tensor | None, factors: str, global_scale_E: Tensor | None, x_format: str
) -> None:
    """Raise unless factors are there that contain the global scale of each expert's input."""
    if scale is None or scale.numel() == 1 or global_scale_E is not None:
        return
    if Format.of(x_format).has_global_scale:
        raise ValueError(
            f"{name} has a global scale for the input of each expert, which {factors} is to "
            f"contain, and there is none; give {factors}, each times its expert's {name}"
        )


def _check_offset(offset: int, expert_map: Tensor | None, here: int) -> None:
    """Raise unless an offset can say the same as the map."""
    if expert_map is None:
        raise ValueError(
            f"expert_offset={offset} goes with an expert_map, which other backends read; give both"
        )
    last = expert_map.shape[0] - here
    if not 0 <= offset <= last:
        raise ValueError(
            f"expert_offset={offset} must be from 0 to {last}, as {here} of the "
            f"{expert_map.shape[0]} experts of expert_map are here"
        )


def _check_formats(call: ExpertsCall) -> None:
    """Raise unless the weights are of the format, with what belongs to it and nothing else."""
    format, transposed = call.w_format, call.transposed
    w13_scale, w13_zero = call.w13_scale_EFG, call.w13_zero_EFG
    w2_scale, w2_zero = call.w2_scale_EDG, call.w2_zero_EDG
    if format:
        check_no_double("x_TD", call.x_TD, "quantised weights")
        check_weight("w13_EFD", call.w13_EFD, w13_scale, w13_zero, format, transposed)
        check_weight("w2_EDI", call.w2_EDI, w2_scale, w2_zero, format, transposed)
        return
    check_plain("w13_EFD", call.w13_EFD, call.dtype, "x_TD")
    check_plain("w2_EDI", call.w2_EDI, call.dtype, "x_TD")
    for name in ("w13_scale_EFG", "w2_scale_EDG", "w13_zero_EFG", "w2_zero_EDG"):
        if getattr(call, name) is not None:
            raise ValueError(f"{name} was given without w_format; name it")
    if call.x_format:
        raise ValueError(
            f"x_format={call.x_format!r} wants a quantised weight too: name its w_format"
        )


def packed(format: str, width: int) -> int:
    """Stored columns of a row of so many values."""
    return Format.of(format).parsed.packed(width) if format else width


def _in(format: str) -> str:
    return f" packed as {format!r}" if format else ""


@op(check=check, remembers=True)
def experts(call: ExpertsCall) -> Tensor:
    """Run every token through its chosen experts: out_t = sum_k w_tk * (W2_e act(W13_e x_t + b13_e)
    + b2_e).

    e = ids_TK[t, k] and w_tk = weights_TK[t, k]; the definition is the composition of
    `dispatch`, `expert_gemm`, `activate`, `expert_gemm` and `combine`, whose docs say what each
    argument does. Pairs whose expert is not here (an id of -1, one not below E, one that the
    expert_map sends to -1) add nothing.

    x_TD: float [T, D]; weights_TK: float [T, K]; ids_TK: int32 or int64 [T, K]; w13_EFD: [E, F,
    D] and w2_EDI: [E, D, I] of x's dtype ([E, D, F] and [E, I, D] if transposed); I = F / 2 if
    gated, else F. Result [T, D] in x's dtype.

    With a w_format both weights are quantised, as `expert_gemm` says; the names that end in scale,
    zero and global scale belong to them. With an x_format the tokens and the activations h are
    quantised before their product, as `quantize` does, with the static scales x_scale and h_scale:
    one value, or float32 [E], by which each routed row is quantised with the scale of its expert.
    Of nvfp4 these are global scales, which global_scale13_E and global_scale2_E then contain, and
    of several a backend that takes one value takes the largest, and factors to match it; without
    them each row has a global scale of its own, its largest magnitude over 6 * 448, which is
    multiplied in. A row's result depends on that row alone, unless one scale for the tensor is made
    at run time (see `quantize`). global_scale13_E may be [E, 2]: the factors of gate and up, where
    they were quantised apart.

    expert_offset is the global id of the first expert here, if those here follow each other. It
    says what the expert_map says, which must be given too, for backends that take an offset.

    Tokens may come quantised: x_TD holds the codes of an x_format of 8 bits with a scale for each
    row or group of columns, x_scale_TG the scales, as `quantize` gives both, and out_dtype names
    the dtype of the result, which is that of the same tokens given as floats.

    layout names the order in which `moe_ops.prepare` stored the weights, scales, zeros and biases
    for a backend; empty: as they were loaded. Any other backend refuses them, and the definition
    restores a copy. A backward that wants gradients of weights in a layout raises RuntimeError.

    Raises ValueError or TypeError for wrong shapes, dtypes, devices, formats or parameters.
    """
    if call.layout:
        call = restored(call)
    _, y_RF, rows_R, ends_E = first_product(call)
    y_RD = second_product(call, activate(y_RF, *call.activation), rows_R, ends_E)
    return combine(y_RD, call.weights_TK, rows_R)


experts.fake(fake_impls.experts)

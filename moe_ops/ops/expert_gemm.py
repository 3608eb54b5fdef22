"""The expert matrix product: each routed row times the weight of its expert."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.shapes import (
    DTYPES,
    FLOATS,
    check_devices,
    check_float,
    check_no_double,
    check_size,
    check_tensor,
    wide,
)
from moe_ops.quant import packing
from moe_ops.quant.arguments import (
    check_global_scale,
    check_input_format,
    check_out_dtype,
    check_plain,
    check_rows_scale,
    check_scale,
    check_weight,
    named_format,
)
from moe_ops.quant.formats import Format
from moe_ops.registry.spec import op
from moe_ops.registry.watched import readable

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ExpertGemmCall:
    """The arguments of `expert_gemm`."""

    x_RD: Tensor
    w_EFD: Tensor
    ends_E: Tensor
    bias_EF: Tensor | None = None
    transposed: bool = False
    x_scale_RG: Tensor | None = None
    w_scale_EFG: Tensor | None = None
    w_zero_EFG: Tensor | None = None
    global_scale_E: Tensor | None = None
    x_format: str = ""
    w_format: str = ""
    out_dtype: str = ""
    x_global_scale_R: Tensor | None = None


def check(call: ExpertGemmCall) -> None:
    """Raise ValueError or TypeError unless `expert_gemm` takes these arguments."""
    x_RD, w_EFD, ends_E, bias_EF = call.x_RD, call.w_EFD, call.ends_E, call.bias_EF
    transposed, w_format = call.transposed, call.w_format
    if (
        bias_EF
        is call.x_scale_RG
        is call.w_scale_EFG
        is call.w_zero_EFG
        is call.global_scale_E
        is call.x_global_scale_R
        is None
        and w_format == call.out_dtype == call.x_format == ""
        and x_RD.dim() == 2
        and w_EFD.dim() == 3
        and ends_E.dim() == 1
        and x_RD.dtype is w_EFD.dtype
        and x_RD.dtype in FLOATS
        and ends_E.dtype is torch.int32
        and x_RD.shape[1] == w_EFD.shape[1 if transposed else 2]
        and w_EFD.shape[0] == ends_E.shape[0] > 0
        and x_RD.device == w_EFD.device == ends_E.device
    ):
        return  # the common call, accepted in half a microsecond
    width = _check_input(call)
    if w_format:
        check_no_double("x_RD", x_RD, "quantised weights")
        check_weight("w_EFD", w_EFD, call.w_scale_EFG, call.w_zero_EFG, w_format, transposed)
        got = Format.of(w_format).parsed.unpacked(w_EFD.shape[2])
        if got != width:
            raise ValueError(
                f"w_EFD must hold {width} values a row (the width of x_RD), got {got} "
                f"in shape {tuple(w_EFD.shape)} of {w_format!r}"
            )
    else:
        check_plain("w_EFD", w_EFD, x_RD.dtype, "x_RD")
        check_size("w_EFD", w_EFD, 1 if transposed else 2, width, "the width of x_RD")
        _check_absent(w_scale_EFG=call.w_scale_EFG, w_zero_EFG=call.w_zero_EFG)
    check_tensor("ends_E", ends_E, 1, (torch.int32,))
    E = w_EFD.shape[0]
    if E < 1:
        raise ValueError(
            f"w_EFD holds no expert, got shape {tuple(w_EFD.shape)}; give one weight or more"
        )
    check_size("ends_E", ends_E, 0, E, "the experts of w_EFD")
    rows = w_EFD.shape[2 if transposed else 1]
    if bias_EF is not None:
        check_float("bias_EF", bias_EF, 2, x_RD)
        check_size("bias_EF", bias_EF, 0, E, "the experts of w_EFD")
        check_size("bias_EF", bias_EF, 1, rows, "the rows of one expert's weight")
    check_global_scale("global_scale_E", call.global_scale_E, E, w_EFD, rows)
    check_rows_scale("x_global_scale_R", call.x_global_scale_R, x_RD, call.x_format)
    check_out_dtype(call.out_dtype, x_RD)
    check_devices(x_RD, w_EFD=w_EFD, ends_E=ends_E, bias_EF=bias_EF, x_scale_RG=call.x_scale_RG)


def _check_input(call: ExpertGemmCall) -> int:
    """The number of values in a row of x; raises unless x and its scales fit the format."""
    x_RD, scale, format = call.x_RD, call.x_scale_RG, call.x_format
    if not format:
        check_float("x_RD", x_RD, 2)
        _check_absent(x_scale_RG=scale)
        return x_RD.shape[1]
    if not call.w_format:
        raise ValueError(f"x_format={format!r} wants a quantised weight too: name its w_format")
    parsed = named_format("x_format", format).parsed
    check_tensor("x_RD", x_RD, 2, (parsed.storage.dtype,), f"give the codes of {format!r}")
    width = parsed.unpacked(x_RD.shape[1])
    check_input_format("x_format", format, width)
    shape = parsed.scale_shape(x_RD.shape[0], width)
    check_scale("x_scale_RG", scale, shape, parsed.scale_dtype, format)
    return width


def _check_absent(**tensors: Tensor | None) -> None:
    for name, t in tensors.items():
        if t is not None:
            format = "x_format" if name.startswith("x") else "w_format"
            raise ValueError(f"{name} was given without {format}; name the format it belongs to")


@op(check=check)
def expert_gemm(call: ExpertGemmCall) -> Tensor:
    """Multiply each row by its expert's weight: y_RF[r] = g[e(r)] * (w[e(r)] @ x_RD[r]) +
    bias[e(r)].

    e(r) is the expert whose rows include r: ends_E[e-1] <= r < ends_E[e], ends_E ascending from 0
    or more to R or less. Products are summed in float32, the bias is added, and the sum is rounded
    once to the result's dtype. (The backend `aten` rounds before it adds the bias and again after,
    as transformers does.) Rows from ends_E[-1] on belong to no expert; they cost no product and
    what y_RF holds there is unspecified.

    On a CPU other ends raise ValueError, except in compiled code that is made of this definition. A
    GPU's ends cannot be looked at without waiting for them: results are then unspecified, and the
    backend `triton` reads and writes nothing outside the tensors; `aten` does what PyTorch does.

    x_RD: float [R, D]; w_EFD: [E, F, D], or [E, D, F] if transposed, of x's dtype, any strides;
    ends_E: int32; bias_EF: float [E, F]. The result has x's dtype, or the one named by out_dtype.

    With a w_format (see `quantize`) the weight holds packed codes [E, F, D packed], w_scale_EFG its
    scales [E, groups of F, groups of D], w_zero_EFG its zero points (uint8, that shape) if the
    element has them, global_scale_E the float32 factors g that are left over: an expert's global
    scale, for nvfp4 times that of the input where it is static; g is 1 without it. It is [E], or
    [E, F] where rows of an expert differ. With an x_format, x_RD and x_scale_RG are what `quantize`
    gives, and x_global_scale_R the global scales by which it made the codes of each row, where
    these have one: a factor of the row's result.
    The definition decodes both sides exactly to float32.

    Raises ValueError or TypeError for wrong shapes, dtypes, devices or formats.

    This definition gathers a weight for every row: exact, traceable, and meant for small R.
    """
    x_RD, ends_E = call.x_RD, call.ends_E
    if readable(ends_E):
        checked_ends(ends_E, x_RD.shape[0])
    w = call.w_EFD.transpose(1, 2) if call.transposed else call.w_EFD
    expert_R = row_experts(ends_E, x_RD.shape[0])
    warn_of_size("expert_gemm", expert_R.shape[0] * w.shape[1] * w.shape[2])
    w_RFD = decode_weight(w, call.w_scale_EFG, call.w_zero_EFG, call.w_format)[expert_R]
    y_RF = (w_RFD * decode_input(x_RD, call.x_scale_RG, call.x_format)[:, None, :]).sum(-1)
    if call.global_scale_E is not None:
        y_RF = y_RF * of_rows(call.global_scale_E)[expert_R]
    if call.x_global_scale_R is not None:
        y_RF = y_RF * call.x_global_scale_R[:, None]
    if call.bias_EF is not None:
        y_RF = y_RF + wide(call.bias_EF)[expert_R]
    return y_RF.to(DTYPES[call.out_dtype] if call.out_dtype else x_RD.dtype)


MOST_BYTES = 2**30
_warned: set[str] = set()


def warn_of_size(name: str, elements: int | torch.SymInt) -> None:
    """Log a WARNING, once, that a definition makes a tensor of more than a GiB in float32. Sizes of
    a trace may be symbols; then it is what they stand for in it."""
    if isinstance(elements, torch.SymInt):
        elements = elements.node.hint or 0
    if elements * 4 > MOST_BYTES and name not in _warned:
        _warned.add(name)
        log.warning(
            "moe_ops.%s runs by its definition, which takes %.1f GiB for this call; a backend "
            "would not: moe_ops.OPS[%r].refusals(...) says why none runs it",
            name, elements * 4 / 2**30, name,
        )  # fmt: skip


def checked_ends(ends_E: Tensor, R: int) -> list[int]:
    """The ends of experts' rows, read from a tensor on a CPU.

    Raises ValueError unless they ascend within R rows.
    """
    ends: list[int] = ends_E.tolist()
    if ends[0] >= 0 and ends[-1] <= R and ends == sorted(ends):
        return ends
    start = 0
    for e, end in enumerate(ends):
        if not start <= end <= R:
            raise ValueError(
                f"ends_E must ascend within the {R} rows of x_RD, got ends_E[{e}] = {end} where "
                f"{start} to {R} would do; give each expert one past its last row"
            )
        start = end
    raise AssertionError("one of the ends is out of place")


def row_experts(ends_E: Tensor, R: int) -> Tensor:
    """The expert of each of R rows as int64; rows of no expert get the last expert's id."""
    rows_R = torch.arange(R, device=ends_E.device, dtype=ends_E.dtype)
    return torch.searchsorted(ends_E, rows_R, right=True).clamp(max=ends_E.shape[0] - 1)


def used_rows(ends_E: Tensor, R: int) -> Tensor:
    """Which of R rows an expert has, as bool [R]; what the others hold is unspecified."""
    return torch.arange(R, device=ends_E.device) < ends_E[-1]


def of_rows(global_scale_E: Tensor) -> Tensor:
    """The factors of an expert's rows: [E, 1], or [E, F] where they differ."""
    return global_scale_E if global_scale_E.dim() == 2 else global_scale_E[:, None]


def decode_input(x: Tensor, scale: Tensor | None, format: str) -> Tensor:
    """Rows as float32 (float64 as it is), whatever their format."""
    if not format:
        return wide(x)
    assert scale is not None
    return packing.dequantize(x, scale, Format.of(format))


def decode_weight(w: Tensor, scale: Tensor | None, zero: Tensor | None, format: str) -> Tensor:
    """Weights as float32 (float64 as it is), whatever their format; any number of leading axes."""
    if not format:
        return wide(w)
    assert scale is not None
    return packing.dequantize(w, scale, Format.of(format), zero)


expert_gemm.fake(fake_impls.expert_gemm)

"""The legend of shape suffixes, and the checks that every op shares.

A tensor's name ends in the letters of its axes:

    T  tokens                      D  model width
    K  experts per token (top-k)   F  rows of one expert's weight: 2 * I if gated, else I
    E  experts on this rank        I  expert width, after the activation
    R  routed rows, R = T * K      G  quantisation groups

`x_TD` is a matrix of tokens by model width, `w13_EFD` the stacked first weights, `w2_EDI` the
second ones. From the layer to the kernels a tensor has the name of the op's argument. A pointer has
no suffix, and no number in a kernel that runs either product: `w_scale_ptr` points to
`w13_scale_EFG` or to `w2_scale_EDG`.

Letters mean something else between ranks, and where replicas of experts are placed:

    P  physical experts            G  rows that arrive on a rank
    R  ranks                       N  rows that a rank sends
    L  layers                      S  scales of a row; slots for replicas
    B  bytes of a row; bins

in the attention and the linear layers of decoding:

    B  sequences                   D  width of a head
    H  heads of the query          V  width of a head of the values
    N  heads of the keys           S  slots of the cache
    R  width of a latent           C  slots that were chosen
    W  angles                      N  rows of a linear layer, K its columns

where H are the heads of the state in linear attention and in state spaces, D are the channels of a
convolution and W its tokens,

and inside kernels:

    M  rows of a matrix product    C  columns of a group or a tile
    N  columns of it               W  words of 32 bits
    K  what it sums over           P  pairs of a token and an expert
    Q  the same pairs, along the other axis

Where docs say `float`, a tensor is of FLOATS: float32, bfloat16 or float16, which tensors of one
call may mix where nothing else is said. In an op that has gradients all floats of a call may be
float64 instead. Such a call runs by the definition on every device, in float64 throughout, as
torch.autograd.gradcheck wants it; it takes no codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ops.checks.signature import did_you_mean

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DOUBLE = torch.float64  # which definitions alone compute
FLOATS_OR_DOUBLE = (*FLOATS, DOUBLE)
INDICES = (torch.int32, torch.int64)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_tensor(
    name: str,
    t: Tensor,
    rank: int,
    dtypes: tuple[torch.dtype, ...],
    instead: str = "convert it first",
) -> None:
    """Raise unless `t` has this rank and one of these dtypes; of others say what to do."""
    if t.dim() != rank:
        raise ValueError(f"{name} must have {rank} axes, got shape {tuple(t.shape)}")
    if t.dtype not in dtypes:
        wanted = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        if len(dtypes) > 1:
            wanted = f"one of {wanted}"
        raise TypeError(
            f"{name} must be {wanted}; got {str(t.dtype).removeprefix('torch.')}; {instead}"
        )


def floats_beside(first: Tensor) -> tuple[torch.dtype, ...]:
    """The dtypes of other floats of a call: float64 beside float64 alone, and nothing else."""
    return (DOUBLE,) if first.dtype is DOUBLE else FLOATS


def check_float(name: str, t: Tensor, rank: int, beside: Tensor | None = None) -> None:
    """Raise unless `t` has this rank and is a float that goes with the one it stands beside."""
    check_tensor(name, t, rank, FLOATS_OR_DOUBLE if beside is None else floats_beside(beside))


def check_no_double(name: str, t: Tensor, beside: str) -> None:
    """Raise TypeError for float64 beside what float64 is not computed with."""
    if t.dtype is DOUBLE:
        check_tensor(name, t, t.dim(), FLOATS, f"{beside} take no float64, so convert it")


def wide(t: Tensor) -> Tensor:
    """A float tensor in the dtype in which sums are taken: float64 as it is, others as float32."""
    return t if t.dtype is DOUBLE else t.float()


def wide_dtype(t: Tensor) -> torch.dtype:
    """The dtype in which sums of a float tensor are taken."""
    return DOUBLE if t.dtype is DOUBLE else torch.float32


def check_size(name: str, t: Tensor, axis: int, want: int, why: str) -> None:
    """Raise unless axis `axis` of `t` has size `want`; of a size that is known when a graph runs,
    the graph raises RuntimeError."""
    differ: Any = t.shape[axis] != want
    if isinstance(differ, torch.SymBool) and _unknown(differ):
        torch._check(t.shape[axis] == want, lambda: f"{name} must have {want} on axis {axis}")
    elif differ:
        raise ValueError(
            f"{name} must have {want} ({why}) on axis {axis}, got shape {tuple(t.shape)}"
        )


def _unknown(value: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # slow to import

    return bool(free_unbacked_symbols(value))


def check_devices(first: Tensor, **others: Tensor | None) -> None:
    """Raise unless every tensor lies on the device of the first."""
    for name, t in others.items():
        if t is not None and t.device != first.device:
            raise ValueError(
                f"{name} is on {t.device}, but the first argument is on {first.device}; move one"
            )


def misfit(named: Iterable[tuple[str, Tensor | None, Sequence[int]]]) -> str | None:
    """Why the first of these tensors that is not of its shape, of FLOATS (or, as the very first,
    float64), or on the device of the very first, does not fit the others; None if all do. None is
    no tensor, which fits."""
    device: tuple[str, torch.device] | None = None
    floats: tuple[torch.dtype, ...] = FLOATS_OR_DOUBLE
    for what, t, shape in named:
        if t is None:
            continue
        if tuple(t.shape) != tuple(shape):
            return f"the {what} is {list(t.shape)}, not {list(shape)}; reshape it"
        if t.dtype not in floats:
            wanted = "float64" if floats == (DOUBLE,) else "float32, bfloat16 or float16"
            return f"the {what} is {t.dtype}, not {wanted}; convert it"
        floats = floats_beside(t)
        first, place = device = device or (what, t.device)
        if t.device != place:
            return f"the {what} is on {t.device}, {first} on {place}; move one of them"
    return None


def check_device(name: str, device: torch.device | str) -> None:
    """Raise ValueError unless memory can be had on a device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # what torch raises for those that it lacks
        said = str(error).partition("\n")[0]
        raise ValueError(f"{name}={device!r} is none: {said}") from None


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise unless `value` is one of the choices."""
    if value not in choices:
        raise ValueError(
            f"{name}={value!r} is unknown; choose one of {', '.join(choices)}"
            f"{did_you_mean(value, choices)}"
        )

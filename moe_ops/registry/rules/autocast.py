"""torch.autocast: what of a call is cast, as the input and the weight of a linear are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import _C, Tensor
from torch.library import Library

from moe_ops.checks.shapes import FLOATS

DEVICES = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
AS_GIVEN = "multiplies by no weights; it moves what it is given, or computes in float32"


def implement(
    name: str,
    arguments: Iterable[str],
    casts: tuple[str, ...],
    overload: Callable[..., Any],
    library: Library,
) -> None:
    """Where autocast is on for a device, run an op with these of its arguments in autocast's dtype.

    Floats on that device are cast, no codes and no scales. A gradient has the dtype of what was
    given. What the op runs then runs without autocast.
    """
    where = [argument in casts for argument in arguments]

    def on(device: str, key: str) -> Callable[..., Any]:
        off = _C.DispatchKeySet(getattr(_C.DispatchKey, key))

        def run(*args: Any, **kwargs: Any) -> Any:
            dtype = torch.get_autocast_dtype(device)
            cast = [_cast(a, dtype, device) if where[i] else a for i, a in enumerate(args)]
            named = {n: _cast(a, dtype, device) if n in casts else a for n, a in kwargs.items()}
            with _C._ExcludeDispatchKeyGuard(off):
                return overload(*cast, **named)

        return run

    for device, key in DEVICES.items():
        library.impl(name, on(device, key), key)


def _cast(value: Any, dtype: torch.dtype, device: str) -> Any:
    if isinstance(value, Tensor) and value.dtype in FLOATS and value.device.type == device:
        return value.to(dtype)
    return value

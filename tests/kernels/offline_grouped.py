"""Compile for a Hopper GPU that is not here the warp-specialised grouped products; a script.

    python offline_grouped.py ACTIVATION...

compiles the first product with these, and with "silu" the second one, which has none. It prints one
JSON line for each variant: its activation, whether there are biases and only whole steps along K,
its registers, and the bytes that it spills.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any
from unittest.mock import patch

import torch
import triton
from offline import TYPES, usage
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from moe_ops.kernels.triton.experts import grouped, grouped_gluon
from moe_ops.ops.activate import Activation
from moe_ops.testing import ACTIVATIONS

E, K, D, I = 8, 2, 512, 256  # noqa: E741


def source_of(kernel: JITFunction, args: tuple[Any, ...]) -> GluonASTSource:
    """What Triton would compile for a launch with these arguments."""
    signature, constants, attributes = {}, {}, {}
    for index, (param, value) in enumerate(zip(kernel.params, args, strict=True)):
        if param.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[param.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, TensorDescriptor):
            dtype = TYPES[value.base.dtype][1:]
            signature[param.name] = f"tensordesc<{dtype}{list(value.block_shape)},{value.layout!r}>"
        else:
            signature[param.name] = TYPES[value.dtype] if isinstance(value, Tensor) else "i32"
            if isinstance(value, Tensor) or value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return GluonASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def compile_launch(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    if self is not grouped_gluon._grouped:
        return
    made = triton.compile(source_of(self, args), target=GPUTarget("cuda", 90, 32), options=options)
    given = dict(zip(self.arg_names, args, strict=True))
    variant = {k: given[k] for k in ("ACT", "EVEN_K")} | {"bias": given["bias_ptr"] is not None}
    print(json.dumps(variant | usage(made.asm["cubin"])), flush=True)


def main() -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    rows, ends = empty(4096, dtype=torch.int32), empty(E, dtype=torch.int32)
    with (
        patch.object(JITFunction, "run", compile_launch),
        patch.object(grouped, "runs_on_hopper", lambda *_: True),
    ):
        for name, bias in itertools.product(sys.argv[1:], (False, True)):
            args = ACTIVATIONS[name]
            act = Activation(**{"kind": "silu"} | args)
            F = 2 * I if act.gated else I
            b13 = empty(E, F) if bias else None
            for width in (D, D + 16) if args == {} else (D,):
                x, w13 = empty(2048, width), empty(E, F, width)
                grouped.grouped_gated(x, rows, ends, w13, b13, K, *act.args)
        for bias in (False, True) if "silu" in sys.argv[1:] else ():
            b2 = empty(E, D) if bias else None
            grouped.grouped_rows(empty(4096, I), ends, empty(E, D, I), b2)


if __name__ == "__main__":
    main()

"""A process that has torch and libmoe_ops, and no moe_ops: what its ops say and give.

child.py LIBRARY CALLS RESULTS OP...: CALLS holds [(op, arguments), ...], RESULTS gets a dict with
"schemas" by op, and "results", of which one that is a string is an error.
"""

import sys

import torch


def result_of(op: str, args: tuple) -> object:
    packet = getattr(torch.ops.moe_ops, op)
    try:
        got = packet.default(*args)
    except RuntimeError as error:
        return str(error)
    planned = packet.planned(*args, plan="64:cpu,:aten")  # whatever a plan says, it has one kernel
    for one, other in zip(_tensors(got), _tensors(planned), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
    return got


def _tensors(result: object) -> tuple:
    return result if isinstance(result, tuple) else (result,)


def main(library: str, calls: str, results: str) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that nobody wrote is NaN
    torch.ops.load_library(library)
    made = [result_of(op, args) for op, args in torch.load(calls, weights_only=False)]
    found = [torch._C._jit_get_schemas_for_operator(f"moe_ops::{op}") for op in sys.argv[4:]]
    schemas = {op: sorted(map(str, of)) for op, of in zip(sys.argv[4:], found, strict=True)}
    assert "moe_ops" not in sys.modules
    torch.save({"schemas": schemas, "results": made}, results)


if __name__ == "__main__":
    main(*sys.argv[1:4])

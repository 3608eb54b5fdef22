"""`python -m moe_ops export`: a model as a file of another runtime, which is then run."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_ops.checks.options import check_writable
from moe_ops.exporting.runtimes import RUNTIMES, Run, Runtime

ABOUT = """\
Exports a Hugging Face model in float32 with its experts and routers in the operators of a runtime,
or as nodes of it, runs the file in that runtime for several shapes, and prints how far its logits
are from those of the model itself, run eagerly.

Exits with 0 if all are within the tolerance, with 1 if one is not, and with 2 for bad usage, for
what the runtime cannot say, and, with the name of its package on pip, without the runtime.
"""
EXAMPLES = """\
examples:
  python -m moe_ops export qwen3_moe --tiny --to onnx -o qwen3.onnx
  python -m moe_ops export qwen3_moe --tiny --to ort --quant uint4:1x32 -o qwen3_int4.onnx
  python -m moe_ops export mixtral --tiny --layers 1 --to aoti -o mixtral.pt2
"""
SHAPES = ((2, 7), (3, 5))  # sequences and their tokens
TOLERANCE = 1e-5  # of the largest logit


def add(commands: Any, positive: Callable[[str], int]) -> None:
    """Add the options of `export`; `positive` reads a number above 0."""
    options = commands.add_parser(
        "export",
        help="a model as a file of ONNX Runtime, AOTInductor, OpenVINO or ExecuTorch",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    put = options.add_argument
    put("model", metavar="FAMILY", help="a model type such as qwen3_moe, a folder, or a hub id")
    put("--to", required=True, choices=tuple(RUNTIMES), help="the runtime")
    put("-o", "--output", required=True, metavar="FILE", help="the file to write")
    put("--tiny", action="store_true", help="shrink every size, with random weights")
    put("--random", action="store_true", help="read the config alone, and take random weights")
    put("--layers", type=positive, help="take this many layers only, with random weights")
    put("--quant", metavar="SCHEME", help="quantise the experts, such as uint4:1x32 or int8:row")
    put("--linears", metavar="FORMAT", help="linear layers, too, such as int8:row")
    put("--head", metavar="FORMAT", help="and the head, such as int8:row")
    put("--tolerance", type=float, default=TOLERANCE, help="relative to the largest logit, 1e-5")
    options.set_defaults(dtype="float32", device="cpu")


def run(top: argparse.ArgumentParser, args: argparse.Namespace, load: Callable[[Any], Any]) -> int:
    """Run the command on the model that `load` makes of the options. Returns 0 if the file gives
    what the model does, else 1; what is told before it is written exits with 2 and a line."""
    runtime = RUNTIMES[args.to]
    missing = runtime.missing()
    if missing:
        top.error(f"--to {args.to} needs {args.to}'s packages; pip install {' '.join(missing)}")
    file = Path(args.output)
    if file.suffix != runtime.suffix:
        top.error(f"-o {file}: files of {args.to} end in {runtime.suffix}; name it so")
    try:
        check_writable("-o", file)
    except OSError as error:
        top.error(first_line(error))
    try:
        model = load(args)
    except Exception as error:  # whatever transformers, its hub or a config's own checks raise
        top.error(f"{args.model}: {first_line(error)}")
    failed = False
    try:
        for line, is_close in checked(model, runtime, file, args.tolerance):
            print(line, flush=True)
            failed |= not is_close
    except NotImplementedError as error:  # to which torch adds the node that it came from
        top.error(first_line(error))
    except CannotExport as error:
        top.error(f"{args.model}: {error}")
    return int(failed)


class CannotExport(Exception):
    """What became of a model that no file can hold."""


def first_line(error: Exception) -> str:
    """The first line of what an error says."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def checked(
    model: Any, runtime: Runtime, file: Path, tolerance: float
) -> Iterator[tuple[str, bool]]:
    """Write the file and run it; lines that say what was done, and whether it was right.

    Raises NotImplementedError for what the runtime's operators cannot say of our ops, CannotExport
    for what else hinders, and for a model without our ops.
    """
    from moe_ops.exporting.programs import Logits, exported, inputs_of, ops_in
    from moe_ops.exporting.tables import decompositions
    from moe_ops.hf.optimize import optimize

    shapes = SHAPES if runtime.dynamic else SHAPES[:1] * 2
    inputs = inputs_of(shapes, model.config.get_text_config().vocab_size)
    with hindered("the model"), torch.inference_mode():
        wanted = [Logits(model)(ids) for ids in inputs]
    began = time.perf_counter()
    with hindered("torch.export"):
        program = exported(optimize(model), inputs[0], dynamic=runtime.dynamic)
    if not ops_in(program):
        raise CannotExport(
            "no layer has experts that moe_ops takes; the first layers of some models have none: "
            "leave --layers out, or give more; models without experts need no table of moe_ops"
        )
    code = runtime.code()
    who = runtime.file.removeprefix("to_")
    with hindered(who):
        code.write(program.run_decompositions(decompositions(runtime.target)), file)
    size, took = file.stat().st_size / 2**20, time.perf_counter() - began
    yield f"wrote {file}: {size:.2f} MiB in {took:.1f} s", True
    with hindered(who):
        ran = code.load(file)
        found = [compared(ran, *pair, tolerance) for pair in zip(inputs, wanted, strict=True)]
    yield from found


@contextmanager
def hindered(who: str) -> Iterator[None]:
    """Raise CannotExport for what `who` raises, but for what our own tables refuse."""
    try:
        yield
    except NotImplementedError:
        raise
    except Exception as error:  # of many kinds, by the runtime and the operator that it lacks
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        line = str(cause).strip().partition("\n")[0]
        raise CannotExport(f"{who} says {type(cause).__name__}: {line}") from error


def compared(ran: Run, ids: Tensor, want: Tensor, tolerance: float) -> tuple[str, bool]:
    """How far a runtime's logits are from those that are wanted, and whether that will do."""
    got = ran(ids)
    if got.shape != want.shape:
        return f"logits of {list(ids.shape)}: {list(got.shape)}, not {list(want.shape)}", False
    error = float((got - want).abs().max() / want.abs().max())
    is_close = math.isfinite(error) and error <= tolerance
    said = "within" if is_close else "NOT within"
    return f"{list(ids.shape)} tokens: off by {error:.2g}, {said} {tolerance:g}", is_close

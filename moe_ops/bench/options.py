"""The options of the commands that measure layers and stages, and which of them go together."""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from moe_ops.bench import accuracy, beside, ep, formats, halves, step, tiles
from moe_ops.bench.contenders import STOCK
from moe_ops.bench.rates import Rates, has_8bit_product
from moe_ops.bench.train_contenders import NAMES
from moe_ops.bench.train_inputs import PUBLISHED, TINY, TRAINED
from moe_ops.planning.layers import ROUTINGS
from moe_ops.quant.arguments import named_format
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.schemes import SCHEMES
from moe_ops.testing import LAYERS

HOST = ("lifted", "ops")  # what is timed by the host's clock, against transformers' own
HOST_TOKENS, TOKENS = "1,4,16,64,128,512", "1,4,16,64,256,1024,4096,16384"
HOST_AGAINST = "grouped_mm,batched_mm"
TRAIN_TOKENS = {"cuda": "1024,4096,16384", "cpu": "64,256"}
# Options of one way to measure, with what they are if they are left out.
OF_HOST: dict[str, Any] = {"part": "experts", "repeats": 60}
OF_MOE: dict[str, Any] = {
    "routing": ["uniform"], "format": None, "backend": None, "rates": None, "seconds": None,
    "peers": None, "plot": None,
}  # fmt: skip

Error = Callable[[str], NoReturn]


def names_of(kind: str, known: Callable[[], list[str]], all_: bool = False) -> Callable[..., Any]:
    """The type of an option: comma-separated names that are known, or "all"."""

    def parse(text: str) -> list[str]:
        names = known() if all_ and text == "all" else text.split(",")
        for name in names:
            if name not in known():
                raise argparse.ArgumentTypeError(
                    f"{name!r} is no {kind}; there are {', '.join(known())}"
                )
        return names

    return parse


layer_names = names_of("layer", lambda: list(LAYERS), all_=True)
trained_names = names_of("layer that trains", lambda: list(TRAINED))
trained_against = names_of("implementation", lambda: list(NAMES))
routing_names = names_of("routing", lambda: list(ROUTINGS))


def rates(text: str) -> Rates:
    try:
        return Rates.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def layer_format(text: str) -> QuantConfig:
    try:
        return formats.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def linear_format(text: str) -> str:
    """A format of weights that a layer's codes may have, by its shortest name; empty for none."""
    try:
        return named_format("linears", text).name if text else ""
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def scheme_names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in SCHEMES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SCHEMES)}")
    return names


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def number(text: str) -> int:
    """A count."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def seconds(text: str) -> float:
    """A time."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return found


def numbers(text: str) -> list[int]:
    """Counts, comma-separated."""
    return [number(word) for word in text.split(",")]


def add_beside(options: argparse.ArgumentParser) -> None:
    """Add the options of `bench beside`."""
    options.add_argument("--layer", type=layer_names, default=["qwen3_next", "dsv3_ep8"])
    options.add_argument(
        "--shared", type=numbers, default=[1],
        help="widths of the shared expert, as multiples of that of a routed one",
    )  # fmt: skip
    options.add_argument("--tokens", type=numbers, default=[1, 8, 64, 512, 4096])
    options.add_argument("--ways", nargs="+", choices=beside.WAYS, default=[*beside.WAYS])


def add_layer(options: argparse.ArgumentParser) -> None:
    """Add the options of `bench layer`, for both ways to measure a layer."""
    add_sizes(options)
    options.add_argument(
        "--tokens", type=numbers, help=f"comma-separated; {HOST_TOKENS}, or {TOKENS} for moe"
    )
    options.add_argument(
        "--against", type=words,
        help="comma-separated: transformers' grouped_mm and batched_mm (both, if left out on the "
        "CPU), and next to moe also backends of ours, FlashInfer's cutlass_fused_moe and humming",
    )  # fmt: skip
    options.add_argument(
        "--ours", choices=(*HOST, "moe"),
        help="moe_ops is transformers' code under our passes, code that calls the ops (both on the "
        "CPU), or the op moe from logits on; moe on a GPU and lifted on a CPU if left out",
    )  # fmt: skip
    host = options.add_argument_group("for --ours lifted and ops")
    host.add_argument("--part", choices=("experts", "block"), help="block: with the router")
    host.add_argument("--repeats", type=int, help="calls at one token; fewer at more")
    moe = options.add_argument_group("for --ours moe")
    moe.add_argument("--routing", type=routing_names, help=f"of {', '.join(ROUTINGS)}")
    moe.add_argument("--backend", help="run ours on this backend; what the ops pick if left out")
    moe.add_argument(
        "--format", type=layer_format, metavar="WEIGHTS[+INPUTS[+static]]",
        help="quantise both, by format strings of the ops: mxfp4, int4:1x128:bfloat16, or "
        "float8_e4m3fn:128x128+float8_e4m3fn:1x128; static: scales of inputs are known before",
    )  # fmt: skip
    moe.add_argument(
        "--rates", type=rates, metavar="COPY_TBS,MATMUL_TFLOPS[,MATMUL8_TFLOPS]",
        help="also give floors by these rates, not by those of this run; the third is of products "
        "in 8 bits, for a format with INPUTS",
    )  # fmt: skip
    moe.add_argument(
        "--seconds", type=seconds,
        help="load the device so long without a rest; as long as for the rates if left out",
    )  # fmt: skip
    moe.add_argument("--peers", help="a JSON file of times to compare with")
    moe.add_argument("--plot", help="draw to this PNG file")


def add_stages(options: argparse.ArgumentParser) -> None:
    """Add the options of `bench op`."""
    add_sizes(options)
    options.add_argument("--tokens", type=numbers, default=TOKENS, help="comma-separated")
    options.add_argument(
        "--backend", type=words, default=[], help="comma-separated; all that can run if left out"
    )
    options.set_defaults(rates=None)


def add_tiles(options: argparse.ArgumentParser) -> None:
    """Add the options of `bench tiles`."""
    add_sizes(options)
    options.add_argument("--tokens", type=numbers, default=[1], help="comma-separated")
    options.add_argument("--format", type=layer_format, help="as for layer")
    options.add_argument("--kernel", choices=tiles.KERNELS, default="rows", help="triton.KERNEL")
    options.add_argument("--product", choices=("up", "down"), default="up", help="of the two")
    options.add_argument("--most", type=number, default=40, help="tiles to try")
    options.set_defaults(rates=None, against=[])


def add_adapters(options: argparse.ArgumentParser) -> None:
    """Add the options of `bench adapters`."""
    options.add_argument("--layer", default="qwen3_30b", choices=sorted(LAYERS))
    options.add_argument("--rank", type=number, default=16, help="of the adapter")
    options.add_argument("--tokens", type=numbers, default=[1, 8, 64], help="in inference")
    options.add_argument("--trained", type=numbers, default=[8192], help="tokens of a step")
    options.add_argument(
        "--formats", type=words, default=["floats", "int4:1x128"], help="of weights, in turn"
    )
    options.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    options.add_argument("--device", choices=("cpu", "cuda"), help="cuda, if there is one")


def add_train(options: argparse.ArgumentParser) -> None:
    """Add the options of `bench train`."""
    options.add_argument(
        "--layers", type=trained_names,
        help=f"comma-separated, of {', '.join(TRAINED)}; {','.join(PUBLISHED)} on a GPU and "
        f"{','.join(TINY)} on a CPU if left out",
    )  # fmt: skip
    options.add_argument(
        "--tokens", type=numbers,
        help=f"comma-separated; {TRAIN_TOKENS['cuda']} on a GPU, {TRAIN_TOKENS['cpu']} on a CPU",
    )  # fmt: skip
    options.add_argument(
        "--against", type=trained_against, default=list(NAMES),
        help=f"comma-separated, of {', '.join(NAMES)}; all if left out, and ours anyway",
    )  # fmt: skip
    options.add_argument(
        "--frozen", action="store_true",
        help="gradients of tokens and routing weights alone, as adapters elsewhere need them",
    )  # fmt: skip
    options.add_argument("--repeats", type=number, default=40, help="calls of each")
    options.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    options.add_argument("--device", choices=("cpu", "cuda"), help="cuda, if there is one")


def settle_train(args: argparse.Namespace) -> None:
    """Give what was left out its value."""
    settle_stages(args)
    if args.layers is None:
        args.layers = PUBLISHED if args.device == "cuda" else TINY
    if args.tokens is None:
        args.tokens = numbers(TRAIN_TOKENS[args.device])


def add_sizes(options: argparse.ArgumentParser) -> None:
    options.add_argument(
        "--layer", type=layer_names, default="qwen3_30b", help=f"all, or of {', '.join(LAYERS)}"
    )
    options.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    options.add_argument("--device", choices=("cpu", "cuda"), help="cuda, if there is one")


def settle_stages(args: argparse.Namespace) -> None:
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")


def settle_layer(args: argparse.Namespace, error: Error) -> None:
    """Give what was left out its value, and refuse options that do not go together."""
    on_host = args.ours in HOST
    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() and not on_host else "cpu"
    if args.ours is None:
        args.ours = "moe" if args.device == "cuda" else "lifted"
    on_host = args.ours in HOST
    if on_host and args.device != "cpu":
        error(f"--ours {args.ours} is timed on the CPU; drop --device, or take --ours moe")
    if on_host and len(args.layer) > 1:
        error(f"--ours {args.ours} measures one layer; take --ours moe for several")
    mine, others = (OF_HOST, OF_MOE) if on_host else (OF_MOE, OF_HOST)
    for name in others:
        if getattr(args, name) is not None:
            ways = "moe" if on_host else " or ".join(HOST)
            error(f"--{name} is for --ours {ways}, but this is --ours {args.ours}")
    for name, value in mine.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.tokens is None:
        args.tokens = numbers(HOST_TOKENS if on_host else TOKENS)
    if args.against is None:
        args.against = words(HOST_AGAINST if on_host else "")
    if args.format is not None:
        settle_format(args, error)


def settle_format(args: argparse.Namespace, error: Error) -> None:
    """Refuse what cannot be measured in a format, before anything is."""
    for name in args.against:
        if name in STOCK:
            error(
                f"--against {name} has weights in 16 bits alone; drop it, or name backends of ours"
            )
    settle_layers(args, error)
    if not formats.eight_bit(args.format):
        return
    third = "--rates COPY_TBS,MATMUL_TFLOPS,MATMUL8_TFLOPS"
    if args.rates is None and not has_8bit_product(torch.device(args.device)):
        error(
            f"the rate of products in 8 bits cannot be measured on {args.device}; give it: {third}"
        )
    if args.rates is not None and args.rates.matmul8_tflops is None:
        error(f"--rates has no rate of products in 8 bits, which this format needs; give {third}")


def settle_layers(args: argparse.Namespace, error: Error) -> None:
    """Refuse layers that the format does not fit."""
    for name in args.layer:
        try:
            formats.check_layer(args.format, LAYERS[name])
        except ValueError as reason:
            error(f"--format: {reason}")


def missing(args: argparse.Namespace) -> str | None:
    """What the command needs and this machine lacks, or None."""
    on_gpu = args.command in ("counters", "tiles") or getattr(args, "device", None) == "cuda"
    if on_gpu and not torch.cuda.is_available():
        return f"this needs a CUDA GPU, and torch {torch.__version__} finds none"
    if args.command == "counters" and shutil.which("ncu") is None:
        return "counters are read with Nsight Compute: put its `ncu` on the PATH"
    return None


def settle_ep(args: argparse.Namespace, error: Error) -> None:
    """Refuse modes that a part does not have, and those that do not run in one process."""
    modes = ep.PARTS[args.part]
    floats = [m for m in args.modes or () if m in ep.PEERS]
    if args.x_format and (args.part == ep.SHARED or args.probe or floats):
        given = "--probe" if args.probe else f"--modes {floats[0]}" if floats else "--part shared"
        error(f"--x-format goes with layers and transports that send codes, not with {given}")
    if {ep.PUSH, ep.VDEV2D} <= set(args.modes or ()):
        error(
            "torch has one kind of shared memory in a process; measure vdev2d in a run of its own"
        )
    for mode in args.modes or ():
        if mode not in modes:
            error(f"--part {args.part} has the modes {', '.join(modes)}, got {mode}")


def add_ep(of: argparse.ArgumentParser) -> None:
    of.add_argument("--layer", type=layer_names, default=["qwen3_30b"])
    of.add_argument("--tokens", type=numbers, default=[1, 8, 64, 512], help="of each rank")
    of.add_argument("--part", choices=list(ep.PARTS), default=ep.LAYER, help="of what is timed")
    of.add_argument("--modes", nargs="+", choices=ep.MODES, help="all of a part")
    of.add_argument("--x-format", default="", choices=["", *ep.W_FORMATS], help="of tokens sent")
    of.add_argument(
        "--routing", type=routing_names, default=["uniform"], help=f"of {', '.join(ROUTINGS)}"
    )  # fmt: skip
    of.add_argument("--probe", action="store_true", help="collectives alone, by bytes")
    of.add_argument("--simulate", action="store_true", help="without ranks; of the last --tokens")
    of.add_argument("--ranks", type=numbers, default=[8, 16, 64], help="of a simulation")
    of.add_argument("--zipf", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    of.add_argument("--redundant", type=int, nargs="+", default=[0, 32], help="experts")


def add_halves(of: argparse.ArgumentParser) -> None:
    of.add_argument("--layer", type=layer_names, default=["mixtral_8x7b"])
    of.add_argument("--tokens", type=numbers, default=[1024, 4096], help="of each rank")
    of.add_argument("--sequences", type=number, default=4, help="of each rank")
    of.add_argument("--blocks", type=number, default=1, help="one after the other")
    of.add_argument("--of-ranks", type=number, default=0, help="as many experts a rank as one has")
    of.add_argument("--collective", choices=list(halves.COLLECTIVES), default="auto")
    of.add_argument(
        "--slower", type=numbers, default=[1],
        help="simulate links of such parts of the rate: collectives carry as many times the bytes",
    )  # fmt: skip
    of.add_argument("--eager", action="store_true", help="without CUDA graphs")


def settle_halves(args: argparse.Namespace, error: Error) -> None:
    """Refuse layers whose attention is not known, and links that stores do not slow down."""
    for name in args.layer:
        if name not in step.ATTENTION:
            error(f"--layer takes {', '.join(step.ATTENTION)} here, got {name}")
    if max(args.slower) > 1 and args.collective != "gather":
        error("--slower stretches collectives, which push does not run; add --collective gather")
    for tokens in args.tokens:
        if tokens % args.sequences:
            error(f"--tokens {tokens} do not divide among --sequences {args.sequences}")


def add_accuracy(of: argparse.ArgumentParser) -> None:
    of.add_argument(
        "--schemes", type=scheme_names, default=[], help="comma-separated; all if left out"
    )
    of.add_argument("--seed", type=int, default=0, help="of weights and inputs")
    of.add_argument(
        "--device", default="cpu", choices=sorted(accuracy.KERNELS), help="whose kernels"
    )


def add_task(of: argparse.ArgumentParser) -> None:
    of.add_argument("--weights", required=True, help="a file of the trained model, or for it")
    of.add_argument(
        "--schemes", type=scheme_names, default=list(SCHEMES),
        help="comma-separated; all if left out, and 16 bits anyway",
    )  # fmt: skip
    of.add_argument(
        "--every-format",
        action="store_true",
        help="all pairs of formats of a scheme; those that quantize_model takes if left out",
    )
    of.add_argument("--ranks", type=numbers, default=[1, 2], help="that share the experts")
    of.add_argument("--rows", type=number, default=64, help="of held-out text to score")
    of.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="whose kernels")
    of.add_argument("--steps", type=number, help="of training; those of the recipe if left out")
    of.add_argument("--seed", type=int, default=0, help="of weights and batches")
    of.add_argument("--plot", help="also draw to this PNG file")
    of.add_argument(
        "--seconds", type=seconds, help="end after the scheme that is scored then; --json goes on"
    )

"""python -m moe_ops.bench [COMMAND] [options]: without a command, both: overhead and layer."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from moe_ops.bench import (
    accuracy,
    adapters,
    beside,
    compile_time,
    counters,
    ep,
    ep_simulated,
    formats,
    grid,
    halves,
    invariant,
    layer,
    linears,
    loading,
    options,
    overhead,
    packing,
    plot,
    quantized,
    step,
    task,
    task_plot,
    train,
)
from moe_ops.bench.results import write
from moe_ops.bench.when import when
from moe_ops.checks.shapes import DTYPES
from moe_ops.planning.cost import processor
from moe_ops.testing import LAYERS

PROGRAM = "python -m moe_ops.bench"

Figures = dict[str, Any]


def measure_overhead(args: argparse.Namespace) -> Figures:
    found = overhead.measure()
    print(overhead.table(found), end="\n\n")
    return {"overhead": [asdict(o) | {"dispatch_us": o.dispatch_us} for o in found]}


def measure_layer(args: argparse.Namespace) -> Figures:
    if args.ours == "moe":
        return grid.measure_layers(args, command())
    case, dtype = LAYERS[args.layer[0]], DTYPES[args.dtype]
    timings = layer.measure(
        case, dtype, args.tokens, args.against, args.repeats, args.part, args.ours
    )
    print(f"{args.part}: ", end="")
    print(layer.table(case, dtype, timings))
    return {
        **versions(),
        "layer": {"case": asdict(case), "dtype": args.dtype, "part": args.part},
        "ours": args.ours,
        "timings": [asdict(t) for t in timings],
    }


def measure_train(args: argparse.Namespace) -> Figures:
    return train.measure_train(args, command())


def measure_op(args: argparse.Namespace) -> Figures:
    return grid.measure_stages(args)


def measure_tiles(args: argparse.Namespace) -> Figures:
    return grid.measure_tiles(args)


def print_report(args: argparse.Namespace) -> Figures:
    return grid.print_report(args)


def measure_both(args: argparse.Namespace) -> Figures:
    return measure_overhead(args) | measure_layer(args)


def measure_accuracy(args: argparse.Namespace) -> Figures:
    base = accuracy.make_base(accuracy.CASE, args.seed).to(args.device)
    print(f"16-bit model: mean entropy {base.entropy:.2f} nats")
    found = accuracy.measure(base, args.schemes)
    print(accuracy.table(found))
    return {
        **versions(),
        "device": args.device,
        "model": {
            "layer": asdict(accuracy.CASE),
            "layers": accuracy.LAYERS,
            "vocabulary": accuracy.VOCABULARY,
            "prompts": accuracy.PROMPTS,
            "seed": args.seed,
            "entropy_nats": base.entropy,
        },
        "accuracy": [asdict(a) for a in found],
    }


def measure_task(args: argparse.Namespace) -> Figures:
    if args.plot:
        plot.pyplot()  # raises before anything is measured
    found = task.measure_task(args, command())
    if args.plot:
        task_plot.draw(task.loaded(found), Path(args.plot))
    return versions() | found


def measure_packing(args: argparse.Namespace) -> Figures:
    case = LAYERS[args.layer]
    found = packing.measure(case, args.gigabytes, args.repeats)
    print(packing.table(found))
    return {
        **versions(),
        "case": asdict(case) | {"E": packing.experts_in(case, args.gigabytes)},
        "packing": [asdict(p) | {"seconds_per_gb": p.seconds_per_gb} for p in found],
    }


def measure_quantized(args: argparse.Namespace) -> Figures:
    case = LAYERS[args.layer]
    found = quantized.measure(case, args.tokens, args.formats, args.seconds)
    print(quantized.table(found))
    return {"case": asdict(case), "turns": [asdict(one) for one in found]}


def measure_compile(args: argparse.Namespace) -> Figures:
    found = [compile_time.measure(n) for n in args.layers]
    print(compile_time.table(found))
    return {
        **versions(),
        "compile": [asdict(s) | {"total_s": s.total_s, "share": s.share} for s in found],
    }


def measure_loading(args: argparse.Namespace) -> Figures:
    codings, folder = args.codings or list(loading.CODINGS), args.folder
    found = loading.measure_all(codings, args.gib, args.repeats, args.cold, folder)
    return {"loading": [asdict(one) for one in found]}


def measure_counters(args: argparse.Namespace) -> Figures:
    format = formats.spelled(args.format)
    found = counters.measure(args.layer, args.tokens, format)
    print(counters.table(found))
    on = torch.cuda.get_device_name()
    return {"device": on, "format": format, "kernels": [asdict(k) for k in found]}


def measure_ep(args: argparse.Namespace) -> Figures:
    if args.simulate:
        case = LAYERS[args.layer[0]]
        sizes = (args.ranks, args.zipf, args.redundant, args.tokens[-1])
        simulated = ep_simulated.simulate(case, *sizes)
        print(ep_simulated.table(simulated))
        return {"simulated": [asdict(s) for s in simulated]}
    with ep.world() as device:
        found = ep.probe(device) if args.probe else ep.measure(_cells(args), args.modes, device)
        if torch.distributed.get_rank() == 0:
            print(ep.table(found))
        ranks = torch.distributed.get_world_size()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"device": f"{ranks} x {name}", "spent": [asdict(s) for s in found]}


def _cells(args: argparse.Namespace) -> list[ep.Cell]:
    """The cells that `ep` measures. Cells of the same weights stand next to each other."""
    return [
        ep.Cell(case=LAYERS[name], T=T, part=args.part, routing=routing, x_format=args.x_format)
        for name in args.layer
        for routing in args.routing
        for T in args.tokens
    ]


def measure_halves(args: argparse.Namespace) -> Figures:
    found = []
    with ep.world() as device:
        for one in halves.measure(_halves_cells(args), device):
            found.append(one)
            if torch.distributed.get_rank() == 0:
                print(halves.table(found[-1:]), f"({one.reason})", sep="\n", flush=True)
        if torch.distributed.get_rank() == 0:
            print(halves.table(found), flush=True)
        ranks = torch.distributed.get_world_size()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"device": f"{ranks} x {name}", "halves": [asdict(s) for s in found]}


def _halves_cells(args: argparse.Namespace) -> list[halves.Cell]:
    return [
        halves.Cell(
            layer=name, tokens=T, sequences=args.sequences, blocks=args.blocks,
            of_ranks=args.of_ranks, slower=slower, collective=args.collective,
            captured=not args.eager,
        )
        for name in args.layer
        for slower in args.slower
        for T in args.tokens
    ]  # fmt: skip


def measure_step(args: argparse.Namespace) -> Figures:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers = args.layers or (24 if device.type == "cuda" else 1)
    formats = step.Formats(experts=args.format, linears=args.linears)
    found = step.measure(args.layer, layers, args.slots, device, formats, args.sequences)
    print(step.table(found))
    return {"step": asdict(found)}


def measure_adapters(args: argparse.Namespace) -> Figures:
    asked = adapters.Asked(
        case=LAYERS[args.layer], dtype=DTYPES[args.dtype], device=torch.device(args.device),
        rank=args.rank,
    )  # fmt: skip
    found = [*adapters.measure(asked, args.formats, args.tokens, args.trained)]
    print(adapters.table(asked, found))
    return {"adapters": [asdict(one) for one in found]}


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], Figures], str]] = {
    "both": (measure_both, "overhead, then layer"),
    "overhead": (measure_overhead, "what calling an op costs beyond its backend"),
    "layer": (measure_layer, "layers on this device against their floor and others' experts"),
    "train": (measure_train, "experts forward and backward, beside others' experts"),
    "tiles": (measure_tiles, "tiles of the expert kernels on a GPU, from those of the tables on"),
    "adapters": (measure_adapters, "experts with adapters, beside the same experts without"),
    "beside": (beside.measure_beside, "shared experts on a second stream, and in order"),
    "op": (measure_op, "the stages of a layer alone, on each of their backends"),
    "step": (measure_step, "a token of each sequence through layers of a model, by launches"),
    "counters": (measure_counters, "what limits each kernel on a GPU, by Nsight Compute"),
    "report": (print_report, "the figures that `layer --ours moe --json` wrote, as Markdown"),
    "accuracy": (measure_accuracy, "error of a layer and KL of a model, for every scheme"),
    "task": (measure_task, "perplexity and accuracy of a small trained model, for every scheme"),
    "compile": (measure_compile, "what the passes add to the time of compiling a model"),
    "packing": (measure_packing, "time to quantise weights, for every format"),
    "quantised": (measure_quantized, "a layer on the CPU in several formats, beside bfloat16"),
    "ep": (measure_ep, "layers over the ranks of torchrun, collectives alone, or a simulation"),
    "halves": (
        measure_halves,
        "a block over the ranks of torchrun, in one batch and in two halves",
    ),
    "invariant": (invariant.measure_invariant, "experts in invariant calls, and in others"),
    "linears": (linears.measure_linears, "linear layers in codes by each backend, beside floats"),
    "loading": (measure_loading, "checkpoints into layers, against safetensors alone"),
}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, what) in COMMANDS.items():
        command_options = commands.add_parser(name, help=what, description=what)
        add_options(name, command_options)
        command_options.add_argument("--threads", type=int, help="threads of torch")
        command_options.add_argument("--json", help="also write the figures to this file")
    return top


ADDED: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "op": options.add_stages,
    "train": options.add_train,
    "adapters": options.add_adapters,
    "tiles": options.add_tiles,
    "beside": options.add_beside,
    "accuracy": options.add_accuracy,
    "task": options.add_task,
    "ep": options.add_ep,
    "halves": options.add_halves,
    "invariant": invariant.add,
    "linears": linears.add,
}  # the options of commands


def add_options(name: str, of: argparse.ArgumentParser) -> None:
    """Add the options of one command to its parser."""
    if name in ("both", "layer"):
        options.add_layer(of)
    if name in ADDED:
        ADDED[name](of)
    if name == "step":
        of.add_argument("--layer", default="qwen3_30b", choices=sorted(step.ATTENTION))
        of.add_argument("--layers", type=options.number, help="of a step; 24 on a GPU, elsewhere 1")
        of.add_argument("--slots", type=options.number, default=256, help="of the cache")
        of.add_argument("--sequences", type=options.number, default=1, help="with a token each")
        of.add_argument("--format", type=options.layer_format, help="of experts, as for layer")
        of.add_argument(
            "--linears", type=options.linear_format, default="", help="of layers of attention"
        )
    if name == "counters":
        of.add_argument("--layer", type=options.layer_names, default=["qwen3_30b"])
        of.add_argument("--tokens", type=options.numbers, default=[1, 64, 4096])
        of.add_argument("--format", type=options.layer_format, help="as for layer")
    if name == "report":
        of.add_argument("file", help="the JSON file")
        of.add_argument("--plot", help="also draw to this PNG file")
    if name == "compile":
        of.add_argument(
            "--layers", type=options.numbers, default=[4, 12, 48], help="comma-separated"
        )
    if name == "packing":
        of.add_argument("--layer", default="qwen3_30b", choices=sorted(LAYERS))
        of.add_argument("--gigabytes", type=float, default=1.0, help="of bfloat16 weights")
        of.add_argument("--repeats", type=int, default=3, help="runs; the fastest counts")
    if name == "quantised":
        of.add_argument("--layer", default="qwen3_30b", choices=sorted(LAYERS))
        of.add_argument("--tokens", type=options.numbers, default=[1, 16, 64, 512])
        of.add_argument(
            "--formats", type=options.words, default=list(quantized.FORMATS),
            help="comma-separated: WEIGHTS or WEIGHTS+INPUTS",
        )  # fmt: skip
        of.add_argument(
            "--seconds", type=float, default=20.0, help="about, for each number of tokens"
        )
    if name == "loading":
        of.add_argument("--codings", nargs="+", choices=sorted(loading.CODINGS))
        of.add_argument("--gib", type=float, default=1.5, help="size of the checkpoint")
        of.add_argument("--repeats", type=int, default=5, help="runs; the median counts")
        of.add_argument("--cold", action="store_true", help="read from the disk")
        of.add_argument("--folder", type=Path, help="where the files are written and removed")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command line. Options without a command are options of "both"."""
    alone = not words or (words[0].startswith("-") and words[0] not in ("-h", "--help"))
    reader = parser()
    args = reader.parse_args(["both", *words] if alone else words)
    if args.command in ("both", "layer"):
        options.settle_layer(args, reader.error)
    if args.command in ("op", "tiles", "adapters"):
        options.settle_stages(args)
    if args.command == "train":
        options.settle_train(args)
    if args.command in ("tiles", "counters") and args.format is not None:
        options.settle_layers(args, reader.error)
    if args.command == "ep":
        options.settle_ep(args, reader.error)
    if args.command == "halves":
        options.settle_halves(args, reader.error)
    if args.command == "report" and not Path(args.file).is_file():
        reader.error(f"there is no file {args.file}")
    return args


def command() -> str:
    return " ".join([PROGRAM, *sys.argv[1:]])


def versions() -> Figures:
    """The version of transformers, which `overhead` alone does not need."""
    import transformers

    return {"transformers": transformers.__version__}


def main() -> None:
    """Exits with 1 if a cell was wrong, and so not timed."""
    args = parse(sys.argv[1:])
    lack = options.missing(args)
    if lack is not None:
        parser().error(f"{args.command}: {lack}")
    if args.threads:
        torch.set_num_threads(args.threads)
    figures: Figures = {
        "command": command(),
        **when(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": processor() or platform.processor() or platform.machine(),
    }
    run, _ = COMMANDS[args.command]
    figures |= run(args)
    if args.json:
        write(Path(args.json), figures)
    measured = (*figures.get("cells", ()), *figures.get("accuracy", ()))
    if any(one.get("wrong") for one in measured):
        sys.exit(1)


if __name__ == "__main__":
    main()

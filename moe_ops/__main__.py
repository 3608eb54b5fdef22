"""The command line: what moe_ops makes of a model, caches filled ahead, which backends run here,
a library for C++, and other programs with moe_ops imported."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import runpy
import shutil
import sys
import tarfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_ops import installed
from moe_ops.checks.config_sizes import TINY, require_experts_per_token, shrink
from moe_ops.checks.options import check_writable
from moe_ops.checks.shapes import DTYPES
from moe_ops.checks.signature import did_you_mean
from moe_ops.conformance import command as conformance
from moe_ops.estimate import command as estimate
from moe_ops.exporting import command as export
from moe_ops.invariant import command as invariant
from moe_ops.library import command as library
from moe_ops.recorded import command as routing

ABOUT = """\
Shows what moe_ops would make of a Hugging Face model: its MoE regions, what each was lifted from,
the backend for every number of tokens, bytes, operations and the least time that this device needs,
what was left alone and why, passes, graphs and graph breaks.

The model is built from its config with random weights that take no memory, and no kernel runs, so
models larger than the machine can be explained. --depyf alone compiles and runs the model, and
needs its memory: use --tiny or --layers with it.
"""
EXAMPLES = """\
examples:
  python -m moe_ops explain qwen3_moe --layers 2 --tokens 1,128
  python -m moe_ops explain Qwen/Qwen3-30B-A3B --html qwen3.html
  python -m moe_ops explain gpt_oss --tiny --depyf dumps
"""
RUN = """\
Imports moe_ops and runs a module with the remaining arguments, as python -m MODULE would. So a
program that knows nothing of moe_ops loads models that moe_ops quantised, and models of
transformers whose experts run on moe_ops: where experts_implementation is given as "moe_ops".
"""
RUN_EXAMPLES = """\
example:
  python -m moe_ops run lm_eval --tasks hellaswag --model hf \\
    --model_args pretrained=Qwen/Qwen3-30B-A3B,experts_implementation=moe_ops
"""
WARM = """\
Compiles a model ahead: runs forwards of it, with a cache and without, for several tokens and for
one, and, with --generate, steps of generate. What that compiles stays in the caches on disk of
torch and Triton. It prints what each call compiled and built, and what the caches hold. A later
process, or a second run, then takes all of it from there. Sizes need no run each: they share code.
"""
WARM_EXAMPLES = """\
examples:
  python -m moe_ops warm Qwen/Qwen3-30B-A3B --generate 64
  python -m moe_ops warm Qwen/Qwen3-30B-A3B --random --layers 2    # as its layers are all alike
  python -m moe_ops warm qwen3_moe --tiny --save caches.tar
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run a command line. Returns 0; bad usage, a file that cannot be written, and a model that
    transformers cannot find or build exit with 2 and a line on stderr. A module that is run exits
    as it does under `python -m`, and with 1 and a line on stderr if there is none."""
    words = sys.argv[1:] if words is None else list(words)
    if words[:1] == ["run"] and len(words) > 1 and not words[1].startswith("-"):
        return run(words[1], words[2:])  # whose arguments are its own, whatever they look like
    top = parser()
    args = top.parse_args(words)
    warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
    if args.command == "backends":
        from moe_ops.backends import available

        columns = shutil.get_terminal_size(fallback=(available.WIDTH, 24)).columns
        print(available.text(min(available.WIDTH, columns)))
        return 0
    if args.command == "conformance":
        return conformance.run(top, args)
    if args.command == library.NAME:
        return library.run(top, args)
    if args.command == routing.NAME:
        return routing.run(top, args)
    if args.command == "warm":
        return warm(top, args)
    if args.command == invariant.NAME:
        return invariant.run(top, args, loaded)
    if args.command == "export":
        return export.run(top, args, loaded)
    if args.command == estimate.NAME:
        return estimate.run(top, args, on_meta)
    try:
        for name in ("html", "json"):
            if getattr(args, name) is not None:
                check_writable(f"--{name}", getattr(args, name))
    except OSError as error:
        top.error(one_line(error))
    try:
        model, inputs = build(args)
    except Exception as error:  # whatever transformers, its hub or a config's own checks raise
        top.error(f"{args.model}: {one_line(error)}")
    from moe_ops.passes.explain import explain  # loads Inductor, which --help need not wait for

    try:
        found = explain(model, inputs, html=args.html, depyf=args.depyf, tokens=args.tokens)
        print(found)
        if args.json is not None:
            Path(args.json).write_text(found.to_json() + "\n", encoding="utf-8")
    except (ImportError, OSError) as error:
        top.error(one_line(error))
    return 0


def warm(top: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Fill the caches of compiled code by calls of a model, and print what is in them."""
    # It loads Inductor, which --help need not wait for.
    from moe_ops.warm import archive
    from moe_ops.warm import caches as held
    from moe_ops.warm import calls as made

    caches = held.folders()
    try:
        if args.save is not None:
            check_writable("--save", args.save)
        made_for = archive.manifest(torch.device(device_of(args)))
        if args.load is not None:
            archive.load(Path(args.load), caches, made_for)
    except (OSError, ValueError, tarfile.TarError) as error:
        top.error(one_line(error))
    try:
        model = loaded(args)
    except Exception as error:  # whatever transformers, its hub or a config's own checks raise
        top.error(f"{args.model}: {one_line(error)}")
    before = held.held_by(caches)
    calls = made.calls_of(model, args.batch, args.tokens, args.generate)
    print(made.text([made.do(call, caches) for call in calls], caches, before))
    if args.save is not None:
        archive.save(Path(args.save), caches, made_for)
    return 0


def run(module: str, args: Sequence[str]) -> int:
    """Run a module as `python -m` does, with these arguments."""
    fault = not_found(module)
    if fault is not None:
        print(f"python -m moe_ops run: {fault}", file=sys.stderr)
        return 1
    sys.argv[1:] = args
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def not_found(module: str) -> str | None:
    """Why there is no module of this name to run; None if there is."""
    if Path(module).is_file() or module.endswith(".py") or "/" in module:
        return f"{module} is no name of a module; give the name as after python -m, without .py"
    try:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{module}.__main__")
            if spec is None:
                return f"{module} is a package without a __main__, which cannot be run"
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the package around it lacks something
        spec = None
    return f"No module named {module}" if spec is None else None


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m moe_ops",
        description="What moe_ops makes of a model, how fast it would generate, caches filled\n"
        "ahead, which backends run here, and other programs with moe_ops imported.",
        epilog="Measurements: python -m moe_ops.bench --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # keeps the lines of --version
    )
    top.add_argument(
        "--version",
        action="version",
        version=installed.report(),
        help="versions of moe_ops, Python, torch, triton, transformers and flashinfer",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    options = commands.add_parser(
        "explain",
        help="what moe_ops makes of a model",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = options.add_argument
    add("model", metavar="MODEL", help="a model type such as qwen3_moe, a folder, or a hub id")
    add(
        "--experts-implementation",
        default="grouped_mm",
        metavar="NAME",
        help="of transformers: grouped_mm (default), batched_mm, or moe_ops",
    )
    add("--tokens", type=counts, metavar="N,N", help="numbers of tokens to give costs for")
    add("--batch", type=positive, default=1, help="sequences in the input, 1 by default")
    add("--length", type=positive, default=16, help="tokens of each sequence, 16 by default")
    add("--dtype", default="bfloat16", choices=sorted(DTYPES))
    add("--device", choices=("cpu", "cuda"), help="cuda if there is a GPU, else cpu")
    add("--layers", type=positive, help="build this many layers only")
    add("--tiny", action="store_true", help="shrink every size of the model")
    add("--html", metavar="FILE", help="write one self-contained page")
    add("--json", metavar="FILE", help="write all that is shown, and the plan, as JSON")
    add("--depyf", metavar="DIR", help="compile and run the model, and write depyf's dumps")
    runs = commands.add_parser(
        "run",
        help="import moe_ops, then run a module as python -m would",
        description=RUN,
        epilog=RUN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    runs.add_argument("module", metavar="MODULE", help="as after python -m")
    runs.add_argument("args", metavar="...", nargs="*", help="the module's arguments, as they are")
    add_warm(commands)
    conformance.add(commands)
    library.add(commands)
    routing.add(commands)
    export.add(commands, positive)
    estimate.add(commands, counts, positive)
    invariant.add(commands, positive, add_made)
    commands.add_parser(
        "backends", help="which backends there are, what each needs, and which run here"
    )
    return top


def add_made(options: argparse.ArgumentParser) -> None:
    """Add what `loaded` makes a model of."""
    add = options.add_argument
    add("model", metavar="MODEL", help="a model type such as qwen3_moe, a folder, or a hub id")
    add("--random", action="store_true", help="read the config alone, and take random weights")
    add("--dtype", default="bfloat16", choices=sorted(DTYPES))
    add("--device", choices=("cpu", "cuda"), help="cuda if there is a GPU, else cpu")
    add("--quant", metavar="SCHEME", help="quantise the experts, such as mxfp4_w4a16")
    add("--linears", metavar="FORMAT", help="linear layers, too, such as float8_e4m3fn:row")
    add("--head", metavar="FORMAT", help="and the head, such as int8:row")
    add("--layers", type=positive, help="take this many layers only, with random weights")
    add("--tiny", action="store_true", help="shrink every size, with random weights")


def add_warm(commands: Any) -> None:
    """Add the options of `warm`."""
    options = commands.add_parser(
        "warm",
        help="compile a model ahead, into the caches on disk",
        description=WARM,
        epilog=WARM_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = options.add_argument
    add_made(options)
    add("--batch", type=positive, default=1, help="sequences of each call, 1 by default")
    add("--tokens", type=counts, default=[128], metavar="N,N", help="their tokens, 128 by default")
    add("--generate", type=positive, metavar="N", help="generate so many tokens after each, too")
    add("--save", metavar="FILE", help="write the caches into a tar file at the end")
    add(
        "--load", metavar="FILE", help="begin with caches that --save wrote; they are run: trust it"
    )


def loaded(args: argparse.Namespace) -> nn.Module:
    """A model that runs, with its own weights or with random ones.

    Raises ValueError as `config_of` does and for an unknown scheme, and what transformers raises.
    """
    installed.require_transformers(args.command)
    from transformers import CONFIG_MAPPING

    from moe_ops.hf.quantize import quantize_model

    config = config_of(args)
    auto, device = auto_class(config), device_of(args)
    of_type = args.model in CONFIG_MAPPING
    if of_type or args.random or args.tiny or args.layers is not None:
        with torch.device(device):
            model = auto.from_config(config, dtype=DTYPES[args.dtype])
    else:
        model = auto.from_pretrained(args.model, dtype=DTYPES[args.dtype]).to(device)
    model.requires_grad_(False).eval()
    others = {"linear_format": args.linears, "head_format": args.head}
    if args.quant is not None or any(others.values()):
        quantize_model(model, args.quant, **others, progress=False)
    return model


def build(args: argparse.Namespace) -> tuple[nn.Module, dict[str, Any]]:
    """A model with random weights, fake ones unless it is to run, and an input for it.

    Raises ValueError as `config_of` does, and what transformers raises.
    """
    installed.require_transformers("explain of a model by its name")
    config = config_of(args)
    mode = contextlib.nullcontext() if args.depyf else FakeTensorMode()
    with mode, torch.device(device_of(args)):
        model = auto_class(config).from_config(config, dtype=DTYPES[args.dtype])
        ids = torch.ones(args.batch, args.length, dtype=torch.int64)
    if not model._can_set_experts_implementation():
        raise ValueError(
            f"{type(model).__name__} has no experts that transformers can run in another way: it "
            "is no MoE model, or has code of its own for its experts"
        )
    model.set_experts_implementation(args.experts_implementation)
    return model.eval(), {"input_ids": ids, "use_cache": False}


def on_meta(args: argparse.Namespace) -> nn.Module:
    """A model in bfloat16 whose tensors have sizes alone. Raises ValueError as `config_of` does,
    and what transformers raises."""
    installed.require_transformers(args.command)
    config = config_of(args)
    with torch.device("meta"):
        return auto_class(config).from_config(config, dtype=torch.bfloat16).eval()


def device_of(args: argparse.Namespace) -> str:
    """The device that is asked for. Raises ValueError for a GPU that is not there."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"torch {torch.__version__} finds no CUDA GPU here; leave out --device")
    return args.device or ("cuda" if torch.cuda.is_available() else "cpu")


def config_of(args: argparse.Namespace) -> Any:
    """The config of the model that is named, with the sizes and layers that are asked for.

    Raises ValueError for a name that is neither a model type, a folder nor a hub id, and what
    transformers raises.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    if args.model in transformers.CONFIG_MAPPING:
        config = transformers.AutoConfig.for_model(args.model)
    elif "/" not in args.model and not Path(args.model).exists():
        raise ValueError(
            "transformers has no such model type, and a hub id names its owner too, as in "
            f"Qwen/Qwen3-30B-A3B{did_you_mean(args.model, transformers.CONFIG_MAPPING)}"
        )
    elif args.model.startswith((".", "/", "~")) and not Path(args.model).exists():
        raise ValueError("there is no such folder; give one that holds a config.json")
    else:
        config = transformers.AutoConfig.from_pretrained(args.model)
    shrink(config, TINY if args.tiny else {}, args.layers)
    require_experts_per_token(config)
    return config


def auto_class(config: Any) -> Any:
    """The class of transformers that makes a model of a config, with a head for text if it can."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

    heads = (AutoModelForCausalLM, AutoModelForImageTextToText)
    return next((auto for auto in heads if type(config) in auto._model_mapping), AutoModel)


def counts(text: str) -> list[int]:
    """Comma-separated positive numbers."""
    return [positive(part) for part in text.split(",")]


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer above 0, got {text!r}")
    return int(text)


def one_line(error: Exception) -> str:
    """The first line of what an error says."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


if __name__ == "__main__":
    sys.exit(main())

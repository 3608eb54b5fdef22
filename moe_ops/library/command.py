"""`python -m moe_ops build-library`: libmoe_ops built from the sources of this package."""

from __future__ import annotations

import argparse
from typing import Any

NAME = "build-library"
ABOUT = """\
Builds libmoe_ops.so, which has the ops of moe_ops and their kernels for CPUs, for programs in C++
that load what AOTInductor made of a model with these ops, and for Python, where
torch.ops.load_library("DIR/libmoe_ops.so") ahead of import moe_ops saves it from compiling any.
The library is for the torch that is installed, and for processors that have the instructions of
this one.

Prints its path. It takes a minute or more; each element type of codes that is left out saves some.
Exits with 2 if nothing can be compiled.
"""
EXAMPLES = """\
examples:
  python -m moe_ops build-library build
  python -m moe_ops build-library build --elements int4,float8_e4m3fn
  python -m moe_ops build-library build --elements none
"""
NONE = "none"


def add(commands: Any) -> None:
    """Add the options of `build-library`."""
    options = commands.add_parser(
        NAME,
        help="the ops and kernels for CPUs as a library for C++",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = options.add_argument
    add("folder", metavar="DIR", help="where to put the library; it is made if there is none")
    add(
        "--elements", metavar="NAME,NAME", help="of weights that are codes, all by default; or none"
    )


def _first_error(output: str) -> str:
    """The line in which a compiler or a linker says what is wrong; of others the last."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error:" in line), lines[-1] if lines else "no reason")


def run(top: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Run the command. Returns 0; bad usage, and sources that cannot be compiled, exit with 2 and a
    line on stderr."""
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler  # loads Inductor

    from moe_ops.library.build import build

    given = args.elements
    elements = None if given is None else () if given == NONE else given.split(",")
    try:
        print(build(args.folder, elements))
    except InvalidCxxCompiler as error:
        top.error(f"{NAME} needs a working C++ compiler ({error or type(error).__name__})")
    except CppCompileError as error:
        top.error(f"{NAME} cannot compile by {error.cmd[0]}: {_first_error(error.output)}")
    except (OSError, ValueError) as error:
        top.error(str(error))
    return 0

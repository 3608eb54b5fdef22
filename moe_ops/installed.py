"""Which version this is, what it runs on, and whether another package of its name is there."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

__version__ = "0.1.0"

OURS, OTHER = "torch-moe-ops", "moe-ops"  # distributions that both hold a package moe_ops
# The distributions that a library may come from, where they have other names than it.
DISTRIBUTIONS = {
    "triton": ("triton", "pytorch-triton", "triton-windows"),
    "flashinfer": ("flashinfer-python",),
    "cutlass": ("nvidia-cutlass-dsl",),
}
REPORTED = ("torch", "triton", "transformers", "flashinfer")


def version(library: str) -> str | None:
    """The version of a library that is installed, read without an import; None if it is not."""
    for name in DISTRIBUTIONS.get(library, (library,)):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def clash() -> str | None:
    """What is wrong, and what to do, if the other distribution's package is there; else None."""
    try:
        other = metadata.distribution(OTHER)
    except metadata.PackageNotFoundError:
        return None
    for file in other.files or ():
        if file.as_posix() == "moe_ops/__init__.py":
            folder = Path(str(other.locate_file(file))).parent
            return (
                f"{OTHER} {other.version}, which is another project, is installed in {folder}; "
                f"`import moe_ops` finds either that or {OURS}, and removing one can break the "
                f"other; uninstall both ({OTHER} and {OURS}), then install the one you want"
            )
    return None


def report() -> str:
    """A line for each version that a report of a fault has to name, and one for a clash."""
    lines = [f"{OURS} {__version__} in {Path(__file__).parent}"]
    lines.append(f"Python {platform.python_version()}")
    lines += [f"{name} {version(name) or 'is not installed'}" for name in REPORTED]
    fault = clash()
    return "\n".join([*lines, *([f"warning: {fault}"] if fault else [])])

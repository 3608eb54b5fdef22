"""Which version this is, what it runs on, and whether another package of its name is there."""

from __future__ import annotations

import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

__version__ = "0.1.0"

OURS, OTHER = "torch-moe-ops", "moe-ops"  # distributions that both hold a package moe_ops
# The distributions that a library may come from, where they have other names than it.
DISTRIBUTIONS = {
    "triton": ("triton", "pytorch-triton", "triton-windows"),
    "flashinfer": ("flashinfer-python",),
    "cutlass": ("nvidia-cutlass-dsl",),
}
# The oldest transformers that works, as the extra "hf" of pyproject.toml has it.
TRANSFORMERS = "5.17"
REPORTED = ("torch", "triton", "transformers", "flashinfer")


def version(library: str) -> str | None:
    """The version of a library that is installed, read without an import; None if it is not."""
    for name in DISTRIBUTIONS.get(library, (library,)):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def lacks_transformers() -> str | None:
    """What is wrong with the transformers that is installed, and what to do; None if it will do."""
    # One that was imported already may be another than the one that is installed.
    found = getattr(sys.modules.get("transformers"), "__version__", None) or version("transformers")
    if found is not None and _numbers(found) >= _numbers(TRANSFORMERS):
        return None
    what = "it is not installed" if found is None else f"{found} is installed"
    return f"needs transformers {TRANSFORMERS} or newer, and {what}; pip install '{OURS}[hf]'"


def require_transformers(what: str) -> None:
    """Raise ImportError unless there is a transformers that will do for this."""
    fault = lacks_transformers()
    if fault is not None:
        raise ImportError(f"{what} {fault}", name="transformers")


def is_transformers_model(model: object) -> bool:
    """Whether a model is one of transformers. This does not import transformers: if there is such a
    model, it has been imported."""
    utils = sys.modules.get("transformers.modeling_utils")
    return utils is not None and isinstance(model, utils.PreTrainedModel)


def inside_of_peft(model: Any) -> Any:
    """The model that a PeftModel of peft holds; any other as it is."""
    kind = getattr(sys.modules.get("peft"), "PeftModel", None)
    return model.get_base_model() if kind is not None and isinstance(model, kind) else model


def refuse_experts(name: str, fault: str) -> None:
    """Have a transformers that is too old say so where its experts are to run on this
    implementation: it looks the name up when it loads a model, and calls what it finds."""
    interface = getattr(sys.modules.get("transformers.integrations.moe"), "ExpertsInterface", None)

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise ImportError(f"experts_implementation={name!r} {fault}", name="transformers")

    if interface is not None:
        interface.register(name, refuse)


def _numbers(text: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(n) for n in re.findall(r"\d+", text)[:2])


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

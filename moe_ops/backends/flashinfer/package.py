"""The installed FlashInfer: whether it is there, and can run here. It is imported by the first call
that runs it, and by nothing else."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import inspect
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moe_ops.kernels import gpus
from moe_ops.kernels.gpus import Capability
from moe_ops.registry.backend import Needs

log = logging.getLogger("moe_ops")

DISTRIBUTION, LEAST = "flashinfer-python", "0.7.2"
KNOWN = "0.7.4"  # the newest version whose functions were compared with what they are given
CUTE_DSL = "nvidia-cutlass-dsl"
INSTALL = "pip install 'torch-moe-ops[flashinfer]'"


@functools.cache
def version(distribution: str = DISTRIBUTION) -> str | None:
    """The version of a distribution, read without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def capability(device: torch.device) -> Capability | None:
    """The compute capability of a device, None where there is no GPU."""
    return gpus.capability(device) if torch.cuda.is_available() else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Machine:
    """What a backend needs of a machine, whatever the call. It is looked up by its identity."""

    capabilities: tuple[Capability, ...]
    packages: tuple[str, ...] = ()  # besides FlashInfer
    cuda: int = 12  # the major version that torch was built for, at least

    def refusal(self, device: torch.device) -> str | None:
        """Why it cannot run on a device, or None; one without an index is the current one."""
        if device.type == "cuda" and device.index is None and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        return _refusal(self, device)

    @property
    def needs(self) -> Needs:
        """What the backend needs of a machine, in the form that the registry takes."""
        packages = " and ".join((f"{DISTRIBUTION} {LEAST} or newer", *self.packages))
        cuda = f", CUDA {self.cuda}" if self.cuda > 12 else ""

        def missing(device: torch.device) -> str | None:  # a method has no source to hash
            return self.refusal(device)

        return Needs(
            said=f"compute capability {_either(self.capabilities)}{cuda}; {packages}",
            missing=missing,
            package=DISTRIBUTION,
        )


@functools.cache
def _refusal(machine: Machine, device: torch.device) -> str | None:
    wanted, got = _either(machine.capabilities), capability(device)
    if got is None:
        return f"needs a GPU of compute capability {wanted}, and there is none"
    if got not in machine.capabilities:
        said = gpus.described(device) if gpus.is_amd() else gpus.dotted(got)
        return f"needs compute capability {wanted}, got {said}"
    for distribution in (DISTRIBUTION, *machine.packages):
        if version(distribution) is None:
            return f"needs the package {distribution}, which is not installed; {INSTALL}"
    found = version() or ""
    if _numbers(found) < _numbers(LEAST):
        return f"needs {DISTRIBUTION} {LEAST} or newer, got {found}; {INSTALL}"
    if _numbers(torch.version.cuda or "0") < (machine.cuda,):
        return f"needs a torch built for CUDA {machine.cuda}, got {torch.version.cuda or 'none'}"
    return None


@functools.cache
def module(name: str) -> Any:
    """A module of FlashInfer, imported now, so that its tensors serve in any grad mode."""
    _tell_of_first_use()
    with torch.inference_mode(False), torch.no_grad():
        return importlib.import_module(name)


@functools.cache
def _tell_of_first_use() -> None:
    log.info(
        "FlashInfer %s is imported; kernels that it has not compiled before it compiles when they "
        "are first called, which takes up to minutes, and keeps",
        version(),
    )


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which `device` is the current one: kernels of CuTe DSL are launched on its
    stream, wherever their tensors lie. CUTLASS goes there by itself."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return HERE
    return torch.cuda.device(device)


HERE = contextlib.nullcontext()


def takes(function: Callable[..., Any], keyword: str) -> bool:
    """Whether the installed function has a parameter of this name."""
    return keyword in parameters(function)


def found(of: str, name: str) -> Any:
    """A function or a class of a module. Raises RuntimeError where there is none of this name."""
    there = getattr(module(of), name, None)
    if there is None:
        raise RuntimeError(f"{DISTRIBUTION} {version()} has no {name} in {of}; {_known()}")
    return there


def call(function: Callable[..., Any], /, *args: Any, **given: Any) -> Any:
    """What an installed function gives.

    Raises RuntimeError if it does not take these arguments, as that of another version may not.
    """
    try:
        return function(*args, **given)
    except TypeError as error:
        _require_taken(function, args, given, error)
        raise


def _require_taken(
    function: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any], error: TypeError
) -> None:
    """Raise RuntimeError if a function takes no such arguments, so that it raised this error."""
    try:
        inspect.signature(function).bind(*args, **given)
    except TypeError as fault:
        raise RuntimeError(
            f"{DISTRIBUTION} {version()} does not take what moe_ops gives to "
            f"{function.__qualname__}: {fault}; {_known()}"
        ) from error


def _known() -> str:
    return f"moe_ops knows {LEAST} to {KNOWN}, install one of these"


@functools.cache
def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the parameters of an installed function, in their order."""
    return tuple(inspect.signature(function).parameters)


def _numbers(text: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, found.group().split("."))) if found else ()


def _either(capabilities: tuple[Capability, ...]) -> str:
    *rest, last = map(gpus.dotted, capabilities)
    return f"{', '.join(rest)} or {last}" if rest else last

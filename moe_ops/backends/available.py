"""Which backends there are, what each needs of a machine, and whether this one has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from textwrap import wrap

import torch

from moe_ops.backends import triton_device, triton_paths
from moe_ops.installed import version
from moe_ops.registry.backend import Backend, Needs
from moe_ops.registry.spec import DECODE_OPS, OPS, REFERENCE

CPU, WIDTH = "cpu", 100
OF_TRITON = ("triton", "push")  # whose kernels are Triton's


@dataclass(frozen=True, slots=True, kw_only=True)
class Available:
    """A backend by its name: the ops that have it, the package of its kernels and the version that
    is installed (empty: none is), what it needs, and why this machine cannot run it, or None; the
    paths by which it runs calls, each with the reason why this machine cannot run it, or None; and
    the module that registered it, if that is of another package."""

    name: str
    ops: tuple[str, ...]
    package: str
    version: str
    needs: str
    missing: str | None
    paths: tuple[tuple[str, str | None], ...] = ()
    outside: str = ""


def available() -> tuple[Available, ...]:
    """All backends that are registered, in the order in which they were. Nothing is imported or
    compiled for it."""
    found: dict[str, dict[str, Backend]] = {}
    for op in (*OPS.values(), *DECODE_OPS.values()):
        for name, backend in op.backends.items():
            found.setdefault(name, {})[op.name] = backend
    return tuple(_available(name, by_op) for name, by_op in found.items())


def _available(name: str, by_op: dict[str, Backend]) -> Available:
    backend = next(iter(by_op.values()))
    needs = backend.needs or _needs(name, backend)
    on, module = min(backend.devices or {CPU}), getattr(backend.run, "__module__", "")
    return Available(
        name=name,
        ops=tuple(by_op),
        package=needs.package,
        version=(version(needs.package) if needs.package else None) or "",
        needs=needs.said,
        missing=needs.missing(torch.device(on)),
        paths=tuple(
            (path.name, _on_gpu(path.missing)(torch.device(on)))
            for path in triton_paths.PATHS
            if path.backend == name
        ),
        outside="" if module.partition(".")[0] == "moe_ops" else module,
    )


def _needs(name: str, backend: Backend) -> Needs:
    """What a backend needs that declares no needs itself, because they depend on dtypes and formats
    too."""
    if name.partition(".")[0] in OF_TRITON:
        least = ".".join(map(str, triton_device.LEAST_CAPABILITY))
        return Needs(
            said=f"compute capability {least} or more; triton",
            missing=_on_gpu(
                lambda device: triton_device.unavailable() or triton_device.refuse_gpu(device)
            ),
            package="triton",
        )
    devices = backend.devices or {CPU}
    if CPU in devices:
        said = "a C++ compiler" if name == CPU else "nothing but torch"
        return Needs(said=said, missing=_compiler if name == CPU else lambda device: None,
                     package="torch")  # fmt: skip
    return Needs(said="a CUDA GPU", missing=_on_gpu(lambda device: None), package="torch")


def _on_gpu(then: Callable[[torch.device], str | None]) -> Callable[[torch.device], str | None]:
    return lambda device: then(device) if torch.cuda.is_available() else "there is no GPU"


def _compiler(device: torch.device) -> str | None:
    """Why no C++ compiler is found; whether it compiles, a first call shows."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return f"no C++ compiler works ({str(error).splitlines()[0]})"
    return None


def text(width: int = WIDTH) -> str:
    """All available backends as text, in lines of at most so many columns, but for long words."""
    return "\n".join(_lines(b, width) for b in available())


def _lines(b: Available, width: int) -> str:
    ops = "every op" if b.name == REFERENCE else ", ".join(b.ops)
    facts = (
        ("of", ops),
        *([("from", b.outside)] if b.outside else []),
        ("needs", b.needs),
        ("installed", f"{b.package} {b.version}" if b.version else f"no {b.package}"),
        ("runs here", "yes" if b.missing is None else f"no: {b.missing}"),
    )
    paths = (f"{name}: {missing or 'can run'}" for name, missing in b.paths)
    by = (_fact("paths" if i == 0 else "", said, width) for i, said in enumerate(paths))
    return "\n".join([b.name, *(_fact(*fact, width) for fact in facts), *by])


def _fact(name: str, said: str, width: int) -> str:
    return "\n".join(
        wrap(said, width, initial_indent=f"   {name:<11}", subsequent_indent=" " * 14,
             break_on_hyphens=False, break_long_words=False)
    )  # fmt: skip

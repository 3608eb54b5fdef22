"""Where the caches of compiled code are, and what they hold."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

BINARIES = (".cubin", ".hsaco")  # of Triton


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What folders of caches hold: files, their bytes, and which of them are machine code."""

    files: int = 0
    bytes: int = 0
    libraries: int = 0  # of C++
    kernels: int = 0  # of Triton

    def since(self, before: Held) -> Held:
        return Held(
            files=self.files - before.files,
            bytes=self.bytes - before.bytes,
            libraries=self.libraries - before.libraries,
            kernels=self.kernels - before.kernels,
        )


def folders() -> dict[str, Path]:
    """The folders of caches by whose they are. Ask before anything is compiled: Inductor moves
    Triton's into its own."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    found = {"Inductor": Path(cache_dir())}
    if importlib.util.find_spec("triton"):
        from triton import knobs

        triton = Path(knobs.cache.dir).absolute()
        if not triton.is_relative_to(found["Inductor"]):
            found["Triton"] = triton
    return found


def files_in(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def held_by(caches: Mapping[str, Path]) -> dict[str, Held]:
    """What each of the folders holds."""
    held = {}
    for name, folder in caches.items():
        found = list(files_in(folder))
        held[name] = Held(
            files=len(found),
            bytes=sum(path.stat().st_size for path in found),
            libraries=sum(path.suffix == ".so" for path in found),
            kernels=sum(path.suffix in BINARIES for path in found),
        )
    return held


def total(held: Mapping[str, Held]) -> Held:
    parts = held.values()
    return Held(
        files=sum(part.files for part in parts),
        bytes=sum(part.bytes for part in parts),
        libraries=sum(part.libraries for part in parts),
        kernels=sum(part.kernels for part in parts),
    )

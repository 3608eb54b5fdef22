"""What `python -m moe_ops warm` does: calls that fill the caches of compiled code, and what each
left there."""

from __future__ import annotations

import importlib.util
import json
import platform
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from moe_ops import installed
from moe_ops.compiler import compile
from moe_ops.passes.inductor.cache_key import sources_key
from moe_ops.planning.cost import device_of

MANIFEST = "moe_ops.json"  # in a saved file: what it is for
BINARIES = (".cubin", ".hsaco")  # of Triton


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a model that compiles what later ones of its like need."""

    name: str
    run: Callable[[], object]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a call took, the graphs that it compiled and had from a cache, and what it built."""

    name: str
    seconds: float
    compiled: int
    cached: int
    built: Held

    @property
    def is_warm(self) -> bool:
        return not self.compiled and not self.built.libraries and not self.built.kernels


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


def calls_of(model: nn.Module, batch: int, tokens: Sequence[int], more: int | None) -> list[Call]:
    """Forwards of sequences of these lengths and of one token, with a cache and without, and, for
    `more` tokens after each, `generate`."""
    fast: Any = compile(model)
    device = next(model.parameters()).device
    calls = []
    for length in dict.fromkeys((*tokens, 1)):
        ids = torch.ones(batch, length, dtype=torch.int64, device=device)
        of = f"{batch} x {length}"
        for use_cache, with_cache in ((True, ""), (False, ", no cache")):
            run = _forward(fast, ids, use_cache)
            calls.append(Call(name=f"forward of {of}{with_cache}", run=run))
        if more is not None and length in tokens:
            calls.append(Call(name=f"{more} tokens after {of}", run=_steps(fast, ids, more)))
    return calls


def _forward(fast: Any, ids: torch.Tensor, use_cache: bool) -> Callable[[], object]:
    return lambda: fast(input_ids=ids, use_cache=use_cache)


def _steps(fast: Any, ids: torch.Tensor, more: int) -> Callable[[], object]:
    return lambda: fast.generate(ids, max_new_tokens=more, min_new_tokens=more, do_sample=False)


def do(call: Call, caches: Mapping[str, Path]) -> Done:
    """Run a call, and say what came of it."""
    before, graphs = total(held_by(caches)), _graphs()
    start = time.perf_counter()
    with torch.inference_mode():
        call.run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    compiled, cached = (now - then for now, then in zip(_graphs(), graphs, strict=True))
    built = total(held_by(caches)).since(before)
    return Done(name=call.name, seconds=seconds, compiled=compiled, cached=cached, built=built)


def _graphs() -> tuple[int, int]:
    """How many graphs Inductor compiled so far, and how many it took from its caches."""
    of = counters["inductor"]
    return of["fxgraph_cache_miss"] + of["fxgraph_cache_bypass"], of["fxgraph_cache_hit"]


def text(done: Sequence[Done], caches: Mapping[str, Path], before: Mapping[str, Held]) -> str:
    """A table of calls, one of caches, and whether all came from these."""
    rows: list[tuple[str, ...]] = [
        ("", "seconds", "graphs compiled", "from caches", "C++ built", "Triton built")
    ]
    for one in done:
        counts = (one.compiled, one.cached, one.built.libraries, one.built.kernels)
        rows.append((one.name, f"{one.seconds:.1f}", *map(str, counts)))
    now = held_by(caches)
    places: list[tuple[str, ...]] = [("cache", "files", "MB", "new MB", "folder")]
    for name, folder in caches.items():
        new = now[name].since(before[name]).bytes
        sizes = f"{now[name].files}", f"{now[name].bytes / 1e6:.1f}", f"{new / 1e6:.1f}"
        places.append((name, *sizes, str(folder)))
    last = (
        "all of it came from the caches"
        if all(one.is_warm for one in done)
        else "what was compiled and built now comes from the caches next time"
    )
    return "\n".join([*_aligned(rows), "", *_aligned(places), "", last])


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines: the first column to the left, numbers to the right, the last as it is if it
    is a folder."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if rows[0][-1] == "folder":
        widths[-1] = 0
    cells = [
        [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]  # both to a width
        for row in rows
    ]
    return ["  ".join(line).rstrip() for line in cells]


def manifest(device: torch.device) -> dict[str, str | None]:
    """What has to be the same where caches are to be used again."""
    return {
        "moe_ops": f"{installed.__version__}, sources {sources_key()[:16]}",
        **{name: installed.version(name) for name in ("torch", "triton", "transformers")},
        "python": platform.python_version(),
        "processor": device_of(torch.device("cpu")).name,
        "device": device_of(device).name,
    }


def save(file: Path, caches: Mapping[str, Path], made_for: Mapping[str, str | None]) -> None:
    """Write all that the folders hold into a tar file."""
    with tarfile.open(file, "w") as tar:
        said = json.dumps(dict(made_for)).encode()
        head = tarfile.TarInfo(MANIFEST)
        head.size = len(said)
        tar.addfile(head, BytesIO(said))
        for name, folder in caches.items():
            for path in files_in(folder):
                if path.suffix != ".lock":
                    tar.add(path, f"{name}/{path.relative_to(folder)}")


def load(file: Path, caches: Mapping[str, Path], needed: Mapping[str, str | None]) -> None:
    """Put what `save` wrote into the folders. It is code that will run: take files that you trust.

    Raises ValueError for a file that was saved for something else, and for one that `save` did not
    write; nothing is changed then.
    """
    if not tarfile.is_tarfile(file):
        raise ValueError(f"{file} is no tar file; give one that warm --save wrote")
    with tarfile.open(file) as tar:
        first = tar.next()
        said = tar.extractfile(first) if first is not None and first.name == MANIFEST else None
        if said is None:
            raise ValueError(f"{file} is no file that warm --save wrote: it has no {MANIFEST}")
        made_for = json.load(said)
        others = [name for name, value in needed.items() if made_for.get(name) != value]
        if others:
            was, now = ({name: of.get(name) for name in others} for of in (made_for, needed))
            raise ValueError(
                f"{file} was saved for {_listed(was)}, and this is {_listed(now)}; run warm here "
                "without --load"
            )
        for member in tar:
            name, _, inner = member.name.partition("/")
            if name in caches and inner:
                member.name = inner
                tar.extract(member, caches[name], filter="data")


def _listed(values: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {value or 'missing'}" for name, value in values.items())

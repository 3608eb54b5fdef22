"""Hashes of the PTX of every kernel variant that is compiled offline, to tell whether a change of
the sources changes what a GPU runs.

    python -m tests.kernels.ptx_hashes [--write FILE] [--against FILE] [PART...]

prints a line for each variant, its name and the hash, and writes them to FILE. Against FILE, which
an earlier run wrote with the same Triton, it prints what differs instead, and fails if anything
does. Without PARTs, which are as in `PARTS`, it compiles them all: about an hour of
one core.

A hash leaves out what is only a name or a place in the sources: names of kernels and of labels,
`.loc` and `.file`, debug sections and comments. Nothing is assembled, so no ptxas is needed.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from triton.backends.nvidia.compiler import CUDABackend

from moe_ops.testing import ACTIVATIONS
from tests.kernels import offline, offline_grouped
from tests.kernels.offline_sizes import FORMATS, PLAIN

Hashes = Iterator[tuple[str, str]]  # name of a variant, hash

COMMENT = re.compile(r"//.*")
DEBUG_SECTION = re.compile(r"\.section\s+\.debug\w*\s*\{[^}]*\}")
DEBUG_LINE = re.compile(
    r"^\s*\.(?:loc|file)\b.*|^\$L__(?:tmp|func_begin|func_end)\d+:", re.MULTILINE
)
FUNCTION = re.compile(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)")
LABEL = re.compile(r"\$L_\w+")


def plain(ptx: str) -> str:
    """PTX without debug information and comments, its kernels and labels named by their order."""
    for left_out in (COMMENT, DEBUG_SECTION, DEBUG_LINE):
        ptx = left_out.sub("", ptx)
    for i, name in enumerate(dict.fromkeys(FUNCTION.findall(ptx))):
        ptx = re.sub(
            rf"(?<![\w$]){re.escape(name)}(?=_param_\d+\b|(?![\w$]))", f"function_{i}", ptx
        )
    labels = {name: f"label_{i}" for i, name in enumerate(dict.fromkeys(LABEL.findall(ptx)))}
    ptx = LABEL.sub(lambda found: labels[found[0]], ptx)
    return "\n".join(line for line in map(str.strip, ptx.splitlines()) if line)


def hash_of(ptx: str) -> str:
    return hashlib.sha256(plain(ptx).encode()).hexdigest()[:16]


def _hash(made: Any) -> dict[str, Any]:
    return {"hash": hash_of(made.asm["ptx"])}


def _of_capability(capability: int, part: str) -> Hashes:
    known: set[tuple[Any, ...]] = set()
    for name, call in offline.PARTS[part](capability):
        for found in offline.compile_launches(call, capability, known, _hash):
            yield f"{name} {found['kernel']}", found["hash"]


def _of_grouped(kernel: str, names: list[str]) -> Hashes:
    for name in names:
        for found in offline_grouped.variants(kernel, [name], _hash):
            yield f"{name} {'with' if found['bias'] else 'without'} bias", found["hash"]


def _parts() -> Iterator[tuple[str, Callable[[], Hashes]]]:
    for capability in offline.SHARED_MEMORY:
        # Floats: tiles are tuned for Hopper alone.
        others = {"one_of_each", "floats" if capability == 90 else "all_floats"}
        for part in offline.PARTS:
            if part not in others:
                yield f"{capability}/{part}", functools.partial(_of_capability, capability, part)
    for kernel in offline_grouped.KERNELS:
        names = [*ACTIVATIONS, *[PLAIN, FORMATS] * (kernel == "_grouped_codes")]
        yield kernel, functools.partial(_of_grouped, kernel, names)


# Of a capability a part of `offline.py`; and the kernels of `offline_grouped.py`.
PARTS = dict(_parts())


def hashes(part: str) -> Hashes:
    """Names and hashes of the variants of a part; the number tells those of one name apart."""
    met: Counter[str] = Counter()
    # What is compiled here has no machine code: no other process may find it in its cache.
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, TRITON_CACHE_DIR=folder),
        patch.object(CUDABackend, "make_cubin", lambda *_: b""),
    ):
        for name, found in PARTS[part]():
            met[name] += 1
            yield f"{part}: {name} {met[name]}", found


def different(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """A line for each variant that is not the same in both."""
    found = [f"missing: {name}" for name in before if name not in after]
    found += [f"new: {name}" for name in after if name not in before]
    return found + [f"differs: {n}" for n, h in after.items() if before.get(n, h) != h]


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.kernels.ptx_hashes")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--write", type=Path, metavar="FILE", help="write all lines to this file")
    parser.add_argument("--against", type=Path, metavar="FILE", help="a file that --write made")
    given = parser.parse_args()
    parts = given.parts or list(PARTS)
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    after: dict[str, str] = {}
    for part in parts:
        for name, found in hashes(part):
            after[name] = found
            if given.against is None:
                print(f"{name}: {found}", flush=True)
    if given.write is not None:
        given.write.write_text("".join(f"{n}: {h}\n" for n, h in after.items()))
    if given.against is None:
        return 0
    lines = (line.rpartition(": ") for line in given.against.read_text().splitlines())
    before = {name: found for name, _, found in lines if name.partition(":")[0] in parts}
    differ = different(before, after)
    print("\n".join([*differ, f"{len(differ)} of {len(after)} variants differ"]))
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())

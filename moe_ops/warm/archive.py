"""Caches of compiled code as one file, for a machine of the same kind."""

from __future__ import annotations

import json
import platform
import tarfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import torch

from moe_ops import installed
from moe_ops.passes.inductor.cache_key import sources_key
from moe_ops.planning.cost import device_of
from moe_ops.warm.caches import files_in

MANIFEST = "moe_ops.json"  # in a saved file: what it is for


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

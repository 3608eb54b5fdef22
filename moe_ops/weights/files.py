"""The files of a checkpoint: which they are, and what is in them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from torch import Tensor

from moe_ops.checks.options import check_type
from moe_ops.weights import bitsandbytes, gguf_files
from moe_ops.weights.configuration import files_of_index
from moe_ops.weights.layouts import Stored


def entries(file: Path, ending: str = "") -> Iterator[Stored]:
    """What a file holds, in the order of its bytes, or what of it has names with this ending, of
    which GGUF has none; tensors are mapped, those of bitsandbytes made of their parts.
    """
    if file.suffix == ".gguf":
        if not ending:
            yield from gguf_files.entries(file)
        return
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(
            "reading checkpoints needs the package safetensors; install it"
        ) from error
    try:
        opened = safe_open(file, framework="pt", device="cpu")  # closed with the last tensor
    except SafetensorError as error:
        raise ValueError(
            f"{file} cannot be read as safetensors ({error}); complete the download, or write the "
            "file anew"
        ) from error

    def get(name: str) -> Tensor:
        try:
            found: Tensor = opened.get_tensor(name)
        except (SafetensorError, RuntimeError, LookupError, AttributeError) as error:
            # It has a dtype, or a size, that this torch has not.
            raise ValueError(f"{name} cannot be read ({error}); write the file anew") from error
        return found

    names = [name for name in opened.offset_keys() if name.endswith(ending)]
    decoded, parts = bitsandbytes.decoders(set(names), get)
    for name in names:
        if name in decoded:
            yield decoded[name].stored()
        elif name not in parts:
            yield Stored(name=name, read=partial(get, name))


def files_of(source: str | Path | Iterable[str | Path]) -> list[Path]:
    """The files of a source, in order: its GGUF files only where it has no safetensors."""
    given = [source] if isinstance(source, (str, os.PathLike)) else source
    check_type("source", given, Iterable, "a path or several")
    paths = []
    for path in given:
        check_type("each of source", path, (str, os.PathLike), "a path")
        paths.append(Path(path))
    if len(paths) == 1 and paths[0].is_dir():
        folder = paths[0]
        indices = sorted(folder.glob("*.safetensors.index.json"))
        if indices:
            paths = files_of_index(indices[0])
        else:
            paths = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.gguf"))
    for path in paths:
        if path.suffix not in (".safetensors", ".gguf"):
            raise ValueError(f"{path} is no safetensors or GGUF file; convert it")
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; complete the download")
    if not paths:
        raise FileNotFoundError(f"no safetensors files in {source}; give a directory or files")
    return paths

"""The files of a checkpoint: which they are, what is in them, what its configuration says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor


def entries(file: Path) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """The names of a file in the order of its bytes, and a function that maps each tensor."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            "reading checkpoints needs the package safetensors; install it"
        ) from error
    with safe_open(file, framework="pt", device="cpu") as opened:
        for name in opened.offset_keys():
            yield name, partial(opened.get_tensor, name)


def files_of(source: str | Path | Iterable[str | Path]) -> list[Path]:
    """The safetensors files of a source, in order."""
    paths = [Path(source)] if isinstance(source, (str, Path)) else [Path(p) for p in source]
    if len(paths) == 1 and paths[0].is_dir():
        folder = paths[0]
        indices = sorted(folder.glob("*.safetensors.index.json"))
        if indices:
            names = set(json.loads(indices[0].read_text())["weight_map"].values())
            paths = [folder / name for name in sorted(names)]
        else:
            paths = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.gguf"))
    for path in paths:
        if path.suffix == ".gguf":
            raise ValueError(
                f"{path} is GGUF, whose blocks no op reads; convert it to safetensors, dequantised "
                "or in one of docs/FORMATS.md"
            )
        if path.suffix != ".safetensors":
            raise ValueError(f"{path} is no safetensors file; convert it")
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; complete the download")
    if not paths:
        raise FileNotFoundError(f"no safetensors files in {source}; give a directory or files")
    return paths


def quantization_of(folder: Path) -> Mapping[str, Any] | None:
    """What a checkpoint's configuration says of its quantisation, if it has one."""
    for name, key in (("config.json", "quantization_config"), ("hf_quant_config.json", "")):
        path = folder / name
        if path.is_file():
            found = json.loads(path.read_text())
            if not key:
                return {"quant_method": "modelopt", **found}
            if found.get(key):
                return dict(found[key])
    return None

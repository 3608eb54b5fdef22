"""What the JSON files beside a checkpoint say: how it is quantised, and which files it has.

The files may say anything: what is read of them is checked here, and errors name the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from moe_ops.interrupts import let_through
from moe_ops.weights.layouts import PLAIN, Coding, awq, compressed, gptq, mxfp4_blocks

NO_OP_READS = {
    "bitsandbytes": "of its weights those of 4 bits alone are read (NF4, FP4)",
}
REMEDY = "complete the download, or write the file anew"
CONFIGURATIONS = (("config.json", "quantization_config"), ("hf_quant_config.json", None))


@contextmanager
def naming(what: object) -> Iterator[None]:
    """Errors that are raised inside name this too, such as a file."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if str(what) in str(error):
            raise
        # Subclasses may want more than a message, as UnicodeDecodeError does.
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{error} (in {what})") from error


def coding_in(folder: Path) -> Coding:
    """The coding of the checkpoint in a folder, as its configuration says; plain without one.

    Raises ValueError or TypeError, naming the file.
    """
    for name, key in CONFIGURATIONS:
        path = folder / name
        if path.is_file():
            with naming(path):
                found = _object(read_json(path), "the file")
                if key is None:
                    return coding_of({**found, "quant_method": "modelopt"})
                if found.get(key) not in (None, {}):
                    return coding_of(_object(found[key], key))
    return PLAIN


def files_of_index(path: Path) -> list[Path]:
    """The files that an index names, each once, in order.

    Raises ValueError or TypeError, naming the index and its entry, for a file that is not inside
    the folder of the index.
    """
    with naming(path):
        index = _object(read_json(path), "the file")
        entries = _object(index.get("weight_map"), "weight_map")
        names: dict[str, str] = {}
        for entry, name in entries.items():
            if not isinstance(name, str):
                raise TypeError(f"{entry}: must name a file, got {name!r}; {REMEDY}")
            names.setdefault(name, entry)
        if not names:
            raise ValueError(f"weight_map is empty; {REMEDY}")
        for name, entry in names.items():
            _check_inside(path.parent, name, entry)
    return [path.parent / name for name in sorted(names)]


def _check_inside(folder: Path, name: str, entry: str) -> None:
    """Raise ValueError unless a name is that of a file below the folder. What a link there points
    to is up to who made it: caches of downloads are folders of links.
    """
    parts = (*PurePosixPath(name).parts, *PureWindowsPath(name).parts)
    absolute = PurePosixPath(name).is_absolute() or PureWindowsPath(name).anchor
    if absolute or ".." in parts or not name.isprintable():
        raise ValueError(
            f"{entry}: names the file {name!r}, which is not inside the checkpoint's folder; "
            f"{REMEDY}"
        )
    try:
        there = (folder / name).is_file()
    except OSError as error:  # a name that is too long, say
        let_through(error)
        there = False
    if not there:
        raise ValueError(f"{entry}: names the file {name!r}, which does not exist; {REMEDY}")


def read_json(path: Path) -> Any:
    """What a JSON file holds. Raises ValueError, naming the file, if it is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}); complete the download") from error


def coding_of(config: Mapping[str, Any] | None) -> Coding:
    """The coding of a checkpoint with this `quantization_config` (of config.json); None: plain.

    Knows gptq, awq, compressed-tensors, modelopt, fp8, mxfp4 and bitsandbytes of four bits. Raises
    ValueError, with the reason, for others and for variants whose weights no op reads; TypeError
    for values that are not of their kind.
    """
    if config is None:
        return PLAIN
    config = _object(config, "quantization_config")
    method = _text(config, "quant_method", "").lower()
    if method == "gptq":
        second = _text(config, "checkpoint_format", "gptq") == "gptq_v2"
        coding = gptq(_bits(config, "bits"), plus_one=not second)
        return replace(coding, symmetric=_flag(config, "sym", False))
    if method == "awq":
        bits, version = _bits(config, "bits"), _text(config, "version", "gemm")
        if bits != 4 or version.lower() != "gemm":
            raise ValueError(
                f"AWQ is read with 4 bits in the version gemm, got bits={bits}, "
                f"version={version!r}; convert the checkpoint"
            )
        return awq()
    if method == "compressed-tensors":
        return _compressed(config)
    if method in ("modelopt", "fp8") or (method == "bitsandbytes" and config.get("load_in_4bit")):
        return PLAIN  # bitsandbytes is decoded when it is read
    if method == "mxfp4":
        return mxfp4_blocks()
    if method == "moe_ops":
        raise ValueError(
            "quant_method 'moe_ops' is of a model that quantize_model quantised, and comes back by "
            "from_pretrained of its class, where moe_ops is imported; give that the folder"
        )
    reason = NO_OP_READS.get(method, "its layout is unknown")
    raise ValueError(
        f"quant_method {method!r} cannot be loaded: {reason}; dequantise the checkpoint, or take "
        "one of gptq, awq, compressed-tensors, modelopt, fp8, mxfp4, bitsandbytes of 4 bits"
    )


def _compressed(config: Mapping[str, Any]) -> Coding:
    """The coding of compressed-tensors: in words, or as the ops read it."""
    found = _object(config.get("config_groups") or {}, "config_groups")
    groups = [_object(group, f"config_groups.{name}") for name, group in found.items()]
    whole = _text(config, "format", "")
    formats = {_text(group, "format", whole) for group in groups}
    if "pack-quantized" not in formats | {whole}:
        return PLAIN
    weights = [_object(group.get("weights"), "weights") for group in groups]
    bits = {_bits(of, "num_bits") for of in weights}
    if len(formats) > 1 or len(bits) != 1:
        raise ValueError(
            f"compressed-tensors with the formats {sorted(formats)} of {sorted(bits)} bits differ "
            "between layers; give the coding of the experts: compressed(bits)"
        )
    symmetric = all(_flag(of, "symmetric", True) for of in weights)
    return replace(compressed(bits.pop()), symmetric=symmetric)


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{what} must be an object of names and values, got {value!r:.80}")
    return value


def _text(config: Mapping[str, Any], key: str, default: str) -> str:
    """A name of a configuration; null stands for what is left out."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, str):
        raise TypeError(f"{key} must be a name, got {value!r:.80}")
    return value


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """A flag of a configuration; null stands for what is left out."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{key} must be true or false, got {value!r:.80}")
    return default if value is None else value


def _bits(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key, 4)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{key} must be a number of bits, got {value!r:.80}")
    return value


def block_in(folder: Path) -> tuple[int, int] | None:
    """Rows and columns that share a scale in the float8 matrices of a checkpoint, None if its
    configuration says none. Raises ValueError or TypeError, naming the file.
    """
    path, key = folder / CONFIGURATIONS[0][0], "weight_block_size"
    if not path.is_file():
        return None
    with naming(path):
        found = _object(read_json(path), "the file").get(CONFIGURATIONS[0][1]) or {}
        size = _object(found, "quantization_config").get(key)
        if size is None:
            return None
        if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int for n in size):
            raise TypeError(f"{key} must be two numbers, got {size!r:.80}")
        if min(size) < 1:
            raise ValueError(f"{key} must be above 0, got {size}")
        return size[0], size[1]

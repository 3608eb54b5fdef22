"""What the JSON files beside a checkpoint say: values of their kind, and which files it has.

The files may say anything: what is read of them is checked here, and errors name the file. How it
is quantised is read in `codings.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from moe_ops.interop.interrupts import let_through
from moe_ops.weights.advice import reworded

REMEDY = "complete the download, or write the file anew"


@contextmanager
def naming(what: object) -> Iterator[None]:
    """Errors that are raised inside name this too, such as a file."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if str(what) in str(error):
            raise
        raise reworded(error, f"{error} (in {what})") from error


def files_of_index(path: Path) -> list[Path]:
    """The files that an index names, each once, in order.

    Raises ValueError or TypeError, naming the index and its entry, for a file that is not inside
    the folder of the index.
    """
    with naming(path):
        index = object_of(read_json(path), "the file")
        entries = object_of(index.get("weight_map"), "weight_map")
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


def object_of(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{what} must be an object of names and values, got {value!r:.80}")
    return value


def text_of(config: Mapping[str, Any], key: str, default: str) -> str:
    """A name of a configuration; null stands for what is left out."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, str):
        raise TypeError(f"{key} must be a name, got {value!r:.80}")
    return value


def flag_of(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """A flag of a configuration; null stands for what is left out."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{key} must be true or false, got {value!r:.80}")
    return default if value is None else value


def bits_of(config: Mapping[str, Any], key: str, default: int = 4) -> int:
    """A number of bits of a configuration; null stands for what is left out."""
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{key} must be a number of bits, got {value!r:.80}")
    return value

"""The source files of the project."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("passes", "fake_impls")  # at the top, and linked into moe_ops


@dataclass(frozen=True)
class Module:
    """A source file and the name under which it is imported."""

    path: Path
    name: str
    is_package: bool

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT))


def files() -> list[str]:
    """Every file and link of the project: those that git knows or does not ignore, or, where an
    sdist was unpacked, those that it lists."""
    if (ROOT / ".git").exists():
        listing = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
        found = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
        names = found.stdout.split("\0")
    else:
        names = (ROOT / "torch_moe_ops.egg-info" / "SOURCES.txt").read_text().splitlines()
        names = [name for name in names if ".egg-info/" not in name]
        names += [f"moe_ops/{link}" for link in LINKED]
    return [name for name in names if name and os.path.lexists(ROOT / name)]


def modules() -> Iterator[Module]:
    """Every module of the library; linked folders count once, where they are."""
    for folder in ("moe_ops", *LINKED):
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT).with_suffix("").parts
            if path.relative_to(ROOT).parts[:2] in [("moe_ops", link) for link in LINKED]:
                continue
            parts = inside if folder == "moe_ops" else ("moe_ops", *inside)
            is_package = parts[-1] == "__init__"
            yield Module(path, ".".join(parts[:-1] if is_package else parts), is_package)

"""When figures were measured, and of which code."""

from __future__ import annotations

import subprocess
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def when(root: Path = ROOT) -> dict[str, str]:
    """The minute by UTC and the commit of the checkout, for a file of figures.

    The commit is marked `-dirty` where files differ from it, and empty where there is no checkout.
    """
    minute = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")
    return {"date": minute, "commit": _commit(root)}


def _commit(root: Path) -> str:
    if not (root / ".git").exists():  # git would take that of a folder around it
        return ""
    describe = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        told = subprocess.run(describe, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return told.stdout.strip()

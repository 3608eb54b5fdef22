"""Build what a release is made of, and try it as users would: `make release`.

    python -m tests.release --tools PYTHON [--python PYTHON] [--torch torch==2.13.0] [--out dist]

Exports the commit that is checked out, builds its sdist and, from that, its wheel, each in an
environment of its own; has twine check what an index will show; installs each into an empty
environment, and runs the first example of README.md there with a tiny model of this machine.
Nothing is uploaded. `--tools` is a Python that has `build` and `twine`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import transformers

from moe_ops import __version__
from tests.docs import pages
from tests.sources import ROOT

NAME = "torch_moe_ops"
# Whatever tells a fresh environment of this one.
OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


@dataclass(frozen=True, slots=True)
class Tried:
    """A file that was installed, the seconds that it took, and those of the example."""

    file: Path
    install: float
    example: float


def say(text: str) -> None:
    print(f"[release] {text}", file=sys.stderr, flush=True)


def run(*command: str | Path, cwd: Path = ROOT, **more: str) -> str:
    """What a command prints. Raises SystemExit with its last lines if it fails."""
    env = {name: value for name, value in os.environ.items() if name not in OURS} | more
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
        raise SystemExit(f"{' '.join(words)[:200]} failed in {cwd}:\n{last}")
    return done.stdout


def wanted(version: str) -> list[str]:
    """The names of a release's files."""
    return [f"{NAME}-{version}-py3-none-any.whl", f"{NAME}-{version}.tar.gz"]


def unready(version: str, changes: str, status: str) -> str | None:
    """Why this version cannot be released, by CHANGELOG.md and what git says of the checkout; None
    if it can."""
    if status:
        return f"files differ from the last commit; commit or remove them:\n{status}"
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changes, re.M):
        return f"CHANGELOG.md has no section `## [{version}] - YYYY-MM-DD`; write it"
    return None


def exported(folder: Path) -> Path:
    """The files of the last commit, links and all."""
    folder.mkdir()
    archive = folder.with_suffix(".tar")
    run("git", "archive", "--output", archive, "HEAD")
    run("tar", "-xf", archive, "-C", folder)
    return folder


def built(source: Path, out: Path, tools: Path) -> list[Path]:
    """The wheel and the sdist, with the time of the commit in them."""
    when = run("git", "log", "-1", "--format=%ct").strip()
    run(tools, "-m", "build", "--outdir", out, source, SOURCE_DATE_EPOCH=when)
    files = [out / name for name in wanted(__version__)]
    lacking = [file.name for file in files if not file.is_file()]
    if lacking:
        raise SystemExit(f"the build made no {' and no '.join(lacking)} in {out}")
    return files


def tried(file: Path, work: Path, python: str, torch: str) -> Tried:
    """Install a file into an empty environment, and run the example there."""
    venv = work / f"venv-{file.suffix[1:]}"
    own = venv / "bin" / "python"
    began = time.perf_counter()
    run(python, "-m", "venv", venv)
    run(own, "-m", "pip", "install", "--quiet", torch, f"{file}[hf]", cwd=work)
    installed = time.perf_counter()
    example = work / "example.py"
    example.write_text(pages.pages()["README.md"][0].text)
    printed = run(own, example, cwd=work / "hub", HF_HUB_OFFLINE="1")
    at = run(own, "-c", "import moe_ops; print(moe_ops.__version__, moe_ops.__file__)", cwd=work)
    if not at.startswith(f"{__version__} {venv}"):
        raise SystemExit(f"{file.name} installed moe_ops {at}, not {__version__} in {venv}")
    if pages.TEXT not in printed or "MoE layers" not in printed:
        raise SystemExit(f"the example printed neither a text nor what runs it:\n{printed}")
    return Tried(file, installed - began, time.perf_counter() - installed)


def table(found: Sequence[Tried]) -> str:
    rows = [("file", "KiB", "installed in", "example in", "sha256")]
    for one in found:
        data = one.file.read_bytes()
        sizes = (str(len(data) // 1024), f"{one.install:.0f} s", f"{one.example:.0f} s")
        rows.append((one.file.name, *sizes, hashlib.sha256(data).hexdigest()))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__)
    parser.add_argument("--tools", type=Path, required=True, help="a Python with build and twine")
    parser.add_argument("--python", default=sys.executable, help="what environments are made of")
    parser.add_argument("--torch", default="torch", help="what is installed ahead of each file")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder of the files")
    args = parser.parse_args(words)
    fault = unready(
        __version__, (ROOT / "CHANGELOG.md").read_text(), run("git", "status", "--porcelain")
    )
    if fault is not None:
        raise SystemExit(f"{__version__} cannot be released: {fault}")
    out, tools = args.out.absolute(), args.tools.absolute()
    with tempfile.TemporaryDirectory(prefix="moe-ops-release-") as folder:
        work = Path(folder)
        say(f"building {__version__}")
        files = built(exported(work / "source"), out, tools)
        say("checking what an index will show")
        run(tools, "-m", "twine", "check", "--strict", *files)
        transformers.utils.logging.disable_progress_bar()
        pages.make_hub(work / "hub")
        found = []
        for file in files:
            say(f"installing {file.name} and running the first example of README.md")
            found.append(tried(file, work, args.python, args.torch))
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

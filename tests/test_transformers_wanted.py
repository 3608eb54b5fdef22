"""Where transformers is too old, or not there, every entry that needs it says which is wanted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_ops import installed
from tests.sources import ROOT

# What stands for a transformers of that time.
OLD = {
    "transformers/__init__.py": '__version__ = "4.40.0"\n',
    "transformers/modeling_utils.py": "import torch\n\n\nclass PreTrainedModel(torch.nn.Module):\n"
    "    def forward(self, x):\n        return x\n",
    "transformers/integrations/__init__.py": "",
    "transformers/integrations/moe.py": "class ExpertsInterface:\n    known = {}\n\n"
    "    @classmethod\n    def register(cls, name, value):\n        cls.known[name] = value\n",
    "transformers/quantizers/__init__.py": "",
    "transformers/quantizers/auto.py": "",
    "transformers-4.40.0.dist-info/METADATA": "Name: transformers\nVersion: 4.40.0\n",
}
PROGRAM = """
import contextlib, importlib, io, logging, runpy, sys
from importlib import metadata

logging.basicConfig(stream=sys.stdout, format="logged: %(message)s")
if sys.argv[1] == "absent":
    real = metadata.version

    def version(name):
        if name == "transformers":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    metadata.version = version
    sys.modules["transformers"] = None  # an import raises ModuleNotFoundError

import torch
import moe_ops
from moe_ops.__main__ import main


def tell(name, call):
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            call()
    except ImportError as error:
        print(f"{name}: {error}")
    except SystemExit as ended:
        print(f"{name}: {errors.getvalue().splitlines()[-1]}")
    else:
        print(f"{name}: nothing")


for name in ("optimize", "restore", "quantize_model", "share_experts", "from_checkpoint",
             "generation_report"):
    tell(name, lambda: getattr(moe_ops, name))
for name in ("hf", "published", "generation"):
    tell(name, lambda: importlib.import_module(f"moe_ops.{name}"))
tell("compile_config", moe_ops.compile_config)
tell("the command", lambda: main(["explain", "qwen3_moe"]))
tell("an estimate", lambda: main(["estimate", "qwen3_moe", "--device", "h100"]))
tell("an example", lambda: runpy.run_path(sys.argv[2]))
if sys.argv[1] == "old":
    import transformers.integrations.moe as experts
    import transformers.modeling_utils
    import transformers.quantizers.auto

    model = transformers.modeling_utils.PreTrainedModel()
    tell("compile", lambda: moe_ops.compile(model))
    tell("explain", lambda: moe_ops.explain(model, torch.ones(2)))
    tell("by name", lambda: experts.ExpertsInterface.known["moe_ops"](None, 1, 2, 3))
moe_ops.compile(torch.nn.Linear(2, 2))
"""


def told(kind: str, path: Path) -> list[str]:
    (path / "program.py").write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(path), str(ROOT)))}
    env["PYTHONPATH"] += os.pathsep + str(ROOT / "examples")  # as where an example is run
    words = [sys.executable, "program.py", kind, str(ROOT / "examples" / "quickstart.py")]
    done = subprocess.run(words, cwd=path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("old", "4.40.0 is installed"),
        pytest.param("absent", "it is not installed", marks=pytest.mark.every),
    ],
)
def test_every_entry_names_the_version_that_is_wanted(
    kind: str, fault: str, tmp_path: Path
) -> None:
    for name, text in OLD.items() if kind == "old" else ():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    lines = told(kind, tmp_path)
    assert len(lines) == (17 if kind == "old" else 13)
    wanted = f"needs transformers 5.17 or newer, and {fault}; pip install 'torch-moe-ops[hf]'"
    assert [line for line in lines if not line.endswith(wanted)] == []
    assert sum(line.startswith("logged: ") for line in lines) == (kind == "old")


@pytest.mark.parametrize("version", ["5.17.0", "5.17.0.dev0", "5.24.1", "6.0", "10.1"])
def test_newer_ones_will_do(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.setattr(installed, "version", lambda name: version)
    assert installed.lacks_transformers() is None


@pytest.mark.parametrize("version", ["5.16.9", "5.9", "4.57.1", None])
def test_older_ones_will_not(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.setattr(installed, "version", lambda name: version)
    with pytest.raises(ImportError, match=r"this needs transformers 5\.17 or newer, and "):
        installed.require_transformers("this")


def test_the_version_is_that_of_pyproject() -> None:
    assert (
        f'hf = ["transformers>={installed.TRANSFORMERS}"]' in (ROOT / "pyproject.toml").read_text()
    )

"""What a wheel holds, and what importing it costs."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.sources import LINKED, ROOT, files


def python(*args: str, cwd: Path, path: Path) -> str:
    """What a fresh Python prints that finds modules of its own in `path` alone."""
    env = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


IN_A_WHEEL = """
import sys
from importlib.resources import files
import torch, moe_ops, moe_ops.passes, moe_ops.fake_impls, moe_ops.kernels.cpu
from moe_ops.testing import CASES, make_layer
assert moe_ops.__file__.startswith(sys.argv[1]), moe_ops.__file__
for name in ("py.typed", "kernels/cpu/layer.h", "library/library.cpp"):
    assert (files("moe_ops") / name).is_file()
layer = make_layer(CASES[0])
args = (layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI)
out = moe_ops.experts(*args)
with moe_ops.using("reference"):
    torch.testing.assert_close(out, moe_ops.experts(*args))
assert callable(moe_ops.explain) and callable(moe_ops.tune) and callable(moe_ops.compile)
print("ran")
"""


@pytest.mark.slow
def test_the_wheel_of_an_sdist_runs_outside_the_checkout(tmp_path: Path) -> None:
    checkout, dist, site = (tmp_path / name for name in ("checkout", "dist", "site"))
    for name in files():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, checkout / name, follow_symlinks=False)
    python("setup.py", "-q", "sdist", "-d", str(dist), cwd=checkout, path=site)
    (sdist,) = dist.glob("torch_moe_ops-*.tar.gz")
    with tarfile.open(sdist) as archive:
        links = {m.name.partition("/")[2]: m.linkname for m in archive if m.issym()}
    assert links == {f"moe_ops/{link}": f"../{link}" for link in LINKED}
    pip = ("-m", "pip", "--disable-pip-version-check")
    build = ("wheel", "--no-deps", "--no-build-isolation", "-w", str(dist), str(sdist))
    python(*pip, *build, cwd=tmp_path, path=site)
    (wheel,) = dist.glob("torch_moe_ops-*.whl")
    python(*pip, "install", "--no-deps", "--target", str(site), str(wheel), cwd=tmp_path, path=site)
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} == {"moe_ops"}
    assert list((site / "moe_ops" / "tuned").glob("*.json"))
    assert (site / "moe_ops" / "estimate" / "measured.json").exists()
    assert python("-c", IN_A_WHEEL, str(site), cwd=tmp_path, path=site).strip() == "ran"


FRESH = """
import sys
import torch
from tests.work import Calls
before = set(sys.modules)
with Calls() as calls:
    import moe_ops
others = {name for name in set(sys.modules) - before if name.partition(".")[0] != "moe_ops"}
print(calls.count, *sorted(others - sys.stdlib_module_names))
"""
MOST_CALLS = 200_000  # of functions


def test_import_does_little_and_loads_torch_alone(tmp_path: Path) -> None:
    calls, *loaded = python("-c", FRESH, cwd=tmp_path, path=ROOT).split()
    assert not loaded
    assert int(calls) <= MOST_CALLS

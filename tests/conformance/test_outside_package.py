"""The package that CONTRIBUTING.md shows, installed as its users would, in a folder of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.sources import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
SCRIPT = """
import logging, sys
logging.basicConfig(level=logging.WARNING)
import torch
import moe_ops
from moe_ops.__main__ import main
from moe_ops.testing import CASES

from moe_ops.registry import outside
assert outside._waiting is None, "they are loaded before anybody asks for backends"
plain = next(case for case in CASES if case.name == "plain")
sizes = {"hidden_size": plain.D, "intermediate_size": plain.I}
layer = moe_ops.MoELayer(num_experts=plain.E, top_k=plain.K, internal_gate=True, **sizes).eval()
x = torch.randn(5, plain.D)
with torch.inference_mode():
    want = layer(x)
    moe_ops.prepare(layer, "mine.paired")
    torch.testing.assert_close(layer(x), want)
    # A plan that names it: the layer's `experts` by this backend for any number of tokens.
    picked = moe_ops.explain(layer, x, thresholds=((None, "mine"),))
    assert "mine" in str(picked), picked
assert main(["backends"]) == 0
assert main(["conformance", "mine", "--sample", "odd/float32"]) == 0
moe_ops.experts.remove_backend("mine")
try:
    main(["conformance", "mine"])
except SystemExit as left:
    print("left with", left.code)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, put there by pip without a network."""
    source, target = (tmp_path_factory.mktemp(name) for name in ("source", "target"))
    (module,) = re.findall(r"<!-- backend -->\n\n```python\n(.*?)```", PAGE, re.S)
    (project,) = re.findall(r"<!-- package -->\n\n((?:    .*\n|\n)+)", PAGE)
    (source / "moe_mine.py").write_text(module)
    (source / "pyproject.toml").write_text(textwrap.dedent(project))
    install = ["install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    command = [sys.executable, "-m", "pip", *install, "--target", str(target), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


@pytest.mark.slow
def test_the_package_that_the_page_shows(installed: Path) -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{installed}"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=installed, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "\nmine\n" in done.stdout  # among the backends
    assert "experts              passed, " in done.stdout
    assert done.stdout.endswith("left with 2\n")
    assert "no backend 'mine'; there are " in done.stderr

"""`experts_implementation="moe_ops"` after `import moe_ops` alone, in whichever order, and programs
that know nothing of it under `python -m moe_ops run`; each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What is imported, in which order.
OURS = "import moe_ops\n"
THEIRS = "from transformers import Qwen3MoeConfig as C, Qwen3MoeForCausalLM\n"
ORDERS = {
    "ours first": OURS + THEIRS,
    "theirs first": THEIRS + OURS,
    "in between": "import transformers\n" + OURS + THEIRS,
    "FP8 first": "from transformers.integrations import finegrained_fp8\n" + OURS + THEIRS,
}
BODY = """
import sys, torch
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS as fp8
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as plain
sizes = dict(hidden_size=16, moe_intermediate_size=8, num_hidden_layers=1, num_experts=4)
heads = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts_per_tok=2)
config = C(**sizes, **heads, vocab_size=9)
model = AutoModelForCausalLM.from_config(config, experts_implementation="moe_ops")
for registry in (plain, fp8):
    assert registry["moe_ops"].__module__.startswith("moe_ops.hf."), registry
called = []
import moe_ops.hf.experts as ours
experts = ours.experts
ours.experts = lambda *args, **kwargs: called.append(1) or experts(*args, **kwargs)
with torch.no_grad():
    model(torch.ones(1, 3, dtype=torch.int64))
print(*called)
"""


def python(*words: str, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(dict.fromkeys((str(path), str(ROOT))))
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "order", ["ours first", *(pytest.param(o, marks=pytest.mark.every) for o in [*ORDERS][1:])]
)
@pytest.mark.slow
def test_the_implementation_is_known_by_its_name(order: str) -> None:
    done = python("-c", ORDERS[order] + BODY)
    assert (done.returncode, done.stdout.split()) == (0, ["1"]), done.stderr


PROGRAM = """
import pickle, sys
class Mine: pass
if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Mine())).__class__ is Mine, "the module is __main__"
    assert "moe_ops" in sys.modules and sys.argv[0] == __file__
    print(*sys.argv[1:])
"""


def test_a_module_runs_as_under_python_m(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = python("-m", "moe_ops", "run", "program", "--help", "--", "-x", "run", path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["--help", "--", "-x", "run"]


def test_exit_codes_and_errors_are_the_modules(tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    (tmp_path / "fails.py").write_text("import missing_here\n")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("print('package', __name__, __spec__.name)\n")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "__init__.py").write_text("")
    program = """
import runpy, sys
for words in {words}:
    sys.argv = ["moe_ops", "run", *words]
    try:
        runpy.run_module("moe_ops", run_name="__main__")
    except SystemExit as ended:
        print(ended.code)
    except ImportError as error:
        print(error)
"""
    words = [
        ["exits", "3"], ["exits", "0"], ["fails"], ["package"], ["not_there"], ["not.there"],
        ["bare"], ["exits.py"], ["--help"], [],
    ]  # fmt: skip
    done = python("-c", program.format(words=words), path=tmp_path)
    out = done.stdout.splitlines()
    assert out[:8] == [
        "3", "0", "No module named 'missing_here'", "package __main__ package.__main__", "0",
        "1", "1", "1",
    ]  # fmt: skip
    assert (
        out[8] == "1" and "usage: python -m moe_ops run" in done.stdout and out[-2:] == ["0", "2"]
    )
    assert done.stderr.splitlines()[:4] == [
        "python -m moe_ops run: No module named not_there",
        "python -m moe_ops run: No module named not.there",
        "python -m moe_ops run: bare is a package without a __main__, which cannot be run",
        "python -m moe_ops run: exits.py is no name of a module; give the name as after python -m, "
        "without .py",
    ]

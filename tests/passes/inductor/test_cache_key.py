"""What the uuid of the pipeline covers, and that Inductor's caches go by it in other processes."""

from __future__ import annotations

import functools
import importlib.util
import json
import linecache
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from moe_ops import installed
from moe_ops.backends.flashinfer.options import flashinfer_options
from moe_ops.passes.inductor import cache_key
from moe_ops.passes.inductor.pipeline import Pipeline
from moe_ops.passes.rewriting.context import Context, Options
from moe_ops.planning import tuned
from moe_ops.registry.backend import Backend
from moe_ops.registry.spec import OPS, REFERENCE

ROOT = Path(__file__).resolve().parents[3]


def some_pass(graph: fx.Graph, context: Context) -> int:
    return 0


def other_pass(graph: fx.Graph, context: Context) -> int:
    return 0


class Hook(CustomGraphPass):
    def __init__(self, key: object) -> None:
        self.key = key

    def __call__(self, graph: fx.Graph) -> None:
        pass

    def uuid(self) -> object:
        return self.key


def test_everything_given_counts(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    tuned.write(table, {})
    pipelines = {
        "default": Pipeline(),
        "passes": Pipeline(passes=(some_pass,)),
        "other passes": Pipeline(passes=(other_pass,)),
        "more passes": Pipeline(passes=(some_pass, other_pass)),
        "another order": Pipeline(passes=(other_pass, some_pass)),
        "stop_after": Pipeline(Options(stop_after="some_pass"), passes=(some_pass,)),
        "strict": Pipeline(Options(strict=True)),
        "thresholds": Pipeline(Options(thresholds=((None, "cpu"),))),
        "tuned": Pipeline(Options(tuned=str(table))),
        "chained": Pipeline(chained=Hook("a")),
        "another": Pipeline(chained=Hook("b")),
        "two": Pipeline(chained=[Hook("a"), Hook("b")]),
        "two in another order": Pipeline(chained=[Hook("b"), Hook("a")]),
    }
    uuids = {name: p.uuid() for name, p in pipelines.items()}
    assert all(isinstance(uuid, str) for uuid in uuids.values())
    assert len(set(uuids.values())) == len(uuids)
    assert {name: p.uuid() for name, p in pipelines.items()} == uuids


class Callee:
    def __call__(self, graph: fx.Graph, context: Context) -> int:
        return 0


@pytest.mark.parametrize(
    ("ours", "reason"),
    [
        (Pipeline(chained=print), "the chained hook .*print.* has no uuid"),
        (Pipeline(chained=[Hook("a"), Hook(None)]), "the chained hook .*Hook.* has no uuid"),
        (Pipeline(passes=(Callee(),)), "the pass Callee has no source"),
        (Pipeline(Options(dump=True)), "options.dump wants every pass to run"),
    ],
    ids=["callable", "no_uuid", "pass_without_source", "dump"],
)
def test_what_has_no_hash_bypasses_the_caches(
    ours: Pipeline, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "moe_ops"):
        assert ours.uuid() is None
    (record,) = caplog.records
    assert record.message.startswith("compiled graphs are not cached: ")
    assert record.levelname == "INFO"
    assert re.search(reason, record.message)


def register(monkeypatch: pytest.MonkeyPatch, **values: object) -> None:
    """Give `activate` a backend named "theirs", for the length of a test."""
    values = {"run": OPS["activate"].body, **values}
    backend = Backend(name="theirs", **values)  # type: ignore[arg-type]
    monkeypatch.setitem(OPS["activate"].backends, "theirs", backend)


def load(path: Path, source: str) -> Callable[..., Tensor]:
    """`run` of a file with this source."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.run


def test_registered_backends_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = load(tmp_path / "a.py", "def run(x):\n    return x + 1\n")
    uuids = [Pipeline().uuid()]
    for values in (
        {"run": run},
        {"run": run, "priority": 1},
        {"run": run, "devices": frozenset({"cuda", "cpu"})},
        {"run": run, "supports": run},
        {"run": OPS["activate"].body},
    ):
        register(monkeypatch, **values)
        uuids.append(Pipeline().uuid())
    monkeypatch.delitem(OPS["activate"].backends, "theirs")
    assert None not in uuids
    assert len(set(uuids)) == len(uuids)
    assert Pipeline().uuid() == uuids[0]


def test_the_order_in_which_backends_are_asked_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    op = OPS["activate"]
    first, second = (Backend(name=n, run=op.body) for n in ("first", "second"))
    reference = op.backends[REFERENCE]
    uuids = set()
    for order in ((reference, first, second), (reference, second, first)):
        monkeypatch.setattr(op, "_backends", {b.name: b for b in order})
        uuids.add(Pipeline().uuid())
    assert len(uuids) == 2


A = "import math\n\ndef helper(x):\n    return x + 1\n\ndef run(x):\n    return helper(x)\n"


@pytest.mark.parametrize(
    ("source", "differs"),
    [
        (A, False),
        (A.replace("return helper(x)", "return helper(x) + 1"), True),
        (A.replace("x + 1", "x + 2"), True),
    ],
    ids=["same", "function", "helper"],
)
def test_the_source_of_a_backend_counts(
    source: str, differs: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for folder in "ab":
        (tmp_path / folder).mkdir()
    register(monkeypatch, run=load(tmp_path / "a" / "theirs.py", A))
    before = Pipeline().uuid()
    register(monkeypatch, run=load(tmp_path / "b" / "theirs.py", source))
    assert (Pipeline().uuid() != before) == differs


def closing_over(value: object) -> Callable[[Tensor], object]:
    def run(x: Tensor) -> object:
        return value

    return run


def test_what_a_backend_closes_over_counts() -> None:
    assert cache_key.function_key(closing_over(1)) == cache_key.function_key(closing_over(1))
    assert cache_key.function_key(closing_over(1)) != cache_key.function_key(closing_over(2))


def typed(source: str) -> Callable[..., object]:
    """`run` of a notebook's cell, whose source Python keeps although it is in no file."""
    name, scope = f"<cell {len(linecache.cache)}>", {"__name__": "notebook"}
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), scope)
    return scope["run"]  # type: ignore[return-value]


def test_a_function_of_a_notebook_counts_by_its_own_source() -> None:
    keys = [cache_key.function_key(typed(f"def run(x):\n    return {n}\n")) for n in (1, 2, 1)]
    assert keys[0] == keys[2] != keys[1]
    assert keys[0] is not None


def exec_ed() -> Callable[..., Tensor]:
    scope: dict[str, Callable[..., Tensor]] = {}
    exec("def run(x):\n    return x", scope)
    return scope["run"]


@pytest.mark.parametrize(
    "run", [functools.partial(some_pass, None), exec_ed(), len], ids=["partial", "exec", "builtin"]
)
def test_a_backend_without_source_bypasses_the_caches(
    run: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    register(monkeypatch, run=run)
    with caplog.at_level("INFO", "moe_ops"):
        assert Pipeline().uuid() is None
    assert "the backend 'theirs' of activate has no source" in caplog.text


def test_every_source_file_counts() -> None:
    names = {str(path.relative_to(ROOT)) for path in cache_key.source_files()}
    for name in (
        "moe_ops/registry/spec.py",
        "moe_ops/ops/route.py",
        "moe_ops/backends/cpu.py",
        "moe_ops/kernels/cpu/experts.cpp",
        "moe_ops/quant/formats.py",
        "passes/inductor/pipeline.py",
        "fake_impls/route.py",
    ):
        assert name in names
    assert not any(name.startswith("tests") for name in names)


def test_the_text_of_source_files_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    monkeypatch.setattr(cache_key, "source_files", lambda: {path})
    keys = []
    for text in ("a = 1", "a = 2", "a = 1"):
        path.write_text(text)
        cache_key.sources_key.cache_clear()
        keys.append(Pipeline().uuid())
    cache_key.sources_key.cache_clear()
    assert keys[0] == keys[2] != keys[1]


def test_tuned_tables_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path)
    mine = tmp_path / "mine"
    tuned.write(mine, {})
    options = Options(tuned=str(mine))
    keys = [Pipeline(options).uuid()]
    (tmp_path / "NVIDIA_H200.json").write_text("{}")
    keys.append(Pipeline(options).uuid())
    (tmp_path / "NVIDIA_H200.json").write_text('{"version": 1}')
    keys.append(Pipeline(options).uuid())
    mine.write_text('{"version": 1, "layers": [ ]}')
    keys.append(Pipeline(options).uuid())
    assert len(set(keys)) == 4


def test_versions_and_device_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "flashinfer-python":
            raise installed.metadata.PackageNotFoundError
        return "1.0"

    keys = [Pipeline().uuid()]
    cache_key._versions.cache_clear()
    monkeypatch.setattr(installed.metadata, "version", version)
    keys.append(Pipeline().uuid())
    assert cache_key._versions() == (
        ("torch", "1.0"), ("triton", "1.0"), ("flashinfer", None), ("cutlass", "1.0"),
    )  # fmt: skip
    cache_key._versions.cache_clear()
    monkeypatch.undo()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    keys.append(Pipeline().uuid())
    torch.set_num_threads(threads)
    assert len(set(keys)) == 3
    assert Pipeline().uuid() == keys[0]


def test_options_that_plans_are_made_by_count() -> None:
    key = Pipeline().uuid()
    with flashinfer_options(b12x_prefill_threshold=32):
        assert Pipeline().uuid() != key
    assert Pipeline().uuid() == key


# From here on in processes of their own.

PROGRAM = '''
import json, sys
import torch
from torch._dynamo.utils import counters
from moe_ops.ops.combine import CombineCall, combine
from moe_ops.passes.rewriting.context import Options
from moe_ops.passes.inductor.pipeline import Pipeline

Tensor = torch.Tensor


def turned(graph, context):
    """One product is called, so that no C++ is compiled."""
    found = [n for n in graph.nodes if n.target is torch.ops.aten.mm.default]
    for node in found:
        node.args = node.args[::-1]
    return len(found)


def theirs(call: CombineCall) -> Tensor:
    return combine.body(call)


for what in sys.argv[1:]:
    torch._dynamo.reset()
    counters.clear()
    if what == "backend":
        combine.backend("theirs")(theirs)
    ours = Pipeline(Options(strict=what == "strict"), passes=(turned,))
    a, b = torch.randn(2, 4, 4)
    with torch.no_grad():
        got = torch.compile(torch.mm, options={"post_grad_custom_post_pass": ours})(a, b)
    torch.testing.assert_close(got, b @ a)
    inductor, aot = counters["inductor"], counters["aot_autograd"]
    print(json.dumps({
        "graphs seen by passes": len(ours.runs),
        "fx": [inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"]],
        "aot": [aot["autograd_cache_hit"], aot["autograd_cache_miss"]],
    }))
'''
COLD = {"graphs seen by passes": 1, "fx": [0, 1], "aot": [0, 1]}
# AOTAutograd's entry names Inductor's, which is then looked up and hit as well.
WARM = {"graphs seen by passes": 0, "fx": [1, 0], "aot": [1, 0]}


def run(site: Path, *args: str) -> list[dict[str, object]]:
    """What the program prints in a fresh process that finds moe_ops in `site` and caches there."""
    env = {**os.environ, "PYTHONPATH": str(site), "TORCHINDUCTOR_CACHE_DIR": str(site / "caches")}
    env.pop("TORCHINDUCTOR_FORCE_DISABLE_CACHES", None)
    env["TORCHINDUCTOR_FX_GRAPH_CACHE_DEFAULT"] = "1"
    env["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # or the compiler is tried for each set of instructions
    program = [sys.executable, str(site / "program.py"), *args]
    done = subprocess.run(program, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.every
@pytest.mark.slow
def test_a_second_process_hits_the_caches_until_something_changes(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "moe_ops", tmp_path / "moe_ops", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "program.py").write_text(PROGRAM)
    assert run(tmp_path, "default") == [COLD]
    assert run(tmp_path, "default", "strict", "backend") == [WARM, COLD, COLD]
    source = tmp_path / "moe_ops" / "passes" / "rewriting" / "context.py"
    source.write_text(source.read_text() + "# changed\n")
    assert run(tmp_path, "default") == [COLD]


def test_all_of_ours_is_known_to_the_cache() -> None:
    assert cache_key.registry_key() is not None


def test_no_test_reads_a_graph_that_was_saved() -> None:
    """A pass meets the same graph again once the process has forgotten it."""
    for _ in range(2):
        torch._dynamo.reset()
        ours = Pipeline(Options(strict=True), passes=())
        with torch.no_grad():
            torch.compile(torch.mm, options={"post_grad_custom_post_pass": ours})(
                *torch.ones(2, 3, 3)
            )
        assert len(ours.runs) == 1

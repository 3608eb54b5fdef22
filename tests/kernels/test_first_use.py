"""What takes seconds the first time says so: one line, and nothing where a cache has the result."""

from __future__ import annotations

import ast
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch._inductor.codecache import CppCodeCache
from torch._inductor.runtime.cache_dir_utils import cache_dir

from moe_ops.kernels.cpu.built import built
from tests.sources import modules


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "moe_ops")
    return caplog


def test_compiling_for_a_cpu_is_told_before_it_begins(
    told: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(CppCodeCache, "cache", {})
    what = "compiling the CPU kernels of a test, which takes seconds, the first time"
    text = f"{what}; kept in {cache_dir()}"
    assert str(tmp_path) in text
    with pytest.raises(Exception, match="not C"):  # which is told before the compiler fails
        built("not C++", " of a test")
    assert [r.getMessage() for r in told.records] == [text]
    told.clear()
    for _ in range(2):  # the second time as another process does, with what is on the disk
        assert built('extern "C" int two() { return 2; }', " of a test").two() == 2
        CppCodeCache.cache.clear()
    assert [(r.levelname, r.getMessage()) for r in told.records] == [("INFO", text)]


def test_all_kernels_for_cpus_are_built_so() -> None:
    users = [m.name for m in modules() if "CppCodeCache" in names(m.path.read_text())]
    assert users == ["moe_ops.kernels.cpu.built"]


def names(source: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}


def test_kernels_of_triton_are_told_of_once(
    told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = pytest.importorskip("triton", reason="triton is not installed").knobs
    from moe_ops.kernels.triton.first_use import tell_of_first_compilation

    heard: list[bool] = []
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda cache_hit, **more: heard.append(cache_hit)
    )
    tell_of_first_compilation()

    def compiled(module: str, *, cache_hit: bool) -> None:
        fn = SimpleNamespace(__module__=module, __name__="kernel")
        times = SimpleNamespace(total=2_340_000)
        given = {"metadata": {}, "metadata_group": {}, "times": times, "cache_hit": cache_hit}
        knobs.compilation.listener(src=SimpleNamespace(fn=fn), **given)

    ours = "moe_ops.kernels.triton.routing"
    compiled(ours, cache_hit=True)
    compiled("torch._inductor.kernel", cache_hit=False)
    knobs.compilation.listener(src=SimpleNamespace(), metadata={}, metadata_group={}, times=None,
                               cache_hit=False)  # fmt: skip  # of an IR, which has no function
    assert not told.records
    compiled(ours, cache_hit=False)
    compiled(ours, cache_hit=False)
    (record,) = told.records
    assert record.levelname == "INFO" and str(knobs.cache.dir) in record.getMessage()
    assert "kernel took 2.3 s" in record.getMessage()
    assert heard == [True, False, False, False, False], "who listened before still does"

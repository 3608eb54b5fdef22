"""torch's caches tell graphs by the sources of our ops, and by what the user put there."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch.compiler.config as config

import moe_ops
from moe_ops import fake_impls
from moe_ops.interop import aot_cache
from moe_ops.quant.packing import dequantize
from moe_ops.ranks.batches import from_batches


def module_of(path: Path) -> ModuleType:
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    return module


def test_importing_the_package_keeps_the_users_tag() -> None:
    code = (
        "import torch.compiler.config as c; c.cache_key_tag = 'mine'; import moe_ops; "
        "print(c.cache_key_tag)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    users, ours = done.stdout.split()
    assert users == "mine" and ours.startswith("moe_ops:")
    assert ours in config.cache_key_tag, "the same sources have the same tag"


def test_nothing_is_appended_twice() -> None:
    with config.patch(cache_key_tag=""):
        aot_cache.tag(moe_ops.registry.spec, fake_impls)
        once = config.cache_key_tag
        aot_cache.tag(moe_ops.registry.spec, fake_impls)
        assert config.cache_key_tag == once != ""


@pytest.mark.parametrize("package", [False, True])
def test_a_changed_source_changes_the_tag(package: bool, tmp_path: Path) -> None:
    source = tmp_path / "op.py"
    main = tmp_path / "__init__.py"
    main.write_text("")
    tags = []
    for text in ("a = 1", "a = 2"):
        source.write_text(text)
        with config.patch(cache_key_tag=""):
            aot_cache.tag(module_of(main if package else source))
            tags.append(config.cache_key_tag)
    assert tags[0] != tags[1]


@pytest.mark.parametrize("name", [*moe_ops.OPS])
def test_what_defines_an_op_is_in_the_tag(name: str) -> None:
    files = aot_cache._files(moe_ops._TRACED)
    op = moe_ops.OPS[name]
    for function in (op.body, op.fake_impl):
        assert function is not None
        path = inspect.getsourcefile(inspect.unwrap(function))
        assert path is not None and os.path.realpath(path) in files


def test_what_definitions_share_is_in_the_tag() -> None:
    files = aot_cache._files(moe_ops._TRACED)
    assert {from_batches.__code__.co_filename, dequantize.__code__.co_filename} <= {*files}

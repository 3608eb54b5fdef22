"""The public names: `dir`, completion and type checkers know them; what is installed beside us."""

import ast
import importlib
import inspect
import runpy
import sys
from pathlib import Path

import pytest

import moe_ops
from moe_ops import installed
from moe_ops.__main__ import main
from tests.sources import ROOT

INIT = ROOT / "moe_ops" / "__init__.py"


def test_dir_has_every_public_name() -> None:
    assert {*moe_ops.__all__, "__version__"} <= set(dir(moe_ops))


def test_dir_without_transformers_has_the_names_that_can_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moe_ops, "lacks_transformers", lambda: "needs transformers")
    missing = set(moe_ops.__all__) - set(dir(moe_ops))
    assert missing == {
        "adapters", "add_adapter", "from_checkpoint", "generation_report", "load_adapter",
        "merge_adapter", "optimize", "quantize_model", "remove_adapter", "restore", "save_adapter",
        "set_adapter", "share_experts",
    }  # fmt: skip


def test_type_checkers_see_the_names_that_are_imported_late() -> None:
    (block,) = (
        node
        for node in ast.parse(INIT.read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    # A module, which is called as the function of this name.
    called = getattr(importlib.import_module(seen.pop("backend")), "backend")  # noqa: B009
    assert inspect.signature(moe_ops.backend) == inspect.signature(called)
    assert sorted(seen) == sorted(moe_ops._LAZY)
    for name, module in seen.items():
        assert getattr(importlib.import_module(module), name) is getattr(moe_ops, name)


@pytest.mark.parametrize(
    ("got", "meant"),
    [
        ("optimise", "optimize"),
        ("quantise_model", "quantize_model"),
        ("MoeLayer", "MoELayer"),
        ("compil", "compile"),
        ("expert_gem", "expert_gemm"),
    ],
)
def test_a_misspelled_name_gets_a_suggestion(got: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{got}'; did you mean '{meant}'\?$"):
        getattr(moe_ops, got)


def test_a_name_that_is_like_none_gets_no_suggestion() -> None:
    name = "zzzz"
    with pytest.raises(AttributeError, match=r"no attribute 'zzzz'$"):
        getattr(moe_ops, name)


def other(site: Path, *files: str) -> None:
    """The other project's distribution, as pip records it in a folder of packages."""
    info = site / "moe_ops-0.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moe-ops\nVersion: 0.9\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def test_the_other_package_of_our_name_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other(tmp_path, "moe_ops/__init__.py", "moe_ops-0.9.dist-info/RECORD")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    said = "moe-ops 0.9, which is another project, is installed in .*moe_ops; .*uninstall both"
    with pytest.warns(UserWarning, match=said):
        runpy.run_path(str(INIT))
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert "warning: moe-ops 0.9, which is another project" in capsys.readouterr().out


def test_a_distribution_of_that_name_without_the_package_is_no_clash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other(tmp_path, "__editable__.moe_ops-0.9.pth", "moe_ops/other.py")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert installed.clash() is None


def test_versions_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in ("torch", "pytorch-triton"):
            raise installed.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(installed.metadata, "version", version)
    monkeypatch.setattr(installed, "clash", lambda: None)
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    first, python, *rest = capsys.readouterr().out.splitlines()
    assert first == f"torch-moe-ops {moe_ops.__version__} in {INIT.parent}"
    assert python.startswith("Python 3.")
    assert rest == [
        "torch 1.0", "triton 1.0", "transformers is not installed", "flashinfer is not installed",
    ]  # fmt: skip

"""What the plugin relies on is in the stand-in and in the published vLLM, whose wheel is read and
never imported: `pip download --no-deps --dest .venv/wheels vllm` puts it there."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
import zipfile
from pathlib import Path

import pytest

from moe_ops.integrations.vllm import contract
from moe_ops.integrations.vllm.contract import Function, Names

STAND_IN = Path(__file__).parent / "stand_in"
WHEELS = Path(sys.prefix) / "wheels"
Root = Path | zipfile.Path


def differences(root: Root) -> list[str]:
    """A sentence for everything in which the sources of a vLLM differ from what is relied on."""
    found = [_function(wanted, _tree(root, wanted.module)) for wanted in contract.FUNCTIONS]
    found += [_names(wanted, _tree(root, wanted.module)) for wanted in contract.NAMES]
    return [said for said in found if said]


def _tree(root: Root, module: str) -> ast.Module:
    path = root / (module.replace(".", "/") + ".py")
    return ast.parse(path.read_text() if path.is_file() else "")


def _function(wanted: Function, tree: ast.Module) -> str | None:
    owner, _, name = wanted.name.rpartition(".")
    bodies = [n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == owner]
    for body in bodies if owner else [tree.body]:
        for node in (n for n in body if isinstance(n, ast.FunctionDef) and n.name == name):
            a = node.args
            given = (*a.posonlyargs, *a.args, *a.kwonlyargs)
            return contract.difference(wanted, tuple(arg.arg for arg in given))
    return f"there is no {wanted.name} in {wanted.module}"


def _names(wanted: Names, tree: ast.Module) -> str | None:
    owner: ast.Module | ast.ClassDef = tree
    if wanted.owner:
        classes = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == wanted.owner]
        if not classes:
            return f"there is no {wanted.owner} in {wanted.module}"
        owner = classes[0]
    defined = {node.name for node in owner.body if isinstance(node, ast.FunctionDef)}
    defined |= {t.id for node in owner.body for t in _targets(node) if isinstance(t, ast.Name)}
    inside = (t for node in ast.walk(owner) for t in _targets(node))
    defined |= {t.attr for t in inside if isinstance(t, ast.Attribute)}  # of self
    return contract.lacking(wanted, defined.__contains__)


def _targets(node: ast.AST) -> list[ast.AST]:
    """What a statement assigns to, also as one of several."""
    whole = node.targets if isinstance(node, ast.Assign) else []
    whole = [node.target] if isinstance(node, ast.AnnAssign) else whole
    return [part for target in whole for part in ast.walk(target)]


def published() -> tuple[str, Root] | None:
    """The version of the installed vLLM and where it is, or of a wheel; None: there is neither."""
    try:
        distribution = importlib.metadata.distribution("vllm")
    except importlib.metadata.PackageNotFoundError:
        wheels = sorted(WHEELS.glob("vllm-*.whl"), key=lambda path: path.stat().st_mtime)
        return (wheels[-1].name.split("-")[1], zipfile.Path(wheels[-1])) if wheels else None
    return distribution.version, Path(str(distribution.locate_file("")))


def test_the_stand_in_has_all_of_it() -> None:
    assert differences(STAND_IN) == []


@pytest.mark.usefixtures("vllm")
def test_the_plugin_finds_all_of_it_in_the_stand_in() -> None:
    assert contract.missing() == []


def test_the_published_vllm_has_all_of_it() -> None:
    found = published()
    if found is None:
        pytest.skip(f"vllm is neither installed nor in {WHEELS}")
    version, root = found
    assert differences(root) == [], f"vLLM {version}, written for {contract.WRITTEN_FOR}"


LAYERS = "vllm/model_executor/layers/fused_moe"
CHANGED = {
    "renamed": (
        "unquantized_fused_moe_method", "layer, x, topk_weights", "layer, hidden, topk_weights",
        "UnquantizedFusedMoEMethod.apply takes layer, hidden, ",
    ),
    "order": (
        "unquantized_fused_moe_method", "topk_weights, topk_ids", "topk_ids, topk_weights",
        "takes layer, x, topk_ids, topk_weights,",
    ),
    "no_function": (
        "fused_moe_method_base", "def __init__", "def __new__",
        "there is no FusedMoEMethodBase.__init__ in vllm.",
    ),
    "no_class": (
        "oracle/unquantized", "class UnquantizedMoeBackend", "class Backend",
        "there is no UnquantizedMoeBackend in vllm.",
    ),
    "no_field": ("config", "tp_rank:", "tensor_rank:", "FusedMoEParallelConfig has no tp_rank"),
    "no_attribute": (
        "routed_experts", "self.swiglu_beta", "self.beta", "RoutedExperts has no swiglu_beta",
    ),
    "no_member": ("oracle/unquantized", "OOT =", "OTHER =", "UnquantizedMoeBackend has no OOT"),
}  # fmt: skip


@pytest.mark.parametrize(("file", "old", "new", "said"), CHANGED.values(), ids=CHANGED)
def test_a_change_is_named(tmp_path: Path, file: str, old: str, new: str, said: str) -> None:
    for path in STAND_IN.rglob("*.py"):
        copy = tmp_path / path.relative_to(STAND_IN)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    changed = tmp_path / LAYERS / f"{file}.py"
    assert old in changed.read_text()
    changed.write_text(changed.read_text().replace(old, new))
    (found,) = differences(tmp_path)
    assert said in found

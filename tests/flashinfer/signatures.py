"""Signatures of FlashInfer and of the stand-in, read in their sources: importing the package would
need a GPU's libraries. `python tests/flashinfer/signatures.py` writes those of the stand-in."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FILE, STAND_IN = HERE / "signatures.json", HERE / "stand_in"
DISTRIBUTION = "flashinfer-python"
WHEELS = Path(sys.prefix) / "wheels"
Root = Path | zipfile.Path
# Where the package defines what the stand-in does.
PLACES = {
    "fp4_quantize": "flashinfer/quantization/fp4_quantization.py",
    "autotune": "flashinfer/autotuner/autotuner.py",
    "map_to_hybrid_bucket": "flashinfer/fused_moe/utils.py",
    "cutlass_fused_moe": "flashinfer/fused_moe/core.py",
    "cutlass_fused_moe_workspace_size": "flashinfer/fused_moe/core.py",
    "get_cutlass_fused_moe_module": "flashinfer/fused_moe/core.py",
    "get_cutlass_fused_moe_module.cutlass_fused_moe": "flashinfer/fused_moe/core.py",
    "trtllm_bf16_moe": "flashinfer/fused_moe/core.py",
    "trtllm_bf16_routed_moe": "flashinfer/fused_moe/core.py",
    "trtllm_fp4_block_scale_moe": "flashinfer/fused_moe/core.py",
    "trtllm_fp4_block_scale_routed_moe": "flashinfer/fused_moe/core.py",
    "trtllm_fp8_block_scale_moe": "flashinfer/fused_moe/core.py",
    "trtllm_fp8_block_scale_routed_moe": "flashinfer/fused_moe/core.py",
    "CuteDslMoEWrapper.__init__": "flashinfer/fused_moe/cute_dsl/fused_moe.py",
    "CuteDslMoEWrapper.run": "flashinfer/fused_moe/cute_dsl/fused_moe.py",
    "CuteDslBf16MoEWrapper.__init__": "flashinfer/fused_moe/cute_dsl/sm90_fused_moe.py",
    "CuteDslBf16MoEWrapper.run": "flashinfer/fused_moe/cute_dsl/sm90_fused_moe.py",
    "B12xMoEWrapper.__init__": "flashinfer/fused_moe/cute_dsl/b12x_moe.py",
    "B12xMoEWrapper.run": "flashinfer/fused_moe/cute_dsl/b12x_moe.py",
}
# Where backends look for them. Methods come with their classes.
EXPORTS = {
    "flashinfer/__init__.py": ("SfLayout", "autotune", "fp4_quantize"),
    "flashinfer/fused_moe/__init__.py": (
        "ActivationType", "B12xMoEWrapper", "CuteDslBf16MoEWrapper", "CuteDslMoEWrapper",
        "Fp8QuantizationType", "RoutingMethodType", "cutlass_fused_moe",
        "cutlass_fused_moe_workspace_size", "trtllm_bf16_moe", "trtllm_bf16_routed_moe",
        "trtllm_fp4_block_scale_moe", "trtllm_fp4_block_scale_routed_moe",
        "trtllm_fp8_block_scale_moe", "trtllm_fp8_block_scale_routed_moe",
    ),
}  # fmt: skip
ENUMS = ("ActivationType", "Fp8QuantizationType", "RoutingMethodType", "SfLayout")
ENUMS_AT = "flashinfer/tllm_enums.py"
# Attributes of a wrapper that the next one is given.
ATTRIBUTES = {"B12xMoEWrapper": ("_static_workspace", "_dynamic_workspace", "_folded_w1_alpha")}

Signature = list[list[str]]  # of each parameter: its kind, its name, and its default if it has one


def read(source: str, name: str) -> Signature | None:
    """The parameters of a function, of a method by Class.name, or of a function in another by
    function.name, in a source; None: it is not there."""
    node = _functions(source).get(name)
    return None if node is None else list(_parameters(node.args))


@functools.cache
def _functions(source: str) -> dict[str, ast.FunctionDef]:
    return {name: node for node, name in _named(ast.parse(source))}


def _named(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, str]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from ((f, f"{node.name}.{f.name}") for f in node.body
                        if isinstance(f, ast.FunctionDef))  # fmt: skip
        elif isinstance(node, ast.FunctionDef):
            yield node, node.name
            yield from ((f, f"{node.name}.{f.name}") for f in node.body
                        if isinstance(f, ast.FunctionDef))  # fmt: skip


def _parameters(a: ast.arguments) -> Iterator[list[str]]:
    plain = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(plain) - len(a.defaults)) + a.defaults
    for kind, names, values in (
        ("plain", plain, defaults),
        ("keyword", a.kwonlyargs, a.kw_defaults),
    ):
        for arg, value in zip(names, values, strict=True):
            if arg.arg != "self":
                yield [kind, arg.arg, *([] if value is None else [ast.unparse(value)])]


def members(source: str, name: str) -> dict[str, int]:
    """The members of an enumeration with plain numbers, or tuples of one."""
    (node,) = (n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name)
    pairs = ((n.targets[0], n.value) for n in node.body if isinstance(n, ast.Assign))
    values = ((t, v.elts[0] if isinstance(v, ast.Tuple) else v) for t, v in pairs)
    return {t.id: v.value for t, v in values
            if isinstance(t, ast.Name) and isinstance(v, ast.Constant)}  # fmt: skip


def imported(source: str) -> set[str]:
    """The names that a source imports from elsewhere, at any depth."""
    nodes = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom))
    return {alias.asname or alias.name for node in nodes for alias in node.names}


def of_stand_in() -> dict[str, Any]:
    """All that moe_ops relies on, as the stand-in has it."""
    sources = [path.read_text() for path in sorted(STAND_IN.rglob("*.py"))]
    found = {}
    for name in PLACES:
        (found[name],) = filter(None, (read(source, name) for source in sources))
    kinds = (STAND_IN / "flashinfer/fused_moe/kinds.py").read_text()
    enums = {name: members(kinds, name) for name in ENUMS}
    return {"version": version_of_stand_in(), "functions": found, **enums}


def version_of_stand_in() -> str:
    (path,) = STAND_IN.glob("flashinfer_python-*.dist-info")
    return path.name.removeprefix("flashinfer_python-").removesuffix(".dist-info")


def changes(wanted: dict[str, Any], root: Root) -> list[str]:
    """A sentence for everything in which a package differs from what moe_ops relies on."""
    found = []
    for name, signature in wanted["functions"].items():
        path = root / PLACES[name]
        got = read(path.read_text(), name) if path.is_file() else None
        if got is None:
            found.append(f"{name} is not in {PLACES[name]}")
            continue
        gone = [p[1] for p in signature if not any(_same(p, q) for q in got)]
        new = [q[1] for q in got if not any(_same(p, q) for p in signature)]
        moved = [p[1] for p in signature] != [q[1] for q in got]
        if not (gone or new or moved):
            continue
        order = "" if gone or new else "; the order of parameters is another"
        found.append(f"{name}: gone or changed: {', '.join(gone) or 'nothing'}; new or changed: "
                     f"{', '.join(new) or 'nothing'}{order}")  # fmt: skip
    for place, names in EXPORTS.items():
        there = imported((root / place).read_text())
        found += [f"{place} exports no {name}" for name in names if name not in there]
    source = (root / ENUMS_AT).read_text()
    for name in ENUMS:
        numbers = members(source, name)
        for member, number in wanted[name].items():
            if numbers.get(member) != number:
                found.append(f"{name}.{member} is {numbers.get(member)}, was {number}")
    for owner, names in ATTRIBUTES.items():
        source = (root / PLACES[f"{owner}.__init__"]).read_text()
        found += [f"{owner} sets no {n}" for n in names if f"self.{n}" not in source]
    return found


def _same(wanted: list[str], got: list[str]) -> bool:
    """Whether parameters are equal; a default that has a name may be any."""
    if len(got) == len(wanted) == 3 and not _is_literal(got[2]):
        return wanted[:2] == got[:2]
    return wanted == got


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except ValueError:
        return False
    return True


def published() -> tuple[str, Root] | None:
    """The version of the installed package and where it is, or of the wheel that `make` downloads
    beside it for this comparison alone; None: there is neither."""
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        wheels = sorted(
            WHEELS.glob("flashinfer_python-*.whl"), key=lambda path: path.stat().st_mtime
        )
        return (wheels[-1].name.split("-")[1], zipfile.Path(wheels[-1])) if wheels else None
    return distribution.version, Path(str(distribution.locate_file("")))


if __name__ == "__main__":
    FILE.write_text(json.dumps(of_stand_in(), indent=1) + "\n")
    if len(sys.argv) > 1:
        print("\n".join(changes(of_stand_in(), Path(sys.argv[1]))) or "the same")

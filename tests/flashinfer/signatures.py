"""What FlashInfer's functions take, by version, read in its sources: importing the package would
need a GPU's libraries. `python -m tests.flashinfer.signatures WHEEL` adds a version to the table.

The stand-in takes what a version takes, so that tests of backends fail with one that does not take
what they give.
"""

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

FILE = Path(__file__).parent / "signatures.json"
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

Record = dict[str, Any]  # "functions": what each takes, as text; enumerations: their members
TABLE: dict[str, Record] = json.loads(FILE.read_text())  # by version, the newest last
NEWEST = list(TABLE)[-1]


def record_of(root: Root) -> Record:
    """What a version takes; `lacking` tells what is not where it was."""
    there = {name: _functions(_text(root / place)).get(name) for name, place in PLACES.items()}
    functions = {name: taken(node.args) for name, node in there.items() if node is not None}
    source = (root / ENUMS_AT).read_text()
    return {"functions": functions, **{name: members(source, name) for name in ENUMS}}


def _text(path: Root) -> str:
    return path.read_text() if path.is_file() else ""


@functools.cache
def _functions(source: str) -> dict[str, ast.FunctionDef]:
    """Functions by name, methods by Class.name, and functions in others by function.name."""
    return {name: node for node, name in _named(ast.parse(source))}


def _named(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, str]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node, node.name
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield from ((f, f"{node.name}.{f.name}") for f in node.body
                        if isinstance(f, ast.FunctionDef))  # fmt: skip


def taken(arguments: ast.arguments) -> str:
    """Parameters as they are written, without `self` and annotations; a default that is no literal
    is `...`, as names may come to stand for other values."""
    parts = []
    for kind, group in _by_kind(arguments):
        parts += ["*"] if kind == "keyword" and group else []
        parts += [name if default is None else f"{name}={default}" for name, default in group]
    return ", ".join(parts)


def _by_kind(a: ast.arguments) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """Parameters and their defaults: those that may be given by position, then the others."""
    plain = [*a.posonlyargs, *a.args]
    defaults = [*[None] * (len(plain) - len(a.defaults)), *a.defaults]
    for kind, names, values in (
        ("plain", plain, defaults),
        ("keyword", a.kwonlyargs, a.kw_defaults),
    ):
        pairs = ((arg.arg, value) for arg, value in zip(names, values, strict=True))
        yield kind, [(n, None if v is None else _default(v)) for n, v in pairs if n != "self"]


def _default(value: ast.expr) -> str:
    try:
        ast.literal_eval(value)
    except ValueError:
        return "..."
    return ast.unparse(value)


def parameters(text: str) -> dict[str, tuple[str, str | None]]:
    """The kind and the default of each parameter, of what `taken` gives."""
    (node,) = ast.parse(f"def f({text}): ...").body
    assert isinstance(node, ast.FunctionDef)
    return {name: (kind, default) for kind, group in _by_kind(node.args) for name, default in group}


def read(source: str, name: str) -> dict[str, tuple[str, str | None]] | None:
    """The `parameters` of a function in a source, named as in PLACES; None: it is not there."""
    node = _functions(source).get(name)
    return None if node is None else parameters(taken(node.args))


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


def lacking(root: Root) -> list[str]:
    """A sentence for everything that moe_ops looks for in a package and that is not there."""
    found = []
    for name, place in PLACES.items():
        if name not in _functions(_text(root / place)):
            found.append(f"{name} is not in {place}")
    for place, names in EXPORTS.items():
        there = imported(_text(root / place))
        found += [f"{place} exports no {name}" for name in names if name not in there]
    for owner, names in ATTRIBUTES.items():
        source = _text(root / PLACES[f"{owner}.__init__"])
        found += [f"{owner} sets no {n}" for n in names if f"self.{n}" not in source]
    return found


def changes(was: Record, now: Record) -> list[str]:
    """A sentence for everything in which a version differs from another one; it may have further
    members of enumerations."""
    found = []
    for name in PLACES:
        old, new = (parameters(record["functions"].get(name, "")) for record in (was, now))
        gone = [n for n, said in old.items() if new.get(n) != said]
        added = [n for n, said in new.items() if old.get(n) != said]
        if not (gone or added or list(old) != list(new)):
            continue
        order = "" if gone or added else "; the order of parameters is another"
        found.append(f"{name}: gone or changed: {', '.join(gone) or 'nothing'}; new or changed: "
                     f"{', '.join(added) or 'nothing'}{order}")  # fmt: skip
    for enum in ENUMS:
        for member, number in was[enum].items():
            if now[enum].get(member) != number:
                found.append(f"{enum}.{member} is {now[enum].get(member)}, was {number}")
    return found


def published() -> tuple[str, Root] | None:
    """The version of the installed package and where it is, or of the wheel that `make` downloads
    beside it for this comparison alone; None: there is neither."""
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        wheels = sorted(
            WHEELS.glob("flashinfer_python-*.whl"), key=lambda path: path.stat().st_mtime
        )
        return version_of(wheels[-1]) if wheels else None
    return distribution.version, Path(str(distribution.locate_file("")))


def version_of(wheel: Path) -> tuple[str, Root]:
    """The version of a wheel, and what is in it."""
    return wheel.name.split("-")[1], zipfile.Path(wheel)


def _versions() -> dict[str, Record]:
    """The table, and the published version."""
    there = published()
    if there is None or there[0] in TABLE:
        return TABLE
    return TABLE | {there[0]: record_of(there[1])}


VERSIONS = _versions()


def write(wheel: Path) -> None:
    """Add the version of a wheel to the table, or write it anew."""
    version, root = version_of(wheel)
    FILE.write_text(json.dumps(TABLE | {version: record_of(root)}, indent=1) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))

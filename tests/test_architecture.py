"""The shape of the code: who imports whom, and what is where."""

import ast
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from moe_ops import OPS
from moe_ops.passes import PIPELINE
from moe_ops.registry.spec import DECODE_OPS
from tests.sources import LINKED, ROOT, Module, modules


@dataclass(frozen=True)
class May:
    """What a part of moe_ops may import besides itself and the standard library."""

    parts: frozenset[str] = frozenset()
    packages: frozenset[str] = frozenset({"torch"})


LOW = frozenset({"checks", "interop", "registry"})
OP = LOW | {"ops", "ranks"}
BACKEND = OP | {"kernels", "backends", "quant"}
TRANSFORMERS, TRITON = frozenset({"torch", "transformers"}), frozenset({"torch", "triton"})
RUNTIMES = frozenset({"torch", "onnxruntime", "openvino", "executorch"})
FACADE = "the facade"  # moe_ops/__init__.py
MAY_IMPORT = {
    "checks": May(),
    "interop": May(),
    "registry": May(frozenset({"checks", "interop"})),
    "fake_impls": May(),
    "terminal": May(),
    "installed": May(),
    "arena": May(),
    "twin": May(frozenset({"interop"})),
    "streams": May(),
    "testing": May(LOW),
    "ranks": May(frozenset({"checks", "interop", "registry"})),
    "ops": May(LOW | {"fake_impls", "quant", "ranks"}),
    "kernels": May(frozenset({"interop"}), TRITON),
    "decode_ops": May(OP | {"fake_impls", "kernels", "quant"}),
    "backends": May(
        OP | {"arena", "decode_ops", "installed", "kernels", "quant", "streams", "terminal"}
    ),
    "quant": May(frozenset({"checks", "fake_impls", "interop"})),
    "parallel": May(OP),
    "prepared": May(OP),
    "main_grad": May(LOW | {"prepared"}),
    "layer": May(OP | {"main_grad", "prepared", "quant", "parallel", "streams"}),
    "weights": May(
        LOW | {"layer", "kernels", "prepared", "quant"}, frozenset({"torch", "safetensors", "gguf"})
    ),
    "planning": May(OP | {"kernels", "quant", "terminal"}),
    "halves": May(OP | {"layer", "planning"}),
    "recorded": May(OP | {"hf", "installed", "layer"}, frozenset({"torch", "safetensors"})),
    "graphs": May(OP | {"arena", "layer", "planning", "prepared"}),
    "hf": May(
        BACKEND | {"decode_ops", "installed", "main_grad", "prepared"},
        TRANSFORMERS | {"safetensors"},
    ),
    "published": May(LOW | {"hf", "installed", "layer", "quant", "weights"}, TRANSFORMERS),
    "restricted": May(
        LOW | {"hf", "layer", "main_grad", "ops", "parallel", "prepared"}, TRANSFORMERS
    ),
    "integrations": May(OP | {"hf"}, frozenset({"torch", "vllm", "kernels"})),
    "forward": May(
        frozenset({"arena", "graphs", "interop", "prepared", "terminal", "twin"})
        | frozenset({"ops", "registry"}),
        TRANSFORMERS,
    ),
    "generation": May(
        BACKEND | {"decode_ops", "forward", "graphs", "hf", "installed", "prepared", "terminal"},
        TRANSFORMERS,
    ),
    # torch writes symbolic sizes in sympy.
    "passes": May(
        BACKEND
        | {"decode_ops", "graphs", "installed", "planning", "prepared", "streams", "terminal"},
        frozenset({"torch", "sympy"}),
    ),
    # It knows passes, forward and generation; neither of the latter knows passes.
    "compiler": May(
        LOW | {"forward", "generation", "graphs", "hf", "installed", "kernels", "passes", "twin"}
    ),
    # A leaf: it measures everything, and nobody imports it.
    "bench": May(
        BACKEND
        | {"testing", "terminal", "layer", "weights", "hf", "passes", "planning", "graphs"}
        | {"decode_ops", "generation", "compiler", "halves", "parallel"},
        frozenset(
            {"torch", "transformers", "matplotlib", "safetensors", "liger_kernel", "humming"}
        ),
    ),
    "library": May(BACKEND | {"fake_impls"}),
    "warm": May(frozenset({"compiler", "installed", "passes", "planning"}), TRITON),
    "exporting": May(OP | {"decode_ops", "hf", "quant"}, RUNTIMES),
    "estimate": May(
        LOW | {"ops", "decode_ops", "quant", "planning", "hf", "forward", "generation", "installed"}
    ),
    "conformance": May(OP | {"planning", "quant", "testing"}, frozenset({"torch", "pytest"})),
    "invariant": May(frozenset({"compiler", "forward", "interop", "passes"})),
    "__main__": May(
        BACKEND
        | {"conformance", "estimate", "exporting", "hf", "installed", "invariant", "library"}
        | {"passes", "recorded", "warm"},
        TRANSFORMERS,
    ),
    FACADE: May(
        BACKEND
        | {"fake_impls", "layer", "hf", "passes", "planning", "graphs", "generation", "compiler"}
        | {"exporting", "halves", "main_grad", "prepared", "published", "installed", "restricted"}
        | {"decode_ops", "recorded"}
    ),
}


def imports(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """The line and the full name of everything that is imported, inside functions too."""
    parents = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*parents[: len(parents) + 1 - node.level], base]).rstrip(".")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def part_of(name: str) -> str:
    """The part of moe_ops that holds a module, or a public name of it."""
    part = name.removeprefix("moe_ops").strip(".").partition(".")[0]
    return part if part in MAY_IMPORT else FACADE


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """Why a module of moe_ops may not import what it does; code outside moe_ops may do more."""
    inside, _, rest = module.partition(".")
    part = rest.partition(".")[0] or FACADE
    found = []
    if inside == "moe_ops" and part not in MAY_IMPORT:
        return [f"moe_ops.{part} is not in MAY_IMPORT: say there what it may import"]
    for line, name in imports(source, module, is_package):
        top = name.partition(".")[0]
        if top in LINKED:
            found.append(f"line {line} imports {top}, whose name is moe_ops.{top}")
        elif inside != "moe_ops" or top in sys.stdlib_module_names:
            continue
        elif top != "moe_ops":
            if top not in MAY_IMPORT[part].packages:
                found.append(f"line {line}: {part} may not import the package {top}")
        else:
            target = part_of(name)
            if target not in {part, *MAY_IMPORT[part].parts}:
                found.append(f"line {line}: {part} may not import {target}")
    return found


@pytest.mark.parametrize("module", list(modules()), ids=str)
def test_imports_point_down(module: Module) -> None:
    found = violations(module.path.read_text(), module.name, module.is_package)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", ["tests", "examples"])
def test_nobody_imports_the_linked_folders_by_their_own_names(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        found = violations(path.read_text(), folder)
        assert not found, f"{path}: {found}"


def test_no_pass_needs_the_explanation() -> None:
    explain = "moe_ops.passes.explain"
    outside = [m for m in modules() if f"{m.name}.".startswith("moe_ops.passes.")]
    outside = [m for m in outside if not f"{m.name}.".startswith(f"{explain}.")]
    found = [
        f"{module}:{line}"
        for module in outside
        for line, name in imports(module.path.read_text(), module.name, module.is_package)
        if name.startswith(explain)
    ]
    assert len(outside) > 20
    assert not found


PLANTED = {
    "kernel_uses_op": ("moe_ops.kernels.cpu", "from moe_ops.ops import route", "ops"),
    "kernel_uses_package": ("moe_ops.kernels.x", "import numpy as np", "package numpy"),
    "fake_uses_shapes": ("moe_ops.fake_impls.x", "import moe_ops.checks.shapes", "checks"),
    "op_uses_backend": ("moe_ops.ops.x", "from moe_ops.backends import cpu", "backends"),
    "op_uses_triton": ("moe_ops.ops.x", "def f():\n    import triton.language", "package triton"),
    "registry_uses_op": ("moe_ops.registry.spec", "import moe_ops.ops.route", "ops"),
    "siblings": ("moe_ops.quant.x", "from moe_ops import parallel", "parallel"),
    "top_siblings": ("moe_ops.hf.x", "from moe_ops.bench import layer", "bench"),
    "passes_from_below": ("moe_ops.hf.x", "from moe_ops.passes import PIPELINE", "passes"),
    "relative": ("moe_ops.ops.x", "from ..backends.cpu import stream_gemm", "backends"),
    "facade": ("moe_ops.passes.x", "import moe_ops", FACADE),
    "facade_name": ("moe_ops.hf.x", "from moe_ops import experts", FACADE),
    "bare_passes": ("moe_ops.passes.x", "import passes", "moe_ops.passes"),
    "bare_fakes": ("tests", "from fake_impls import route", "moe_ops.fake_impls"),
    "new_part": ("moe_ops.utils", "", "not in MAY_IMPORT"),
}
ALLOWED = {
    "op_uses_op": ("moe_ops.ops.x", "from moe_ops.ops.route import route"),
    "backend_uses_backend": ("moe_ops.backends.x", "from . import aten"),
    "backend_uses_kernel": ("moe_ops.backends.x", "from moe_ops.kernels import cpu"),
    "kernel_uses_triton": ("moe_ops.kernels.x", "import math\nimport triton.language as tl"),
    "op_uses_fakes": ("moe_ops.ops.x", "from moe_ops import fake_impls"),
    "facade_looks_up": ("moe_ops", "from moe_ops.passes import compile"),
    "outside": ("tests", "import numpy\nfrom moe_ops.passes import PIPELINE"),
}


@pytest.mark.parametrize(("module", "source", "found"), PLANTED.values(), ids=PLANTED)
def test_the_import_checker_finds_a_violation(module: str, source: str, found: str) -> None:
    (violation,) = violations(source, module)
    assert violation.endswith(found) or found in violation


@pytest.mark.parametrize(("module", "source"), ALLOWED.values(), ids=ALLOWED)
def test_the_import_checker_lets_the_rest_pass(module: str, source: str) -> None:
    assert violations(source, module, is_package=module == "moe_ops") == []


def rooms(document: str) -> list[list[str]]:
    """The parts of moe_ops in each row of the table of ARCHITECTURE.md."""
    table = document.partition("| room |")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines()[2:]]
    names = [re.findall(r"`([^`]+)`", cell) for cell in cells]
    parts = [[n.removeprefix("moe_ops/").removesuffix("/") for n in row] for row in names]
    return [[FACADE if n == "__init__.py" else n.removesuffix(".py") for n in p] for p in parts]


def downward(source: str, module: str, is_package: bool, rows: list[list[str]]) -> list[str]:
    """What a module of moe_ops imports from a lower row than its own."""
    place = {part: i for i, row in enumerate(rows) for part in row}
    found = (name for _, name in imports(source, module, is_package))
    ours = {part_of(name) for name in found if name.partition(".")[0] == "moe_ops"}
    lower = [part for part in ours if place[part] > place[part_of(module)]]
    return [f"{module} imports {part}, which is in a lower row" for part in sorted(lower)]


ROOMS = rooms((ROOT / "ARCHITECTURE.md").read_text())


def test_every_part_is_in_one_row_of_the_table() -> None:
    assert sorted(part for row in ROOMS for part in row) == sorted(MAY_IMPORT)


def test_imports_go_up_the_table() -> None:
    texts = ((m, m.path.read_text()) for m in modules())
    found = [x for m, text in texts for x in downward(text, m.name, m.is_package, ROOMS)]
    assert not found, "\n".join(found)


def test_an_import_down_the_table_is_found() -> None:
    rows = rooms(
        "| room | what |\n|---|---|\n| `fake_impls/` | a |\n| `moe_ops/ops/`, `arena.py` | b |\n\n|"
    )
    assert rows == [["fake_impls"], ["ops", "arena"]]
    source = "from moe_ops import fake_impls\nfrom moe_ops.ops.route import route\n"
    assert downward(source, "moe_ops.arena", False, rows) == []
    (line,) = downward(source, "moe_ops.fake_impls.route", False, rows)
    assert line == "moe_ops.fake_impls.route imports ops, which is in a lower row"


def names_in(folder: str) -> set[str]:
    return {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__"}


# What the definitions and the gradients of several ops share, and what several rooms do with one.
SHARED = {
    "adapters", "by_choice", "experts_products", "gradients", "gradients_adapted",
    "linear_layers", "routing_methods", "splits",
}  # fmt: skip


def test_there_is_one_file_per_op_and_per_fake() -> None:
    assert names_in("fake_impls") == {*OPS, *DECODE_OPS, "formats"}
    for folder, table in (("ops", OPS), ("decode_ops", DECODE_OPS)):
        assert names_in(f"moe_ops/{folder}") - SHARED == {*table, "rules"}
        for name, op in table.items():
            assert op.body.__module__ == f"moe_ops.{folder}.{name}"
            assert op.fake_impl is not None
            assert op.fake_impl.__module__ == f"moe_ops.fake_impls.{name}"


def test_packages_in_pyproject_are_those_of_the_tree() -> None:
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11 to read pyproject.toml")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert sorted(settings["packages"]) == sorted(m.name for m in modules() if m.is_package)
    assert settings["package-dir"] == {f"moe_ops.{link}": link for link in LINKED}


def circles(found: dict[str, set[str]]) -> list[set[str]]:
    """Modules that import each other, by whatever way around."""
    reached = {name: set(others) for name, others in found.items()}
    for middle in reached:
        for others in reached.values():
            if middle in others:
                others |= reached[middle]
    return [
        {name, *(o for o in reached[name] if name in reached[o])}
        for name in found
        if name in reached[name]
    ]


def imported_by(m: Module, known: set[str]) -> set[str]:
    """The modules of moe_ops that one imports, in functions and for types alone, too."""
    found = {name for _, name in imports(m.path.read_text(), m.name, m.is_package)}
    return {n if n in known else n.rpartition(".")[0] for n in found} & known - {m.name}


def test_no_modules_import_each_other() -> None:
    known = {m.name for m in modules()}
    assert circles({m.name: imported_by(m, known) for m in modules()}) == []


def test_a_circle_is_found() -> None:
    found = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set[str]()}
    assert circles(found) == [{"b", "c"}, {"b", "c"}]


def test_a_file_of_passes_is_one_pass() -> None:
    assert names_in("passes") == {one.__name__ for one in PIPELINE}


def test_every_folder_with_code_is_a_package() -> None:
    packages = {m.path.parent for m in modules() if m.is_package}
    assert {m.path.parent for m in modules()} == packages


@pytest.mark.parametrize("link", LINKED)
def test_links_are_relative_and_resolve(link: str) -> None:
    assert os.readlink(ROOT / "moe_ops" / link) == f"../{link}"
    assert (ROOT / "moe_ops" / link).resolve() == ROOT / link
    assert (ROOT / "moe_ops" / link / "__init__.py").is_file()


# `like/this.py` or `dir/`, in backticks.
PATH = re.compile(r"`((?:[\w.-]+/)+(?:[\w-]+\.\w+)?)`")


def test_paths_are_found_in_text() -> None:
    text = "`passes/`, `moe_ops/ops/route.py` and `.ci/run.sh`, but not `experts` or `a / b`"
    assert PATH.findall(text) == ["passes/", "moe_ops/ops/route.py", ".ci/run.sh"]


def test_paths_in_the_architecture_document_exist() -> None:
    document = (ROOT / "ARCHITECTURE.md").read_text()
    missing = [path for path in PATH.findall(document) if not (ROOT / path).exists()]
    assert not missing

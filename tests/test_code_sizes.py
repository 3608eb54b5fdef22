"""How big the code gets: files, functions, signatures."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.sources import LINKED, ROOT, modules


def sources() -> list[Path]:
    folders = ("moe_ops", *LINKED, "tests", "examples")
    found = {p.resolve() for f in folders for p in (ROOT / f).rglob("*") if p.is_file()}
    return sorted(p for p in found if p.suffix in (".py", ".cpp", ".cu", ".h"))


def is_kernel(path: Path) -> bool:
    return (ROOT / "moe_ops" / "kernels") in path.parents


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without its signature and its docstring."""
    body = function.body
    if ast.get_docstring(function) is not None:
        body = body[1:]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def long_functions(source: str, most: int) -> list[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, functions)]
    return [f"{f.name}: {body_lines(f)} lines" for f in found if body_lines(f) > most]


def test_no_file_is_too_long() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in sources()}
    assert len(lengths) > 30
    long = [
        f"{path.relative_to(ROOT)}: {n} lines, at most {800 if is_kernel(path) else 400}"
        for path, n in lengths.items()
        if n > (800 if is_kernel(path) else 400)
    ]
    assert not long, "\n".join(long)


def test_no_function_is_too_long() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {found}"
        for path in sources()
        if path.suffix == ".py"
        for found in long_functions(path.read_text(), 150 if is_kernel(path) else 60)
    ]
    assert not long, "\n".join(long)


def test_signature_and_docstring_do_not_count() -> None:
    source = (
        'def f(\n    a,\n    b,\n):\n    """One.\n\n    Two.\n    """\n    a = b\n    return a\n'
    )
    assert long_functions(source, 2) == []
    assert long_functions(source, 1) == ["f: 2 lines"]


# Public constructors and loaders that take each of their options by name.
MANY_PARAMETERS = {
    "moe_ops/layer/module.py: MoELayer.__init__",
    "moe_ops/parallel/config.py: ParallelConfig.of",
    "moe_ops/weights/experts.py: load_expert",
}
MOST_PARAMETERS = 8


def long_signatures(source: str, most: int) -> list[str]:
    """Functions with more parameters than so many besides self; methods with their class."""
    tree = ast.parse(source)
    owners = {
        f: f"{c.name}." for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for f in c.body
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            if len([a for a in given if a.arg not in ("self", "cls")]) > most:
                found.append(owners.get(node, "") + node.name)
    return found


def test_no_signature_is_too_long() -> None:
    found = {
        f"{module}: {name}"
        for module in modules()
        if not is_kernel(module.path)
        for name in long_signatures(module.path.read_text(), MOST_PARAMETERS)
    }
    assert found == MANY_PARAMETERS


def test_parameters_are_counted_without_self() -> None:
    source = "class A:\n    def f(self, a, b, *, c): ...\n\ndef f(a, b): ...\n"
    assert long_signatures(source, 2) == ["A.f"]
    assert long_signatures(source, 3) == []

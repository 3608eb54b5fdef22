"""What moe_ops logs and warns of, and its reasons, as texts that stand in its source.

A text is what a call is given before its values are put in; each value is `…` here.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.sources import ROOT, files

METHODS = {"warning": "WARNING", "info": "INFO", "log": "WARNING", "warn": "warning of Python"}
FUNCTIONS = {"warn_once": "WARNING", "info_once": "INFO"}
TELLS = re.compile(r"\b(log|logger|warnings|getLogger|init_logger|warn_once|info_once)\b")
LOGGERS = ("log", "logger", "warnings")
OURS = ("moe_ops/", "passes/", "fake_impls/")
# Functions with "refusal" in their names here give the reasons that INFO and reports print.
REASONS = ("moe_ops/forward/", "moe_ops/generation/", "moe_ops/graphs/")
SAYS = "moe_ops/hf/report.py"  # defines the functions above
VALUE = "…"


@dataclass(frozen=True)
class Message:
    kind: str  # WARNING, INFO, a warning of Python, or the name of a function that gives a reason
    file: str
    line: int
    texts: tuple[str, ...]  # () where it is made elsewhere

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.kind}: {' | '.join(self.texts)}"


@functools.cache
def trees() -> dict[str, ast.Module]:
    """The files of the package, parsed."""
    found = [file for file in files() if file.endswith(".py") and file.startswith(OURS)]
    return {file: ast.parse((ROOT / file).read_text()) for file in found}


@functools.cache
def messages() -> list[Message]:
    """What is logged and warned of, in the order of files."""
    constants = {name: text for tree in trees().values() for name, text in constants_of(tree)}
    return [
        one
        for file, tree in trees().items()
        if file != SAYS and TELLS.search((ROOT / file).read_text())
        for one in said(file, tree, constants)
    ]


def reasons() -> list[Message]:
    """Why a call runs another way, or without a graph."""
    return [
        Message(function.name, file, node.lineno, (found,))
        for file, tree in trees().items()
        if file.startswith(REASONS)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and "refusal" in function.name
        for node in given(function)
        if (found := text(node, {})).strip(VALUE)
    ]


def given(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """What a function returns, and the keys of a table of reasons in it."""
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None:
            either = isinstance(node.value, ast.IfExp)
            yield from (node.value.body, node.value.orelse) if either else (node.value,)
        elif isinstance(node, ast.Dict):
            yield from (key for key in node.keys if key is not None)


def texts() -> list[str]:
    """All texts in the package, whatever they are for."""
    nodes = [node for tree in trees().values() for node in ast.walk(tree)]
    return [text(node, {}) for node in nodes if isinstance(node, (ast.Constant, ast.JoinedStr))]


def constants_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Texts with a name of capitals at the top of a module."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, found = node.targets[0].id, text(node.value, {})
            if name.isupper() and found:
                yield name, found


def said(file: str, tree: ast.Module, constants: dict[str, str]) -> Iterator[Message]:
    """The calls of a file that tell somebody."""
    for node in ast.walk(tree):
        kind = kind_of(node.func) if isinstance(node, ast.Call) else ""
        if kind and node.args:
            is_log = isinstance(node.func, ast.Attribute) and node.func.attr == "log"
            found = text(node.args[1 if is_log else 0], constants)
            yield Message(kind, file, node.lineno, (found,) if found.strip(VALUE) else ())


def kind_of(called: ast.expr) -> str:
    """What a call of this tells; empty if it is no logger, warning, or function of ours."""
    if isinstance(called, ast.Name):
        return FUNCTIONS.get(called.id, "")
    if not isinstance(called, ast.Attribute):
        return ""
    of = called.value
    is_logger = isinstance(of, ast.Name) and of.id in LOGGERS
    is_made = isinstance(of, ast.Call) and "ogger" in ast.unparse(of.func)
    return METHODS.get(called.attr, "") if is_logger or is_made else ""


def text(node: ast.expr, constants: dict[str, str]) -> str:
    """A text as it is written, with `…` for its values; empty if all of it is a variable."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[\d.]*[a-z]", VALUE, node.value)
    if isinstance(node, ast.JoinedStr):
        parts = (p.value if isinstance(p, ast.Constant) else VALUE for p in node.values)
        return "".join(map(str, parts))
    if isinstance(node, ast.Name):
        return constants.get(node.id, "")
    if isinstance(node, ast.BinOp):
        return text(node.left, constants) + text(node.right, constants)
    return ""

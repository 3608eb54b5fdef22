"""Fingerprints of source: how we know that a method is exactly the one we can express."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from moe_ops.interop.interrupts import let_through


@functools.cache
def fingerprint(*functions: Callable[..., Any]) -> str:
    """Twelve hex digits of what the functions do, not of how they are written.

    Comments, docstrings, annotations, layout and the function's own name do not count; every other
    change of the code gives another fingerprint. A function without readable source gives
    "unreadable".
    """
    digest = hashlib.sha256()
    for function in functions:
        try:
            source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
        except (OSError, TypeError) as error:
            let_through(error)
            return "unreadable"
        tree = ast.parse(source).body[0]
        if not isinstance(tree, ast.FunctionDef):
            return "unreadable"
        digest.update(_normalise(tree).encode())
    return digest.hexdigest()[:12]


def _normalise(tree: ast.FunctionDef) -> str:
    tree.name = "f"
    tree.decorator_list = []
    tree.returns = None
    arguments = tree.args
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        argument.annotation = None
    for extra in (arguments.vararg, arguments.kwarg):
        if extra is not None:
            extra.annotation = None
    if isinstance(tree.body[0], ast.Expr) and isinstance(tree.body[0].value, ast.Constant):
        tree.body = tree.body[1:] or [ast.Pass()]
    # ast.dump differs between Python versions in which empty fields it prints; the unparsed text
    # does not.
    return ast.unparse(tree)


@functools.cache
def source_of(thing: Callable[..., Any] | type) -> str:
    """The source of a class or function; empty where there is none to read."""
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError) as error:
        let_through(error)
        return ""

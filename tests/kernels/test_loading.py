"""Modules in C of one name, as Triton makes one for each kernel."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from triton.runtime import build

from moe_ops.kernels.triton import loading

CODE = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&module); }
"""


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Two modules, each loaded before, whose functions give their numbers."""
    made = []
    for number in range(2):
        path = tmp_path / f"{number}.so"
        path.with_suffix(".c").write_text(CODE.replace("NUMBER", str(number)))
        include = sysconfig.get_paths()["include"]
        command = ["cc", "-shared", "-fPIC", f"-I{include}", str(path.with_suffix(".c"))]
        subprocess.run([*command, "-o", str(path)], check=True)
        made.append(str(path))
        assert build._load_module_from_path("launcher", made[-1]).launch() == number
    return made


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Any]:
    """Triton's own function."""
    (ours, *_) = [build._load_module_from_path]
    cells = dict(zip(ours.__code__.co_freevars, ours.__closure__, strict=True))
    before: Callable[[str, str], Any] = cells["before"].cell_contents
    monkeypatch.setattr(build, "_load_module_from_path", before)
    return before


def test_tritons_own_loads_share_a_module(
    plain: Callable[[str, str], Any], paths: list[str]
) -> None:
    """The reason for `loading.py`: where this fails, it is not needed any more."""
    first, second = (plain("launcher", path) for path in paths)
    assert first is second and first.launch() == 1


def test_a_module_is_the_callers_own(
    plain: Callable[[str, str], Any], paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loading.load_one_at_a_time()
    load = build._load_module_from_path
    assert [load("launcher", path).launch() for path in paths] == [0, 1]
    first, second = (load("launcher", path) for path in paths)
    assert (first.launch(), second.launch()) == (0, 1)
    wrong = []

    def again(number: int) -> None:
        for _ in range(500):
            if load("launcher", paths[number]).launch() != number:
                wrong.append(number)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=again, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not wrong

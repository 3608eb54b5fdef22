"""A tensor has one name from the layer to the kernels, and a suffix that the legend explains."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from moe_ops.checks import shapes
from moe_ops.decode_ops.experts_onto import ExpertsOntoCall
from moe_ops.ops.experts import ExpertsCall
from tests.sources import ROOT, files
from tests.test_spelling import names_in

EXPERTS = "moe_ops/kernels/triton/experts/"
# Pointers of kernels for experts: of one letter are w, x and y, the arguments of `expert_gemm` and
# `combine`, h between them, and a, which is x or h. Others that were once called otherwise:
LETTERS = "wxyha"
OTHERWISE = {
    "experts_ptr": "ids_ptr",
    "map_ptr": "expert_map_ptr",
    "weight_ptr": "weights_ptr",
    "given_ptr": "static_ptr",
    "common_ptr": "global_scale_ptr",
}
SUFFIX = re.compile(r"[a-z][a-z0-9_]*_\d?([A-Z][A-Z0-9]*)")


def tensors_of(record: Any) -> set[str]:
    return {f.name for f in fields(record) if "Tensor" in str(f.type)}


def test_records_of_kernels_name_tensors_as_the_op_does() -> None:
    pytest.importorskip("triton", reason="the kernels are Triton's")
    from moe_ops.backends.triton import TENSORS
    from moe_ops.kernels.triton.experts.formats.codes import Codes
    from moe_ops.kernels.triton.experts.weights import Experts

    arguments = tensors_of(ExpertsCall)
    assert {"w13_EFD", "w13_scale_EFG", "global_scale2_E"} <= arguments
    held = tensors_of(Experts) | tensors_of(Codes)
    assert held <= arguments, held - arguments
    assert set(TENSORS) == arguments | tensors_of(ExpertsOntoCall)


def misnamed(file: str, source: str) -> set[str]:
    """Pointers whose names are short for those of arguments."""
    names = {n for n in names_in(file, source) if n.endswith("_ptr")}
    short = {n for n in names if re.fullmatch(r"[a-z]\d*_ptr", n) and n[0] not in LETTERS}
    return names & OTHERWISE.keys() | (short if file.startswith(EXPERTS) else set())


def test_pointers_have_the_names_of_arguments() -> None:
    kernels = [f for f in files() if f.startswith("moe_ops/kernels/triton/") and f.endswith(".py")]
    assert any(f.startswith(EXPERTS) for f in kernels)
    found = {f: names for f in kernels if (names := misnamed(f, (ROOT / f).read_text()))}
    assert not found, f"name pointers as the op's argument, like w_scale_ptr: {found}"


@pytest.mark.parametrize("source", ["def f(s_ptr, w_ptr): ...", "a.g_ptr", "map_ptr = h_ptr"])
def test_a_pointer_that_is_named_otherwise_is_found(source: str) -> None:
    assert len(misnamed(f"{EXPERTS}a.py", source)) == 1
    assert not misnamed("moe_ops/kernels/triton/decode/a.py", "def f(q_ptr, w0_ptr): ...")


def letters_of(source: str) -> set[str]:
    """The letters of suffixes among the names of a source."""
    suffixes = (SUFFIX.fullmatch(n) for n in names_in("a.py", source))
    return {letter for found in suffixes if found for letter in found[1] if letter.isalpha()}


def test_the_legend_has_every_letter_of_a_suffix() -> None:
    legend = set(re.findall(r"(?m)(?:^ {4}| {2,})([A-Z])  (?=\S)", shapes.__doc__ or ""))
    assert {"T", "Q"} <= legend
    library = [f for f in files() if f.startswith(("moe_ops/", "passes/", "fake_impls/"))]
    sources = [ROOT / f for f in library if f.endswith(".py") and not (ROOT / f).is_symlink()]
    assert len(sources) > 300
    missing = {str(p): left for p in sources if (left := letters_of(p.read_text()) - legend)}
    assert not missing, f"add these letters to the legend of moe_ops/checks/shapes.py: {missing}"


def test_letters_are_those_of_suffixes_alone() -> None:
    assert letters_of("x_TD = splits_2R = used_R1 = MAX_ROWS = Name = w13 = values_of_4") == set(
        "TDR"
    )

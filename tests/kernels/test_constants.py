"""Records that kernels are compiled for: equal by value, and the same to Triton in any process."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are Triton's")

import triton
import triton.language as tl
from triton.runtime.jit import compute_cache_key

from moe_ops.backends.triton_formats import weight_of
from moe_ops.kernels.triton import LINEAR, Act, Weight
from moe_ops.kernels.triton.experts.products.grouped_wgmma import Scaling
from moe_ops.kernels.triton.experts.products.register_stream import Sizes, Stream
from moe_ops.ops.activate import Activation

INT4 = Weight("int4", 1, 128, "bfloat16", False, 4)
RECORDS = [
    INT4, Act("silu", limit=7.0), Sizes(4, 1, 1, 1),
    Scaling(1, "float32", "row", "tensor", tl.bfloat16),
]  # fmt: skip
each_record = pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)


@each_record
def test_records_of_equal_values_are_equal(record: Any) -> None:
    same = replace(record)
    assert same is not record and same == record and hash(same) == hash(record)
    assert len({record, same}) == 1
    first = next(iter(record.__dict__))
    other = replace(record, **{first: "other"})
    assert other != record and len({record, other}) == 2
    assert record != record._values()  # a tuple of them is no record
    with pytest.raises(FrozenInstanceError):
        record.bits = 3


@each_record
def test_a_copy_is_equal(record: Any) -> None:
    for made in (copy.copy(record), pickle.loads(pickle.dumps(record))):
        assert made == record and hash(made) == hash(record)


def test_records_of_equal_values_but_other_kinds_differ() -> None:
    assert Act("a", True, False, 1.0, None, 0.0) != Weight("a", 1, 0, 1.0, None, 0)  # type: ignore[arg-type]


def test_they_say_what_backends_ask_for() -> None:
    assert weight_of("int4:1x128:bfloat16", "") == INT4
    assert weight_of("int4:1x128:bfloat16", "") is weight_of("int4:1x128:bfloat16", "")
    act = Activation(kind="silu", gated=True, interleaved=True, alpha=1.7, limit=7.0, up_shift=1.0)
    assert Act(*act.args) == Act("silu", True, True, 1.7, 7.0, 1.0)
    assert all(getattr(Act(*act.args), name) == getattr(act, name) for name in act.__slots__)
    assert Act(None, False, False, 1.0, None, 0.0) == LINEAR
    assert Stream(S=8, MW=4, MT=2, NT=3).sizes == Sizes(8, 4, 2, 3)


@each_record
def test_triton_finds_equal_records_in_its_cache(record: Any) -> None:
    """By the key of a launch, the second time at once."""
    known: dict[Any, str] = {}
    keys = [compute_cache_key(known, [("constexpr", r)], {}) for r in (record, replace(record))]
    assert keys[0] == keys[1] and len(known) == 1
    first = next(iter(record.__dict__))
    other = replace(record, **{first: "other"})
    assert compute_cache_key(known, [("constexpr", other)], {}) != keys[0]


SOURCE = """
import tests.kernels.test_constants as t
print(t.key_on_disk())
"""


@triton.jit
def kernel(out_ptr, W: tl.constexpr, ACT: tl.constexpr, SIZES: tl.constexpr, S: tl.constexpr):
    if ACT.gated and S.kind == "float32":
        tl.store(out_ptr, W.bits + SIZES.S)


def key_on_disk() -> str:
    """Of what Triton would compile, what its cache on the disk has it by."""
    from triton.compiler import ASTSource

    signature = {"out_ptr": "*i32"} | dict.fromkeys(("W", "ACT", "SIZES", "S"), "constexpr")
    constants = dict(zip(("W", "ACT", "SIZES", "S"), RECORDS, strict=True))
    return ASTSource(fn=kernel, signature=signature, constexprs=constants).hash()


def test_another_process_has_the_same_key_on_the_disk() -> None:
    root = Path(__file__).resolve().parents[2]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    found = [
        subprocess.run(
            [sys.executable, "-c", SOURCE], capture_output=True, text=True, check=True, cwd=root,
            env=environment | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert found[0] == found[1] and len(found[0]) > 32

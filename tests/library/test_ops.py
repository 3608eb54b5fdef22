"""The ops of libmoe_ops in a process without moe_ops: their schemas are Python's, their results
those of the definitions, and what they do not take they refuse in words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ops import OPS
from moe_ops.conformance.call import Call
from moe_ops.conformance.memory import surrounded
from moe_ops.conformance.samples import samples
from moe_ops.library.records import LIBRARY_OPS
from moe_ops.quant.formats import Format
from moe_ops.testing import BF16, CASES, F32, Case, make_layer
from tests.library import built

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
BY_NAME = {case.name: case for case in CASES}
# Widths that fill no register, no tokens, and experts with many rows.
CHOSEN = (("odd_unaligned", F32), ("no_tokens", BF16), ("many_rows", BF16))


def calls_of(op: str, case: Case, dtype: torch.dtype) -> Iterator[Call]:
    """The samples of an op as calls of its definition."""
    of = OPS[op]
    for sample in samples(op, case, dtype):
        yield Call(
            op=of, backend=of.backends["reference"], case=case, dtype=dtype, label=sample.name,
            loaded=sample.args, device=CPU,
        )  # fmt: skip


def is_plain(call: Call) -> bool:
    return not call.named.get("w_format", "")


def given(call: Call) -> tuple[str, tuple[Any, ...]]:
    """An op and arguments in memory of their own, amid NaN."""
    return call.op.name, tuple(surrounded(value, CPU) for value in call.loaded)


def compare(calls: list[Call], results: list[Any]) -> None:
    assert len(calls) == len(results)
    for call, got in zip(calls, results, strict=True):
        assert not isinstance(got, str), f"{call.op.name} {call.sample}: {got}"
        call.compare(got, call.loaded, f" of {call.sample}")


@dataclass(frozen=True)
class Ran:
    """Calls that one process ran, and what it gave."""

    calls: list[Call]
    refused: Mapping[str, str]  # what was said, by the name of a refusal
    schemas: Mapping[str, list[str]]
    results: list[Any]
    cancelled: torch.Tensor  # what is left of a sum


@pytest.fixture(scope="module")
def ran(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    calls = [
        call
        for op in LIBRARY_OPS
        for name, dtype in CHOSEN
        for call in calls_of(op, BY_NAME[name], dtype)
        if is_plain(call) and not is_refused(call)
    ]
    others = [(op, OPS[op].arguments.in_order(named)) for op, named, _ in REFUSED.values()]
    others.append(("combine", (Y_RD, WEIGHTS_TK, ROWS_R)))
    made = built.ran(library, [*map(given, calls), *others], tmp_path_factory.mktemp("library"))
    results, said = made["results"][: len(calls)], made["results"][len(calls) :]
    *said, cancelled = said
    refused = dict(zip(REFUSED, said, strict=True))
    return Ran(calls, refused, made["schemas"], results, cancelled)


def is_refused(call: Call) -> bool:
    """Whether the bias would have to be rounded at each call."""
    return call.dtype is BF16 and call.label == "float32_bias"


@pytest.mark.parametrize("op", LIBRARY_OPS)
def test_schemas_are_those_of_python(op: str, ran: Ran) -> None:
    ours = OPS[op].overload._schema, OPS[op].planned._schema
    assert ran.schemas[op] == sorted(map(str, ours))


@pytest.mark.parametrize("op", LIBRARY_OPS)
def test_results_are_those_of_the_definition(op: str, ran: Ran) -> None:
    found = [(c, r) for c, r in zip(ran.calls, ran.results, strict=True) if c.op.name == op]
    assert len(found) >= 10
    compare(*map(list, zip(*found, strict=True)))


# A sum of which nothing would be left if float32 weights were rounded to the dtype of outputs.
Y_RD, ROWS_R = torch.tensor([[1.0], [-1.0]], dtype=BF16), torch.arange(2, dtype=torch.int32)
WEIGHTS_TK = torch.tensor([[1 + 2**-12, 1.0]])


def test_weights_are_as_exact_as_given(ran: Ran) -> None:
    assert ran.cancelled.tolist() == [[2**-12]]


def layer(**changes: Any) -> dict[str, Any]:
    """The arguments of `experts`, with others in the place of some."""
    found = make_layer(BY_NAME["plain"])
    names = ("x_TD", "weights_TK", "ids_TK", "w13_EFD", "w2_EDI")
    return {**{name: getattr(found, name) for name in names}, **changes}


LAYER = make_layer(BY_NAME["plain"])
ROWS = {"x_RD": LAYER.x_TD, "w_EFD": LAYER.w13_EFD}
ENDS = torch.full((8,), 16, dtype=torch.int32)
# Calls that are refused: op, arguments, and what is said of them after the op.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "float16": (
        "experts",
        layer(x_TD=LAYER.x_TD.half(), w13_EFD=LAYER.w13_EFD.half(), w2_EDI=LAYER.w2_EDI.half()),
        "x_TD must be one of float32, bfloat16, got float16; .* convert the tokens",
    ),
    "another dtype of a weight": (
        "experts",
        layer(w2_EDI=LAYER.w2_EDI.bfloat16()),
        "w2_EDI must be float32, got bfloat16; convert it first",
    ),
    "a width": (
        "experts",
        layer(w2_EDI=LAYER.w2_EDI[..., 1:]),
        r"w2_EDI must have 32 \(the width after the activation\) on axis 2, got .*\(8, 64, 31\)",
    ),
    "a layout": (
        "experts",
        layer(layout="mine"),
        "does not read layout, got 'mine'; leave it out, or call the op from Python",
    ),
    "scales that are not in it": (
        "experts",
        layer(w_format="nvfp4"),
        "scale of a format of libmoe_ops='float8_e4m3fn' is unknown; choose one of float32, b",
    ),
    "an element that is not in it": (
        "experts",
        layer(w_format="float8_e5m2:row"),
        "w_format='float8_e5m2:row': .* with the elements int8, .*; take one of these",
    ),
    "an empty scale": (
        "experts",
        layer(w_format="int8:1x32:"),
        "scale of a format of libmoe_ops='' is unknown; choose one of float32, b",
    ),
    "a group of three": (
        "experts",
        layer(w_format="int8:1x32x"),
        "w_format='int8:1x32x' has the group '1x32x'; choose tensor, row, column or rows x",
    ),
    "an offset past the map": (
        "experts",
        layer(expert_map=torch.arange(8), expert_offset=1),
        "expert_offset=1 must be from 0 to 0, as 8 of the 8 experts of expert_map are here",
    ),
    "an offset without a map": (
        "experts",
        layer(expert_offset=1),
        "expert_offset=1 goes with an expert_map; give both",
    ),
    "a format that was not built": (
        "experts",
        layer(
            w13_EFD=LAYER.w13_EFD.to(torch.int8), w2_EDI=LAYER.w2_EDI.to(torch.int8),
            w13_scale_EFG=torch.ones(8, 64, 1), w2_scale_EDG=torch.ones(8, 64, 1),
            w_format="int8:row",
        ),
        "w_format='int8:row': .* built without it; .* build-library",
    ),
    "scales without a format": (
        "experts",
        layer(w13_scale_EFG=torch.ones(8, 64, 1)),
        "w13_scale_EFG was given without w_format; name it",
    ),
    "codes in a product": (
        "expert_gemm",
        {**ROWS, "ends_E": ENDS, "w_format": "int8:row", "w_scale_EFG": torch.ones(8, 64, 1)},
        "multiplies codes in `experts` alone, got w_format='int8:row'; call that",
    ),
    "another dtype of a result": (
        "expert_gemm",
        {**ROWS, "ends_E": ENDS, "out_dtype": "bfloat16"},
        "out_dtype must be that of x_RD, float32, got 'bfloat16'; leave it out",
    ),
    "ends that descend": (
        "expert_gemm",
        {**ROWS, "ends_E": ENDS - torch.arange(8, dtype=torch.int32)},
        r"ends_E must ascend .* 16 rows of x_RD, got ends_E\[1\] = 15 where 16 to 16",
    ),
    "ends past the rows": (
        "expert_gemm",
        {**ROWS, "ends_E": ENDS + 1},
        r"got ends_E\[0\] = 17 where 0 to 16 would do",
    ),
    "a bias to round": (
        "expert_gemm",
        {
            "x_RD": LAYER.x_TD.bfloat16(), "w_EFD": LAYER.w13_EFD.bfloat16(), "ends_E": ENDS,
            "bias_EF": LAYER.b13_EF,
        },
        "bias_EF must have the dtype of the tokens, bfloat16, got float32; convert it once",
    ),
    "too many experts a token": (
        "route",
        {"logits_TE": LAYER.logits_TE, "top_k": 9},
        "top_k=9 must be from 1 to the 8 experts of logits_TE; lower top_k",
    ),
    "an unknown score": (
        "route",
        {"logits_TE": LAYER.logits_TE, "top_k": 2, "score": "tanh"},
        "score='tanh' is unknown; choose one of softmax, sigmoid, sqrtsoftplus, logit",
    ),
    "no experts": (
        "dispatch",
        {"x_TD": LAYER.x_TD, "ids_TK": LAYER.ids_TK, "num_experts": 0},
        "num_experts=0 must be at least 1",
    ),
    "an odd width": (
        "activate",
        {"y_RF": LAYER.x_TD[:, 1:]},
        r"gated activation halves the width of y_RF, which is odd: \(16, 63\)",
    ),
    "rows of another number": (
        "combine",
        {"y_RD": LAYER.x_TD, "weights_TK": LAYER.weights_TK, "rows_R": ENDS},
        r"y_RD must have 32 \(tokens times top-k of weights_TK\) on axis 0",
    ),
    "logits of other experts": (
        "moe",
        {
            "x_TD": LAYER.x_TD, "logits_TE": LAYER.logits_TE[:, 1:], "w13_EFD": LAYER.w13_EFD,
            "w2_EDI": LAYER.w2_EDI, "top_k": 2,
        },
        r"logits_TE must have 8 \(the experts of w13_EFD, as there is no expert_map\) on axis 1",
    ),
    "a part of the layer": (
        "moe",
        {
            "x_TD": LAYER.x_TD, "logits_TE": LAYER.logits_TE, "w13_EFD": LAYER.w13_EFD,
            "w2_EDI": LAYER.w2_EDI, "top_k": 2, "kind": "tanh",
        },
        "kind='tanh' is unknown; choose one of silu, gelu, gelu_tanh, relu2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_take_is_refused_in_words(name: str, ran: Ran) -> None:
    op, _, said = REFUSED[name]
    assert isinstance(ran.refused[name], str), "it was taken"
    assert re.match(rf"moe_ops\.{op}: .*{said}", ran.refused[name]), ran.refused[name]


INVARIANT = """
import sys
import torch
torch.ops.load_library(sys.argv[1])
torch.manual_seed(0)
x, w13, w2 = torch.randn(40, 70), torch.randn(2, 66, 70), torch.randn(2, 70, 33)
weights, ids = torch.rand(40, 1), torch.arange(40)[:, None] % 2
ends = torch.tensor([13, 40], dtype=torch.int32)
planned = torch.ops.moe_ops.experts.planned, torch.ops.moe_ops.expert_gemm.planned

def differ(plan):
    together = planned[0](x, weights, ids, w13, w2, plan=plan)
    alone = torch.cat([planned[0](x[t:t+1], weights[t:t+1], ids[t:t+1], w13, w2, plan=plan)
                       for t in range(40)])
    product = planned[1](x, w13, ends, plan=plan)
    row = planned[1](x[12:13], w13, torch.tensor([1, 1], dtype=torch.int32), plan=plan)
    return not torch.equal(together, alone), not torch.equal(product[12:13], row)

print(differ("invariant;cpu"), differ("cpu"))
"""


def test_plans_of_batch_invariant_calls_give_rows_one_result(library: Path) -> None:
    done = built.python("-c", INVARIANT, str(library))
    assert done.stdout.split("\n")[0] == "(False, False) (True, True)"


STRINGS = """
import sys
import torch
torch.ops.load_library(sys.argv[1])
long, logits = "x" * 2**20, torch.zeros(2, 2)

def held():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])  # pages

def calls():
    torch.ops.moe_ops.route.planned(logits, 1, plan=long)
    try:
        torch.ops.moe_ops.route.default(logits, 1, score=long)
    except RuntimeError:
        pass

for _ in range(8):
    calls()
before = held()
for _ in range(64):
    calls()
print((held() - before) * 4096 >> 20)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc")
def test_strings_of_calls_are_freed(library: Path) -> None:
    """A mebibyte of each would make 128 of 64 calls."""
    assert int(built.python("-c", STRINGS, str(library)).stdout) < 32


@pytest.mark.every
def test_every_sample_is_as_defined_or_refused_by_the_backend_too(
    whole_library: Path, tmp_path: Path
) -> None:
    """All sizes and formats. What the library refuses, Python's kernels do, which are the same; and
    codes in `expert_gemm`, which have none."""
    calls = [
        call
        for op in LIBRARY_OPS
        for case in CASES
        for dtype in (F32, BF16)
        for call in calls_of(op, case, dtype)
    ]
    results = built.ran(whole_library, [given(call) for call in calls], tmp_path)["results"]
    done = [(c, r) for c, r in zip(calls, results, strict=True) if not isinstance(r, str)]
    compare(*map(list, zip(*done, strict=True)))
    for call, got in zip(calls, results, strict=True):
        if isinstance(got, str) and call.op.name == "experts":
            assert call.op.refusals(*call.loaded)["cpu"] is not None, f"{call.sample}: {got}"
        elif isinstance(got, str):
            assert not is_plain(call) or is_refused(call), f"{call.sample}: {got}"
    formats = {str(c.named["w_format"]) for c, _ in done if c.op.name == "experts"}
    assert {Format.of(name).element for name in formats if name} >= {"int8", "int4", "float4_e2m1"}

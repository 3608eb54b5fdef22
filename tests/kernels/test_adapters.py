"""The expert kernels with adapters against the definition of `experts_adapted`; in Triton's
interpreter without a GPU, which multiplies float16 and float32 alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops import OPS, experts, experts_adapted
from moe_ops.backends import triton_hopper
from moe_ops.backends.triton_limits import MOST_ROWS_OF_CODES
from moe_ops.conformance import Only, examine
from moe_ops.conformance.adapter_samples import FORMS, PAIRS, adapters
from moe_ops.conformance.memory import surrounded
from moe_ops.conformance.samples import samples
from moe_ops.kernels.triton.experts.adapters import turned
from moe_ops.ops.adapters import ADAPTER
from moe_ops.quant.formats import Format
from moe_ops.quant.packing import quantize
from moe_ops.testing import (
    ACTIVATIONS,
    CASES,
    DEVICE,
    TOL,
    Case,
    assert_close,
    float32,
    make_layer,
    poisoned,
)
from tests.chosen import in_turn
from tests.kernels.sampled import anywhere, hold, of_the_kit

F16, F32 = torch.float16, torch.float32
BY_NAME = {case.name: case for case in CASES}
FORMS_BY_NAME = {f"{a}_{b}_of_{n}": ((a, b), n) for a, b, n in FORMS}
KERNELS = {
    name: found for name, found in (experts_adapted.backends | experts_adapted.paths).items()
    if name.startswith("triton.")
}  # fmt: skip
PLAIN = ("triton.tiny", "triton.rows", "triton.grouped/plain")
each_kernel = pytest.mark.parametrize("kernel", PLAIN)
each_form = pytest.mark.parametrize("form", FORMS_BY_NAME)
HERE = torch.device(DEVICE)


def call_of(case: Case, form: str, dtype: torch.dtype = F16, **changes: Any) -> dict[str, Any]:
    layer = make_layer(case, dtype, gated=changes.get("gated", True))
    names = ("x_TD", "weights_TK", "ids_TK", "w13_EFD", "w2_EDI", "b13_EF", "b2_ED")
    call = {name: getattr(layer, name) for name in names} | changes
    torch.manual_seed(1)
    return call | adapters(call, *FORMS_BY_NAME[form])


def run(kernel: str, call: dict[str, Any]) -> Tensor:
    args = experts_adapted.arguments.in_order(call)
    record = experts_adapted.call(*(surrounded(a, HERE) for a in args))
    backend = KERNELS[kernel]
    refusal = backend.refusal("cuda", len(call["x_TD"]), record)
    assert refusal is None, refusal
    with poisoned():
        return backend.run(record).cpu()


def check(kernel: str, call: dict[str, Any], dtype: torch.dtype = F16) -> None:
    want = experts_adapted.reference(**{n: float32(v) for n, v in call.items()})
    assert_close(run(kernel, call), want, TOL["experts_adapted", dtype], kernel)


@each_kernel
@each_form
@pytest.mark.parametrize("case", ["one_token", "odd"])
def test_each_form(kernel: str, form: str, case: str) -> None:
    check(kernel, call_of(BY_NAME[case], form))


@pytest.mark.slow
@each_kernel
@pytest.mark.parametrize("case", ["odd_unaligned", "plain", "one_expert", "no_tokens"])
def test_each_case(kernel: str, case: str) -> None:
    check(kernel, call_of(BY_NAME[case], "2_6_of_3"))


@each_form
def test_many_rows(form: str) -> None:
    check("triton.rows", call_of(BY_NAME["many_rows"], form))
    check("triton.grouped/plain", call_of(BY_NAME["many_rows"], form))


def test_float32() -> None:
    call = call_of(BY_NAME["odd"], "2_6_of_3", F32)
    check("triton.grouped/plain", call, F32)


@each_kernel
@pytest.mark.parametrize("name", ["gpt_oss", "ungated_relu2"])
def test_activations_and_orders_of_weights(kernel: str, name: str) -> None:
    given = ACTIVATIONS[name]
    weights = {}
    if name == "ungated_relu2":
        layer = make_layer(BY_NAME["odd"], F16, gated=False)
        weights = {"w13_EFD": layer.w13_EFD, "b13_EF": layer.b13_EF, "w2_EDI": layer.w2_EDI}
    call = call_of(BY_NAME["odd"], "2_6_of_3", **given, **weights)
    flipped = {n: call[n].transpose(1, 2).contiguous() for n in ("w13_EFD", "w2_EDI")}
    check(kernel, {**call, **flipped, "transposed": True})


@each_kernel
def test_experts_that_are_not_here(kernel: str) -> None:
    call = call_of(BY_NAME["odd"], "2_6_of_3")
    ids = call["ids_TK"].clone()
    ids[0], ids[1], ids[2, 1] = torch.tensor([-1, 5, 4]), -1, 2**30
    check(kernel, {**call, "ids_TK": ids})
    repeated = {**call, "ids_TK": call["ids_TK"][:, :1].expand(-1, 3).contiguous()}
    check(kernel, repeated)


@each_kernel
def test_adapters_of_any_strides_and_a_wide_rank(kernel: str) -> None:
    call = call_of(BY_NAME["odd"], "4_4_of_0")
    call |= adapters({n: v for n, v in call.items() if n not in ADAPTER}, (33, 20), 2)
    for a, b in PAIRS:
        call[a] = call[a].transpose(1, 2).contiguous().transpose(1, 2)
        call[b] = call[b].permute(1, 2, 0).contiguous().permute(2, 0, 1)
    check(kernel, call)


@each_kernel
@pytest.mark.parametrize("dtype", [F16])
def test_a_token_without_an_adapter_has_the_bits_of_experts(
    kernel: str, dtype: torch.dtype
) -> None:
    """By the same kernel, whatever the adapters of others hold."""
    call = call_of(BY_NAME["odd"], "2_6_of_3", dtype)
    call["adapter_T"] = torch.arange(13, dtype=torch.int32) % 5 - 1
    plain = {n: v for n, v in call.items() if n not in ADAPTER}
    record = experts.call(*experts.arguments.in_order({n: _here(v) for n, v in plain.items()}))
    named = experts.backends.get(kernel) or experts.paths[kernel]
    want = named.run(record).cpu()
    got = run(kernel, call)
    none = (call["adapter_T"] == -1) | (call["adapter_T"] == 3)
    assert torch.equal(got[none], want[none]) and not torch.equal(got, want)


@each_kernel
def test_an_index_is_told_by_all_its_bits(kernel: str) -> None:
    """Of an int64 that is an adapter's in its lower half alone, a token has none."""
    call = call_of(BY_NAME["odd"], "2_6_of_3")
    far = call["adapter_T"].long()
    far[4:9] += 2**32
    none = far.clone()
    none[4:9] = -1
    got, want = run(kernel, {**call, "adapter_T": far}), run(kernel, {**call, "adapter_T": none})
    assert torch.equal(got, want) and not torch.equal(got, run(kernel, call))


@pytest.mark.parametrize("name", ["a13_GrD", "b13_GFr", "a2_GrI", "b2_GDr"])
@pytest.mark.skipif(DEVICE == "cuda", reason="there memory that is asked for is taken")
@each_kernel
def test_ranks_that_lie_far_apart(kernel: str, name: str) -> None:
    """2^31 elements and more. Of such memory only what is written to is taken."""
    call = call_of(BY_NAME["one_token"], "4_4_of_0")
    given, axis = call[name], 1 if name.startswith("a") else 2
    apart = 2**30 + 8
    strides = [*torch.empty(given.shape).stride()]
    strides[axis] = apart
    storage = torch.UntypedStorage(2 * (given.shape[axis] - 1) * apart + 8 * given.numel())
    far = torch.empty(0, dtype=F16).set_(storage, 0, given.shape, strides).copy_(given)
    args = experts_adapted.arguments.in_order({**call, name: far})
    with poisoned():
        got = KERNELS[kernel].run(experts_adapted.call(*args))
    assert torch.equal(got, run(kernel, call))


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0)], ids=str)
@pytest.mark.parametrize("sizes", [(3, 5, 70), (2, 33, 129), (1, 1, 1)], ids=str)
def test_a_is_transposed_from_any_strides(
    sizes: tuple[int, int, int], order: tuple[int, ...]
) -> None:
    """As the kernel for Hopper reads it: columns of a last tile, and ranks that fill none."""
    G, rank, _ = sizes
    laid = torch.randn([sizes[i] for i in order], device=DEVICE, dtype=F16)
    a_GrD, b_GFr = laid.permute(order), torch.randn(G, 4, rank, device=DEVICE, dtype=F16)
    with poisoned():
        narrows, widens = turned((a_GrD, b_GFr), True)
    assert narrows is not None and widens is not None
    assert widens.is_contiguous() and torch.equal(widens, a_GrD.transpose(1, 2))
    assert torch.equal(narrows, b_GFr.transpose(1, 2))


def _here(value: Any) -> Any:
    return value.to(DEVICE) if isinstance(value, Tensor) else value


@pytest.mark.parametrize("kernel", ["triton.rows", "triton.grouped/plain"])
def test_a_row_depends_on_itself_alone(kernel: str) -> None:
    call = call_of(BY_NAME["odd"], "2_6_of_3")
    whole = run(kernel, call)
    changed = dict(call)
    changed["x_TD"] = call["x_TD"].clone()
    changed["x_TD"][7:] = float("nan")
    changed["adapter_T"] = call["adapter_T"].clone()
    changed["adapter_T"][7:] = 0
    assert torch.equal(run(kernel, changed)[:7], whole[:7])


FORMATS = ("int4:1x32", "uint4:1x16", "mxfp4", "nvfp4", "mxfp6_e2m3", "int8:1x32",
           "float8_e4m3fn:128x128", "float8_e5m2:row")  # fmt: skip
CODED = Case(name="coded", T=5, E=4, K=2, D=96, I=64)


@in_turn(each_kernel, pytest.mark.parametrize("format", FORMATS))
def test_codes(kernel: str, format: str) -> None:
    i = FORMATS.index(format)
    call = coded(format, [*FORMS_BY_NAME][i % len(FORMS)])
    want = experts_adapted.reference(**{n: float32(v) for n, v in call.items()})
    tol = TOL["experts_adapted", F16]
    assert_close(run(kernel, call), want, tol, f"{kernel} {format}")


def coded(format: str, form: str) -> dict[str, Any]:
    return coded_of(CODED, format, form)


def coded_of(case: Case, format: str, form: str) -> dict[str, Any]:
    call = call_of(case, form)
    for name, scale, zero in (
        ("w13_EFD", "w13_scale_EFG", "w13_zero_EFG"),
        ("w2_EDI", "w2_scale_EDG", "w2_zero_EDG"),
    ):
        done = quantize(call[name], Format.of(format))
        call |= {name: done.values, scale: done.scale, zero: done.zero, "w_format": format}
    return call


def test_samples_are_taken_or_refused_for_what_they_have() -> None:
    """By any of the kernels but those of inputs that are quantised."""
    for name, args in samples("experts_adapted", BY_NAME["plain"], F16):
        call = experts_adapted.call(*args)
        said = KERNELS["triton.rows"].refusal("cuda", len(args[0]), call)
        if call.layer.x_format:
            assert said == "adds adapters to products of inputs that are not quantised alone", name
        else:
            assert said is None, (name, said)


def test_codes_that_are_decoded_first_run_by_rows_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of codes for many rows on Hopper adds no adapters."""
    monkeypatch.setattr(triton_hopper, "refuse_hopper", lambda _: None)
    case = Case(name="wide", T=64, E=2, K=2, D=512, I=512)
    call = coded_of(case, "int4:1x128", "4_4_of_0")
    record = experts_adapted.call(*experts_adapted.arguments.in_order(call))
    adapted = KERNELS["triton.rows"].rows.preferred
    plain = experts.backends["triton.rows"].rows.preferred
    assert adapted is not None and plain is not None
    assert adapted(record) == MOST_ROWS_OF_CODES[4] > plain(record.layer)


def test_a_rank_above_what_a_tile_holds_is_refused() -> None:
    call = call_of(BY_NAME["plain"], "4_4_of_0")
    call |= adapters({n: v for n, v in call.items() if n not in ADAPTER}, (129, 0), 0)
    record = experts_adapted.call(*experts_adapted.arguments.in_order(call))
    said = KERNELS["triton.rows"].refusal("cuda", 16, record)
    assert said == "adds adapters up to rank 128, got 129"


def test_paths_that_add_no_adapters_say_so() -> None:
    record = experts_adapted.call(
        *experts_adapted.arguments.in_order(coded("int4:1x32", "4_4_of_0"))
    )
    told = KERNELS["triton.grouped"].told
    assert told is not None and "grouped/registers adds no adapters" in told(record)


OF_TRAINING = ("experts_adapted_saving", "experts_adapted_backward")


@pytest.mark.parametrize("name", OF_TRAINING)
@pytest.mark.parametrize(("case", "dtype"), [("odd", F16), ("one_token", F32), ("no_tokens", F16)])
def test_samples_of_training(name: str, case: str, dtype: torch.dtype) -> None:
    """All but one: a gradient by the kept rows comes of a backward of a backward. Of codes those
    of 16 bits are multiplied."""
    refused = hold(OPS[name], BY_NAME[case], dtype)
    of_codes = {label for label, why in refused.items() if why.startswith("needs bfloat16 or")}
    others = {} if name == OF_TRAINING[0] else {"gradient_of_rows": "does not read grad_y_RF"}
    assert {label: refused[label] for label in refused.keys() - of_codes} == others
    assert bool(of_codes) == (dtype is F32)


def test_adapters_train_by_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    call = {n: _here(v) for n, v in call_of(BY_NAME["odd"], "2_6_of_3", F32).items()}
    names = ("x_TD", "weights_TK", *(n for pair in PAIRS for n in pair))
    leaves = {n: call[n].requires_grad_() for n in names}
    weight = torch.randn(call["x_TD"].shape)

    def grads(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, [*leaves.values()], weight.to(out))

    ops = [OPS[n] for n in (*OF_TRAINING, "expert_wgrad")]
    with anywhere(monkeypatch, *ops) as ran:
        found = grads(experts_adapted(**call))
    assert ran == [*OF_TRAINING, *["expert_wgrad"] * 4]
    for name, g, w in zip(names, found, grads(experts_adapted.reference(**call)), strict=True):
        assert_close(g, w, TOL["model", F32], name)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_TRAINING)
@pytest.mark.parametrize("sample", of_the_kit("map_and_holes", "ranks_2_6_of_3"))
def test_the_kit_finds_nothing(sample: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with anywhere(monkeypatch, OPS[name]):
        report = examine(name, "triton", only=Only(sample=sample), device=DEVICE)
        assert report.sound and report.ran, str(report)
